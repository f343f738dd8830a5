#!/usr/bin/env python3
"""What a nap costs: memory given back and taken again, and content kept in host memory meanwhile.

    python benchmarks/sleep_bench.py [--output FILE] [--gib 20] [--device cuda]

Content crosses the bus both ways at a share of what one long pinned copy reaches in the same run. The first
backup also takes its pinned memory from the operating system; the later ones find it in PyTorch's cache.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable

import torch

from allocator import PoolController, backup, extensible_kv_pool, results

GIB, MIB = 1 << 30, 1 << 20
NUM_SEGMENTS = 28
BLOCK_BYTES = 64 * 1024
SHARE_OF_PINNED = 0.7  # asked for, each way


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", default="sleep.json")
    parser.add_argument("--gib", type=float, default=20, help="bytes of content that are kept")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    data = results.build(records_of(int(args.gib * GIB), args.rounds, args.device))
    results.write(args.output, data)
    results.print_table(data)
    return 1 if results.failed(data) else 0


def records_of(num_bytes: int, rounds: int, device: str) -> list[dict]:
    """Keep every block of a pool of `num_bytes`, then every second one, chosen at random."""
    pool, view = make_pool(num_bytes, device)
    num_blocks = pool.capacity_blocks
    pool.commit(num_blocks)
    to_host, to_device = pinned_gib_per_s(min(num_bytes, 4 * GIB), rounds, device)
    out = [
        results.from_samples("pinned_copy_to_host", to_host, "GiB/s", better="higher"),
        results.from_samples("pinned_copy_to_device", to_device, "GiB/s", better="higher"),
    ]
    choices = {
        "all": list(range(num_blocks)),
        "half": sorted(random.Random(0).sample(range(num_blocks), num_blocks // 2)),
    }
    for name, blocks in choices.items():
        first, saves, restores, intact = naps(pool, view, blocks, rounds, device)
        note = f"{len(blocks)} of {num_blocks} blocks, {NUM_SEGMENTS} segments, {BLOCK_BYTES} bytes each"
        out += [
            results.record(
                f"first_save_{name}", first, "GiB/s", better="higher", note=f"{note}; takes the pinned memory"
            ),
            results.from_samples(f"save_{name}", saves, "GiB/s", better="higher", note=note),
            results.from_samples(f"restore_{name}", restores, "GiB/s", better="higher", note=note),
            *(
                results.record(
                    f"{way}_{name}_share_of_pinned_copy",
                    statistics.median(samples) / statistics.median(stock),
                    "",
                    limit=SHARE_OF_PINNED if device.startswith("cuda") else None,
                    better="higher",
                    repeats=rounds,
                )
                for way, samples, stock in (("save", saves, to_host), ("restore", restores, to_device))
            ),
            results.record(f"content_intact_{name}", intact, "", limit=True, better="equal", repeats=rounds),
        ]
    return [*out, *release_records(pool, rounds, device)]


def make_pool(num_bytes: int, device: str) -> tuple[PoolController, torch.Tensor]:
    num_blocks = num_bytes // (NUM_SEGMENTS * BLOCK_BYTES)
    with extensible_kv_pool(device) as pool:
        flat = torch.zeros(NUM_SEGMENTS * num_blocks * BLOCK_BYTES, dtype=torch.int8, device=device)
    view = flat.view(torch.int64).view(NUM_SEGMENTS, num_blocks, -1)
    for layer in view:
        pool.bind(layer)
    return pool, view


def naps(
    pool: PoolController, view: torch.Tensor, blocks: list[int], rounds: int, device: str
) -> tuple[float, list[float], list[float], bool]:
    """Return GiB/s of the first save, of the later ones and of the restores, and whether all came back."""
    saves, restores, intact = [], [], True
    index = torch.tensor(blocks, device=device)
    for _ in range(rounds + 1):
        for layer in view:
            layer.random_()
        sums = [layer.index_select(0, index).sum(dtype=torch.int64).item() for layer in view]
        seconds, saved = timed(lambda: finished(backup.save(pool, blocks)), device)
        saves.append(saved.num_bytes / seconds / GIB)
        pool.release_physical()
        pool.recommit()

        def restore(saved: backup.Backup = saved) -> None:
            saved.restore(pool)
            saved.wait()

        seconds, _ = timed(restore, device)
        restores.append(saved.num_bytes / seconds / GIB)
        intact &= sums == [layer.index_select(0, index).sum(dtype=torch.int64).item() for layer in view]
        saved.drop()
        del saved
    return saves[0], saves[1:], restores[1:], intact


def release_records(pool: PoolController, rounds: int, device: str) -> list[dict]:
    """Time release and recommit without content, each rested: a driver clears freed memory meanwhile."""
    releases, recommits = [], []
    for _ in range(rounds):
        releases.append(timed(pool.release_physical, device)[0] * 1e3)
        time.sleep(2.0)
        recommits.append(timed(pool.recommit, device)[0] * 1e3)
        time.sleep(2.0)
    note = f"{pool.physical_bytes / GIB:.1f} GiB"
    return [
        results.from_samples("release", releases, "ms", note=note),
        results.from_samples("recommit", recommits, "ms", note=f"{note}, zeroed"),
    ]


def pinned_gib_per_s(num_bytes: int, rounds: int, device: str) -> tuple[list[float], list[float]]:
    """Return GiB/s of one long copy to and from pinned memory."""
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.startswith("cuda")).zero_()
    there = torch.empty(num_bytes, dtype=torch.uint8, device=device).zero_()
    ways: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for samples, to, source in ((ways[0], host, there), (ways[1], there, host)):
            seconds, _ = timed(lambda to=to, source=source: to.copy_(source, non_blocking=True), device)
            samples.append(num_bytes / seconds / GIB)
    return ways


def finished(saved: backup.Backup) -> backup.Backup:
    saved.wait()
    return saved


def timed(body: Callable[[], object], device: str) -> tuple[float, object]:
    synchronize(device)
    start = time.perf_counter()
    result = body()
    synchronize(device)
    return time.perf_counter() - start, result


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
