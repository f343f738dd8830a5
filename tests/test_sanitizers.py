"""The shim and the stub drivers under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
import test_fault_ladder
import test_state_machine
from c_build import SANITIZERS, sanitized_program, sanitized_shim, stub_library
from stub_lab import GRANULE, SANITIZED

DRIVERS = {"host": 0, "cuda": 1, "hip": 2}
ROUNDS = 30


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_threads_at_once_are_clean(sanitizer, driver, tmp_path):
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
        library = stub_library(driver, *SANITIZERS[sanitizer])
        environment[f"EKV_{driver.upper()}_LIBRARY"] = str(library)
    command = [str(sanitized_program("threads", sanitizer)), str(DRIVERS[driver]), str(ROUNDS)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout == "done\n"
    if driver != "host":
        events = [json.loads(line) for line in report.read_text().splitlines()]
        (end,) = events
        assert end["event"] == "unload", events
        assert end["handles"] == end["mappings"] == end["reservations"] == end["allocations"] == 0, end


@pytest.mark.parametrize("name", test_fault_ladder.OPERATIONS)
def test_undo_is_clean(name, monkeypatch):
    monkeypatch.setenv(SANITIZED, str(sanitized_shim()))
    test_fault_ladder.test_ladder_any_call_fails_state_is_kept_and_retry_succeeds(driver="hip", name=name)


@pytest.mark.parametrize("driver", DRIVERS)
def test_random_operations_are_clean(driver, monkeypatch):
    monkeypatch.setenv(SANITIZED, str(sanitized_shim()))
    test_state_machine.test_any_sequence_of_operations_agrees_with_the_model(driver=driver)


def test_host_driver_any_system_call_or_malloc_fails():
    wrapped = "malloc calloc realloc mmap munmap mprotect madvise memfd_create fallocate close".split()
    program = sanitized_program("host_ladder", "address", *wrapped)
    environment = {**os.environ, "EKV_HOST_GRANULARITY": str(GRANULE)}
    run = subprocess.run(
        [str(program)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    steps = [line.split(": ") for line in run.stdout.splitlines()]
    assert len(steps) == 16
    assert all(int(count) > 1 for _, count in steps), steps
