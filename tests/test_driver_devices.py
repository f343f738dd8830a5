"""Drivers, on the CUDA and the HIP stub: devices, captures, threads, forks and ends."""

from __future__ import annotations

import ctypes
import os
import threading

import pytest
from driver_rig import BOTH, capture_mode, current_device, error, make_current, rig
from stub_lab import Stub, in_child

from allocator.errors import DriverError


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
    """Any call fails, those around the driver's work too: entering, and each step of going back."""
    stub, pool = Stub(driver), rig(driver, device=0)
    make_current(driver, 1)
    for which, last in ((stub.prefix, 30), (None, 120)):
        for n in range(1, last):
            stub.fail_nth(which, n, 2, 0)
            pool.commit(1 + n % 5)
            pool.shrink(0)
            stub.fail_clear()
            assert current_device(driver) == 1, (which, n)
            assert capture_mode(driver) == 0, (which, n)
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
def test_fork_after_a_second_device_did_not_open_is_refused(driver):  # invariant 10
    from rig import Rig

    pool = rig(driver)
    assert Rig(driver, "layers", device=7).reserve() != 0
    assert "device 7" in error()
    child = os.fork()
    if child == 0:
        try:
            with pytest.raises(DriverError, match="forked"):
                pool.info()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
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
@in_child()
def test_fork_while_threads_work_ends_in_an_error_at_once(driver):
    import signal

    pools = [rig(driver, layout) for layout in ("layers", "kv-split")]
    stop = threading.Event()

    def work(pool):
        while not stop.is_set():
            assert pool.commit(5) == 0
            assert pool.shrink(1) == 0

    threads = [threading.Thread(target=work, args=(pool,)) for pool in pools]
    for thread in threads:
        thread.start()
    for _ in range(40):
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # a child that waits for the parent's lock would wait for ever
            os._exit(0 if pools[0].commit(6) == 5 else 1)
        assert os.waitpid(child, 0)[1] == 0
    stop.set()
    for thread in threads:
        thread.join()
    for pool in pools:
        assert pool.unreserve() == 0
