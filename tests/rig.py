"""A reservation under test and what must be in it, for the fault ladder and the state machines."""

from __future__ import annotations

import ctypes
import itertools
import os

from allocator.reservation import Reservation
from allocator.shim import ffi, last_error, lib

KINDS = {"host": lib.EKV_HOST, "cuda": lib.EKV_CUDA, "hip": lib.EKV_HIP}
_patterns = itertools.count(1)

# Layouts in granules: (offset, block stride) of each segment, and the capacity in blocks.
LAYOUTS = {
    "block-major": ([(0, 1.5)], 10),
    "kv-split": ([(0, 0.625), (7.5, 0.625)], 12),  # the two segments share a granule
    "layers": ([(0, 1), (6, 1), (12, 1), (18, 1)], 6),
    "small-blocks": ([(0, 0.25), (4.25, 0.25), (8.5, 0.25)], 17),
    "holes": ([(0.5, 2), (17, 2)], 8),
}


class _Span(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]


def readable_bytes(address: int, size: int) -> int:
    """Return how many bytes from `address` on can be read by this process, without faulting."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    into = ctypes.create_string_buffer(size)
    local, remote = _Span(ctypes.addressof(into), size), _Span(address, size)
    count = libc.process_vm_readv(os.getpid(), ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    return max(0, count)


class Rig:
    """One reservation with a layout, and a dict of what each block of each segment holds."""

    def __init__(self, driver: str, layout: str, *, max_chunk_granules: float = 0, device: int = 0) -> None:
        self.driver, self.layout, self.device = driver, layout, device
        self.max_chunk_granules = max_chunk_granules
        self.content: dict[tuple[int, int], bytes] = {}
        self.reservation: Reservation | None = None

    def reserve(self, shareable: bool = False) -> int:
        """Reserve and bind; returns the status."""
        granularity = self._granularity()
        segments, self.capacity = LAYOUTS[self.layout]
        self.segments = [
            (int(offset * granularity), int(stride * granularity)) for offset, stride in segments
        ]
        size = max(offset + self.capacity * stride for offset, stride in self.segments)
        out = ffi.new("uint64_t *")
        max_chunk = int(self.max_chunk_granules * granularity)
        status = lib.ekv_reserve(KINDS[self.driver], self.device, size, max_chunk, shareable, out)
        if not status:
            self.reservation = Reservation(out[0])
            self.base = self.reservation.base
            self.bind()
        return status

    def bind(self) -> None:
        """Tell the reservation the layout."""
        triples = [(offset, stride, self.capacity * stride) for offset, stride in self.segments]
        self.reservation.set_segments(triples, self.capacity)

    def _granularity(self) -> int:
        return int(os.environ["EKV_HOST_GRANULARITY"])

    def info(self):
        assert self.reservation is not None
        return self.reservation.info()

    def commit(self, num_blocks: int, flags: int = lib.EKV_COMMIT_ZERO) -> int:
        return lib.ekv_commit([self.reservation.id], 1, num_blocks, flags)

    def defragment(self) -> int:
        flags = lib.EKV_COMMIT_ZERO | lib.EKV_COMMIT_DEFRAGMENT
        return lib.ekv_commit([self.reservation.id], 1, self.info().committed_blocks, flags)

    def shrink(self, num_blocks: int) -> int:
        return lib.ekv_shrink([self.reservation.id], 1, num_blocks)

    def release(self) -> int:
        return lib.ekv_release_physical([self.reservation.id], 1)

    def recommit(self) -> int:
        return lib.ekv_recommit([self.reservation.id], 1)

    def unreserve(self) -> int:
        status = lib.ekv_unreserve(self.reservation.id)
        if not status:
            self.reservation = None
        return status

    def address(self, segment: int, block: int) -> int:
        offset, stride = self.segments[segment]
        return self.base + offset + block * stride

    def expect_zero(self, blocks: range) -> None:
        """Say that an operation has zeroed these blocks."""
        for segment, (_, stride) in enumerate(self.segments):
            for block in blocks:
                self.content[segment, block] = bytes(stride)

    def forget(self, from_block: int) -> None:
        """Say that the blocks from here on are no longer backed."""
        self.content = {key: value for key, value in self.content.items() if key[1] < from_block}

    def write(self, blocks: range) -> None:
        """Fill blocks with patterns that occur nowhere else."""
        for segment, (_, stride) in enumerate(self.segments):
            for block in blocks:
                pattern = (next(_patterns).to_bytes(8, "little") * (stride // 8 + 1))[:stride]
                ctypes.memmove(self.address(segment, block), pattern, stride)
                self.content[segment, block] = pattern

    def check(self, committed: int, stub=None) -> None:
        """Invariants 2, 3, 5 and 6 with `committed` blocks: the content and the stub's books."""
        info = self.info()
        assert info.committed_blocks == committed, (info.committed_blocks, committed, last_error())
        assert info.base == self.base
        for (segment, block), expected in self.content.items():
            if block < committed:
                found = ctypes.string_at(self.address(segment, block), len(expected))
                assert found == expected, (segment, block)
        assert all((s, b) in self.content for s in range(len(self.segments)) for b in range(committed))
        self._check_beyond(committed)
        if stub is not None:
            assert not stub.num_violations(), stub.text()
            assert info.physical_bytes == stub.used_bytes(self.device), (info.physical_bytes, stub.live())
            assert info.num_chunks == stub.live_mappings()

    def check_nothing_spare(self, num_blocks: int) -> None:
        """Each chunk holds something of the first blocks of some segment."""
        kept = [(offset, offset + num_blocks * stride) for offset, stride in self.segments]
        for chunk in self.reservation.chunks():
            end = chunk.offset + chunk.size_bytes
            assert any(a < end and chunk.offset < b for a, b in kept), (chunk, kept)

    def _check_beyond(self, committed: int) -> None:
        """No byte outside of the chunks can be read, so the first block past them faults."""
        chunks = self.reservation.chunks()
        ends = [(c.offset, c.offset + c.size_bytes) for c in chunks]
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends)), ends  # invariant 1
        at = 0
        for begin, end in [*ends, (self.reservation.size_bytes, None)]:
            for page in {at, (at + begin) // 2 // 4096 * 4096, begin - 4096}:
                if at <= page < begin:
                    assert not readable_bytes(self.base + page, 4096), (page, ends, committed)
            at = end
