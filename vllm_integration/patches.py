"""Patch records: what is wrapped in vLLM and why, checked against the sources before anything is applied.

A `Target` is a name in a vLLM module together with the parameters that the plugin relies on. A `Patch` is a
target that gets wrapped. Verification parses the source files, so it imports nothing and works as well on a
wheel that was only unpacked. Applying a group is all or nothing, and removing it restores the same objects.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

__all__ = [
    "Patch",
    "PatchError",
    "Patcher",
    "Target",
    "check_version",
    "forget_sources",
    "installed_root",
    "problems",
]

MIN_VERSION, END_VERSION = (0, 29), (0, 34)


class PatchError(RuntimeError):
    """The installed vLLM is not what the patches were written for; nothing was applied."""


@dataclass(frozen=True)
class Target:
    """A function, method or imported name in vLLM.

    Parameters
    ----------
    module, name : str
        ``vllm.v1.engine.core`` and ``EngineCore._initialize_kv_caches``.
    parameters : tuple of str or None
        The first positional parameters, in order, without `self`; more may follow. None for a name that the
        module only has to have, because it imports it.
    why : str
        What the plugin does with it.
    releases : tuple of str or None
        Releases (``"0.33"``) that have it, where some do not.
    """

    module: str
    name: str
    parameters: tuple[str, ...] | None
    why: str
    releases: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True)
class Patch:
    """A wrapper around one target: `wrap(original)` returns what replaces it.

    `tested` names the releases it was run or checked on, `remove_when` what would make it superfluous.
    """

    target: Target
    wrap: Callable[[Any], Any]
    tested: str
    remove_when: str


def installed_root() -> Path:
    """Return the directory that holds the installed ``vllm`` package, without importing it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise PatchError("vLLM is not installed")
    return Path(next(iter(spec.submodule_search_locations))).parent


def check_version(version: str) -> str | None:
    """Return what is wrong with `version` (``"0.33.0+cpu"``), or None when it is one the plugin knows."""
    numbers = version.split("+")[0].split(".")
    known_form = len(numbers) > 1 and numbers[0].isdigit() and numbers[1].isdigit()
    if known_form and MIN_VERSION <= (int(numbers[0]), int(numbers[1])) < END_VERSION:
        return None
    known = f"{'.'.join(map(str, MIN_VERSION))} to {END_VERSION[0]}.{END_VERSION[1] - 1}"
    return f"vLLM {version} is not one of the releases this plugin was tested with ({known})"


def problems(targets: Iterable[Target], root: Path | None = None, release: str | None = None) -> list[str]:
    """Compare `targets` with the vLLM sources under `root`; return one line for each that does not match.

    Parameters
    ----------
    targets : iterable of Target
    root : Path or None
        The directory that holds the package ``vllm``; None for the installed one.
    release : str or None
        Release of these sources; targets that other releases have are skipped.
    """
    root = installed_root() if root is None else root
    found = []
    for target in targets:
        if release and target.releases and ".".join(release.split(".")[:2]) not in target.releases:
            continue
        problem = _problem(target, root)
        if problem:
            found.append(f"{target}: {problem}")
    return found


class Patcher:
    """Applies and removes groups of patches; safe from any thread, and idempotent."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._applied: dict[str, list[tuple[Any, str, Any, Any]]] = {}

    def apply(self, group: str, patches: Sequence[Patch]) -> None:
        """Wrap every target of `patches`, or none: on any failure, those already wrapped are restored."""
        with self._lock:
            if group in self._applied:
                return
            done: list[tuple[Any, str, Any, Any]] = []
            try:
                for patch in patches:
                    owner, name = _owner(patch.target)
                    if patch.target.releases and name not in vars(owner):
                        continue  # a release without it
                    original = vars(owner)[name]
                    replacement = patch.wrap(original)
                    setattr(owner, name, replacement)
                    done.append((owner, name, original, replacement))
            except Exception as error:
                _restore(done)
                raise PatchError(f"{patch.target} could not be wrapped: {error}") from error
            self._applied[group] = done

    def remove(self, group: str) -> None:
        """Restore what `apply` replaced; a target that someone else wrapped since is left alone."""
        with self._lock:
            _restore(self._applied.pop(group, []))

    def is_applied(self, group: str) -> bool:
        """Return whether `group` is in place."""
        with self._lock:
            return group in self._applied


def _restore(done: list[tuple[Any, str, Any, Any]]) -> None:
    for owner, name, original, replacement in reversed(done):
        if vars(owner).get(name) is replacement:
            setattr(owner, name, original)


def _owner(target: Target) -> tuple[Any, str]:
    *path, name = target.name.split(".")
    owner: Any = importlib.import_module(target.module)
    for part in path:
        owner = getattr(owner, part)
    if name not in vars(owner) and not target.releases:
        raise PatchError("it is not defined there")
    return owner, name


def _problem(target: Target, root: Path) -> str | None:
    base = root.joinpath(*target.module.split("."))
    file = next((f for f in (base.with_suffix(".py"), base / "__init__.py") if f.is_file()), None)
    if file is None:
        return "the module does not exist"
    *classes, name = target.name.split(".")
    body: list[ast.stmt] = _parse(file).body
    for part in classes:
        found = next((n for n in body if isinstance(n, ast.ClassDef) and n.name == part), None)
        if found is None:
            return f"the class {part} does not exist"
        body = found.body
    function = next((n for n in body if isinstance(n, ast.FunctionDef) and n.name == name), None)
    if target.parameters is None:
        return None if function or _binds(body, name) else "the module does not bind this name"
    if function is None:
        return "it does not exist"
    names = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]
    if names[:1] in (["self"], ["cls"]):
        names = names[1:]
    expected = list(target.parameters)
    if names[: len(expected)] != expected:
        return f"its parameters are ({', '.join(names)}), expected ({', '.join(expected)}, ...)"
    return None


def _binds(body: Iterable[ast.stmt], name: str) -> bool:
    for node in body:
        if isinstance(node, ast.ImportFrom | ast.Import):
            if any((alias.asname or alias.name) == name for alias in node.names):
                return True
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            if node.name == name:
                return True
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return True
    return False


@lru_cache(maxsize=64)
def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def forget_sources() -> None:
    """Drop the parsed sources that `problems` keeps between calls."""
    _parse.cache_clear()
