"""`Reservation`: one address range of a driver, by id. No torch, no ownership: whoever made it frees it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from allocator.errors import PoolValueError
from allocator.layout import BlockLayout
from allocator.shim import DRIVER_KINDS, HANDLE_KINDS, check, ffi, lib

__all__ = ["Chunk", "Reservation"]


class Chunk(NamedTuple):
    """One handle mapped at `offset` of a reservation."""

    offset: int
    size_bytes: int


class Reservation:
    """A thin wrapper over one reservation of the shim.

    Several reservations commit together through `allocator.pool`; the operations here are what one of them
    can tell about itself. Safe to use from any thread. Every member raises `PoolValueError` once the
    reservation was freed, and `DriverError` in a process forked after the driver's first use.
    """

    __slots__ = ("base", "granularity", "id", "size_bytes")

    def __init__(self, reservation_id: int) -> None:
        self.id = reservation_id
        info = self.info()
        self.base: int = info.base
        self.size_bytes: int = info.size
        self.granularity: int = info.granularity

    @classmethod
    def reserve(
        cls, driver: int, device: int, size_bytes: int, max_chunk_bytes: int = 0, shareable: bool = False
    ) -> Reservation:
        """Take `size_bytes` (rounded up to the granularity) of addresses from a driver; no memory yet."""
        if size_bytes <= 0:
            raise PoolValueError(f"a reservation needs a positive size, got {size_bytes} bytes")
        out = ffi.new("uint64_t *")
        check(lib.ekv_reserve(driver, device, size_bytes, max_chunk_bytes, shareable, out))
        return cls(out[0])

    def info(self) -> Any:
        """Return the shim's `ekv_reservation_info`."""
        info = ffi.new("ekv_reservation_info *")
        check(lib.ekv_get_info(self.id, info))
        return info

    def set_layout(self, layout: BlockLayout) -> None:
        """Tell the shim the segments. Raises `PoolValueError` after the first commit."""
        pairs = zip(layout.segments, layout.sizes_bytes, strict=True)
        self.set_segments(((s.offset, s.block_stride, size) for s, size in pairs), layout.capacity_blocks)

    def set_segments(self, segments: Iterable[tuple[int, int, int]], capacity_blocks: int) -> None:
        """Tell the shim `(offset, block_stride, size_bytes)` of each segment, sorted and disjoint."""
        items = ffi.new("ekv_segment[]", list(segments))
        check(lib.ekv_set_segments(self.id, items, len(items), capacity_blocks))

    def chunks(self) -> list[Chunk]:
        """Return what is mapped, sorted by offset."""
        count = ffi.new("size_t *")
        capacity = self.info().num_chunks
        while True:
            items = ffi.new("ekv_chunk_info[]", max(1, capacity))
            check(lib.ekv_get_chunks(self.id, items, capacity, count))
            if count[0] <= capacity:
                return [Chunk(items[i].offset, items[i].size) for i in range(count[0])]
            capacity = count[0]  # another thread committed in between

    def unreserve(self) -> None:
        """Give back memory and addresses. After a failure it can be called again."""
        check(lib.ekv_unreserve(self.id))

    def snapshot(self) -> dict[str, Any]:
        """Return what `PoolController.snapshot` says of one reservation."""
        info = self.info()
        return {
            "id": self.id,
            "base": self.base,
            "size_bytes": self.size_bytes,
            "granularity": self.granularity,
            "physical_bytes": info.physical_bytes,
            "driver": DRIVER_KINDS[info.driver],
            "handle_kind": HANDLE_KINDS[info.handle_kind],
        }
