"""What the tests share: what this machine can run, one small model, engines in their own processes."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of a small model whose output depends on its KV cache."""
    from vllm_integration.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


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
def run_engine(
    tiny_model_path: Path, engine_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> EngineRunner:
    """Return a function that runs an engine in its own process and gives back what `engine_runner.py` says.

    ``run_engine(llm={...}, steps=[...], env={...})``: ``llm`` are keywords of ``vllm.LLM`` (its model is the
    tiny one unless named), ``steps`` what to do with it, ``env`` is added to the environment. The answer
    holds ``results``, one for each step, and ``log``, everything the process printed.
    """

    def run(
        llm: dict[str, Any] | None = None,
        steps: list[dict[str, Any]] | None = None,
        env: dict[str, str] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("engine")
        job, answer, log = folder / "job.json", folder / "answer.json", folder / "log.txt"
        llm = {"model": str(tiny_model_path), **(llm or {})}
        job.write_text(json.dumps({"llm": llm, "steps": steps or [], **options}))
        with log.open("w") as output:
            process = subprocess.run(
                [sys.executable, str(ENGINE_RUNNER), str(job), str(answer)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**engine_env, **(env or {})},
                timeout=ENGINE_TIMEOUT_S,
                check=False,
            )
        text = log.read_text(errors="replace")
        assert answer.exists(), f"the engine gave no answer (exit {process.returncode}):\n{text[-6000:]}"
        return {**json.loads(answer.read_text()), "exit": process.returncode, "log": text}

    return run
