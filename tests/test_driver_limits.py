"""Drivers, on the CUDA and the HIP stub: what a device cannot do, and what is tried instead."""

from __future__ import annotations

import os

import pytest
from driver_rig import BOTH, MIB, SYMBOLS, error, reserve, rig
from stub_lab import GRANULE, Stub, in_child

from allocator.errors import DriverError, UnsupportedError


@BOTH
@in_child()
def test_no_virtual_memory_is_unsupported(driver):  # case 36
    from rig import KINDS

    from allocator.reservation import Reservation

    Stub(driver).set_attribute(SYMBOLS[driver]["vmm"], 0, 0)
    with pytest.raises(UnsupportedError, match="no virtual memory management"):
        Reservation.reserve(KINDS[driver], 0, MIB)


@BOTH
@in_child()
def test_granularity_query_not_supported_is_an_error(driver):  # case 36
    from rig import KINDS

    from allocator.reservation import Reservation

    stub = Stub(driver)
    stub.option("granularity_code", 801)
    with pytest.raises(DriverError, match=r"GetAllocationGranularity failed: .*\(801\)"):
        Reservation.reserve(KINDS[driver], 0, MIB)
    stub.option("granularity_code", 0)
    assert rig(driver).unreserve() == 0


@BOTH
@in_child()
def test_reservation_over_the_limit_fails_and_a_smaller_one_works(driver):  # case 37
    Stub(driver).option("max_reserve_bytes", 8 << 30)
    assert reserve(driver, 9 << 30) == 2
    assert "AddressReserve failed: " in error()
    assert f"{9 << 30} bytes" in error()
    assert reserve(driver, 8 << 30) == 0


def shareable_kind(driver: str) -> tuple[str, str]:
    """Probe, and return the kind of handle and why it is not better."""
    from rig import KINDS

    from allocator.shim import HANDLE_KINDS, check, ffi, lib

    info, reason = ffi.new("ekv_probe_info *"), ffi.new("char[]", 1024)
    check(lib.ekv_probe(KINDS[driver], 0, info, reason, 1024))
    return HANDLE_KINDS[info.handle_kind], ffi.string(reason).decode()


@BOTH
@in_child()
def test_fabric_that_fails_falls_back_with_the_reason(driver):  # case 34
    stub = Stub(driver)
    stub.set_attribute(128, 1, 0)
    for code in (800, 801, 1, 2):
        stub.option("fabric_code", code)
        kind, reason = shareable_kind(driver)
        assert kind in ("fd", "fd+rdma")
        assert f"({code})" in reason
    stub.option("fabric_code", 0)
    assert shareable_kind(driver) == ("fabric", "")
    assert not any(stub.live().values())


@BOTH
@in_child()
def test_shareable_out_of_memory_is_not_a_reason_to_fall_back(driver):  # case 34
    stub = Stub(driver)
    stub.set_total_memory(0, GRANULE // 2)
    assert reserve(driver, MIB, shareable=True) == 2
    stub.set_total_memory(0, MIB)
    assert reserve(driver, MIB, shareable=True) == 0


@BOTH
@pytest.mark.parametrize("fabric", [False, True])
@in_child()
def test_shareable_out_of_memory_for_a_moment_makes_no_lesser_kind(driver, fabric):  # case 34
    """Memory is short for the best descriptor only: a lesser kind would succeed, and stay for good."""
    stub, create = Stub(driver), SYMBOLS[driver]["create"]
    stub.option("fabric_code", 0 if fabric else 801)
    stub.set_attribute(110, 1, 0)
    stub.fail_nth(create, 1, 2, 0)
    if fabric:  # which answers so where nothing is exported over a network: the next kind tells
        stub.fail_after_first(create, 1, 2, 0)
    assert reserve(driver, MIB, shareable=True) == 2
    assert "Create failed" in error()
    assert stub.injected() == 1 + fabric
    assert not any(stub.live().values())


@BOTH
@in_child()
def test_fabric_out_of_memory_falls_back_to_a_descriptor(driver):  # case 34
    from rig import Rig

    stub, made = Stub(driver), Rig(driver, "layers")
    stub.option("fabric_code", 0)
    stub.fail_nth(SYMBOLS[driver]["create"], 1, 2, 0)
    assert made.reserve(shareable=True) == 0, error()
    assert made.reservation.snapshot()["handle_kind"] in ("fd", "fd+rdma")
    assert made.commit(2) == 0
    assert made.unreserve() == 0


@in_child()
def test_rdma_attribute_query_refused_is_not_fatal():  # case 35
    stub = Stub("cuda")
    stub.set_attribute(110, 0, 1)
    kind, reason = shareable_kind("cuda")
    assert kind == "fd"
    assert "801" in reason  # fabric


@in_child()
def test_rdma_memory_refused_falls_back_to_a_plain_descriptor():
    Stub("cuda").option("rdma_code", 801)
    assert shareable_kind("cuda")[0] == "fd"


@in_child()
def test_shareable_granularity_is_asked_for_the_properties_used():
    from rig import KINDS

    from allocator.reservation import Reservation

    stub = Stub("cuda")
    stub.option("fabric_code", 0)
    stub.option("fabric_granularity_factor", 4)
    shared = Reservation.reserve(KINDS["cuda"], 0, 5 * GRANULE, shareable=True)
    assert shared.granularity == 4 * GRANULE
    assert shared.size_bytes == 8 * GRANULE
    shared.unreserve()


@BOTH
@in_child(env={"EKV_CUDA_LIBRARY": "/nonexistent.so", "EKV_HIP_LIBRARY": "/nonexistent.so"})
def test_missing_library_is_unsupported_and_named(driver):
    from rig import KINDS

    from allocator.reservation import Reservation
    from allocator.shim import lib

    for _ in range(2):
        with pytest.raises(UnsupportedError, match=f"{driver}: .*nonexistent"):
            Reservation.reserve(KINDS[driver], 0, MIB)
    child = os.fork()  # no driver was used: the child is told the same
    if child == 0:
        os._exit(reserve(driver, MIB))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == lib.EKV_UNSUPPORTED


@BOTH
@in_child(env={"EKV_CUDA_LIBRARY": "libm.so.6", "EKV_HIP_LIBRARY": "libm.so.6"})
def test_library_without_the_symbols_is_unsupported(driver):
    from rig import KINDS

    from allocator.reservation import Reservation

    with pytest.raises(UnsupportedError, match="has no (cu|hip)"):
        Reservation.reserve(KINDS[driver], 0, MIB)


@BOTH
@in_child()
def test_device_that_does_not_exist_is_an_error_and_no_more(driver):
    from rig import KINDS

    from allocator.reservation import Reservation

    with pytest.raises(DriverError, match=r"INVALID_DEVICE|InvalidDevice"):
        Reservation.reserve(KINDS[driver], 7, MIB)
    assert rig(driver).unreserve() == 0
