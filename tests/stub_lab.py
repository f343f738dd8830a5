"""Runs the body of a test in a child process whose CUDA and HIP drivers are the stub libraries.

The shim opens its driver library once per process, at first use, so a stub needs a process of its own.
`@in_child` makes a test's body run in one; afterwards the stubs' report must show no violation and, unless
`leaks=True`, nothing that was not given back.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import importlib.util
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

from c_build import runtime_library, stub_library

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
IN_CHILD = "EKV_STUB_CHILD"
SANITIZED = "EKV_TEST_SHIM"  # path of an AddressSanitizer build of the shim, to be used instead
GRANULE = 16 << 10


class Stub:
    """The controls of one loaded stub library: `stub_*` of tests/stubs/vmm_control.h, without the prefix."""

    def __init__(self, driver: str) -> None:
        self._library = ctypes.CDLL(os.environ[f"EKV_{driver.upper()}_LIBRARY"])
        self.prefix = {"cuda": "cuMem*", "hip": "hipMem*"}[driver]
        for name in ("stub_violations", "stub_log"):
            getattr(self._library, name).restype = ctypes.c_char_p
        for name in ("handles", "mappings", "reservations", "allocations", "streams"):
            getattr(self._library, f"stub_live_{name}").restype = ctypes.c_size_t
        self._library.stub_used_bytes.restype = ctypes.c_uint64
        for name in ("stub_calls", "stub_injected"):
            getattr(self._library, name).restype = ctypes.c_long

    def __getattr__(self, name: str):
        function = getattr(self._library, f"stub_{name}")

        def call(*arguments):
            converted = [ctypes.c_int64(a) if isinstance(a, int) else a for a in arguments]
            return function(*(a.encode() if isinstance(a, str) else a for a in converted))

        return call

    @property
    def driver(self) -> ctypes.CDLL:
        """The driver's own symbols."""
        return self._library

    def text(self) -> str:
        """Return the violations so far."""
        return self._library.stub_violations().decode()

    def live(self) -> dict[str, int]:
        """Return how many objects of each kind exist; the shim keeps its streams for good."""
        kinds = ("handles", "mappings", "reservations", "allocations")
        return {kind: getattr(self, f"live_{kind}")() for kind in kinds}

    def option(self, name: str, value: int) -> None:
        """Set an option; unknown names fail."""
        assert self.set_option(name, value) == 0, name


def in_child(
    *,
    leaks: bool = False,
    violations: bool = False,
    options: str = "",
    env: dict[str, str] | None = None,
    preload: tuple[str, ...] = (),
):
    """Make the decorated test run in a child process; see the module's description.

    `preload` names modules that take long to import and touch no driver.
    """

    def decorate(body):
        if os.environ.get(IN_CHILD):
            return body

        @functools.wraps(body)
        def test(**arguments):
            checks = {"leaks": leaks, "violations": violations}
            run_child(body, arguments, options=options, env=env or {}, preload=preload, **checks)

        return test

    return decorate


def run_child(
    body, arguments, *, leaks=False, violations=False, options="", env=None, timeout_s=120, preload=()
) -> str:
    """Run `body(**arguments)` in a child and check its end; returns what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        report, output_path = Path(folder) / "report", Path(folder) / "output"
        environment = {
            "EKV_CUDA_LIBRARY": str(stub_library("cuda")),
            "EKV_HIP_LIBRARY": str(stub_library("hip")),
            "EKV_STUB_REPORT": str(report),
            "EKV_STUB_OPTIONS": ",".join(filter(None, (f"granularity={GRANULE}", options))),
            "EKV_HOST_GRANULARITY": str(GRANULE),
            "EKV_HIP_GRANULARITY": str(GRANULE),
            **(env or {}),
        }
        request = {
            "module": Path(inspect.getfile(body)).stem,
            "body": body.__name__,
            "arguments": arguments,
            "env": environment,
            "output": str(output_path),
            "timeout_s": timeout_s,
        }
        status = _server(os.environ.get(SANITIZED, ""), *preload).ask(request)
        events = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
        output = output_path.read_text()
    assert status == 0, f"the child ended with {status}:\n{output}"
    if not violations:
        assert not [e for e in events if e["event"] == "violation"], events
    for event in events:
        if event["event"] == "unload" and not leaks:
            left = {k: event[k] for k in ("handles", "mappings", "reservations", "allocations") if event[k]}
            assert not left and event["used_bytes"] == [0, 0], event
    return output


class _Server:
    """A process that has imported everything but touched no driver, and forks a child for each request."""

    def __init__(self, sanitized: str, preload: tuple[str, ...]) -> None:
        environment = {**os.environ, IN_CHILD: "1", "PYTHONPATH": os.pathsep.join((str(TESTS), str(ROOT)))}
        if sanitized:
            environment |= {"LD_PRELOAD": runtime_library("libasan.so"), "ASAN_OPTIONS": "detect_leaks=0"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", "import stub_lab; stub_lab.serve()", *preload],
            env=environment,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, request: dict) -> int:
        """Return the exit status of the child that ran the request: negative for a signal."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@functools.cache
def _server(sanitized: str, *preload: str) -> _Server:
    return _Server(sanitized, preload)


def serve() -> None:
    """Answer requests until the input ends; a child returns from here into the interpreter's normal end."""
    if SANITIZED in os.environ:
        _use_shim(os.environ[SANITIZED])
    for name in ("pytest", "rig", "allocator.shim", *sys.argv[1:]):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a child's end need not look at what it has inherited
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(request)
            return
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(status, file=answers, flush=True)


def _use_shim(path: str) -> None:
    """Make the extension module at `path` the one that the package imports."""
    spec = importlib.util.spec_from_file_location("allocator._ekv", path)
    assert spec and spec.loader
    sys.modules["allocator._ekv"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["allocator._ekv"])


def _run(request: dict) -> None:
    """Be the child: whatever fails ends it with status 1 and a traceback in its output."""
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(request["env"])
    signal.alarm(request["timeout_s"])
    try:
        getattr(importlib.import_module(request["module"]), request["body"])(**request["arguments"])
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
