"""Engines, each in a fork of one process that has vLLM imported: `engine_server.py [MODULE ...]`.

Importing vLLM takes longer than everything else of a small engine's start. The server has imported it, has
started no engine itself and never touched a device. A line of JSON on its stdin names ``job``, ``answer`` and
``log`` (files; see `engine_runner.py`), ``env``, which is added to the environment, and ``limit_s``, after
which the engine and its workers are killed. Its answer on stdout is the exit status of the engine's process.
Each MODULE has ``STEPS`` of its own for the runner.
"""

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

ENGINE = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.core.sched.scheduler",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.layers.quantization.online.base",
)
PRELOAD = {
    # The CPU worker goes first: it changes torch for what is imported after it.
    "cpu": (
        "vllm.v1.worker.cpu_worker",
        *ENGINE,
        "vllm.v1.executor.multiproc_executor",
        "vllm.v1.attention.backends.cpu_attn",
    ),
    "gpu": (
        *ENGINE,
        "vllm.v1.worker.gpu_worker",
        "vllm.v1.worker.gpu_model_runner",
        "vllm.v1.worker.gpu.model_runner",
        "vllm.v1.attention.backends.flash_attn",
    ),
}


class EngineServer:
    """The server from its user's side, started at the first use."""

    def __init__(self, env: Mapping[str, str], *modules: str) -> None:
        self._env, self._modules = dict(env), modules
        self._process: subprocess.Popen[str] | None = None

    def run(self, job: Path, answer: Path, log: Path, env: Mapping[str, str], limit_s: float) -> int:
        """Run one engine; return the exit status of its process, negative for a signal."""
        if self._process is None:
            command = [sys.executable, str(Path(__file__).resolve()), *self._modules]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._env
            )
            self._read()
        assert self._process.stdin
        request = {"job": str(job), "answer": str(answer), "log": str(log), "env": env, "limit_s": limit_s}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._read())

    def close(self) -> None:
        """End the server; it runs no engine now."""
        if self._process is not None:
            self._process.communicate(timeout=30)
            self._process = None

    def _read(self) -> str:
        assert self._process and self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine server ended with status {self._process.wait()}")
        return line.strip()


def main() -> None:
    """Import, then serve until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed while importing is no answer
    import engine_runner

    for module in sys.argv[1:]:
        engine_runner.STEPS.update(importlib.import_module(module).STEPS)
    _preload()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _become_engine(request)
            engine_runner.run(Path(request["job"]), Path(request["answer"]))
            return  # into the interpreter's normal end
        print(_wait(child, request["limit_s"]), file=answers, flush=True)


def _preload() -> None:
    import torch
    from vllm.platforms import current_platform

    for module in PRELOAD["cpu" if current_platform.is_cpu() else "gpu"]:
        try:
            importlib.import_module(module)
        except ImportError as error:
            print(f"not preloaded: {error}", file=sys.stderr)
    assert not torch.cuda.is_initialized(), "importing vLLM started CUDA: engines cannot be forked"
    gc.collect()
    gc.freeze()  # an engine's collections need not look at what it has inherited


def _become_engine(request: dict[str, Any]) -> None:
    """Make this fork a process like one that was started for the engine alone, with children of its own."""
    os.setpgid(0, 0)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(request["env"])
    from vllm import envs
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and "VLLM_WORKER_MULTIPROC_METHOD" not in request["env"]:
        # The CPU platform asks for `spawn`, and each engine core and worker would import vLLM again.
        envs.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "fork"


def _wait(child: int, limit_s: float) -> int:
    """Return the exit status of `child`, which is killed with its workers after `limit_s` seconds.

    What one that failed has left running is killed too: its workers may still hold a device's memory.
    """
    deadline, ended = time.monotonic() + limit_s, 0
    try:
        while not ended and time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0 if ended else 0.01)
    finally:
        if not ended or status:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        if not ended:
            status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    main()
