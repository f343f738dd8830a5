"""What a pool costs on any device, against PyTorch's own allocation of the same bytes in the same run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from allocator import results
from allocator.errors import PoolValueError
from allocator.pool import PoolController, extensible_kv_pool
from allocator.pool_map import format_bytes
from allocator.probing import memory_info
from allocator.torch_routing import empty_cache, resolve_device

__all__ = ["default_size_bytes", "run"]

TORCH_ALLOCATION = "torch: allocate and zero"
Samples = dict[str, list[float]]


def default_size_bytes(device: str | torch.device | None) -> int:
    """Return a size that fits easily: 1 GiB, or an eighth of what is free, in whole MiB."""
    free_bytes, _ = memory_info(device)
    return max(1 << 20, min(1 << 30, free_bytes // 8 >> 20 << 20))


def run(
    device: str | torch.device | None = None,
    *,
    size_bytes: int,
    num_segments: int = 28,
    num_blocks: int = 1024,
    max_chunk_bytes: int = 0,
    repeats: int = 5,
    rest_seconds: float = 0.0,
) -> list[dict[str, Any]]:
    """Measure every operation of a pool `repeats` times, in turns with PyTorch; return records.

    Parameters
    ----------
    size_bytes : int
        Bytes of the whole cache, rounded down to whole blocks; the device needs them free.
    num_segments, num_blocks : int
        The cache is `num_segments` layers of `num_blocks` blocks.
    max_chunk_bytes : int
        As for `extensible_kv_pool`.
    repeats : int
        Rounds. Each measures PyTorch and then a new pool.
    rest_seconds : float
        Pause before each timed commit or allocation. A GPU driver clears freed memory in the background and
        a new owner waits for it; 2 seconds keep that out of the figures.
    """
    torch_device = resolve_device(device)
    block_bytes = size_bytes // (num_segments * num_blocks)
    if block_bytes == 0 or repeats < 1:
        raise PoolValueError(
            f"{repeats} repeats of {size_bytes} bytes: at least 1 repeat, and 1 byte for each of "
            f"{num_blocks} blocks of {num_segments} segments, are needed"
        )
    free_bytes, _ = memory_info(torch_device)
    if size_bytes > free_bytes:
        raise PoolValueError(
            f"{format_bytes(size_bytes)} do not fit into the {format_bytes(free_bytes)} that are free on "
            f"{torch_device}"
        )
    shape = (num_segments, num_blocks, block_bytes)
    samples: Samples = defaultdict(list)
    facts: dict[str, list[bool]] = defaultdict(list)
    for _ in range(repeats):
        _rest(torch_device, rest_seconds)
        _measure_torch(shape, torch_device, samples)
        _rest(torch_device, rest_seconds)
        _measure_pool(shape, torch_device, max_chunk_bytes, rest_seconds, samples, facts)
        _rest(torch_device, rest_seconds)
        _measure_one_commit(shape, torch_device, max_chunk_bytes, samples, facts)
    size = format_bytes(num_segments * num_blocks * block_bytes)
    chunk = f"chunks of {format_bytes(max_chunk_bytes)}" if max_chunk_bytes else "one chunk a segment"
    note = f"{size}, {num_segments} segments, {num_blocks} blocks, {chunk}"
    records = [
        results.from_samples(name, values, "ms", note=note if name == TORCH_ALLOCATION else "")
        for name, values in samples.items()
    ]
    records += [
        results.record(name, all(values), "", limit=True, better="equal", repeats=repeats)
        for name, values in facts.items()
    ]
    return records


def _measure_torch(shape: tuple[int, int, int], device: torch.device, samples: Samples) -> None:
    with _timed(device, samples[TORCH_ALLOCATION]):
        tensor = torch.empty(shape, dtype=torch.int8, device=device).zero_()
    with _timed(device, samples["torch: write all"]):
        tensor.fill_(1)


def _measure_pool(
    shape: tuple[int, int, int],
    device: torch.device,
    max_chunk_bytes: int,
    rest_seconds: float,
    samples: Samples,
    facts: dict[str, list[bool]],
) -> None:
    num_blocks = shape[1]
    with _timed(device, samples["pool: reserve and bind"]):
        pool, tensor = _make_pool(shape, device, max_chunk_bytes)
    address = tensor.data_ptr()
    try:
        with _timed(device, samples["pool: commit 2 blocks, zeroed"]):
            pool.commit(2)
        with _timed(device, samples["pool: commit the rest, zeroed"]):
            pool.commit(num_blocks)
        with _timed(device, samples["pool: first write of all"]):
            tensor.fill_(1)
        with _timed(device, samples["pool: write all"]):
            tensor.fill_(1)
        with _timed(device, samples["pool: shrink to half"]):
            pool.shrink(num_blocks // 2)
        with _timed(device, samples["pool: release"]):
            pool.release_physical()
        facts["release leaves no physical bytes"].append(pool.physical_bytes == 0)
        _rest(device, rest_seconds)
        with _timed(device, samples["pool: recommit half, zeroed"]):
            pool.recommit()
        facts["base address never moved"].append(tensor.data_ptr() == address)
    finally:
        pool.free()


def _measure_one_commit(
    shape: tuple[int, int, int],
    device: torch.device,
    max_chunk_bytes: int,
    samples: Samples,
    facts: dict[str, list[bool]],
) -> None:
    pool, _tensor = _make_pool(shape, device, max_chunk_bytes)
    try:
        with _timed(device, samples["pool: commit all at once, zeroed"]):
            pool.commit(shape[1])
        facts["bytes_for says what a commit holds"].append(pool.bytes_for(shape[1]) == pool.physical_bytes)
        with _timed(device, samples["pool: blocks within a budget"]):
            pool.max_blocks_within(pool.physical_bytes // 3)
    finally:
        pool.free()


def _make_pool(
    shape: tuple[int, int, int], device: torch.device, max_chunk_bytes: int
) -> tuple[PoolController, torch.Tensor]:
    with extensible_kv_pool(device, min_bytes=1, max_chunk_bytes=max_chunk_bytes) as pool:
        tensor = torch.empty(shape, dtype=torch.int8, device=device)
    pool.bind(tensor, 1)
    return pool, tensor


@contextmanager
def _timed(device: torch.device, into: list[float]) -> Iterator[None]:
    """Append the milliseconds of the body, the device's work included."""
    _synchronize(device)
    start = time.perf_counter()
    yield
    _synchronize(device)
    into.append((time.perf_counter() - start) * 1000)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _rest(device: torch.device, seconds: float) -> None:
    empty_cache(device)
    time.sleep(seconds)
