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
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from allocator import errors
from allocator.backup_plan import Piece, plan
from allocator.committed_rows import Rows, committed_rows
from allocator.errors import PoolValueError
from allocator.limits import container_free_bytes
from allocator.pool import PoolController
from allocator.torch_routing import empty_cache

__all__ = ["DEFAULT_PIECE_BYTES", "Backup", "host_need", "save"]

# The staging buffer's size: long enough for the bus's full speed, small enough for any device that is full.
DEFAULT_PIECE_BYTES = 32 << 20
_LACKING = re.compile("out of memory|can't allocate memory")


def save(pool: PoolController, blocks: Iterable[int], *, piece_bytes: int = DEFAULT_PIECE_BYTES) -> Backup:
    """Copy the content of `blocks` to host memory; on a GPU the copies may still run when this returns.

    Work that the current stream gets afterwards comes after the copies. The pool is not changed. Several
    processes that save at once must first see whether the host has room for all of them, with `host_need`.

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
    ids = _checked(pool, blocks)
    if piece_bytes <= 0:
        raise PoolValueError(f"pieces of {piece_bytes} bytes")
    with _factories_as_they_are():
        backup = Backup(pool, ids, piece_bytes)
        backup._copy(pool, to_host=True)
    return backup


def host_need(pool: PoolController, blocks: Iterable[int]) -> tuple[int, int | None]:
    """Return the bytes that `save` of `blocks` would take from the host, and those that the host has.

    Every process of a host is told the same bytes that it has: those that save at once must fit together.
    None where the host does not say. What an earlier backup left in PyTorch's cache is not taken again.

    Raises
    ------
    PoolValueError
        A block is not committed.
    """
    ids = _checked(pool, blocks)
    with _factories_as_they_are():
        _, _, slab_bytes = plan(committed_rows(pool), tuple(ids), DEFAULT_PIECE_BYTES)
    return _new_bytes(slab_bytes, pinned=pool.device.type == "cuda"), _available_host_bytes()


def _checked(pool: PoolController, blocks: Iterable[int]) -> list[int]:
    ids = sorted({operator.index(block) for block in blocks})
    committed = pool.committed_blocks
    if ids and not (ids[0] >= 0 and ids[-1] < committed):
        raise PoolValueError(f"blocks {ids[0]} to {ids[-1]} to be saved, of {committed} that are committed")
    return ids


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
        self._places, self._pieces, slab_bytes = plan(committed_rows(pool), self.blocks, piece_bytes)
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
        if self._device.type == "cuda":
            _left.update(_pinned_sizes([slab.nbytes for slab in self._slabs]))
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
        self, rows: list[Rows], piece: Piece, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        segment, index = rows[piece.segment], ids[piece.first : piece.last]
        if segment.cut is not None and self.blocks[piece.first] >= segment.num_whole:
            return segment.cut, torch.zeros_like(index)
        return segment.whole, index

    def _host_of(self, piece: Piece, tensor: torch.Tensor) -> torch.Tensor:
        slab = self._slabs[piece.slab][piece.offset : piece.offset + piece.num_bytes]
        return slab.view(tensor.dtype).view(piece.last - piece.first, tensor.shape[1])


def _gather_or_scatter(rows: torch.Tensor, index: torch.Tensor, piece: torch.Tensor, gather: bool) -> None:
    if gather:
        torch.index_select(rows, 0, index, out=piece)
    else:
        rows.index_copy_(0, index, piece)


def _factories_as_they_are() -> Any:
    """Leave out default devices, and pools whose context is open: one would take a slab for its own."""
    return torch._C.DisableTorchFunction()


def _host_memory(slab_bytes: list[int], *, pinned: bool) -> list[torch.Tensor]:
    wanted, available = _new_bytes(slab_bytes, pinned), _available_host_bytes()
    if available is not None and wanted > available:
        raise errors.PoolOutOfMemoryError(
            f"host: a backup of {wanted} bytes, and {available} bytes of host memory are available"
        )
    with _memory_errors():
        slabs = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in slab_bytes]
    if pinned:
        _left.subtract(_pinned_sizes(slab_bytes) & _left)
    return slabs


def pinned_need(sizes: Iterable[int]) -> int:
    """Return what pinned tensors of `sizes` bytes that somebody else makes would take from the host.

    PyTorch rounds each up to a power of two, and uses again what it has cached, but for what backups left.
    """
    ours = sum(_left.elements())
    return max(0, sum(_pinned_sizes(sizes).elements()) - max(0, _cached_pinned_bytes() - ours))


# Of the pinned slabs that backups left in PyTorch's cache, which serves a request from one of its size only.
_left: Counter[int] = Counter()


def _pinned_sizes(sizes: Iterable[int]) -> Counter[int]:
    return Counter(1 << (size - 1).bit_length() for size in sizes)


def _cached_pinned_bytes() -> int:
    stats = torch.cuda.host_memory_stats()
    return int(stats.get("allocated_bytes.current", 0) - stats.get("active_bytes.current", 0))


def _new_bytes(slab_bytes: list[int], pinned: bool) -> int:
    if not pinned:
        return sum(slab_bytes)
    wanted = _pinned_sizes(slab_bytes)
    again = sum((wanted & _left).elements())
    return sum(wanted.elements()) - max(0, min(again, _cached_pinned_bytes()))


def _available_host_bytes() -> int | None:
    """Return what this machine has, or the container around this process if that is less."""
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    container = container_free_bytes()
    machine = int(found.group(1)) * 1024 if found else None
    return min((size for size in (machine, container) if size is not None), default=None)


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
