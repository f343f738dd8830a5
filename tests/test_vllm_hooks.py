"""The patch records against vLLM's sources: the installed one, unpacked wheels, and changed sources."""

import os
import shutil
import sys
import types
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

SOURCES = os.environ.get("EKV_VLLM_SOURCES", "")
CORE = "vllm/v1/engine/core.py"


@pytest.fixture(scope="module")
def hooks() -> types.ModuleType:
    from vllm_integration import hooks

    return hooks


@pytest.fixture(scope="module")
def patches() -> types.ModuleType:
    from vllm_integration import patches

    return patches


@pytest.fixture
def some_sources(tmp_path: Path, hooks: types.ModuleType, patches: types.ModuleType) -> Path:
    """A copy of the modules that the records name, for a test to change."""
    root = patches.installed_root()
    for module in {target.module for target in hooks.ALL_TARGETS}:
        file = Path(*module.split(".")).with_suffix(".py")
        if (root / file).exists():
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / file, tmp_path / file)
    return tmp_path


def release() -> str:
    from vllm.version import __version__

    return __version__


def test_installed_vllm_matches_every_record(hooks: types.ModuleType, patches: types.ModuleType) -> None:
    assert patches.check_version(release()) is None
    assert patches.problems(hooks.ALL_TARGETS, release=release()) == []


@pytest.mark.skipif(not SOURCES, reason="EKV_VLLM_SOURCES does not name a directory of unpacked releases")
def test_unpacked_releases_match_every_record(hooks: types.ModuleType, patches: types.ModuleType) -> None:
    """EKV_VLLM_SOURCES holds a directory for each release (``0.29.0``, ...) with the package ``vllm``."""
    releases = sorted(path for path in Path(SOURCES).iterdir() if (path / "vllm").is_dir())
    found = {
        path.name: patches.problems(hooks.ALL_TARGETS, path, path.name.split("-")[-1]) for path in releases
    }
    assert found
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_every_record_says_why_and_until_when(hooks: types.ModuleType) -> None:
    patches = (*hooks.FLAG, *hooks.ENGINE, *hooks.CLIENT, *hooks.ALLOCATION)
    for patch in patches:
        assert patch.target.why
        assert patch.tested
        assert patch.remove_when
    assert len({str(patch.target) for patch in patches}) == 18


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("def _initialize_kv_caches(self, vllm_config", "def _initialize_kv_caches(self, config", "(config)"),
        ("def _initialize_kv_caches(", "def _init_kv_caches(", "does not exist"),
        ("class EngineCore:", "class EngineCoreBase:", "the class EngineCore does not exist"),
        ("    get_kv_cache_configs,\n", "", "does not bind this name"),
    ],
)
def test_changed_source_is_named(
    some_sources: Path,
    hooks: types.ModuleType,
    patches: types.ModuleType,
    before: str,
    after: str,
    named: str,
) -> None:
    text = (some_sources / CORE).read_text()
    assert before in text
    (some_sources / CORE).write_text(text.replace(before, after, 1))
    patches.forget_sources()
    problems = patches.problems(hooks.ALL_TARGETS, some_sources, release())
    patches.forget_sources()
    assert problems
    assert all("vllm.v1.engine.core" in line for line in problems)
    assert any(named in line for line in problems)


def test_missing_module_is_named(
    some_sources: Path, hooks: types.ModuleType, patches: types.ModuleType
) -> None:
    (some_sources / CORE).unlink()
    problems = patches.problems(hooks.ALL_TARGETS, some_sources, release())
    assert any("the module does not exist" in line for line in problems)


@pytest.mark.parametrize("version", ["0.28.1", "0.34.0", "1.0.0", "0.34.0rc1+cpu", "dev", ""])
def test_unknown_version_is_refused(patches: types.ModuleType, version: str) -> None:
    assert version in (patches.check_version(version) or "")
    assert "0.29 to 0.33" in (patches.check_version(version) or "")


@pytest.mark.parametrize("version", ["0.29.0", "0.32.0+cpu", "0.33.1", "0.33.0.dev1+g123"])
def test_known_version_is_taken(patches: types.ModuleType, version: str) -> None:
    assert patches.check_version(version) is None


@pytest.fixture
def module() -> types.ModuleType:
    module = types.ModuleType("ekv_patch_victim")
    exec("class Thing:\n    def method(self, a): return a\n\ndef function(a): return a\n", module.__dict__)
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def _patch(patches: types.ModuleType, name: str, wrap: object) -> object:
    return patches.Patch(patches.Target("ekv_patch_victim", name, None, "test"), wrap, "all", "never")


def _add_one(original: object) -> object:
    return lambda *args: original(*args) + 1  # type: ignore[operator]


def test_apply_twice_wraps_once_and_remove_restores(
    patches: types.ModuleType, module: types.ModuleType
) -> None:
    patcher = patches.Patcher()
    originals = (module.Thing.__dict__["method"], module.function)
    group = [_patch(patches, "Thing.method", _add_one), _patch(patches, "function", _add_one)]
    for _ in range(2):
        patcher.apply("group", group)
    assert (module.Thing().method(1), module.function(1)) == (2, 2)
    for _ in range(2):
        patcher.remove("group")
    assert (module.Thing.__dict__["method"], module.function) == originals
    assert not patcher.is_applied("group")


def test_apply_that_fails_midway_leaves_nothing_wrapped(
    patches: types.ModuleType, module: types.ModuleType
) -> None:
    patcher = patches.Patcher()
    original = module.function
    group = [_patch(patches, "function", _add_one), _patch(patches, "Thing.missing", _add_one)]
    with pytest.raises(patches.PatchError, match="ekv_patch_victim.Thing.missing"):
        patcher.apply("group", group)
    assert module.function is original
    assert not patcher.is_applied("group")


def test_remove_leaves_what_someone_else_wrapped_since(
    patches: types.ModuleType, module: types.ModuleType
) -> None:
    patcher = patches.Patcher()
    patcher.apply("group", [_patch(patches, "function", _add_one)])
    ours = module.function
    module.function = lambda a: ours(a) * 10
    theirs = module.function
    patcher.remove("group")
    assert module.function is theirs
