"""What ROCm users report, one stub option each: the HIP driver works all the same."""

from __future__ import annotations

import pytest
from driver_rig import MIB
from ladder import Shared
from stub_lab import GRANULE, Stub, in_child

HIP_ROCM_7_2 = {  # Linux, as reported; see the description of driver_hip.c
    "hold_until_address_free": 1,
    "range_unmap_breaks_free": 1,
    "release_while_mapped_breaks_free": 1,
    "set_access_fails_every": 3,
    "aligned_reserve_code": 1,
}


def rig(layout: str = "layers", **arguments):
    from rig import Rig

    made = Rig("hip", layout, **arguments)
    assert made.reserve() == 0
    return made


@pytest.mark.parametrize("layout", ["layers", "block-major"])  # several mappings, and only one
@in_child()
def test_memory_that_returns_only_with_the_addresses_comes_back_on_release(layout):
    stub = Stub("hip")
    stub.option("hold_until_address_free", 1)
    pool = rig(layout)
    base = pool.base
    for _ in range(5):
        assert pool.commit(6) == 0
        pool.expect_zero(range(6))
        pool.write(range(3))
        assert pool.release() == 0
        pool.forget(0)
        assert stub.used_bytes(0) == 0
        assert stub.live_reservations() == 1  # at once: nobody else may get in between
        assert pool.recommit() == 0
        pool.expect_zero(range(6))
        pool.check(6, stub)
        assert pool.base == base
    assert pool.unreserve() == 0


@in_child()
def test_memory_of_a_failed_first_commit_comes_back_too():
    stub = Stub("hip")
    stub.option("hold_until_address_free", 1)
    pool = rig()
    stub.set_total_memory(0, 20 * GRANULE)
    assert pool.commit(6) == 2
    assert stub.used_bytes(0) == 0
    assert pool.commit(5) == 0
    assert pool.unreserve() == 0


@in_child()
def test_addresses_are_asked_for_again_when_that_is_refused_once():
    stub = Stub("hip")
    stub.option("hold_until_address_free", 1)
    pool = rig()
    assert pool.commit(3) == 0
    stub.fail_nth("hipMemAddressReserve", 1, 2, 0)
    assert pool.release() == 0
    assert stub.injected() == stub.live_reservations() == 1
    assert pool.recommit() == 0
    assert pool.unreserve() == 0


@in_child()
def test_addresses_that_somebody_else_took_are_an_error_not_corruption():
    from allocator.shim import last_error

    stub = Stub("hip")
    stub.option("hold_until_address_free", 1)
    pool = rig()
    assert pool.commit(3) == 0
    stub.option("refuse_address_hint", 1)
    assert pool.release() == 0
    assert pool.recommit() == 3
    assert "something else in this process has taken them" in last_error()[1]
    assert pool.unreserve() == 0
    assert not any(stub.live().values())


@in_child()
def test_addresses_that_become_free_again_are_taken_again():
    stub = Stub("hip")
    stub.option("hold_until_address_free", 1)
    pool = rig()
    assert pool.commit(3) == 0
    stub.option("refuse_address_hint", 1)
    assert pool.release() == 0
    stub.option("refuse_address_hint", 0)
    assert pool.recommit() == 0
    pool.expect_zero(range(3))
    pool.check(3, stub)
    assert pool.unreserve() == 0


@pytest.mark.parametrize("every", [2, 3, 5])
@in_child()
def test_set_access_that_fails_now_and_then_is_tried_again(every):
    stub = Stub("hip")
    stub.option("set_access_fails_every", every)
    pool = rig("block-major", max_chunk_granules=1)
    for blocks in (1, 4, 10):
        assert pool.commit(blocks) == 0
        pool.expect_zero(range(blocks))
        pool.check(blocks, stub)
    assert pool.unreserve() == 0


@in_child()
def test_set_access_that_fails_twice_in_a_row_is_tried_again():
    stub = Stub("hip")
    pool = rig()
    stub.fail_nth("hipMemSetAccess", 1, 1, 0)
    stub.fail_after_first("hipMemSetAccess", 1, 1, 0)
    assert pool.commit(2) == 0
    assert stub.injected() == 2
    pool.expect_zero(range(2))
    pool.check(2, stub)
    assert pool.unreserve() == 0


@in_child()
def test_set_access_that_never_works_is_an_error():
    from allocator.shim import last_error

    stub = Stub("hip")
    pool = rig()
    stub.fail_nth("hipMemSetAccess", 1, 1, 1)
    assert pool.commit(2) == 3
    assert "hipMemSetAccess failed: hipErrorInvalidValue (1)" in last_error()[1]
    pool.check(0, stub)
    stub.fail_clear()
    assert pool.commit(2) == 0
    assert pool.unreserve() == 0


@in_child()
def test_set_access_that_counts_from_the_first_mapping_grows_all_the_same():
    stub = Stub("hip")
    stub.option("set_access_first_sum", 1)
    pool = rig("block-major")
    for blocks in (1, 2, 5, 10):  # tails of other sizes than the first chunk
        assert pool.commit(blocks) == 0
        pool.expect_zero(range(blocks))
        pool.check(blocks, stub)
    assert pool.unreserve() == 0


@in_child()
def test_reserve_with_an_alignment_refused_is_tried_without():
    Stub("hip").option("aligned_reserve_code", 1)
    pool = rig()
    assert pool.commit(2) == 0
    assert pool.unreserve() == 0


@in_child(options="granularity=4096,aligned_reserve_code=1", env={"EKV_HIP_GRANULARITY": str(64 << 20)})
def test_reserve_that_comes_back_unaligned_is_given_back_and_an_error():
    from allocator.shim import ffi, last_error, lib

    out = ffi.new("uint64_t *")
    assert lib.ekv_reserve(lib.EKV_HIP, 0, 64 << 20, 0, False, out) == lib.EKV_DRIVER_FAILED
    assert "hipMemAddressReserve failed: hipErrorInvalidValue (1)" in last_error()[1]
    assert not any(Stub("hip").live().values())


@in_child(env={"EKV_HIP_GRANULARITY": str(GRANULE * 3 // 2)})
def test_granularity_that_is_no_multiple_of_the_runtimes_is_rounded_up():
    from allocator.reservation import Reservation
    from allocator.shim import lib

    reservation = Reservation.reserve(lib.EKV_HIP, 0, MIB)
    assert reservation.granularity == 2 * GRANULE
    reservation.unreserve()


@in_child(options="granularity=4096,page_bytes=2097152", env={"EKV_HIP_GRANULARITY": ""})
def test_memory_rounded_to_bigger_pages_is_what_the_books_say():  # invariants 6 and 7
    from allocator.reservation import Reservation
    from allocator.shim import lib

    stub = Stub("hip")
    reservation = Reservation.reserve(lib.EKV_HIP, 0, 64 << 20)
    assert reservation.granularity == 2 << 20
    reservation.set_segments([(0, 3 << 20, 30 << 20), (30 << 20, 3 << 20, 30 << 20)], 10)
    for blocks in (1, 2, 5, 10):
        assert lib.ekv_commit([reservation.id], 1, blocks, lib.EKV_COMMIT_ZERO) == 0
        assert reservation.info().physical_bytes == stub.used_bytes(0)
    reservation.unreserve()


@in_child()
def test_failures_do_not_stay_in_the_last_error():
    stub = Stub("hip")
    pool = rig()
    for n in range(1, 60):
        stub.fail_nth(None, n, 999, 0)
        pool.commit(6)
        stub.fail_clear()
        assert stub.driver.hipPeekAtLastError() == 0
        assert pool.shrink(0) == 0
    assert stub.driver.hipSetDevice(9) == 101
    assert stub.driver.hipPeekAtLastError() == 101  # the application's own stays
    assert pool.commit(1) == 0
    assert stub.driver.hipPeekAtLastError() == 101
    stub.reset()
    assert pool.unreserve() == 0


@pytest.mark.parametrize("version", [60443484, 70051831, 70125424, 70226015])
@in_child()
def test_descriptor_is_imported_as_the_runtime_takes_it(version):
    Stub("hip").option("runtime_version", version)
    shared = Shared("hip")
    assert shared.export() == 0
    assert shared.import_() == 0
    shared.importer.content = dict(shared.exporter.content)
    shared.importer.check(5)
    shared.free()


@in_child()
def test_imported_memory_is_not_expected_to_come_back():
    stub = Stub("hip")
    shared = Shared("hip")
    assert shared.export() == 0
    assert shared.import_() == 0
    before = stub.calls("hipMemAddressFree")
    assert shared.importer.release() == 0
    assert stub.calls("hipMemAddressFree") == before
    shared.free()


@in_child()
def test_all_reported_quirks_at_once():
    stub = Stub("hip")
    for name, value in HIP_ROCM_7_2.items():
        stub.option(name, value)
    pool = rig("layers", max_chunk_granules=1)
    for _ in range(3):
        for blocks in (1, 3, 6):
            assert pool.commit(blocks) == 0
        assert pool.release() == 0
        assert stub.used_bytes(0) == 0
        assert pool.recommit() == 0
        assert pool.shrink(2) == 0
        assert pool.release() == 0
        assert pool.recommit() == 0
    assert pool.unreserve() == 0
    assert not any(stub.live().values())
