"""What NVML tells of this process: what it took of its GPU before vLLM's first reading, and what it holds.

The first are the CUDA context, NCCL and library handles. vLLM counts a process's use from a snapshot that it
takes after all these exist, so a cache sized by it ends over `gpu_memory_utilization` by as much. NVML can be
read without a context, and so tells the difference.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["MOST_BYTES", "bytes_before_snapshot", "free_by_device", "process_bytes"]

# A neighbour that starts meanwhile must not be taken for our context, which is 0.3 to 1.5 GiB with NCCL.
MOST_BYTES = 2 << 30
# Inode of the machine's first PID namespace. Source: Linux, include/linux/proc_ns.h, PROC_PID_INIT_INO.
FIRST_PID_NAMESPACE = 0xEFFFFFFC


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
    """Return what this process holds of `worker.device` by the driver's account, pool and context included.

    None where the driver does not tell: without NVML, and in a container whose process ids are not the
    machine's, which NVML would take for those of others.
    """
    physical = _physical_id(worker)
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
    return int(own[0]) if len(own) == 1 and own[0] is not None else None


def bytes_before_snapshot(worker: Any, free_before: dict[int, int], free_after: dict[int, int]) -> int:
    """Return the bytes of `worker.device` that were taken between `free_before` and its `init_snapshot`.

    `free_after` was read when `worker.init_device` had returned; what it took after the snapshot is told by
    the driver's reading and left out. 0 where NVML cannot say, which is vLLM's own way of counting.
    """
    from vllm_integration.measure import free_bytes

    physical = _physical_id(worker)
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

    try:
        return int(current_platform.visible_device_id_to_physical_device_id(worker.device.index or 0))
    except (RuntimeError, ValueError, IndexError):
        return None
