"""`extensible_kv_pool()` and the `PoolController` it yields."""

from __future__ import annotations

import operator
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from allocator import sizing
from allocator.errors import PoolValueError
from allocator.layout import BlockLayout, ViewSpec
from allocator.reservation import Chunk, Reservation
from allocator.shim import DRIVER_KINDS, check, ids_argument, lib
from allocator.torch_routing import (
    RoutingMode,
    call_with_room,
    driver_of,
    refuse_while_capturing,
    reserve_tensor,
    resolve_device,
)

__all__ = ["DEFAULT_MAX_CHUNK_BYTES", "DEFAULT_MIN_BYTES", "PoolController", "extensible_kv_pool"]

DEFAULT_MIN_BYTES = 1 << 20
# Commits as fast as one chunk per segment, because zeroing overlaps mapping, and shrinks in finer steps;
# chunks of 64 MiB take twice the time. Source: benchmarks/results, part "pool".
DEFAULT_MAX_CHUNK_BYTES = 512 << 20


@contextmanager
def extensible_kv_pool(
    device: torch.device | str | int | None = None,
    *,
    min_bytes: int = DEFAULT_MIN_BYTES,
    predicate: Callable[[torch.Tensor], bool] | None = None,
    max_chunk_bytes: int = DEFAULT_MAX_CHUNK_BYTES,
    shareable: bool = False,
) -> Iterator[PoolController]:
    """Make tensor factories on `device` return growable tensors inside the `with` block.

    `torch.empty`, `zeros`, `full(…, 0)`, `empty_strided`, `empty_like`, `zeros_like`, `new_empty` and
    `new_zeros` of the calling thread take addresses but no memory: reading or writing such a tensor faults
    until `PoolController.commit`. All else, other threads included, goes where it always went.

    Parameters
    ----------
    device : optional
        A CUDA (or ROCm) device, or the CPU, which the host driver serves. Default: the current CUDA device,
        or the CPU where there is none.
    min_bytes : int
        Smaller tensors stay with PyTorch.
    predicate : callable, optional
        Called with a meta tensor of the result (shape, strides, dtype); False leaves it with PyTorch.
    max_chunk_bytes : int
        The largest piece of physical memory taken at once, rounded up to the granularity, and so the step in
        which `shrink` can give back. 0: one piece per segment and commit.
    shareable : bool
        Ask for memory that other processes and network cards can be given; the best kind that really
        allocates is used.

    Yields
    ------
    PoolController
        Usable after the block, for as long as the tensors live.
    """
    if min_bytes < 0 or not 0 <= max_chunk_bytes < 1 << 63:
        raise PoolValueError(
            f"min_bytes={min_bytes} and max_chunk_bytes={max_chunk_bytes} must not be negative"
        )
    pool = PoolController(resolve_device(device), max_chunk_bytes=max_chunk_bytes, shareable=shareable)

    def take(meta: torch.Tensor) -> torch.Tensor | None:
        num_bytes = meta.untyped_storage().nbytes()
        if num_bytes < max(1, min_bytes) or (predicate is not None and not predicate(meta)):
            return None
        return pool.reserve(meta)

    with RoutingMode(take, pool.device, min_bytes):
        yield pool


@dataclass
class _Member:
    """One reservation of the pool and the views bound over it."""

    reservation: Reservation
    views: list[ViewSpec] = field(default_factory=list)
    layout: BlockLayout | None = None

    def contains(self, address: int) -> bool:
        return 0 <= address - self.reservation.base < self.reservation.size_bytes


class PoolController:
    """Grows, shrinks and describes the memory behind the tensors of one pool.

    Made by `extensible_kv_pool`. All operations cover every tensor of the pool, all or nothing: a failure
    leaves blocks, contents and memory as they were. Base addresses never change. Safe to use from any thread;
    `bind` and the operations on memory take turns.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        max_chunk_bytes: int = DEFAULT_MAX_CHUNK_BYTES,
        shareable: bool = False,
    ) -> None:
        self.device = device
        self.max_chunk_bytes = max_chunk_bytes
        self.shareable = shareable
        self.last_commit_seconds = 0.0
        self._driver, self._device_index = driver_of(device)
        self._members: list[_Member] = []
        self._lock = threading.RLock()
        self._freed = self._had_tensors = False
        _pools.add(self)

    def reserve(self, meta: torch.Tensor) -> torch.Tensor:
        """Make a growable tensor with the shape, strides and dtype of `meta`; the routing calls this."""
        with self._lock:
            self._check_not_freed()
            if self.committed_blocks:
                raise PoolValueError(f"a new tensor after {self.committed_blocks} blocks were committed")
            tensor, reservation = reserve_tensor(
                tuple(meta.shape),
                meta.stride(),
                meta.dtype,
                self.device,
                self.max_chunk_bytes,
                self.shareable,
            )
            self._members.append(_Member(reservation))
            self._had_tensors = True
            return tensor

    def bind(self, view: torch.Tensor, block_dim: int = 0, *, kernel_blocks_per_block: int = 1) -> None:
        """Learn from a view where blocks lie: call it for every view (layer) before the first commit.

        Shape, strides, element size and address are all that counts; the storage's size is never used.

        Parameters
        ----------
        view : torch.Tensor
            Any view of a tensor of this pool.
        block_dim : int
            The dimension that counts blocks.
        kernel_blocks_per_block : int
            How many neighbours along `block_dim` make one block.

        Raises
        ------
        PoolValueError
            The view is on another device or outside the pool, disagrees with earlier views on the number of
            blocks, overlaps them without sharing blocks, or blocks were committed already. Nothing changed.
        """
        if view.device != self.device:
            raise PoolValueError(f"a view on {view.device} cannot be bound to a pool on {self.device}")
        spec = ViewSpec.from_tensor(view, block_dim, kernel_blocks_per_block)
        with self._lock:
            self._check_not_freed()
            member = self._member_of(spec.address)
            layout = BlockLayout.from_views(
                member.reservation.base, member.reservation.size_bytes, [*member.views, spec]
            )
            blocks = next(self._capacities_beside(member), None)  # one is enough: they agree with each other
            if blocks not in (None, layout.capacity_blocks):
                raise PoolValueError(
                    f"a view with {layout.capacity_blocks} blocks cannot join a pool of {blocks} blocks"
                )
            member.reservation.set_layout(layout)
            member.layout = layout
            member.views.append(spec)

    def commit(self, num_blocks: int, defragment: bool = False, may_empty_cache: bool = True) -> None:
        """Back blocks `0..num_blocks` of every segment; new blocks read as zero when it returns.

        Fewer blocks than committed change nothing. When the device is short of memory, PyTorch's cache is
        emptied and the commit tried once more, if it may be.

        Parameters
        ----------
        num_blocks : int
            In blocks, at most `capacity_blocks`.
        defragment : bool
            Back each segment with one single chunk, also when no more blocks than committed are asked for.
            The content of all blocks is lost: they read as zero. Needs room for the new chunks beside the old
            ones; where there is none, `release_physical`, `recommit` and `max_chunk_bytes=0` do the same.
        may_empty_cache : bool
            False leaves to PyTorch what it caches, for one that knows that it will be needed again.

        Raises
        ------
        PoolValueError
            Before `bind`, past the capacity, while released, or after `free`.
        PoolOutOfMemoryError
            The device has not enough memory.
        DriverError
            A driver call failed; the text names it.
        """
        flags = lib.EKV_COMMIT_ZERO | (lib.EKV_COMMIT_DEFRAGMENT if defragment else 0)
        num_blocks = _count("commit", num_blocks)
        with self._lock:
            self._check_bound("commit", num_blocks)
            if defragment:
                refuse_while_capturing("defragment", self.device)
            what = partial(self._asked_for, "commit", num_blocks)
            self._grow(what, lib.ekv_commit, num_blocks, flags, may_empty_cache=may_empty_cache)

    def shrink(self, num_blocks: int) -> None:
        """Give back the chunks that hold nothing of blocks `0..num_blocks`, which keep their content.

        More blocks than committed change nothing. Waits for the device, so not while a stream is captured. A
        chunk that holds a kept block stays whole, so how much memory returns depends on `max_chunk_bytes`.
        """
        num_blocks = _count("shrink", num_blocks)
        with self._lock:
            self._check_bound("shrink", num_blocks)
            refuse_while_capturing("shrink", self.device)
            check(self._for_all(lib.ekv_shrink, num_blocks))

    def release_physical(self) -> None:
        """Give back all memory and keep the addresses; contents are lost. Twice is harmless.

        Waits for the device, so not while a stream is captured. Touching a block faults until `recommit`.
        """
        with self._lock:
            self._check_not_freed()
            refuse_while_capturing("release_physical", self.device)
            check(self._for_all(lib.ekv_release_physical))

    def recommit(self, may_empty_cache: bool = True) -> None:
        """Back the blocks that `release_physical` gave back again, zeroed.

        `may_empty_cache` is what it is for `commit`, and so are the errors.
        """
        with self._lock:
            self._check_not_freed()
            blocks = max((info.released_blocks for _, info in self._living()), default=0)
            what = partial(self._asked_for, "recommit", blocks)
            self._grow(what, lib.ekv_recommit, may_empty_cache=may_empty_cache)

    def free(self) -> None:
        """Give back all memory for good. The addresses follow when the last tensor over them dies."""
        with self._lock:
            if self._freed:
                return
            check(self._for_all(lib.ekv_release_physical))
            self._freed = True

    def bytes_for(self, num_blocks: int) -> int:
        """Return the physical bytes that a fresh `commit(num_blocks)` holds, granule rounding included."""
        self._check_bound("bytes_for", num_blocks)
        return sum(
            m.layout.extent_bytes(num_blocks, m.reservation.granularity) for m in self._members if m.layout
        )

    def max_blocks_within(self, num_bytes: int) -> int:
        """Return the most blocks whose `bytes_for` is at most `num_bytes`."""
        return sizing.blocks_within(num_bytes, self.bytes_for, self.capacity_blocks)

    @property
    def capacity_blocks(self) -> int:
        """How many blocks the reservation has room for; 0 before `bind`."""
        return min((m.layout.capacity_blocks for m in self._live() if m.layout), default=0)

    @property
    def committed_blocks(self) -> int:
        """How many blocks are backed now: blocks `0..committed_blocks` may be read and written."""
        return min((info.committed_blocks for _, info in self._living()), default=0)

    @property
    def physical_bytes(self) -> int:
        """What the driver was asked for and has not been given back."""
        return sum(info.physical_bytes for _, info in self._living())

    @property
    def reserved_bytes(self) -> int:
        """Bytes of addresses."""
        return sum(m.reservation.size_bytes for m in self._live())

    @property
    def granularity(self) -> int:
        """The driver's unit of mapping in bytes; 0 before the first tensor."""
        return max((m.reservation.granularity for m in self._live()), default=0)

    @property
    def num_segments(self) -> int:
        """How many segments the bound views have."""
        return sum(len(m.layout.segments) for m in self._live() if m.layout)

    def committed_regions(self) -> list[tuple[int, int]]:
        """Return `(address, size_bytes)` of all committed blocks, sorted, neighbours joined."""
        regions: list[tuple[int, int]] = []
        with self._lock:
            for member, info in self._living():
                for offset, size in member.layout.spans(info.committed_blocks) if member.layout else ():
                    address = member.reservation.base + offset
                    if size and regions and sum(regions[-1]) == address:
                        regions[-1] = (regions[-1][0], regions[-1][1] + size)
                    elif size:
                        regions.append((address, size))
        return sorted(regions)

    def view_committed(self, view: torch.Tensor, block_dim: int = 0) -> torch.Tensor:
        """Return `view` narrowed to the committed blocks, over a storage that is committed memory only.

        For code that hands memory on (to a network card, to another process) by storage as well as by view.

        Parameters
        ----------
        view : torch.Tensor
            A view of this pool whose blocks lie in one segment, with room for the pool's capacity.
        block_dim : int
            The dimension that counts blocks, or pieces of blocks of which a whole number make one.

        Returns
        -------
        torch.Tensor
            Same address, strides and dtype. Its storage is the committed part of the segment, which it shares
            with the other layers of a packed row. It owns nothing: `view`'s memory must outlive it, and a
            shrink or a release takes the memory away.

        Raises
        ------
        PoolValueError
            Nothing is committed, the view is outside the pool or crosses segments, or its size does not fit.
        """
        from allocator.committed_rows import view_committed

        return view_committed(self, view, block_dim)

    def snapshot(self) -> dict[str, Any]:
        """Return a JSON-able description: sizes, segments and chunks. `extensible-kv map` draws it."""
        with self._lock:
            members = [(m, found) for m in self._live() if (found := _description(m.reservation))]
            return {
                "device": str(self.device),
                "driver": DRIVER_KINDS[self._driver],
                "granularity": self.granularity,
                "capacity_blocks": self.capacity_blocks,
                "committed_blocks": self.committed_blocks,
                "physical_bytes": self.physical_bytes,
                "reserved_bytes": self.reserved_bytes,
                "last_commit_seconds": self.last_commit_seconds,
                "reservations": [found for _, (found, _) in members],
                "segments": [
                    {
                        "reservation": index,
                        "offset": s.offset,
                        "block_stride": s.block_stride,
                        "size_bytes": size,
                    }
                    for index, (m, _) in enumerate(members)
                    if m.layout
                    for s, size in zip(m.layout.segments, m.layout.sizes_bytes, strict=True)
                ],
                "chunks": [
                    {"reservation": index, "offset": c.offset, "size": c.size_bytes}
                    for index, (_, (_, chunks)) in enumerate(members)
                    for c in chunks
                ],
            }

    def _asked_for(self, operation: str, num_blocks: int) -> str:
        wanted, held = self.bytes_for(num_blocks), self.physical_bytes
        return f"{operation} of {num_blocks} blocks, {wanted} bytes of which {held} are held,"

    def _grow(
        self, what: Callable[[], str], call: Callable[..., int], *arguments: int, may_empty_cache: bool = True
    ) -> None:
        start = time.perf_counter()
        call_with_room(lambda: self._for_all(call, *arguments), self.device, what, may_empty_cache)
        self.last_commit_seconds = time.perf_counter() - start

    def _for_all(self, call: Callable[..., int], *arguments: int) -> int:
        """Call the shim for all tensors; once more without those that died on their way there."""
        while True:
            status = call(*ids_argument([m.reservation.id for m in self._live()]), *arguments)
            if status != lib.EKV_FREED:
                return status

    def _live(self) -> list[_Member]:
        """Forget tensors that have died, scratch ones among them, and return the rest."""
        return [member for member, _ in self._living()]

    def _living(self) -> list[tuple[_Member, Any]]:
        """Do as `_live`, each with the shim's `ekv_reservation_info`; a tensor may die right after it."""
        with self._lock:
            living = [(m, info) for m in self._members if (info := _info(m.reservation)) is not None]
            self._members = [member for member, _ in living]
            return living

    def _capacities_beside(self, member: _Member) -> Iterator[int]:
        for other in self._members:
            if other is not member and other.layout and _info(other.reservation) is not None:
                yield other.layout.capacity_blocks

    def _member_of(self, address: int) -> _Member:
        for member in self._members:
            if member.contains(address) and _info(member.reservation) is not None:
                return member
        self._live()
        ranges = ", ".join(
            f"0x{m.reservation.base:x}..0x{m.reservation.base + m.reservation.size_bytes:x}"
            for m in self._members
        )
        raise PoolValueError(
            f"a view at 0x{address:x} lies outside the pool's memory ({ranges or 'no tensors'}): it takes "
            "what is made inside its context, on its device, of min_bytes or more, and as the predicate says"
        )

    def _check_bound(self, operation: str, num_blocks: int) -> None:
        self._check_not_freed()
        members = self._live()
        for member in members:
            if member.layout is None:
                raise PoolValueError(
                    f"{operation} of {num_blocks} blocks before bind: no view over the tensor of "
                    f"{member.reservation.size_bytes} bytes at 0x{member.reservation.base:x}"
                )
        if not members and self._had_tensors:
            raise PoolValueError(f"{operation} of {num_blocks} blocks: all tensors of the pool were freed")
        if not members:
            raise PoolValueError(f"{operation} of {num_blocks} blocks before bind: the pool has no tensors")

    def _check_not_freed(self) -> None:
        if self._freed:
            raise PoolValueError("the pool was freed")


def _count(operation: str, num_blocks: int) -> int:
    num_blocks = operator.index(num_blocks)  # of NumPy and PyTorch too, which count in 64 bits only
    if not 0 <= num_blocks < 1 << 63:
        raise PoolValueError(f"{operation} of {num_blocks} blocks")
    return num_blocks


def _info(reservation: Reservation) -> Any:
    """Return what the shim knows of `reservation`, or None when its tensor has died."""
    try:
        return reservation.info()
    except PoolValueError:
        return None


def _description(reservation: Reservation) -> tuple[dict[str, Any], list[Chunk]] | None:
    try:
        return reservation.snapshot(), reservation.chunks()
    except PoolValueError:  # its tensor has just died
        return None


def _renew_locks() -> None:
    for pool in list(_pools):
        pool._lock = threading.RLock()


# A child of a process whose other threads hold a lock at the fork would wait for them for ever.
_pools: weakref.WeakSet[PoolController] = weakref.WeakSet()
os.register_at_fork(after_in_child=_renew_locks)
