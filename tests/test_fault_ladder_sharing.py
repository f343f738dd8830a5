"""Ladders of export and import; what is shared stays whole on both sides."""

from __future__ import annotations

import ctypes
import os

import pytest
from ladder import OPTIONS, WAYS, Shared, climb, once, open_files, opened
from stub_lab import Stub, in_child

BOTH = pytest.mark.parametrize("driver", ["cuda", "hip"])


@BOTH
@in_child(options=OPTIONS)
def test_export_fails_at_any_call_and_leaves_no_file(driver):
    stub, before = opened(driver), open_files()

    def succeeded(shared):
        shared.exporter.check(5)
        shared.free()
        assert open_files() == before

    for way in WAYS:
        assert climb(stub, lambda: Shared(driver), Shared.export, lambda _: None, succeeded, way=way) > 8, way


@BOTH
@in_child(options=OPTIONS)
def test_import_fails_at_any_call_and_leaves_the_reservation_empty(driver):
    stub = opened(driver)

    def prepare():
        shared = Shared(driver)
        assert shared.export() == 0
        return shared

    def failed(shared):
        info = shared.importer.info()
        assert info.committed_blocks == 0
        assert info.num_chunks == info.physical_bytes == 0 or way is not once
        shared.exporter.check(5)

    def succeeded(shared):
        shared.importer.content = dict(shared.exporter.content)
        shared.importer.check(5)
        ctypes.memset(shared.importer.address(1, 4), 7, 8)
        assert ctypes.string_at(shared.exporter.address(1, 4), 8) == bytes([7]) * 8
        shared.free()

    for way in WAYS:
        assert climb(stub, prepare, Shared.import_, failed, succeeded, way=way) > 8, way


@BOTH
@in_child(options=OPTIONS)
def test_import_into_a_reservation_with_memory_changes_nothing(driver):
    from allocator.shim import lib

    shared = Shared(driver)
    assert shared.export() == 0
    assert shared.importer.commit(3) == 0
    shared.importer.write(range(3))
    assert shared.import_() == lib.EKV_INVALID
    shared.importer.check(3)
    assert shared.importer.shrink(0) == 0
    os.close(shared.files.pop())  # what the blocks need is not all there
    assert shared.import_() == lib.EKV_INVALID
    shared.importer.forget(0)
    shared.importer.check(0)
    assert not Stub(driver).num_violations(), Stub(driver).text()
    shared.free()


@BOTH
@in_child(options=OPTIONS)
def test_import_of_impossible_chunks_is_refused_before_any_driver_call(driver):
    from rig import Rig

    from allocator.shim import last_error, lib

    shared = Shared(driver)
    assert shared.export() == 0
    chunks, size = shared.chunks, shared.importer.reservation.size_bytes
    unit = shared.importer.reservation.granularity
    first, last = chunks[0], chunks[len(chunks) - 1]
    right = [(chunk.offset, chunk.size) for chunk in chunks]
    target, calls = shared.importer.reservation.id, Stub(driver).calls(None)

    def refused(blocks=5, reservation=target):
        arguments = (chunks, shared.files, len(shared.files), blocks)
        assert lib.ekv_import_chunks(reservation, *arguments) == lib.EKV_INVALID
        assert last_error()[1].startswith("import of "), last_error()
        for chunk, (offset, num_bytes) in zip(chunks, right, strict=True):
            chunk.offset, chunk.size = offset, num_bytes

    chunks[1].offset = first.offset
    refused()  # overlaps
    last.offset += unit // 2
    refused()  # begins inside a granule
    last.size -= unit // 2
    refused()  # ends inside one
    last.size = 0
    refused()
    last.offset = size
    refused()  # behind the end
    last.offset = 2**64 - unit
    refused()  # ... and where adding the size wraps around
    last.size = size
    refused()  # across the end
    refused(blocks=shared.importer.capacity + 1)
    assert Stub(driver).calls(None) == calls
    unbound = Rig(driver, "layers")
    unbound.bind = lambda: None
    assert unbound.reserve(shareable=True) == 0
    for blocks in (0, 5):
        refused(blocks, unbound.reservation.id)
    assert shared.import_() == 0, last_error()
    assert unbound.unreserve() == 0
    shared.free()


@BOTH
@in_child(options=OPTIONS)
def test_export_of_no_chunk_or_of_memory_that_is_not_shareable_is_refused(driver):
    from rig import Rig

    from allocator.shim import ffi, last_error, lib

    chunk, file = ffi.new("ekv_chunk_info *"), ffi.new("int *")
    for shareable in (True, False):
        made = Rig(driver, "block-major")
        assert made.reserve(shareable=shareable) == 0
        assert made.commit(3) == 0
        calls = Stub(driver).calls(None)
        for index in (made.info().num_chunks, 7) if shareable else (0,):
            assert lib.ekv_export_chunk(made.reservation.id, index, chunk, file) == lib.EKV_INVALID
            assert ("there are 1" if shareable else "not allocated as shareable") in last_error()[1]
        assert Stub(driver).calls(None) == calls
        assert made.unreserve() == 0
