#!/usr/bin/env python3
"""What the pool costs on a GPU, against PyTorch's own allocation of the same bytes in the same run.

    python benchmarks/pool_bench.py [--output FILE] [--gib 100]

Commits are timed in processes of their own (`commit_samples`), because a server commits once in its life;
`torch.zeros` and one chunk per granule are timed the same way. To give memory back, rest and commit again, or
call `torch.zeros` again, was seen to cost a process more: the records with `again` in their names say how
much, under the same limits.
"""

import argparse
import statistics
import sys
from collections.abc import Callable

import torch
from commit_samples import GIB, KINDS, NUM_BLOCKS, NUM_SEGMENTS, Samples, collect, layered_pool, timed

from allocator import extensible_kv_pool, results


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", default="pool.json")
    parser.add_argument("--gib", type=float, default=100, help="bytes to commit in the large benchmark")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run of the commits, no limits"
    )
    args = parser.parse_args()
    data = results.build(records_of(args.gib, args.rounds, args.device))
    results.write(args.output, data)
    results.print_table(data)
    return 1 if results.failed(data) else 0


def records_of(gib: float, rounds: int, device: str) -> list[dict]:
    """Commits first: their processes are forks of this one, which must not have started CUDA."""
    block_row = NUM_SEGMENTS * NUM_BLOCKS
    commits = commit_records(collect(int(gib * GIB) // block_row * block_row, rounds, device), gib, device)
    return commits if device == "cpu" else [*commits, *kernel_records(rounds), *routing_records()]


def commit_records(samples: Samples, gib: float, device: str) -> list[dict]:
    """Commit-and-zero by chunk size, and against `torch.zeros` and granules, from samples in milliseconds."""
    first, again = ({kind: of.get(what, []) for kind, of in samples.items()} for what in ("first", "again"))
    chunks = [kind.name for kind in KINDS if kind.max_chunk_bytes is not None]
    alone = f"{gib:g} GiB, {NUM_SEGMENTS} segments, each sample a process of its own on a rested device"
    repeated = f"{gib:g} GiB again in the same processes, which gave them back and rested"

    def ratio(name: str, sides: dict[str, list[float]], note: str, limit: float, better: str) -> dict:
        over, under = sides.values()
        pairs = [a / b for a, b in zip(over, under, strict=False)]
        return results.record(
            name,
            statistics.median(over) / statistics.median(under),
            "",
            limit=limit if device == "cuda" else None,
            better=better,
            repeats=len(pairs),
            spread=max(pairs) - min(pairs),
            note=f"{note}: {', '.join(f'{side} {_ms(times)}' for side, times in sides.items())} ms",
        )

    def compared(name: str, times: dict[str, list[float]], note: str) -> list[dict]:
        """The same two limits, whether a process has held the memory before or not."""
        stock = {"pool": times["default"], "stock": times["stock"]}
        granules = {"one chunk per 2 MiB granule": times["granule"], "default chunks": times["default"]}
        return [
            ratio(f"{name}{gib:g}gib_vs_cudamalloc", stock, note, 1.1, "lower"),
            ratio(f"{name}granule_chunks_over_default", granules, note, 50, "higher"),
        ]

    return [
        results.from_samples("torch_zeros", first["stock"], "ms", note=alone),
        *(
            results.from_samples(f"commit_zero_chunk_{name}", first[name], "ms", note=alone)
            for name in chunks
        ),
        *(
            results.from_samples(f"shrink_to_half_chunk_{name}", samples[name]["shrink"], "ms")
            for name in chunks
            if "shrink" in samples[name]
        ),
        *compared("commit_zero_", first, alone),
        results.from_samples("torch_zeros_again", again["stock"], "ms", note=repeated),
        results.from_samples("commit_zero_again_chunk_default", again["default"], "ms", note=repeated),
        results.from_samples("commit_zero_again_chunk_granule", again["granule"], "ms", note=repeated),
        *compared("commit_zero_again_", again, repeated),
    ]


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
