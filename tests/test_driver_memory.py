"""Drivers, on the CUDA and the HIP stub: memory that is short, refused, in use, or retired."""

from __future__ import annotations

import ctypes

import pytest
from driver_rig import BOTH, SYMBOLS, error, make_current, rig
from stub_lab import GRANULE, Stub, in_child

from allocator.errors import PoolValueError


@BOTH
@in_child()
def test_fresh_memory_reads_as_zero_when_commit_returns(driver):  # case 17, invariant 5
    pool = rig(driver, "small-blocks")
    for blocks in (1, 2, 7, 17):
        assert pool.commit(blocks) == 0
        pool.expect_zero(range(blocks))
        pool.check(blocks, Stub(driver))
    assert pool.unreserve() == 0


@BOTH
@in_child()
def test_error_names_driver_call_code_device_and_bytes(driver):  # invariant 8
    stub, pool = Stub(driver), rig(driver)
    name = {"cuda": "CUDA_ERROR_OUT_OF_MEMORY", "hip": "hipErrorOutOfMemory"}[driver]
    stub.set_total_memory(0, 3 * GRANULE)
    assert pool.commit(1) == 2
    call = SYMBOLS[driver]["create"]
    assert error() == f"{driver}: {call} failed: {name} (2), device 0, {GRANULE} bytes"
    assert stub.used_bytes(0) == 0
    assert pool.unreserve() == 0


@BOTH
@in_child()
def test_neighbour_takes_memory_midway_commit_goes_back(driver):  # case 29
    stub, pool = Stub(driver), rig(driver)
    stub.set_total_memory(0, 64 * GRANULE)
    assert pool.commit(2) == 0
    pool.write(range(2))
    for k in range(1, 4):
        stub.neighbour_takes_at(SYMBOLS[driver]["create"], k, 0, 60 * GRANULE)
        assert pool.commit(6) == 2
        pool.check(2, stub)
        stub.fail_clear()
        stub.neighbour_takes(0, -60 * GRANULE)
    assert pool.commit(6) == 0
    pool.expect_zero(range(2, 6))
    pool.check(6, stub)
    assert pool.unreserve() == 0


@BOTH
@in_child()
def test_kth_chunk_fails_to_be_created_mapped_or_accessed(driver):  # case 28
    stub, pool = Stub(driver), rig(driver, "block-major", max_chunk_granules=1)
    assert pool.commit(2) == 0
    pool.write(range(2))
    for call in ("create", "map", "access"):
        for k in range(1, 10):
            stub.fail_nth(SYMBOLS[driver][call], k, 999, int(call == "access"))
            status, fired = pool.commit(8), stub.injected()
            stub.fail_clear()
            assert bool(status) == bool(fired)
            if fired:
                pool.check(2, stub)
            else:
                assert pool.shrink(2) == 0
    assert pool.commit(8) == 0
    pool.expect_zero(range(2, 8))
    pool.check(8, stub)
    assert pool.unreserve() == 0


@BOTH
@in_child()
def test_hundred_release_recommit_cycles_leave_nothing(driver):  # case 30
    stub, pool = Stub(driver), rig(driver)
    assert pool.commit(5) == 0
    size = stub.used_bytes(0)
    for _ in range(100):
        assert pool.release() == 0
        assert pool.release() == 0
        assert stub.used_bytes(0) == 0
        assert pool.info().released_blocks == 5
        assert pool.recommit() == 0
        assert stub.used_bytes(0) == size
    pool.expect_zero(range(5))
    pool.check(5, stub)
    assert pool.unreserve() == 0


@BOTH
@in_child()
def test_recommit_on_a_full_device_fails_and_works_later(driver):  # case 31
    stub, pool = Stub(driver), rig(driver)
    stub.set_total_memory(0, 24 * GRANULE)
    assert pool.commit(6) == 0
    assert pool.release() == 0
    stub.neighbour_takes(0, 20 * GRANULE)
    assert pool.recommit() == 2
    pool.forget(0)
    pool.check(0, stub)
    stub.neighbour_takes(0, -20 * GRANULE)
    assert pool.recommit() == 0
    pool.expect_zero(range(6))
    pool.check(6, stub)
    assert pool.unreserve() == 0


@pytest.mark.parametrize("name", ["shrink", "release", "defragment", "unreserve", "retire"])
@BOTH
@in_child()
def test_memory_that_enqueued_work_still_uses_is_waited_for(driver, name):
    from allocator.shim import lib

    stub, pool, stream = Stub(driver), rig(driver), ctypes.c_uint64()
    assert pool.commit(6) == 0
    make_current(driver, 0)
    create = {"cuda": "cuStreamCreate", "hip": "hipStreamCreateWithFlags"}[driver]
    fill = {"cuda": "cuMemsetD8Async", "hip": "hipMemsetD8Async"}[driver]
    assert getattr(stub.driver, create)(ctypes.byref(stream), 1) == 0
    address = ctypes.c_uint64(pool.address(1, 5))
    assert getattr(stub.driver, fill)(address, ctypes.c_ubyte(7), ctypes.c_size_t(GRANULE), stream) == 0
    retired = pool.reservation.id
    operations = {
        "shrink": lambda: pool.shrink(2),
        "release": pool.release,
        "defragment": pool.defragment,
        "unreserve": pool.unreserve,
        "retire": lambda: lib.ekv_retire(retired, 0),
    }
    assert operations[name]() == 0, error()
    assert not stub.num_violations(), stub.text()
    if name == "retire":
        lib.ekv_adopt(pool.base, 0, out := ids())
        assert lib.ekv_unreserve(out[0]) == 0
    elif name != "unreserve":
        assert pool.unreserve() == 0


def ids():
    """Return room for one id."""
    from allocator.shim import ffi

    return ffi.new("uint64_t *")


@BOTH
@in_child()
def test_operations_after_free_are_refused(driver):
    from allocator.shim import check, lib

    pool = rig(driver)
    freed = pool.reservation.id
    assert pool.unreserve() == 0
    with pytest.raises(PoolValueError, match="was freed"):
        check(lib.ekv_commit([freed], 1, 1, 0))


@pytest.mark.parametrize("asleep", [False, True])
@BOTH
@in_child()
def test_retired_memory_is_given_back_and_its_addresses_are_adopted(driver, asleep):
    from allocator.reservation import Reservation
    from allocator.shim import ffi, ids_argument, lib

    stub, pool = Stub(driver), rig(driver)
    assert pool.commit(6) == 0
    pool.write(range(6))
    base, old = pool.base, pool.reservation.id
    if asleep:
        ids, count = ids_argument([old])
        assert lib.ekv_release_physical(ids, count) == 0
    assert lib.ekv_retire(old, 0) == 0
    assert stub.used_bytes(0) == 0
    assert lib.ekv_retire(old, 0) == lib.EKV_FREED
    out = ffi.new("uint64_t *")
    assert lib.ekv_adopt(base + GRANULE, 0, out) == lib.EKV_INVALID
    assert lib.ekv_adopt(base, 2 * GRANULE, out) == 0
    pool.reservation = Reservation(out[0])
    assert pool.reservation.info().released_blocks == 0
    assert lib.ekv_adopt(base, 0, out) == lib.EKV_INVALID
    pool.bind()
    pool.forget(0)
    assert pool.commit(6) == 0
    pool.expect_zero(range(6))
    pool.check(6, stub)
    assert (
        max(chunk.size_bytes for chunk in pool.reservation.chunks()) == 2 * GRANULE
    )  # the new owner's limit
    assert pool.unreserve() == 0


@BOTH
@in_child()
def test_retired_while_capturing_is_given_back_later(driver):
    from allocator.shim import lib, library_path

    stub, pool = Stub(driver), rig(driver)
    assert lib.ekv_torch_driver(lib.EKV_CUDA if driver == "cuda" else lib.EKV_HIP) == 0
    shim = ctypes.CDLL(library_path())
    shim.ekv_malloc.restype = ctypes.c_void_p
    arguments = (ctypes.c_ssize_t(4096), ctypes.c_int(0), None)
    assert pool.commit(6) == 0
    stub.begin_capture()
    assert lib.ekv_retire(pool.reservation.id, 1) == 0
    memory = shim.ekv_malloc(*arguments)
    assert memory
    assert stub.end_capture() == 0, stub.text()
    assert stub.used_bytes(0) > 4096
    other = rig(driver, "kv-split")
    assert stub.used_bytes(0) == 4096
    assert other.unreserve() == 0
    shim.ekv_free(ctypes.c_void_p(memory), *arguments)
    shim.ekv_free(ctypes.c_void_p(pool.base), *arguments)
    lib.ekv_empty_cache()
    assert not any(stub.live().values())


@BOTH
@in_child()
def test_allocation_short_of_memory_takes_what_a_retired_pool_still_holds(driver):
    from allocator.shim import lib, library_path

    stub, pool = Stub(driver), rig(driver)
    assert lib.ekv_torch_driver(lib.EKV_CUDA if driver == "cuda" else lib.EKV_HIP) == 0
    shim = ctypes.CDLL(library_path())
    shim.ekv_malloc.restype = ctypes.c_void_p
    stub.set_total_memory(0, 24 * GRANULE)
    assert pool.commit(6) == 0
    stub.fail_nth({"cuda": "cuMemUnmap", "hip": "hipMemUnmap"}[driver], 1, 999, 1)
    assert lib.ekv_retire(pool.reservation.id, 0) == 3
    stub.fail_clear()
    arguments = (ctypes.c_ssize_t(20 * GRANULE), ctypes.c_int(0), None)
    memory = shim.ekv_malloc(*arguments)
    assert memory
    shim.ekv_free(ctypes.c_void_p(memory), *arguments)
    shim.ekv_free(ctypes.c_void_p(pool.base), *arguments)
    lib.ekv_empty_cache()
    assert not any(stub.live().values())
