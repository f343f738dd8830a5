"""Starts one engine after another without importing vLLM each time: `python benchmarks/engine_server.py`.

A line of JSON on stdin names ``job``, ``answer`` and ``log`` (files; see tests/engine_runner.py), ``env``,
and ``limit_s``, after which the engine is killed; it runs in a fork of this process, which has vLLM imported
but has never touched the device.  The answer on stdout is the exit status of the engine's process.
"""

import importlib
import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import engine_runner
import load_steps
import torch

PRELOAD = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.model_executor.models.qwen3",
    "vllm.v1.attention.backends.flash_attn",
)


def main() -> None:
    """Import, then serve until stdin ends."""
    for module in PRELOAD:
        try:
            importlib.import_module(module)
        except ImportError as error:
            print(f"not preloaded: {error}", file=sys.stderr)
    assert not torch.cuda.is_initialized(), "importing vLLM started CUDA: engines cannot be forked"
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            run(request)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def run(request: dict) -> None:
    """Be the engine's process, and end it."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(request["env"])
    signal.alarm(request["limit_s"])
    engine_runner.STEPS.update(load_steps.STEPS)
    sys.argv = ["engine_runner.py", request["job"], request["answer"]]
    engine_runner.main()
    sys.exit(0)


if __name__ == "__main__":
    main()
