"""Where the blocks of a KV cache lie inside a reservation, derived from views alone.

Units are bytes, addresses are integers, offsets count from the base of one reservation. Nothing here needs
torch or a device, and nothing takes time that grows with the number of blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from allocator.errors import PoolValueError
from allocator.views import BlockRun, ViewSpec, parse_view

__all__ = ["BlockLayout", "Segment", "ViewSpec"]


@dataclass(frozen=True, order=True)
class Segment:
    """A run of the reservation in which block `b` sits at `offset + b * block_stride`."""

    offset: int
    block_stride: int


@dataclass(frozen=True)
class BlockLayout:
    """The segments of one reservation, sorted by offset, and how many blocks each of them has room for.

    Immutable, and safe to use from any thread. `sizes_bytes[i]` is what segment `i` takes with all blocks
    committed: `capacity_blocks * block_stride`, cut where padding behind the last block would run into the
    next segment or leave the reservation. Use `spans`, which respects the cut, instead of multiplying.
    """

    segments: tuple[Segment, ...]
    capacity_blocks: int
    sizes_bytes: tuple[int, ...]

    @classmethod
    def from_views(cls, base_address: int, reservation_bytes: int, views: Iterable[ViewSpec]) -> BlockLayout:
        """Derive segments and capacity from every view over one reservation.

        Views that alias, or whose blocks lie inside one another's stride window (packed rows of several
        layers, groups that overlay the same pages), share one segment.

        Raises
        ------
        PoolValueError
            No view; a block dimension out of range or with a stride that is not positive; a block larger than
            its stride; outer indices, or two views, whose blocks overlap; block counts that differ; bytes
            outside `[base_address, base_address + reservation_bytes)`.
        """
        parsed = [
            parse_view(view, base_address, reservation_bytes, index) for index, view in enumerate(views)
        ]
        if not parsed:
            raise PoolValueError("a layout needs at least one view, got 0")
        capacity = parsed[0].capacity_blocks
        for index, view in enumerate(parsed):
            if view.capacity_blocks != capacity:
                raise PoolValueError(
                    f"view {index} has room for {view.capacity_blocks} blocks, view 0 for {capacity}"
                )
        runs = _collapse(sorted({run for view in parsed for run in view.runs()}), capacity)
        limits = [run.offset for run in runs[1:]] + [reservation_bytes]
        sizes = tuple(
            min(capacity * run.block_stride, limit - run.offset)
            for run, limit in zip(runs, limits, strict=True)
        )
        # A single block may come with any stride; its size is the only one that can be told.
        strides = sizes if capacity == 1 else tuple(run.block_stride for run in runs)
        segments = (Segment(run.offset, stride) for run, stride in zip(runs, strides, strict=True))
        return cls(tuple(segments), capacity, sizes)

    def spans(self, num_blocks: int, first_block: int = 0) -> list[tuple[int, int]]:
        """Return `(offset, size_bytes)` of blocks `first_block` to `num_blocks` of each segment."""
        self._check_num_blocks(num_blocks)
        if not 0 <= first_block <= num_blocks:
            raise PoolValueError(f"the first block is {first_block}, outside 0..{num_blocks}")
        spans = []
        for (offset, stride), limit in zip(self._pairs(), self.sizes_bytes, strict=True):
            start, end = min(first_block * stride, limit), min(num_blocks * stride, limit)
            spans.append((offset + start, end - start))
        return spans

    def granule_ranges(self, num_blocks: int, granularity: int) -> list[tuple[int, int]]:
        """Return `(offset, size_bytes)` of the granules under blocks `0..num_blocks`, neighbours joined."""
        ranges: list[list[int]] = []
        for start, end in self._rounded(num_blocks, granularity):
            if ranges and start <= ranges[-1][1]:
                ranges[-1][1] = max(ranges[-1][1], end)
            else:
                ranges.append([start, end])
        return [(start, end - start) for start, end in ranges]

    def extent_bytes(self, num_blocks: int, granularity: int) -> int:
        """Return the physical bytes that a fresh commit of `num_blocks` holds: every touched granule once."""
        total = covered = 0
        for start, end in self._rounded(num_blocks, granularity):
            if end > covered:
                total += end - max(start, covered)
                covered = end
        return total

    def _rounded(self, num_blocks: int, granularity: int) -> Iterable[tuple[int, int]]:
        self._check_num_blocks(num_blocks)
        if granularity <= 0:
            raise PoolValueError(f"the granularity is {granularity} bytes, it must be positive")
        if num_blocks == 0:
            return
        for (offset, stride), limit in zip(self._pairs(), self.sizes_bytes, strict=True):
            end = offset + min(num_blocks * stride, limit)
            yield offset - offset % granularity, end + -end % granularity

    def _pairs(self) -> Iterable[tuple[int, int]]:
        return ((segment.offset, segment.block_stride) for segment in self.segments)

    def _check_num_blocks(self, num_blocks: int) -> None:
        if not 0 <= num_blocks <= self.capacity_blocks:
            raise PoolValueError(f"{num_blocks} blocks asked for, the capacity is {self.capacity_blocks}")


def _collapse(runs: Sequence[BlockRun], capacity: int) -> list[BlockRun]:
    """Join sorted `runs` that share their blocks, and refuse those that share bytes but not blocks."""
    joined: list[BlockRun] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last is None:
            joined.append(run)
            continue
        used_bytes = max(last.inner_bytes, run.offset + run.inner_bytes - last.offset)
        if run.block_stride == last.block_stride and used_bytes <= last.block_stride:
            joined[-1] = last._replace(inner_bytes=used_bytes)
        elif run.offset >= last.offset + (capacity - 1) * last.block_stride + last.inner_bytes:
            joined.append(run)
        elif capacity == 1:  # one block has no stride to disagree about: the union of the bytes is the block
            joined[-1] = BlockRun(last.offset, max(used_bytes, last.block_stride), used_bytes)
        else:
            raise PoolValueError(
                f"views overlap but share no blocks: {last.inner_bytes} bytes every {last.block_stride} from "
                f"offset {last.offset}, and {run.inner_bytes} bytes every {run.block_stride} from offset "
                f"{run.offset}, {capacity} blocks each"
            )
    return joined
