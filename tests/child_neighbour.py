"""A neighbour that is a process of its own, beside an engine in the same container (a control group).

vLLM imports this module in the worker for ``worker_extension_cls``. EKV_TEST_CHILD is JSON,
``{"procs": file, "after": {stage: bytes, ...}}``: this process enters that group, and when a stage
has ended, a child of it holds so many bytes of real memory from then on.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from vllm_integration import stages

JOB = json.loads(os.environ["EKV_TEST_CHILD"])
CHILD = """
import sys
for line in sys.stdin:
    held = None
    held = b"x" * int(line)
    print(len(held), flush=True)
"""


class Extension:
    """What vLLM puts among the worker's base classes."""


def _listen(name: str, record: dict[str, Any] | None) -> None:
    if record and name in JOB["after"]:
        assert _CHILD.stdin and _CHILD.stdout
        print(JOB["after"][name], file=_CHILD.stdin, flush=True)
        assert int(_CHILD.stdout.readline()) == JOB["after"][name]


Path(JOB["procs"]).write_text(str(os.getpid()))
_CHILD = subprocess.Popen(
    [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
)
_LISTENING = stages.listen(_listen)
_LISTENING.__enter__()
