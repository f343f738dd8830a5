"""Arithmetic of sizing: from what the driver says is free to a number of blocks.

Pure functions of integers; units are bytes unless a name says blocks or tokens. "Free" always means the
driver's free memory, read after PyTorch's cache was emptied and the device synchronized; PyTorch's own
counters are no input, because memory can be mapped and unmapped behind its back.
"""

from __future__ import annotations

from collections.abc import Callable

from allocator.errors import PoolValueError

__all__ = ["SizingError", "blocks_within", "kv_budget_bytes"]


class SizingError(PoolValueError):
    """The memory, or the number asked for, cannot hold a usable cache; the message has both numbers."""


def kv_budget_bytes(
    requested_bytes: int,
    initial_free_bytes: int,
    free_now_bytes: int,
    committed_pool_bytes: int,
    step_reserve_bytes: int,
    margin_bytes: int,
    *,
    known_held_bytes: int = 0,
) -> int:
    """Return the bytes that the cache may hold after warm-up, at least 0.

    The budget is what was requested, less what the process holds outside the pool, less what the widest step
    needs on top of it, less the margin. It is never more than the device has left for the pool.

    Parameters
    ----------
    requested_bytes : int
        What the process may hold in the end, the cache included.
    initial_free_bytes, free_now_bytes : int
        The driver's free memory before the model was loaded, and now, after warm-up and capture. The
        difference is what the process took, and what neighbours took or gave back meanwhile.
    committed_pool_bytes : int
        Physical bytes that the pool holds now (the warm-up prefix); they are part of the budget.
    step_reserve_bytes : int
        What the widest step needs for a moment and what is not held now: activations, logits, an encoder
        cache.
    margin_bytes : int
        Left alone.
    known_held_bytes : int
        What the process is known to hold outside the pool from another source than a memory reading, such as
        the size of the weights. It counts where the readings say less, because a neighbour freed memory
        between them.

    Raises
    ------
    SizingError
        Nothing would be left: the message names what was requested and what is held or reserved.
    """
    held_bytes = max(initial_free_bytes - free_now_bytes - committed_pool_bytes, known_held_bytes)
    reserved_bytes = step_reserve_bytes + margin_bytes
    if held_bytes + reserved_bytes > requested_bytes:
        raise SizingError(
            f"no memory is left for the KV cache: {requested_bytes} bytes were requested, but "
            f"{held_bytes} bytes are held outside it and {reserved_bytes} bytes are reserved for a step, "
            f"{held_bytes + reserved_bytes} bytes together"
        )
    available_bytes = free_now_bytes + committed_pool_bytes
    if reserved_bytes > available_bytes:
        raise SizingError(
            f"no memory is left for the KV cache: the device has {available_bytes} bytes for it, but "
            f"{reserved_bytes} bytes are reserved for a step"
        )
    return min(requested_bytes - held_bytes, available_bytes) - reserved_bytes


def blocks_within(budget_bytes: int, bytes_for: Callable[[int], int], capacity_blocks: int) -> int:
    """Return the largest `n` in `0..capacity_blocks` with `bytes_for(n) <= budget_bytes`.

    `bytes_for` must be monotone with `bytes_for(0) == 0`; it is called about log2(capacity_blocks) times.
    """
    if budget_bytes < 0:
        raise SizingError(
            f"the budget of the KV cache is {budget_bytes} bytes, for {capacity_blocks} blocks at most"
        )
    low, high = 0, capacity_blocks
    while low < high:
        middle = (low + high + 1) // 2
        if bytes_for(middle) <= budget_bytes:
            low = middle
        else:
            high = middle - 1
    return low
