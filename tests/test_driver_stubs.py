"""What every device driver has to get right, on the CUDA and on the HIP stub alike."""

from __future__ import annotations

import ctypes
import os
import threading

import pytest
from stub_lab import GRANULE, Stub, in_child

from allocator.errors import DriverError, PoolValueError, UnsupportedError

BOTH = pytest.mark.parametrize("driver", ["cuda", "hip"])
SYMBOLS = {
    "cuda": {"create": "cuMemCreate", "map": "cuMemMap", "access": "cuMemSetAccess", "vmm": 102},
    "hip": {"create": "hipMemCreate", "map": "hipMemMap", "access": "hipMemSetAccess", "vmm": 89},
}
MIB = 1 << 20


def rig(driver: str, layout: str = "layers", **arguments):
    from rig import Rig

    made = Rig(driver, layout, **arguments)
    assert made.reserve() == 0, error()
    return made


def reserve(driver: str, size_bytes: int, shareable: bool = False) -> int:
    """Reserve and, when that worked, give back; returns the status."""
    from rig import KINDS

    from allocator.shim import ffi, lib

    out = ffi.new("uint64_t *")
    status = lib.ekv_reserve(KINDS[driver], 0, size_bytes, 0, shareable, out)
    return status or lib.ekv_unreserve(out[0])


def error() -> str:
    from allocator.shim import last_error

    return last_error()[1]


def current_device(driver: str) -> int | None:
    """Return the calling thread's current device; None without a context."""
    library, out = Stub(driver).driver, ctypes.c_int(-1)
    if driver == "hip":
        assert library.hipGetDevice(ctypes.byref(out)) == 0
        return out.value
    context = ctypes.c_void_p()
    assert library.cuCtxGetCurrent(ctypes.byref(context)) == 0
    if not context:
        return None
    assert library.cuCtxGetDevice(ctypes.byref(out)) == 0
    return out.value


def capture_mode(driver: str) -> int:
    """Return the calling thread's stream capture mode."""
    mode = ctypes.c_int(0)
    name = {"cuda": "cuThreadExchangeStreamCaptureMode", "hip": "hipThreadExchangeStreamCaptureMode"}[driver]
    exchange = getattr(Stub(driver).driver, name)
    assert exchange(ctypes.byref(mode)) == 0
    found = mode.value
    assert exchange(ctypes.byref(mode)) == 0
    return found


def make_current(driver: str, device: int) -> None:
    """Play the application: make a device current on this thread."""
    library = Stub(driver).driver
    if driver == "hip":
        assert library.hipSetDevice(device) == 0
        return
    context = ctypes.c_void_p()
    assert library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    assert library.cuCtxSetCurrent(context) == 0


@BOTH
@in_child()
def test_pool_of_one_device_leaves_another_current(driver):  # case 20
    stub = Stub(driver)
    pool = rig(driver, device=0)
    assert current_device(driver) == (None if driver == "cuda" else 0)
    make_current(driver, 1)
    for step in (
        lambda: pool.commit(4),
        lambda: pool.shrink(1),
        pool.release,
        pool.recommit,
        pool.defragment,
    ):
        assert step() == 0, error()
        assert current_device(driver) == 1
        assert capture_mode(driver) == 0
    assert stub.used_bytes(0) == pool.info().physical_bytes > 0
    assert stub.used_bytes(1) == 0
    assert pool.unreserve() == 0
    assert current_device(driver) == 1


@BOTH
@in_child()
def test_device_that_fails_restores_the_current_one(driver):
    stub, pool = Stub(driver), rig(driver, device=0)
    make_current(driver, 1)
    for n in range(1, 30):
        stub.fail_nth(stub.prefix, n, 2, 0)
        pool.commit(6)
        stub.fail_clear()
        assert current_device(driver) == 1
        assert capture_mode(driver) == 0
    assert pool.unreserve() == 0


@BOTH
@in_child()
def test_two_devices_have_their_own_memory(driver):
    stub = Stub(driver)
    first, second = rig(driver, device=0), rig(driver, device=1)
    assert first.commit(2) == 0
    assert second.commit(6) == 0
    assert stub.used_bytes(0) == first.info().physical_bytes
    assert stub.used_bytes(1) == second.info().physical_bytes == 3 * stub.used_bytes(0)
    assert first.unreserve() == 0
    assert second.unreserve() == 0


@BOTH
@in_child()
def test_device_that_does_not_exist_is_an_error_and_no_more(driver):
    from rig import KINDS

    from allocator.reservation import Reservation

    with pytest.raises(DriverError, match=r"INVALID_DEVICE|InvalidDevice"):
        Reservation.reserve(KINDS[driver], 7, MIB)
    assert rig(driver).unreserve() == 0


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
@in_child()
def test_fork_after_use_is_refused_without_a_driver_call(driver):  # invariant 10
    pool = rig(driver)
    assert pool.commit(3) == 0
    child = os.fork()
    if child == 0:
        try:
            with pytest.raises(DriverError, match="forked"):
                pool.info()
            assert pool.commit(4) != 0
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert pool.commit(5) == 0
    assert pool.unreserve() == 0


@BOTH
@in_child()
def test_fork_before_use_works(driver):  # case 38
    child = os.fork()
    if child == 0:
        try:
            pool = rig(driver)
            assert pool.commit(3) == 0
            assert pool.unreserve() == 0
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


@BOTH
@in_child(leaks=True)
def test_exit_without_any_cleanup_is_clean(driver):  # case 23, invariant 11
    pool = rig(driver)
    assert pool.commit(3) == 0


@BOTH
@in_child()
def test_allocation_passes_through_and_works_while_capturing(driver):
    from allocator.shim import ffi, lib, library_path

    stub = Stub(driver)
    assert lib.ekv_torch_driver(lib.EKV_CUDA if driver == "cuda" else lib.EKV_HIP) == 0
    shim = ctypes.CDLL(library_path())
    shim.ekv_malloc.restype = ctypes.c_void_p
    arguments = (ctypes.c_ssize_t(4096), ctypes.c_int(1), None)
    warm = shim.ekv_malloc(*arguments)  # opens the device
    assert lib.ekv_route_begin(1, 0, 0) == 0
    routed = shim.ekv_malloc(*arguments)
    reservation = lib.ekv_route_end()
    assert reservation
    items = ffi.new("ekv_segment[]", [(0, 4096, 4096)])
    assert lib.ekv_set_segments(reservation, items, 1, 1) == 0
    stub.begin_capture()
    plain = shim.ekv_malloc(*arguments)
    assert plain and routed and warm
    assert lib.ekv_commit([reservation], 1, 1, lib.EKV_COMMIT_ZERO) == 0
    shim.ekv_free(ctypes.c_void_p(plain), *arguments)
    assert stub.end_capture() == 0
    for address in (warm, routed):
        shim.ekv_free(ctypes.c_void_p(address), *arguments)
    lib.ekv_empty_cache()
    assert not any(stub.live().values())


@BOTH
@in_child()
def test_threads_commit_their_own_pools_at_once(driver):
    pools = [rig(driver, layout) for layout in ("layers", "kv-split", "block-major")]
    failures: list[BaseException] = []

    def work(pool):
        try:
            for blocks in (2, 6, 3, 6):
                assert pool.commit(blocks) == 0, error()
                assert pool.shrink(1) == 0, error()
                assert pool.release() == 0, error()
                assert pool.recommit() == 0, error()
        except BaseException as problem:
            failures.append(problem)

    threads = [threading.Thread(target=work, args=(pool,)) for pool in pools]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for pool in pools:
        assert pool.unreserve() == 0
    assert not any(Stub(driver).live().values())


@BOTH
@in_child(env={"EKV_CUDA_LIBRARY": "/nonexistent.so", "EKV_HIP_LIBRARY": "/nonexistent.so"})
def test_missing_library_is_unsupported_and_named(driver):
    from rig import KINDS

    from allocator.reservation import Reservation

    for _ in range(2):
        with pytest.raises(UnsupportedError, match=f"{driver}: .*nonexistent"):
            Reservation.reserve(KINDS[driver], 0, MIB)


@BOTH
@in_child(env={"EKV_CUDA_LIBRARY": "libm.so.6", "EKV_HIP_LIBRARY": "libm.so.6"})
def test_library_without_the_symbols_is_unsupported(driver):
    from rig import KINDS

    from allocator.reservation import Reservation

    with pytest.raises(UnsupportedError, match="has no (cu|hip)"):
        Reservation.reserve(KINDS[driver], 0, MIB)


@BOTH
@in_child()
def test_operations_after_free_are_refused(driver):
    from allocator.shim import check, lib

    pool = rig(driver)
    freed = pool.reservation.id
    assert pool.unreserve() == 0
    with pytest.raises(PoolValueError, match="was freed"):
        check(lib.ekv_commit([freed], 1, 1, 0))


@BOTH
@in_child()
def test_retired_memory_is_given_back_and_its_addresses_are_adopted(driver):
    from allocator.reservation import Reservation
    from allocator.shim import ffi, lib

    stub, pool = Stub(driver), rig(driver)
    assert pool.commit(6) == 0
    pool.write(range(6))
    base, old = pool.base, pool.reservation.id
    assert lib.ekv_retire(old, 0) == 0
    assert stub.used_bytes(0) == 0
    assert lib.ekv_retire(old, 0) == lib.EKV_FREED
    out = ffi.new("uint64_t *")
    assert lib.ekv_adopt(base + GRANULE, 0, out) == lib.EKV_INVALID
    assert lib.ekv_adopt(base, 0, out) == 0
    pool.reservation = Reservation(out[0])
    assert lib.ekv_adopt(base, 0, out) == lib.EKV_INVALID
    pool.bind()
    pool.forget(0)
    assert pool.commit(6) == 0
    pool.expect_zero(range(6))
    pool.check(6, stub)
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
