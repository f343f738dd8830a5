"""What NVML tells of this process: what it took of its GPU before vLLM's first reading, and what it holds.

The first are the CUDA context, NCCL and library handles. vLLM counts a process's use from a snapshot that it
takes after all these exist, so a cache sized by it ends over `gpu_memory_utilization` by as much. NVML can be
read without a context, and so tells the difference.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

__all__ = ["MOST_BYTES", "Before", "bytes_before_snapshot", "free_by_device", "look", "process_bytes"]

# A neighbour that starts meanwhile must not be taken for our context, which is 0.3 to 1.5 GiB with NCCL.
MOST_BYTES = 2 << 30
# Inode of the machine's first PID namespace. Source: Linux, include/linux/proc_ns.h, PROC_PID_INIT_INO.
FIRST_PID_NAMESPACE = 0xEFFFFFFC


@dataclass(frozen=True)
class Before:
    """What there was before a worker took its device, in bytes; a key is missing where nobody tells.

    What the process already holds, another engine's or the user's own, is no part of this engine's budget.
    """

    free: dict[int, int] = field(default_factory=dict)  # of each physical GPU, by NVML
    held: dict[int, int] = field(default_factory=dict)  # of each physical GPU by this process, by NVML
    by_pytorch: dict[int, int] = field(default_factory=dict)  # of each visible GPU, by `measure.own_bytes`


def look() -> Before:
    """Return what there is now. Empties PyTorch's cache, as vLLM is about to; makes no CUDA context."""
    import torch

    from vllm_integration import measure

    by_pytorch = {}
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            if not torch.cuda.memory_reserved(index):
                continue  # to wait for a device would make a context on it
            measure.settle(torch.device("cuda", index))
            by_pytorch[index] = measure.own_bytes(torch.device("cuda", index))
    free = free_by_device()
    held = {physical: used for physical in free if (used := _held_bytes(physical)) is not None}
    return Before(free, held, by_pytorch)


def free_by_device() -> dict[int, int]:
    """Return NVML's free bytes of each physical GPU; empty where there is no NVML. Makes no CUDA context."""
    with _nvml() as nvml:
        if nvml is None:
            return {}
        try:
            handles = {i: nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())}
            return {i: int(nvml.nvmlDeviceGetMemoryInfo(handle).free) for i, handle in handles.items()}
        except nvml.NVMLError:
            return {}


def process_bytes(worker: Any) -> int | None:
    """Return what this process took of `worker.device` since `worker.init_device`, by the driver's account.

    Pool and context are part of it. None where the driver does not tell: without NVML, on a part of a GPU
    (MIG), and in a container whose process ids are not the machine's, which NVML would take for others'.
    """
    physical = _physical_id(worker)
    before = worker._ekv_before.held.get(physical)
    now = None if before is None else _held_bytes(physical)
    return now - before if now else None  # a process that NVML does not list holds something all the same


def _held_bytes(physical: int | None) -> int | None:
    """Return what NVML says that this process holds of a GPU: 0 if it lists others only, None if unknown."""
    if physical is None or os.stat("/proc/self/ns/pid").st_ino != FIRST_PID_NAMESPACE:
        return None
    with _nvml() as nvml:
        if nvml is None:
            return None
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(physical)
            processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except nvml.NVMLError:
            return None
    own = [process.usedGpuMemory for process in processes if process.pid == os.getpid()]
    if len(own) > 1 or None in own:
        return None
    return int(own[0]) if own else 0


def bytes_before_snapshot(worker: Any, free_after: dict[int, int]) -> int:
    """Return the bytes of `worker.device` that were taken from `worker._ekv_before` to its `init_snapshot`.

    `free_after` was read when `worker.init_device` had returned; what it took after the snapshot is told by
    the driver's reading and left out. 0 where NVML cannot say, which is vLLM's own way of counting.
    """
    from vllm_integration.measure import free_bytes

    physical, free_before = _physical_id(worker), worker._ekv_before.free
    if physical not in free_before or physical not in free_after:
        return 0
    after_snapshot = int(worker.init_snapshot.free_memory) - free_bytes(worker.device)
    taken = free_before[physical] - free_after[physical] - after_snapshot
    return max(0, min(taken, MOST_BYTES))


@contextmanager
def _nvml() -> Iterator[Any]:
    try:
        import vllm.third_party.pynvml as nvml

        nvml.nvmlInit()
    except Exception:  # no library, no driver, no permission: NVML has an exception class for each
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _physical_id(worker: Any) -> int | None:
    from vllm.platforms import current_platform

    index = worker.device.index or 0
    visible = os.environ.get(current_platform.device_control_env_var, "").split(",")
    if visible[index : index + 1] and visible[index].startswith("MIG-"):
        return None  # NVML's number of a part is not one of a GPU
    try:
        return int(current_platform.visible_device_id_to_physical_device_id(index))
    except (RuntimeError, ValueError, IndexError):
        return None
