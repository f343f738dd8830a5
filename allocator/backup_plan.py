"""How a backup is cut into pieces: which rows of which segment lie where in host memory."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from allocator.committed_rows import Rows

__all__ = ["Piece", "plan"]

# Host memory is taken in slabs of this size. A power of two, because PyTorch rounds pinned memory up to one.
_SLAB_BYTES = 256 << 20
_ALIGN = 64


class Piece(NamedTuple):
    """Some rows of one segment, and where in which slab they are kept."""

    segment: int
    first: int  # of the blocks that the segment keeps, in order
    last: int
    slab: int
    offset: int
    num_bytes: int


def plan(
    rows: list[Rows], blocks: tuple[int, ...], piece_bytes: int
) -> tuple[list[tuple[int, int]], list[Piece], list[int]]:
    """Return where the segments are, the pieces, and the bytes of each slab."""
    pieces: list[Piece] = []
    slabs: list[int] = []
    for number, segment in enumerate(rows):
        num_whole = bisect_left(blocks, segment.num_whole)
        step = max(1, piece_bytes // segment.stride_bytes)
        spans = [(first, min(first + step, num_whole)) for first in range(0, num_whole, step)]
        sizes = [(last - first) * segment.stride_bytes for first, last in spans]
        if num_whole < len(blocks) and segment.cut_bytes:
            spans.append((num_whole, len(blocks)))
            sizes.append(segment.cut_bytes)
        for (first, last), num_bytes in zip(spans, sizes, strict=True):
            taken = num_bytes + -num_bytes % _ALIGN
            if not slabs or slabs[-1] + taken > _SLAB_BYTES:
                slabs.append(0)
            pieces.append(Piece(number, first, last, len(slabs) - 1, slabs[-1], num_bytes))
            slabs[-1] += taken
    return [segment.place for segment in rows], pieces, slabs
