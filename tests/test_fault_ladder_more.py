"""More ladders: reserving, several reservations at once, probing, retiring, PyTorch's two calls."""

from __future__ import annotations

import ctypes

import pytest
from ladder import OPTIONS, OUT_OF_MEMORY, UNKNOWN, WAYS, climb, error, once, opened
from stub_lab import in_child

BOTH = pytest.mark.parametrize("driver", ["cuda", "hip"])


@pytest.mark.parametrize("code", [UNKNOWN, OUT_OF_MEMORY])
@pytest.mark.parametrize("shareable", [False, True])
@BOTH
@in_child(options=OPTIONS)
def test_reserve_fails_at_any_call_and_leaves_nothing(driver, shareable, code):
    from rig import KINDS

    from allocator.shim import ffi, lib

    stub = opened(driver)
    stub.option("fabric_code", 0)

    def reserve(out):
        return lib.ekv_reserve(KINDS[driver], 0, 1 << 20, 0, shareable, out)

    def nothing_left(_out):
        assert not any(stub.live().values()) or way is not once, stub.live()

    def free(out):
        assert lib.ekv_unreserve(out[0]) == 0

    for way in WAYS:
        assert climb(stub, lambda: ffi.new("uint64_t *"), reserve, nothing_left, free, code, way) > 2, way


class Pair:
    """Two reservations that are committed together."""

    def __init__(self, driver: str) -> None:
        from rig import Rig

        self.rigs = [Rig(driver, "layers"), Rig(driver, "holes", max_chunk_granules=1)]
        assert all(rig.reserve() == 0 for rig in self.rigs)
        self.ids = [rig.reservation.id for rig in self.rigs]

    def commit(self, blocks: int) -> int:
        from allocator.shim import lib

        return lib.ekv_commit(self.ids, 2, blocks, lib.EKV_COMMIT_ZERO)

    def check(self, stub, committed: int) -> None:
        for rig in self.rigs:
            rig.check(committed)
        held = sum(rig.info().physical_bytes for rig in self.rigs)
        assert held == stub.used_bytes(0)
        assert sum(rig.info().num_chunks for rig in self.rigs) == stub.live_mappings()

    def free(self, *_) -> None:
        assert all(rig.unreserve() == 0 for rig in self.rigs)


@pytest.mark.parametrize("code", [UNKNOWN, OUT_OF_MEMORY])
@BOTH
@in_child(options=OPTIONS)
def test_commit_of_two_reservations_is_all_or_nothing(driver, code):
    stub = opened(driver)

    def prepare():
        pair = Pair(driver)
        assert pair.commit(2) == 0
        for rig in pair.rigs:
            rig.write(range(2))
        return pair

    def succeeded(pair):
        for rig in pair.rigs:
            rig.expect_zero(range(2, 5))
        pair.check(stub, 5)
        pair.free()

    climb(stub, prepare, lambda pair: pair.commit(5), lambda pair: pair.check(stub, 2), succeeded, code)


@pytest.mark.parametrize("name", ["shrink", "release", "recommit"])
@BOTH
@in_child(options=OPTIONS)
def test_two_reservations_shrink_release_and_recommit_all_or_nothing(driver, name):
    from allocator.shim import lib

    stub = opened(driver)
    before, after = {"shrink": (5, 2), "release": (5, 0), "recommit": (0, 5)}[name]
    operations = {
        "shrink": lambda pair: lib.ekv_shrink(pair.ids, 2, 2),
        "release": lambda pair: lib.ekv_release_physical(pair.ids, 2),
        "recommit": lambda pair: lib.ekv_recommit(pair.ids, 2),
    }

    def prepare():
        pair = Pair(driver)
        assert pair.commit(5) == 0
        for rig in pair.rigs:
            rig.write(range(5))
        if name == "recommit":
            assert operations["release"](pair) == 0
            for rig in pair.rigs:
                rig.expect_zero(range(5))
        return pair

    def failed(pair):
        pair.check(stub, before)
        for rig in pair.rigs:
            assert rig.info().num_chunks or not before

    def succeeded(pair):
        for rig in pair.rigs:
            rig.check(after)
        pair.free()

    climb(stub, prepare, operations[name], failed, succeeded)


@BOTH
@in_child(options=OPTIONS)
def test_probe_fails_at_any_call_and_leaves_nothing(driver):
    from rig import KINDS

    from allocator.shim import ffi, lib

    stub = opened(driver)
    stub.option("fabric_code", 0)
    info, reason = ffi.new("ekv_probe_info *"), ffi.new("char[]", 1024)
    run = lambda _: lib.ekv_probe(KINDS[driver], 0, info, reason, 1024)  # noqa: E731
    for way in WAYS:
        assert climb(stub, lambda: None, run, lambda _: None, lambda _: None, way=way) > 8, way


@BOTH
@in_child(options=OPTIONS)
def test_retire_fails_at_any_call_and_is_finished_later(driver):
    from rig import Rig

    from allocator.shim import ffi, lib

    stub, adopted = opened(driver), ffi.new("uint64_t *")

    def prepare():
        rig = Rig(driver, "layers")
        assert rig.reserve() == 0
        assert rig.commit(4) == 0
        return rig

    n, fired = 0, True
    while fired:
        n += 1
        rig = prepare()
        stub.fail_nth(None, n, UNKNOWN, 0)
        lib.ekv_retire(rig.reservation.id, 0)
        fired = stub.injected()
        stub.fail_clear()
        other = prepare()
        assert other.unreserve() == 0
        assert stub.used_bytes(0) == 0, (n, error())
        assert lib.ekv_adopt(rig.base, 0, adopted) == 0
        assert lib.ekv_unreserve(adopted[0]) == 0
        assert not any(stub.live().values())
        assert not stub.num_violations(), stub.text()
    assert n > 8


@pytest.mark.parametrize("persistent", [0, 1])
@BOTH
@in_child(options=OPTIONS)
def test_drop_fails_at_any_call_and_is_finished_later(driver, persistent):
    from rig import Rig

    from allocator.shim import lib

    stub, n, fired = opened(driver), 0, True
    while fired:
        n += 1
        rig = Rig(driver, "holes", max_chunk_granules=2)
        assert rig.reserve() == 0
        assert rig.commit(4) == 0
        stub.fail_nth(stub.prefix if persistent else None, n, UNKNOWN, persistent)
        lib.ekv_drop(rig.reservation.id)
        fired = stub.injected()
        stub.fail_clear()
        assert lib.ekv_unreserve(rig.reservation.id) == lib.EKV_FREED
        opened(driver)
        assert not any(stub.live().values()), (n, stub.live())
        assert not stub.num_violations(), stub.text()
    assert n > 8


@BOTH
@in_child(options=OPTIONS)
def test_pytorch_calls_fail_at_any_call_without_leaving_reservations(driver):
    from allocator.shim import lib, library_path

    stub = opened(driver)
    assert lib.ekv_torch_driver(lib.EKV_CUDA if driver == "cuda" else lib.EKV_HIP) == 0
    shim = ctypes.CDLL(library_path())
    shim.ekv_malloc.restype = ctypes.c_void_p
    arguments = (ctypes.c_ssize_t(1 << 20), ctypes.c_int(0), None)
    n, fired = 0, True
    while fired:  # the allocation
        n += 1
        stub.fail_nth(None, n, UNKNOWN, 1)
        assert lib.ekv_route_begin(0, 0, 0) == 0
        memory = shim.ekv_malloc(*arguments)
        reservation = lib.ekv_route_end()
        fired = stub.injected()
        stub.fail_clear()
        assert bool(memory) == bool(reservation)
        if memory:
            shim.ekv_free(ctypes.c_void_p(memory), *arguments)
        assert not any(stub.live().values())
        stub.driver.cuCtxPopCurrent_v2(None) if driver == "cuda" and stub.thread_pushes() else None
    fired, n = True, 0
    while fired:  # the free, which cannot report: it is finished at a later operation
        n += 1
        assert lib.ekv_route_begin(0, 0, 0) == 0
        memory = shim.ekv_malloc(*arguments)
        reservation = lib.ekv_route_end()
        stub.fail_nth(None, n, UNKNOWN, 0)
        shim.ekv_free(ctypes.c_void_p(memory), *arguments)
        fired = stub.injected()
        stub.fail_clear()
        opened(driver)
        assert not any(stub.live().values()), (n, stub.live())
    assert not stub.num_violations(), stub.text()
