"""A neighbour on the engine's GPU: a process of its own that takes and frees memory as the engine starts.

vLLM imports this module in the worker for ``worker_extension_cls``. EKV_NEIGHBOUR is JSON,
``{"first": bytes, "after": {stage: bytes, ...}, "events": file}``: the neighbour holds so many bytes before
the engine first looks, and from the end of each stage on. Each line of the file is JSON: the stage, the bytes
held since, and what the neighbour takes beside them (its CUDA context).
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from vllm_integration import stages

JOB = json.loads(os.environ["EKV_NEIGHBOUR"])
NEIGHBOUR = """
import sys, pynvml, torch
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(int(sys.argv[1]))
free = lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).free
before = free()
torch.zeros(1, device="cuda")
torch.cuda.synchronize()
context = before - free()
for line in sys.stdin:
    held = None
    torch.cuda.empty_cache()
    held = torch.zeros(int(line), dtype=torch.int8, device="cuda")
    torch.cuda.synchronize()
    print(context, flush=True)
"""


class Extension:
    """What vLLM puts among the worker's base classes."""


def _hold(stage: str, num_bytes: int) -> None:
    assert _PROCESS.stdin and _PROCESS.stdout
    print(num_bytes, file=_PROCESS.stdin, flush=True)
    event = {"stage": stage, "bytes": num_bytes, "context_bytes": int(_PROCESS.stdout.readline())}
    with Path(JOB["events"]).open("a") as events:
        events.write(json.dumps(event) + "\n")


def _listen(name: str, record: dict[str, Any] | None) -> None:
    if record and name in JOB["after"]:
        _hold(name, JOB["after"][name])


_PROCESS = subprocess.Popen(
    [sys.executable, "-c", NEIGHBOUR, os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
)
_hold("first", JOB["first"])
_LISTENING = stages.listen(_listen)
_LISTENING.__enter__()
