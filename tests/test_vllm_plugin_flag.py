"""The switch: three ways in, kept through command lines, copies and process boundaries; and bad input."""

import argparse
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

SIZES = ("--max-model-len", "256", "--enforce-eager", "--dtype", "float32")


@pytest.fixture(scope="module")
def args_classes() -> tuple[Any, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

    import vllm_integration  # noqa: F401  (adds the keyword)

    return EngineArgs, AsyncEngineArgs


@pytest.fixture(params=["EngineArgs", "AsyncEngineArgs"])
def args_class(request: pytest.FixtureRequest, args_classes: tuple[Any, Any]) -> Any:
    return args_classes[["EngineArgs", "AsyncEngineArgs"].index(request.param)]


def parse(args_class: Any, *words: str) -> Any:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = args_class.add_cli_args(FlexibleArgumentParser())
    return args_class.from_cli_args(parser.parse_args(list(words)))


def test_keyword_ends_in_additional_config(args_class: Any, tiny_model_path: Path) -> None:
    args = args_class(model=str(tiny_model_path), enable_extensible_kv_cache=True)
    assert args.additional_config == {"extensible_kv_cache": True}


def test_no_keyword_leaves_additional_config_alone(args_class: Any, tiny_model_path: Path) -> None:
    given = {"mine": 1}
    args = args_class(model=str(tiny_model_path), additional_config=given)
    assert args.additional_config is given
    assert args_class(model=str(tiny_model_path)).additional_config == {}


def test_keyword_does_not_write_to_callers_dictionary(args_class: Any, tiny_model_path: Path) -> None:
    given = {"mine": 1}
    args = args_class(model=str(tiny_model_path), additional_config=given, enable_extensible_kv_cache=True)
    assert args.additional_config == {"mine": 1, "extensible_kv_cache": True}
    assert given == {"mine": 1}


@pytest.mark.parametrize("flag_first", [True, False])
def test_command_line_keeps_flag_beside_additional_config(args_class: Any, flag_first: bool) -> None:
    flag, more = ["--enable-extensible-kv-cache"], ["--additional-config", '{"mine": 1}']
    args = parse(args_class, *(flag + more if flag_first else more + flag))
    assert args.additional_config == {"mine": 1, "extensible_kv_cache": True}


def test_command_line_without_flag_has_no_switch(args_class: Any) -> None:
    assert parse(args_class).additional_config == {}
    assert parse(args_class, "--additional-config", '{"mine": 1}').additional_config == {"mine": 1}


def test_command_line_can_switch_off_what_the_options_switch_on(args_class: Any) -> None:
    from vllm_integration.config import options_of

    options = ["--additional-config", '{"extensible_kv_cache": {"margin_bytes": 5}}']
    on = parse(args_class, *options)
    assert options_of(on).margin_bytes == 5  # type: ignore[union-attr]
    assert options_of(parse(args_class, *options, "--enable-extensible-kv-cache")).margin_bytes == 5  # type: ignore[union-attr]
    assert options_of(parse(args_class, *options, "--no-enable-extensible-kv-cache")) is None


def test_flag_is_added_to_a_parser_once(args_class: Any) -> None:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = args_class.add_cli_args(FlexibleArgumentParser())
    flags = [action for action in parser._actions if action.dest == "enable_extensible_kv_cache"]
    assert len(flags) == 1
    assert isinstance(flags[0], argparse.BooleanOptionalAction)


def test_switch_and_worker_class_survive_pickling(args_class: Any, tiny_model_path: Path) -> None:
    from vllm_integration.config import options_of

    args = parse(args_class, "--model", str(tiny_model_path), *SIZES, "--enable-extensible-kv-cache")
    config = pickle.loads(pickle.dumps(args.create_engine_config()))
    assert options_of(config) is not None
    assert config.parallel_config.worker_cls.startswith("vllm_integration.workers.")


def test_configuration_without_switch_is_as_vllm_makes_it(args_class: Any, tiny_model_path: Path) -> None:
    config = parse(args_class, "--model", str(tiny_model_path), *SIZES).create_engine_config()
    assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert config.additional_config == {}


def test_own_worker_class_is_extended(args_class: Any, tiny_model_path: Path) -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.worker.cpu_worker import CPUWorker

    from vllm_integration.worker import ExtensibleWorker

    words = ["--model", str(tiny_model_path), *SIZES, "--worker-cls", "vllm.v1.worker.cpu_worker.CPUWorker"]
    config = parse(args_class, *words, "--enable-extensible-kv-cache").create_engine_config()
    extended = resolve_obj_by_qualname(config.parallel_config.worker_cls)
    assert issubclass(extended, CPUWorker)
    assert issubclass(extended, ExtensibleWorker)
    assert extended is resolve_obj_by_qualname(config.parallel_config.worker_cls)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"margin_byte": 1}, "unknown options margin_byte; known are margin_bytes"),
        ({"margin_bytes": -1}, "margin_bytes must be an integer of at least 0, got -1"),
        ({"margin_bytes": True}, "margin_bytes must be an integer"),
        ({"max_chunk_bytes": 0}, "max_chunk_bytes must be an integer of at least 1"),
        ({"warmup_blocks": 1}, "warmup_blocks must be an integer of at least 2, got 1"),
        ({"sleep_backup": "disk"}, "sleep_backup must be \"cpu\" or null, got 'disk'"),
        ({"enabled": "yes"}, "enabled must be true or false"),
        ({"host_staged_transfers": 1}, "host_staged_transfers must be true or false, got 1"),
        ("yes", "must be true, false or a dictionary of options, got 'yes'"),
        (1, "must be true, false or a dictionary of options, got 1"),
    ],
)
def test_bad_option_is_refused_by_name(
    args_classes: tuple[Any, Any], tiny_model_path: Path, value: Any, named: str
) -> None:
    args = args_classes[0](
        model=str(tiny_model_path), max_model_len=256, additional_config={"extensible_kv_cache": value}
    )
    with pytest.raises(ValueError, match=named):
        args.create_engine_config()


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (False, "enable_extensible_kv_cache is set, and .*=False switches it off: drop one"),
        ({"enabled": False, "margin_bytes": 1}, "'margin_bytes': 1} switches it off: drop one"),
        ({"enabled": "yes"}, "enabled must be true or false"),
        ("yes", "must be true, false or a dictionary of options, got 'yes'"),
    ],
)
def test_flag_beside_a_switch_that_is_off_or_none_is_refused(
    args_class: Any, tiny_model_path: Path, value: Any, named: str
) -> None:
    words = ["--model", str(tiny_model_path), *SIZES, "--enable-extensible-kv-cache"]
    words += ["--additional-config", json.dumps({"extensible_kv_cache": value})]
    with pytest.raises(ValueError, match=named):
        parse(args_class, *words).create_engine_config()


@pytest.mark.parametrize("value", [True, {"margin_bytes": 1}, {"enabled": True}])
def test_flag_that_says_no_goes_over_the_switch(args_class: Any, tiny_model_path: Path, value: Any) -> None:
    words = ["--model", str(tiny_model_path), *SIZES, "--no-enable-extensible-kv-cache"]
    words += ["--additional-config", json.dumps({"extensible_kv_cache": value})]
    config = parse(args_class, *words).create_engine_config()
    assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"


@pytest.mark.parametrize("value", [False, None, {"enabled": False, "margin_bytes": 1}])
def test_switched_off_is_off(args_classes: tuple[Any, Any], tiny_model_path: Path, value: Any) -> None:
    args = args_classes[0](
        model=str(tiny_model_path), max_model_len=256, additional_config={"extensible_kv_cache": value}
    )
    assert args.create_engine_config().parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"


def _unknown_version(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.version

    monkeypatch.setattr(vllm.version, "__version__", "0.99.0")


def _changed_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_integration import hooks, patches

    changed = patches.Target(hooks.CORE, "EngineCore._initialize_kv_caches", ("another",), "as if it changed")
    monkeypatch.setattr(hooks, "ALL_TARGETS", (*hooks.ALL_TARGETS, changed))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_unknown_version, ["vLLM 0.99.0 is not one of the releases"]),
        (_changed_hook, ["does not match: vllm.v1.engine.core", "_initialize_kv_caches"]),
    ],
)
def test_vllm_that_does_not_match_warns_once_and_keeps_the_normal_cache(
    args_classes: tuple[Any, Any],
    tiny_model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[pytest.MonkeyPatch], None],
    named: list[str],
) -> None:
    from vllm_integration import fallback, plugin
    from vllm_integration.config import options_of

    warnings: list[str] = []
    monkeypatch.setattr(
        fallback.logger.__class__, "__getattr__", lambda self, name: lambda *a: warnings.append(a[0] % a[1:])
    )
    change(monkeypatch)
    plugin.incompatibility.cache_clear()
    try:
        args = args_classes[0](model=str(tiny_model_path), max_model_len=256, enable_extensible_kv_cache=True)
        config = args.create_engine_config()
    finally:
        plugin.incompatibility.cache_clear()
    assert options_of(config) is None
    assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
    (warning,) = warnings
    assert all(text in warning for text in named)


def test_unregister_restores_vllm_and_register_is_idempotent(args_classes: tuple[Any, Any]) -> None:
    from vllm.engine import arg_utils
    from vllm.v1.engine import core

    from vllm_integration import plugin, register

    register()
    wrapped = (vars(arg_utils.EngineArgs)["from_cli_args"], core.get_kv_cache_configs)
    register()
    assert (vars(arg_utils.EngineArgs)["from_cli_args"], core.get_kv_cache_configs) == wrapped
    plugin.unregister()
    try:
        with pytest.raises(TypeError, match="enable_extensible_kv_cache"):
            args_classes[0](model="x", enable_extensible_kv_cache=True)
        assert not _is_ours(core.get_kv_cache_configs)
        assert not _is_ours(core.EngineCore._initialize_kv_caches)
    finally:
        register()
    assert _is_ours(core.get_kv_cache_configs)
    assert _is_ours(core.EngineCore._initialize_kv_caches)


def _is_ours(function: Any) -> bool:
    return "vllm_integration" in function.__code__.co_filename
