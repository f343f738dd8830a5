"""What NVML tells of this process, from a strict stand-in for its Python module."""

import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from pools import make_pool

from vllm_integration import measure, own_context

pytestmark = pytest.mark.vllm

MIB, GIB = 1 << 20, 1 << 30


class NVMLError(Exception):
    """Of the stand-in."""


class Nvml(types.ModuleType):
    """Two devices; every call outside of init and shutdown fails, as NVML's do."""

    NVMLError = NVMLError

    def __init__(self) -> None:
        super().__init__("vllm.third_party.pynvml")
        self.free = [70 * GIB, 60 * GIB]
        self.processes: list[tuple[int, int | None]] = []
        self.open = 0
        self.fails = ""

    def _called(self, name: str) -> None:
        if self.fails == name or not self.open:
            raise NVMLError(name)

    def nvmlInit(self) -> None:
        if self.fails == "init":
            raise NVMLError("init")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        self._called("count")
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._called("handle")
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        self._called("memory")
        return types.SimpleNamespace(free=self.free[handle])

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        self._called("processes")
        listed = self.processes if handle == 1 else []
        return [types.SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in listed]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    import vllm.third_party
    from vllm.platforms import current_platform

    module = Nvml()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(vllm.third_party, "pynvml", module, raising=False)
    # Device 0 of the process is the second one of the machine.
    physical = staticmethod(lambda visible: visible + 1)
    monkeypatch.setattr(type(current_platform), "visible_device_id_to_physical_device_id", physical)
    here = os.stat("/proc/self/ns/pid").st_ino
    monkeypatch.setattr(own_context, "FIRST_PID_NAMESPACE", here)
    return module


def worker(free_at_snapshot: int = 0, before: own_context.Before | None = None) -> Any:
    device = types.SimpleNamespace(type="cuda", index=None)
    return types.SimpleNamespace(
        device=device,
        init_snapshot=types.SimpleNamespace(free_memory=free_at_snapshot),
        _ekv_before=before or own_context.Before(held={1: 0}),
    )


def test_process_bytes_are_this_processs_on_its_own_device(nvml: Nvml) -> None:
    nvml.processes = [(1, 5 * GIB), (os.getpid(), 3 * GIB)]
    assert own_context.process_bytes(worker()) == 3 * GIB
    assert nvml.open == 0


def test_process_bytes_leave_out_what_it_held_before(nvml: Nvml) -> None:
    """Another engine of this process, or a model of the user's own."""
    nvml.processes = [(1, 5 * GIB), (os.getpid(), 30 * GIB)]
    before = own_context.look()
    assert before.held == {0: 0, 1: 30 * GIB} and before.free == {0: 70 * GIB, 1: 60 * GIB}
    assert before.by_pytorch == {}  # which has no context here
    nvml.processes[1] = (os.getpid(), 42 * GIB)
    assert own_context.process_bytes(worker(before=before)) == 12 * GIB
    assert own_context.process_bytes(worker(before=own_context.Before())) is None


def test_pytorchs_own_count_is_read_once_its_cache_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [9 * GIB, 4 * GIB, 0]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: held[index])
    monkeypatch.setattr(measure, "settle", lambda device: held.__setitem__(device.index, device.index * GIB))
    monkeypatch.setattr(measure, "own_bytes", lambda device: held[device.index])
    assert own_context.look().by_pytorch == {0: 0, 1: GIB}


def test_part_of_a_gpu_is_not_the_gpu_with_that_number(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    nvml.processes = [(os.getpid(), 3 * GIB)]
    for visible, told in (("MIG-1b2c", None), ("GPU-1b2c", 3 * GIB), ("", 3 * GIB)):
        monkeypatch.setenv(current_platform.device_control_env_var, visible)
        assert own_context.process_bytes(worker()) == told


@pytest.mark.parametrize(
    "processes",
    [[], [(1, 5 * GIB)], [(os.getpid(), None)], [(os.getpid(), GIB), (os.getpid(), GIB)]],
    ids=["none", "others", "not told", "two"],
)
def test_process_that_nvml_does_not_tell_of(nvml: Nvml, processes: list[tuple[int, int | None]]) -> None:
    nvml.processes = processes
    assert own_context.process_bytes(worker()) is None


@pytest.mark.parametrize("fails", ["init", "handle", "processes"])
def test_nvml_that_fails_tells_nothing_and_is_closed(nvml: Nvml, fails: str) -> None:
    nvml.processes = [(os.getpid(), 3 * GIB)]
    nvml.fails = fails
    assert own_context.process_bytes(worker()) is None
    assert nvml.open == 0


def test_process_ids_of_a_container_are_not_nvmls(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.processes = [(os.getpid(), 3 * GIB)]  # of somebody else, who has that id outside
    monkeypatch.setattr(own_context, "FIRST_PID_NAMESPACE", own_context.FIRST_PID_NAMESPACE + 1)
    assert own_context.process_bytes(worker()) is None


def test_first_pid_namespace_has_a_number_of_its_own() -> None:
    """Of this machine, if process 2, the kernel's thread daemon, can be seen from here."""
    daemon = Path("/proc/2/comm")
    if not daemon.exists() or daemon.read_text() != "kthreadd\n":
        pytest.skip("this process is in a container")
    assert os.stat("/proc/self/ns/pid").st_ino == own_context.FIRST_PID_NAMESPACE


@pytest.mark.parametrize("fails", ["init", "count", "handle", "memory"])
def test_free_memory_without_nvml_is_unknown(nvml: Nvml, fails: str) -> None:
    assert own_context.free_by_device() == {0: 70 * GIB, 1: 60 * GIB}
    nvml.fails = fails
    assert own_context.free_by_device() == {}
    assert nvml.open == 0


@pytest.mark.parametrize(
    ("taken", "after_snapshot", "counted"),
    [
        (900 * MIB, 100 * MIB, 800 * MIB),
        (900 * MIB, 0, 900 * MIB),
        (50 * MIB, 80 * MIB, 0),  # a neighbour gave something back
        (40 * GIB, 0, own_context.MOST_BYTES),  # or took
    ],
)
def test_context_is_what_was_taken_before_the_snapshot(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch, taken: int, after_snapshot: int, counted: int
) -> None:
    before = own_context.look()
    nvml.free[1] -= taken
    nvml.free[0] -= 7 * GIB  # another device
    now = nvml.free[1] - 3 * MIB  # by the driver, which counts a little differently
    monkeypatch.setattr(measure, "free_bytes", lambda device: now)
    after = own_context.free_by_device()
    counts = lambda before, after: own_context.bytes_before_snapshot(  # noqa: E731
        worker(now + after_snapshot, before), after
    )
    assert counts(before, after) == counted
    assert counts(own_context.Before(), after) == 0
    assert counts(before, {0: 1}) == 0


@pytest.mark.gpu
def test_driver_counts_what_a_pool_commits_and_gives_back() -> None:
    torch.zeros(1, device="cuda")
    asked = types.SimpleNamespace(device=torch.device("cuda:0"), _ekv_before=own_context.look())
    if not any(asked._ekv_before.held.values()):
        pytest.skip("NVML does not tell of this process")
    pool, _view = make_pool("cuda", num_layers=8, num_blocks=1024, block_bytes=256 * 1024)  # 2 GiB
    pool.commit(1024)
    assert own_context.process_bytes(asked) == pytest.approx(pool.physical_bytes, abs=4 * MIB)
    pool.shrink(0)
    assert own_context.process_bytes(asked) == pytest.approx(0, abs=4 * MIB)
