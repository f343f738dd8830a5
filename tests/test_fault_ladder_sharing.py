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
