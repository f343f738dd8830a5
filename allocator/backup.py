"""The content of a pool's blocks in host memory, while the pool's own memory is given back.

    saved = save(pool, blocks)
    saved.wait()
    pool.release_physical()
    ...
    pool.recommit()
    saved.restore(pool)
    saved.wait()

Blocks are gathered piece by piece, so that what crosses the bus is long and contiguous however scattered they
are; on a GPU through a small staging buffer, in a stream of its own, to and from pinned memory.
"""

from __future__ import annotations

import operator
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from allocator import errors
from allocator.committed_rows import Rows, committed_rows
from allocator.errors import PoolValueError
from allocator.pool import PoolController
from allocator.torch_routing import empty_cache

__all__ = ["DEFAULT_PIECE_BYTES", "Backup", "save"]

# The staging buffer's size: long enough for the bus's full speed, small enough for any device that is full.
DEFAULT_PIECE_BYTES = 32 << 20
# Host memory is taken in slabs of this size. A power of two, because PyTorch rounds pinned memory up to one.
_SLAB_BYTES = 256 << 20
_ALIGN = 64
_LACKING = re.compile("out of memory|can't allocate memory")


class _Piece(NamedTuple):
    """Some rows of one segment, and where in which slab they are kept."""

    segment: int
    first: int  # of the blocks that the segment keeps, in order
    last: int
    slab: int
    offset: int
    num_bytes: int


def save(pool: PoolController, blocks: Iterable[int], *, piece_bytes: int = DEFAULT_PIECE_BYTES) -> Backup:
    """Copy the content of `blocks` to host memory; on a GPU the copies may still run when this returns.

    Work that the current stream gets afterwards comes after the copies. The pool is not changed.

    Parameters
    ----------
    blocks : iterable of int
        Committed blocks in any order.
    piece_bytes : int
        Bytes of the staging buffer on a GPU: at least one block of one segment is staged at once.

    Returns
    -------
    Backup
        Call its `wait` before the pool's memory is given back.

    Raises
    ------
    PoolValueError
        A block is not committed.
    PoolOutOfMemoryError
        The host has too little memory for the blocks, or the device for the staging buffer.
    """
    ids = sorted({operator.index(block) for block in blocks})
    committed = pool.committed_blocks
    if ids and not (ids[0] >= 0 and ids[-1] < committed):
        raise PoolValueError(f"blocks {ids[0]} to {ids[-1]} to be saved, of {committed} that are committed")
    if piece_bytes <= 0:
        raise PoolValueError(f"pieces of {piece_bytes} bytes")
    with _factories_as_they_are():
        backup = Backup(pool, ids, piece_bytes)
        backup._copy(pool, to_host=True)
    return backup


class Backup:
    """What `save` kept. Usable from any thread, by one at a time; independent of the pool's life.

    Attributes
    ----------
    blocks : tuple of int
        The blocks it holds, sorted.
    num_bytes : int
        Bytes of their content.
    """

    def __init__(self, pool: PoolController, blocks: list[int], piece_bytes: int) -> None:
        self.blocks = tuple(blocks)
        self._device = pool.device
        self._stream: Any = None
        self._places, self._pieces, slab_bytes = _plan(committed_rows(pool), self.blocks, piece_bytes)
        self.num_bytes = sum(piece.num_bytes for piece in self._pieces)
        self._slabs = _host_memory(slab_bytes, pinned=self._device.type == "cuda")

    def restore(self, pool: PoolController) -> None:
        """Copy the content back into the same blocks of `pool`, which must be committed again.

        On a GPU the copies may still run when this returns; work that the current stream gets afterwards
        comes after them. The backup keeps its content.

        Raises
        ------
        PoolValueError
            Not all of its blocks are committed, the pool has other segments, or the backup was dropped.
        PoolOutOfMemoryError
            The device has no room for the staging buffer; the blocks' content is undefined.
        """
        committed = pool.committed_blocks
        if self.blocks and self.blocks[-1] >= committed:
            raise PoolValueError(f"block {self.blocks[-1]} is saved, and only {committed} are committed")
        if self._pieces and not self._slabs:
            raise PoolValueError("the backup was dropped")
        with _factories_as_they_are():
            self._copy(pool, to_host=False)

    def wait(self) -> None:
        """Return when the copies are done; the staging buffer goes back to the device."""
        if self._stream is not None:
            self._stream.synchronize()
            self._stream = None
            empty_cache(self._device)

    def drop(self) -> None:
        """Give the host memory back; PyTorch keeps what was pinned for the next backup."""
        self.wait()
        self._slabs = []

    def _copy(self, pool: PoolController, *, to_host: bool) -> None:
        rows = committed_rows(pool)
        if [segment.place for segment in rows] != self._places:
            raise PoolValueError("the pool has other segments than the one that was saved")
        ids = torch.tensor(self.blocks, dtype=torch.int64)
        if self._device.type != "cuda":
            for piece in self._pieces:
                tensor, index = self._rows_of(rows, piece, ids)
                _gather_or_scatter(tensor, index, self._host_of(piece, tensor), to_host)
            return
        current = torch.cuda.current_stream(self._device)
        stream = self._stream or torch.cuda.Stream(self._device)
        stream.wait_stream(current)
        with _memory_errors(), torch.cuda.device(self._device), torch.cuda.stream(stream):
            largest = max((piece.num_bytes for piece in self._pieces), default=0)
            staging = torch.empty(largest, dtype=torch.uint8, device=self._device)
            self._stream = stream
            ids = ids.to(self._device)
            for piece in self._pieces:
                tensor, index = self._rows_of(rows, piece, ids)
                host = self._host_of(piece, tensor)
                stage = staging[: piece.num_bytes].view(tensor.dtype).view(host.shape)
                if not to_host:
                    stage.copy_(host, non_blocking=True)
                _gather_or_scatter(tensor, index, stage, to_host)
                if to_host:
                    host.copy_(stage, non_blocking=True)
        current.wait_stream(stream)

    def _rows_of(
        self, rows: list[Rows], piece: _Piece, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        segment, index = rows[piece.segment], ids[piece.first : piece.last]
        if segment.cut is not None and self.blocks[piece.first] >= segment.num_whole:
            return segment.cut, torch.zeros_like(index)
        return segment.whole, index

    def _host_of(self, piece: _Piece, tensor: torch.Tensor) -> torch.Tensor:
        slab = self._slabs[piece.slab][piece.offset : piece.offset + piece.num_bytes]
        return slab.view(tensor.dtype).view(piece.last - piece.first, tensor.shape[1])


def _gather_or_scatter(rows: torch.Tensor, index: torch.Tensor, piece: torch.Tensor, gather: bool) -> None:
    if gather:
        torch.index_select(rows, 0, index, out=piece)
    else:
        rows.index_copy_(0, index, piece)


def _plan(
    rows: list[Rows], blocks: tuple[int, ...], piece_bytes: int
) -> tuple[list[tuple[int, int]], list[_Piece], list[int]]:
    """Return where the segments are, the pieces, and the bytes of each slab."""
    pieces: list[_Piece] = []
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
            pieces.append(_Piece(number, first, last, len(slabs) - 1, slabs[-1], num_bytes))
            slabs[-1] += taken
    return [segment.place for segment in rows], pieces, slabs


def _factories_as_they_are() -> Any:
    """Leave out default devices, and pools whose context is open: one would take a slab for its own."""
    return torch._C.DisableTorchFunction()


def _host_memory(slab_bytes: list[int], *, pinned: bool) -> list[torch.Tensor]:
    wanted, available = sum(slab_bytes), _available_host_bytes()
    if pinned and available is not None:  # what an earlier backup left in PyTorch's cache is taken again
        stats = torch.cuda.host_memory_stats()
        available += stats.get("allocated_bytes.current", 0) - stats.get("active_bytes.current", 0)
    if available is not None and wanted > available:
        raise errors.PoolOutOfMemoryError(
            f"host: a backup of {wanted} bytes, and {available} bytes of host memory are available"
        )
    with _memory_errors():
        return [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in slab_bytes]


def _available_host_bytes() -> int | None:
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found.group(1)) * 1024 if found else None


@contextmanager
def _memory_errors() -> Iterator[None]:
    """Turn PyTorch's words for a lack of memory into the package's."""
    try:
        yield
    except errors.EkvError:
        raise
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or _LACKING.search(str(error)):
            raise errors.PoolOutOfMemoryError(f"backup: {error}") from error
        raise
