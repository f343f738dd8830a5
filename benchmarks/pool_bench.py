#!/usr/bin/env python3
"""What the pool costs on a GPU, against PyTorch's own allocation of the same bytes in the same run.

    python benchmarks/pool_bench.py [--output FILE] [--gib 100]

The driver clears freed memory in the background and a new owner waits for it, so every timed commit or
allocation starts on a rested device (2 s after the last memory was given back), and both sides take turns.
A device that rests also lowers its clocks, which costs whoever zeroes first more than the difference that is
looked for: a tenth of a second of work goes before each timing, as an engine that commits has just warmed up.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

from allocator import PoolController, extensible_kv_pool, results
from allocator.pool import DEFAULT_MAX_CHUNK_BYTES

GIB, MIB = 1 << 30, 1 << 20
REST_SECONDS = 2.0
WAKE_SECONDS = 0.1
CHUNK_BYTES = {"default": DEFAULT_MAX_CHUNK_BYTES, "segment": 0, "1gib": GIB, "64mib": 64 * MIB}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", default="pool.json")
    parser.add_argument("--gib", type=int, default=100, help="bytes to commit in the large benchmark")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    records = records_of(args.gib, args.rounds)
    data = results.build(records)
    results.write(args.output, data)
    results.print_table(data)
    return 1 if results.failed(data) else 0


def records_of(gib: int, rounds: int) -> list[dict]:
    return [*commit_records(gib, rounds), *kernel_records(rounds), *routing_records()]


def layered_pool(num_bytes: int, num_segments: int = 28, num_blocks: int = 1024, **options) -> PoolController:
    """A pool whose tensor stays alive with it: `num_segments` layers of `num_blocks` blocks."""
    with extensible_kv_pool("cuda", **options) as pool:
        flat = torch.zeros(num_bytes, dtype=torch.int8, device="cuda")
    view = flat.view(num_segments, num_blocks, -1)
    for layer in view:
        pool.bind(layer)
    pool.view = view  # type: ignore[attr-defined]
    return pool


def timed(body: Callable[[], object]) -> tuple[float, object]:
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = body()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3, result


def rest() -> None:
    """Let the driver clear what was freed, then bring the clocks up again."""
    work = torch.zeros(256 * MIB, dtype=torch.int8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    time.sleep(REST_SECONDS)
    end = time.perf_counter() + WAKE_SECONDS
    while time.perf_counter() < end:
        work.add_(1)
        torch.cuda.synchronize()


def commit_and_shrink(num_bytes: int, num_blocks: int, max_chunk_bytes: int) -> tuple[float, float]:
    """Milliseconds of committing all blocks on a rested device, and of shrinking to half of them."""
    pool = layered_pool(num_bytes, num_blocks=num_blocks, max_chunk_bytes=max_chunk_bytes)
    rest()
    commit_ms, _ = timed(lambda: pool.commit(num_blocks))
    shrink_ms, _ = timed(lambda: pool.shrink(num_blocks // 2))
    pool.free()
    return commit_ms, shrink_ms


def commit_records(gib: int, rounds: int) -> list[dict]:
    """Commit-and-zero against `torch.zeros`, by chunk size; one chunk per granule once (it takes seconds)."""
    num_blocks = 1024
    num_bytes = gib * GIB // (28 * num_blocks) * (28 * num_blocks)
    commits: dict[str, list[float]] = {name: [] for name in CHUNK_BYTES}
    shrinks: dict[str, list[float]] = {name: [] for name in CHUNK_BYTES}
    stock = []
    for _ in range(rounds):
        rest()
        ms, tensor = timed(lambda: torch.zeros(num_bytes, dtype=torch.int8, device="cuda"))
        stock.append(ms)
        del tensor
        for name, max_chunk_bytes in CHUNK_BYTES.items():
            commit_ms, shrink_ms = commit_and_shrink(num_bytes, num_blocks, max_chunk_bytes)
            commits[name].append(commit_ms)
            shrinks[name].append(shrink_ms)
    granules, _ = commit_and_shrink(num_bytes, num_blocks, 2 * MIB)
    median = {name: statistics.median(samples) for name, samples in commits.items()}
    ratios = [c / s for c, s in zip(commits["default"], stock, strict=True)]
    note = f"{gib} GiB, 28 segments, rested device: pool {_ms(commits['default'])}, stock {_ms(stock)} ms"
    out = [
        results.from_samples("torch_zeros", stock, "ms"),
        *(results.from_samples(f"commit_zero_chunk_{name}", commits[name], "ms") for name in CHUNK_BYTES),
        *(results.from_samples(f"shrink_to_half_chunk_{name}", shrinks[name], "ms") for name in CHUNK_BYTES),
        results.record("commit_zero_chunk_granule", granules, "ms"),
        results.record(
            f"commit_zero_{gib}gib_vs_cudamalloc",
            median["default"] / statistics.median(stock),
            "",
            limit=1.1,
            repeats=rounds,
            spread=max(ratios) - min(ratios),
            note=note,
        ),
        results.record(
            "commit_zero_granule_chunks_over_default",
            granules / median["default"],
            "",
            limit=50,
            better="higher",
            note="one chunk per 2 MiB granule against the default chunk size",
        ),
    ]
    return out


def _ms(samples: list[float]) -> str:
    return "/".join(f"{s:.1f}" for s in samples)


def kernel_records(rounds: int) -> list[dict]:
    """A memory-bound kernel (in-place add over 4 GiB) on pool and on cudaMalloc memory, taking turns."""
    num_bytes = 4 * GIB
    pool = layered_pool(num_bytes, num_segments=4)
    pool.commit(1024)
    ours = pool.view.view(torch.int32)  # type: ignore[attr-defined]
    stock = torch.zeros(ours.shape, dtype=torch.int32, device="cuda")

    def milliseconds(tensor: torch.Tensor) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(20):
            tensor.add_(1)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 20

    milliseconds(ours), milliseconds(stock)
    pairs = [(milliseconds(ours), milliseconds(stock)) for _ in range(2 * rounds)]
    ratio = statistics.median(a for a, _ in pairs) / statistics.median(b for _, b in pairs)
    note = f"add_ over 4 GiB: pool {_ms([a for a, _ in pairs])}, cudaMalloc {_ms([b for _, b in pairs])} ms"
    return [
        results.record(
            "kernel_on_pool_vs_cudamalloc",
            ratio,
            "",
            limit=1.01,
            repeats=len(pairs),
            spread=max(a / b for a, b in pairs) - min(a / b for a, b in pairs),
            note=note,
        )
    ]


def routing_records() -> list[dict]:
    """What the context costs: other allocations inside it, and a pool allocation against a plain one."""

    def others() -> None:
        for _ in range(200):
            torch.randn(2048, 7168, device="cuda")

    def small() -> None:
        for _ in range(2000):
            torch.empty(1024, device="cuda")

    def inside(body: Callable[[], None]) -> float:
        with extensible_kv_pool("cuda"):
            return timed(body)[0]

    for body in (others, small):
        timed(body)
        inside(body)
    pairs = [(inside(others), timed(others)[0]) for _ in range(9)]
    small_pairs = [(inside(small), timed(small)[0]) for _ in range(9)]
    extra = []
    for _ in range(50):
        with extensible_kv_pool("cuda"):
            ms, tensor = timed(lambda: torch.zeros(GIB, dtype=torch.int8, device="cuda"))
        del tensor
        torch.cuda.empty_cache()
        stock_ms, tensor = timed(lambda: torch.empty(GIB, dtype=torch.int8, device="cuda"))
        del tensor
        extra.append((ms - stock_ms) * 1e3)
    return [
        results.record(
            "other_allocations_inside_context",
            statistics.median(a for a, _ in pairs) / statistics.median(b for _, b in pairs),
            "",
            limit=1.05,
            repeats=len(pairs),
            spread=max(a / b for a, b in pairs) - min(a / b for a, b in pairs),
            note="200 times torch.randn(2048, 7168), each dropped at once",
        ),
        results.record(
            "small_allocation_extra_inside_context",
            (statistics.median(a for a, _ in small_pairs) - statistics.median(b for _, b in small_pairs)) / 2,
            "us",
            repeats=len(small_pairs),
            note="torch.empty(1024) that is not routed: time added to each call",
        ),
        results.record(
            "pool_allocation_extra_us",
            statistics.median(extra),
            "us",
            limit=100,
            repeats=len(extra),
            spread=max(extra) - min(extra),
            note="1 GiB torch.zeros in the pool (addresses only) less torch.empty outside (cudaMalloc)",
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
