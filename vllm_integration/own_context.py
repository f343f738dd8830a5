"""What this process took of its GPU before vLLM's first reading: the CUDA context, NCCL, library handles.

vLLM counts a process's use from a snapshot that it takes after all these exist, so a cache sized by it ends
over `gpu_memory_utilization` by as much. NVML can be read without a context, and so tells the difference.
"""

from __future__ import annotations

from typing import Any

__all__ = ["bytes_before_snapshot", "free_by_device"]

# A neighbour that starts meanwhile must not be taken for our context, which is 0.3 to 1.5 GiB with NCCL.
MOST_BYTES = 2 << 30


def free_by_device() -> dict[int, int]:
    """Return NVML's free bytes of each physical GPU; empty where there is no NVML. Makes no CUDA context."""
    try:
        import vllm.third_party.pynvml as nvml

        nvml.nvmlInit()
    except Exception:  # no library, no driver, no permission: NVML has an exception class for each
        return {}
    try:
        handles = {i: nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())}
        return {i: int(nvml.nvmlDeviceGetMemoryInfo(handle).free) for i, handle in handles.items()}
    except nvml.NVMLError:
        return {}
    finally:
        nvml.nvmlShutdown()


def bytes_before_snapshot(worker: Any, free_before: dict[int, int], free_after: dict[int, int]) -> int:
    """Return the bytes of `worker.device` that were taken between `free_before` and its `init_snapshot`.

    `free_after` was read when `worker.init_device` had returned; what it took after the snapshot is told by
    the driver's reading and left out. 0 where NVML cannot say, which is vLLM's own way of counting.
    """
    from vllm.platforms import current_platform

    from vllm_integration.measure import free_bytes

    try:
        physical = current_platform.visible_device_id_to_physical_device_id(worker.device.index or 0)
    except (RuntimeError, ValueError, IndexError):
        return 0
    if physical not in free_before or physical not in free_after:
        return 0
    after_snapshot = int(worker.init_snapshot.free_memory) - free_bytes(worker.device)
    taken = free_before[physical] - free_after[physical] - after_snapshot
    return max(0, min(taken, MOST_BYTES))
