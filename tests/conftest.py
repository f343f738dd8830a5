"""What the tests share: what this machine can run, one small model, engines in their own processes."""

import functools
import gc
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_server import EngineServer

ENGINE_RUNNER = Path(__file__).parent / "engine_runner.py"
ENGINE_TIMEOUT_S = 240
EngineRunner = Callable[..., dict[str, Any]]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a GPU where there is none; where vLLM is missing, skip or fail what needs it."""
    if not _has_gpu():
        gone = [
            item for item in items if item.get_closest_marker("gpu") or item.get_closest_marker("vllm_gpu")
        ]
        items[:] = [item for item in items if item not in set(gone)]
        config.hook.pytest_deselected(items=gone)
    if importlib.util.find_spec("vllm") is None:
        if os.environ.get("EKV_REQUIRE_VLLM") == "1":
            raise pytest.UsageError("EKV_REQUIRE_VLLM=1, but vllm is not installed")
        for item in items:
            if item.get_closest_marker("vllm") or item.get_closest_marker("vllm_gpu"):
                item.add_marker(pytest.mark.skip(reason="vllm is not installed"))


@functools.cache
def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def unchanged_environment() -> Iterator[None]:
    """Undo what a test does to the environment: vLLM's CPU platform sets LD_PRELOAD, for all that follows."""
    before = dict(os.environ)
    yield
    for name in (os.environ.keys() | before.keys()) - {"PYTEST_CURRENT_TEST"}:
        if name not in before:
            del os.environ[name]
        elif os.environ.get(name) != before[name]:
            os.environ[name] = before[name]


@pytest.fixture
def host_budget() -> Iterator[Any]:
    """Set how much more than now the host driver may hold, in bytes; None: no limit."""
    from allocator import memory_info
    from allocator.shim import lib

    def allow(more_bytes: int | None) -> None:
        gc.collect()  # what tests before this one left in cycles would go later, and make room
        lib.ekv_host_configure(0, 1 << 40)
        used = (1 << 40) - memory_info("cpu")[0]
        lib.ekv_host_configure(0, 0 if more_bytes is None else used + more_bytes)

    yield allow
    lib.ekv_host_configure(0, 0)


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of a small model whose output depends on its KV cache."""
    from vllm_integration.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def vllm_config(tiny_model_path: Path) -> Any:
    """Return the configuration of an engine of the small model on this machine."""
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(
        model=str(tiny_model_path), max_model_len=512, dtype="float32", enforce_eager=True
    ).create_engine_config()
    config.cache_config.kv_cache_layout = "LBHNC"
    return config


@pytest.fixture(scope="session")
def engine_env() -> dict[str, str]:
    """Environment for a process with an engine: loopback only, no hub, no usage statistics."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "PYTHONFAULTHANDLER": "1",
    }


@pytest.fixture(scope="session")
def engine_server(engine_env: dict[str, str]) -> Iterator[EngineServer]:
    """Return the process that engines are forked from."""
    # One thread, because a fork has none of its parent's. The sampler is the only thing that an eager engine
    # compiles, which takes longer than the rest of its start.
    server = EngineServer(engine_env | {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"})
    yield server
    server.close()


@pytest.fixture(scope="session")
def run_engine(
    tiny_model_path: Path,
    engine_env: dict[str, str],
    engine_server: EngineServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> EngineRunner:
    """Return a function that runs an engine in its own process and gives back what `engine_runner.py` says.

    ``run_engine(llm={...}, steps=[...], env={...})``: ``llm`` are keywords of `vllm.LLM` (its model is the
    tiny one unless named), ``steps`` what to do with it, ``env`` is added to the environment. With
    ``fresh=True`` the process starts from nothing, as a user's does, and compiles; else it and its children
    are forks of one that has vLLM imported. The answer holds ``results``, one for each step, ``exit``,
    the exit status, and ``log``, everything the process printed.
    """

    def run(
        llm: dict[str, Any] | None = None,
        steps: list[dict[str, Any]] | None = None,
        env: dict[str, str] | None = None,
        fresh: bool = False,
        **options: Any,
    ) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("engine")
        job, answer, log = folder / "job.json", folder / "answer.json", folder / "log.txt"
        llm = {"model": str(tiny_model_path), **(llm or {})}
        job.write_text(json.dumps({"llm": llm, "steps": steps or [], **options}))
        if fresh:
            status = _run_fresh(job, answer, log, {**engine_env, **(env or {})})
        else:
            status = engine_server.run(job, answer, log, env or {}, ENGINE_TIMEOUT_S)
        text = log.read_text(errors="replace")
        assert answer.exists(), f"the engine gave no answer (exit {status}):\n{text[-6000:]}"
        return {**json.loads(answer.read_text()), "exit": status, "log": text}

    return run


def _run_fresh(job: Path, answer: Path, log: Path, env: dict[str, str]) -> int:
    with log.open("w") as output:
        return subprocess.run(
            [sys.executable, str(ENGINE_RUNNER), str(job), str(answer)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            timeout=ENGINE_TIMEOUT_S,
            check=False,
        ).returncode
