"""What the cache of one worker may hold: what was requested, less what this process holds beside it.

Two accounts are kept of that, and the larger counts: what the device has lost since the worker first looked,
and what this process is known to hold. A neighbour that takes memory raises the first, as vLLM has it; one
that gives memory back makes the process look smaller there than it is, and not in the second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_integration import measure, own_context

if TYPE_CHECKING:
    from vllm_integration.worker_state import WorkerCache

__all__ = ["budget_now", "requested_and_free", "uncounted_bytes"]


def requested_and_free(worker: Any) -> tuple[int, int]:
    """Return the bytes that the worker may hold in the end, and those that were free before it held any."""
    if worker.device.type == "cpu":
        return int(worker.requested_cpu_memory), measure.free_bytes(worker.device)
    # vLLM's snapshot comes after the context, which is part of what the process holds all the same.
    return int(worker.requested_memory), int(worker.init_snapshot.free_memory) + worker._ekv_context_bytes


def uncounted_bytes(cache: WorkerCache, worker: Any) -> int:
    """Return what this process holds after vLLM's profile that PyTorch does not count: context, libraries."""
    if worker.device.type != "cuda":
        return cache.context_bytes
    taken = cache.initial_free_bytes - cache.profile_free_bytes
    # Of a neighbour that came meanwhile no more than this is taken for ours.
    return max(cache.context_bytes, min(taken - _pytorch_bytes(worker), own_context.MOST_BYTES))


def budget_now(cache: WorkerCache, worker: Any, free: int, committed: int) -> tuple[int, int]:
    """Return the bytes that the cache may hold, 0 where nothing is left, and those in use without it.

    `free` is the driver's reading after the widest step, and `committed` what the pool holds.
    """
    from allocator.sizing import SizingError, kv_budget_bytes

    own = _own_bytes(cache, worker, committed)
    # vLLM sizes a CPU's cache by what this process holds, and a GPU's by what the device has lost.
    initial_free = free + committed if worker.device.type == "cpu" else cache.initial_free_bytes
    used = max(own, initial_free - free - committed)
    try:
        budget = kv_budget_bytes(
            cache.requested_bytes,
            initial_free,
            free,
            committed,
            cache.set_aside_bytes,
            cache.options.margin_bytes,
            known_held_bytes=own,
        )
    except SizingError:
        budget = 0
    return budget, used


def _own_bytes(cache: WorkerCache, worker: Any, committed: int) -> int:
    """Return what this process is known to hold beside the `committed` bytes of its pool."""
    counted = own_context.process_bytes(worker) if worker.device.type == "cuda" else None
    if counted is None:
        return _pytorch_bytes(worker) + cache.uncounted_bytes
    return counted - committed


def _pytorch_bytes(worker: Any) -> int:
    """Return what PyTorch took since the worker began, on a CPU what this process holds in all."""
    before = worker._ekv_before.by_pytorch.get(worker.device.index or 0, 0)
    return measure.own_bytes(worker.device) - (before if worker.device.type == "cuda" else 0)
