"""Arithmetic of sizing: from what the driver says is free to a number of blocks.

Pure functions of integers; units are bytes unless a name says blocks or tokens. "Free" always means the
driver's free memory, read after PyTorch's cache was emptied and the device synchronized; PyTorch's own
counters are no input, because memory can be mapped and unmapped behind its back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from allocator.errors import PoolValueError

__all__ = [
    "SizingError",
    "blocks_for_tokens",
    "blocks_within",
    "explicit_budget_bytes",
    "final_blocks",
    "kv_budget_bytes",
    "logits_bytes",
    "longest_request_tokens",
    "requested_bytes",
    "warmup_blocks",
]

# Block 0 is the null block of the serving engine; one more is the smallest cache that can hold anything.
MIN_WARMUP_BLOCKS = 2


class SizingError(PoolValueError):
    """The memory, or the number asked for, cannot hold a usable cache; the message has both numbers."""


def requested_bytes(total_bytes: int, utilization: float) -> int:
    """Return the share of the device that the process may hold in the end, rounded down."""
    if not 0 < utilization <= 1:
        raise SizingError(f"the memory utilization is {utilization}, outside 0..1")
    return min(total_bytes, int(total_bytes * utilization))


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


def explicit_budget_bytes(
    explicit_bytes: int, free_now_bytes: int, committed_pool_bytes: int, step_reserve_bytes: int
) -> int:
    """Return `explicit_bytes`, whatever the utilization, if the device has them and what a step needs.

    Raises
    ------
    SizingError
        The device does not: the message names the bytes asked for, needed by a step, and available.
    """
    available_bytes = free_now_bytes + committed_pool_bytes
    if explicit_bytes <= 0 or explicit_bytes + step_reserve_bytes > available_bytes:
        raise SizingError(
            f"a KV cache of {explicit_bytes} bytes was asked for and a step needs {step_reserve_bytes} bytes "
            f"beside it, {explicit_bytes + step_reserve_bytes} bytes together, but the device has "
            f"{available_bytes} bytes"
        )
    return explicit_bytes


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


def final_blocks(
    per_rank_blocks: Sequence[int],
    required_blocks: int,
    *,
    override_blocks: int | None = None,
    capacity_blocks: int | None = None,
) -> int:
    """Return the one number of blocks that every rank commits.

    Parameters
    ----------
    per_rank_blocks : sequence of int
        What each rank measured that it can hold; the smallest counts.
    required_blocks : int
        What one request of the full model length needs, the null block included.
    override_blocks : int, optional
        A number that the user chose; it replaces the measured one and may not exceed it.
    capacity_blocks : int, optional
        Room in the reservation, if that is not in `per_rank_blocks` already.

    Raises
    ------
    SizingError
        Fewer blocks than required, or an override that does not fit: the message names both numbers.
    """
    if not per_rank_blocks:
        raise SizingError(f"0 ranks measured their blocks, {required_blocks} blocks are required")
    measured = min(per_rank_blocks)
    rank = list(per_rank_blocks).index(measured)
    if capacity_blocks is not None:
        measured = min(measured, capacity_blocks)
    if override_blocks is None:
        blocks, source = measured, f"rank {rank} has memory for {measured} blocks"
    elif override_blocks > measured:
        raise SizingError(
            f"an override of {override_blocks} blocks was asked for, but rank {rank} has memory for "
            f"{measured} blocks"
        )
    else:
        blocks, source = override_blocks, f"an override of {override_blocks} blocks was asked for"
    if blocks < required_blocks:
        raise SizingError(
            f"{source}, but one request of the full model length needs {required_blocks} blocks"
        )
    return blocks


def warmup_blocks(capacity_blocks: int, *needed_blocks: int) -> int:
    """Return the prefix that warm-up may use: the largest need, at least 2, at most the capacity."""
    if capacity_blocks < 1:
        raise SizingError(f"warm-up needs {MIN_WARMUP_BLOCKS} blocks, the capacity is {capacity_blocks}")
    return min(capacity_blocks, max(MIN_WARMUP_BLOCKS, *needed_blocks, 0))


def blocks_for_tokens(num_tokens: int, block_size_tokens: int, *, null_blocks: int = 1) -> int:
    """Return the blocks that `num_tokens` of one request take, and the null block, which holds no tokens."""
    return null_blocks + -(-num_tokens // block_size_tokens)


def longest_request_tokens(
    num_blocks: int, block_size_tokens: int, model_tokens: int, *, null_blocks: int = 1
) -> int:
    """Return the longest request that fits alone, at most the model's length."""
    tokens = min(model_tokens, (num_blocks - null_blocks) * block_size_tokens)
    if tokens <= 0:
        raise SizingError(f"{num_blocks} blocks hold no tokens beside {null_blocks} null block")
    return tokens


def logits_bytes(num_sequences: int, draft_tokens: int, vocabulary: int, *, itemsize: int = 4) -> int:
    """Return the bytes of the widest logits: every sequence's next token and all its draft tokens, fp32."""
    return num_sequences * (draft_tokens + 1) * vocabulary * itemsize
