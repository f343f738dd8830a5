"""The shim and the stub drivers under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from stub_lab import GRANULE, ROOT, TESTS, WARNINGS, compile_c, stub_library

CSRC = ROOT / "allocator" / "csrc"
SANITIZERS = {
    "thread": ("-fsanitize=thread",),
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
}
DRIVERS = {"host": 0, "cuda": 1, "hip": 2}
ROUNDS = 30


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_threads_at_once_are_clean(sanitizer, driver, tmp_path):
    flags = SANITIZERS[sanitizer]
    sources = [TESTS / "c" / "threads.c", *sorted(CSRC.glob("*.c"))]
    options = (*WARNINGS[1:], "-std=gnu11", "-O1", f"-I{CSRC}", *flags)
    program = compile_c(f"threads-{sanitizer}", sources, options, sorted(CSRC.glob("*.h")))
    report = tmp_path / "report"
    environment = {
        **os.environ,
        "EKV_STUB_OPTIONS": f"granularity={GRANULE}",
        "EKV_STUB_REPORT": str(report),
        "EKV_HOST_GRANULARITY": str(GRANULE),
        "EKV_HIP_GRANULARITY": str(GRANULE),
        "TSAN_OPTIONS": "halt_on_error=1",
        "ASAN_OPTIONS": "detect_leaks=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    if driver != "host":
        environment[f"EKV_{driver.upper()}_LIBRARY"] = str(stub_library(driver, *flags))
    command = [str(program), str(DRIVERS[driver]), str(ROUNDS)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout == "done\n"
    if driver != "host":
        events = [json.loads(line) for line in report.read_text().splitlines()]
        (end,) = events
        assert end["event"] == "unload", events
        assert end["handles"] == end["mappings"] == end["reservations"] == end["allocations"] == 0, end
