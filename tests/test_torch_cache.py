"""The cache behind `ekv_malloc`, on the stub drivers: `change_current_allocator` mode without a GPU."""

import ctypes
import random
import threading

import pytest
from stub_lab import Stub, in_child

BOTH = pytest.mark.parametrize("driver", ["cuda", "hip"])
MIB = 1 << 20
ALLOCATE = {"cuda": "cuMemAlloc_v2", "hip": "hipMalloc"}
FREE = {"cuda": "cuMemFree_v2", "hip": "hipFree"}
WAIT = {"cuda": "cuStreamSynchronize", "hip": "hipStreamSynchronize"}


class Torch:
    """`ekv_malloc` and `ekv_free` as PyTorch calls them; streams are any number but 0."""

    def __init__(self, driver):
        from allocator.shim import lib, library_path

        assert lib.ekv_torch_driver(lib.EKV_CUDA if driver == "cuda" else lib.EKV_HIP) == 0
        self.lib, self.stub, self.driver = lib, Stub(driver), driver
        self.shim = ctypes.CDLL(library_path())
        self.shim.ekv_malloc.restype = ctypes.c_void_p
        self.streams = []

    def stream(self):
        out = ctypes.c_uint64()
        create = {"cuda": "cuStreamCreate", "hip": "hipStreamCreateWithFlags"}[self.driver]
        if self.driver == "cuda":
            self.in_context(lambda: getattr(self.stub.driver, create)(ctypes.byref(out), 1))
        else:
            assert getattr(self.stub.driver, create)(ctypes.byref(out), 1) == 0
        return out.value

    def in_context(self, call):
        context = ctypes.c_void_p()
        driver = self.stub.driver
        assert driver.cuInit(0) == 0
        assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        assert driver.cuCtxPushCurrent_v2(context) == 0
        assert call() == 0
        assert driver.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0
        assert driver.cuDevicePrimaryCtxRelease_v2(0) == 0

    def malloc(self, size, stream=0):
        return self.shim.ekv_malloc(ctypes.c_ssize_t(size), ctypes.c_int(0), ctypes.c_void_p(stream))

    def free(self, address, size, stream=0):
        arguments = ctypes.c_ssize_t(size), ctypes.c_int(0), ctypes.c_void_p(stream)
        self.shim.ekv_free(ctypes.c_void_p(address), *arguments)

    def calls(self, names):
        return self.stub.calls(names[self.driver])


@BOTH
@in_child()
def test_freed_memory_is_used_again_without_driver_calls(driver):
    torch = Torch(driver)
    sizes = [1, 500, 513, 70_000, MIB, MIB + 1, 3 * MIB, 33 * MIB]
    for _ in range(200):
        addresses = [torch.malloc(size) for size in sizes]
        assert all(addresses) and len(set(addresses)) == len(sizes)
        for address, size in zip(addresses, sizes, strict=True):
            torch.free(address, size)
    assert torch.calls(ALLOCATE) == len(sizes)
    assert torch.calls(FREE) == 0
    assert sum(sizes) <= torch.lib.ekv_cached_bytes() <= 1.13 * sum(sizes) + 1024 * len(sizes)
    torch.lib.ekv_empty_cache()
    assert torch.calls(FREE) == len(sizes)
    assert torch.lib.ekv_cached_bytes() == 0


@BOTH
@in_child()
def test_memory_of_one_stream_is_not_used_on_another(driver):
    torch = Torch(driver)
    first, second = torch.stream(), torch.stream()
    address = torch.malloc(MIB, first)
    torch.free(address, MIB, first)
    other = torch.malloc(MIB, second)
    assert other != address
    assert torch.malloc(MIB, first) == address
    torch.free(address, MIB, first)
    torch.free(other, MIB, second)
    torch.lib.ekv_empty_cache()


@BOTH
@in_child(leaks=True)
def test_memory_freed_during_capture_stays_in_that_capture(driver):
    torch = Torch(driver)
    stream = torch.stream()
    before = torch.malloc(MIB, stream)
    torch.stub.begin_capture()
    inside = torch.malloc(MIB, stream)
    assert inside != before
    torch.free(inside, MIB, stream)
    assert torch.malloc(MIB, stream) == inside  # inside the same capture
    torch.free(inside, MIB, stream)
    torch.free(before, MIB, stream)  # the graph may touch it at every replay
    assert torch.stub.end_capture() == 0, torch.stub.text()
    after = torch.malloc(MIB, stream)
    assert after not in (inside, before)
    torch.stub.begin_capture()
    second = torch.malloc(MIB, stream)
    assert second not in (inside, before, after)
    kept = torch.malloc(MIB, stream)
    assert torch.stub.end_capture() == 0
    torch.free(kept, MIB, stream)  # freed after its capture: the graph still touches it
    torch.free(after, MIB, stream)
    assert torch.malloc(MIB, stream) == after
    torch.lib.ekv_empty_cache()
    assert torch.calls(FREE) == 0
    torch.free(after, MIB, stream)
    torch.lib.ekv_empty_cache()
    assert torch.calls(FREE) == 1
    assert torch.lib.ekv_cached_bytes() == 3 * MIB


@BOTH
@in_child()
def test_short_of_memory_the_cache_is_given_back_and_the_call_succeeds(driver):
    torch = Torch(driver)
    torch.stub.set_total_memory(0, 64 * MIB)
    addresses = [torch.malloc(8 * MIB) for _ in range(6)]
    assert all(addresses)
    for address in addresses:
        torch.free(address, 8 * MIB)
    large = torch.malloc(48 * MIB)
    assert large
    assert torch.malloc(48 * MIB) is None
    status = torch.lib.ekv_last_error(torch_text := torch_buffer(), 1024)
    assert status == torch.lib.EKV_OUT_OF_MEMORY
    assert "device 0, 50331648 bytes" in text_of(torch_text)
    torch.free(large, 48 * MIB)
    torch.lib.ekv_empty_cache()


@BOTH
@in_child()
def test_pool_tensor_dropped_during_capture_does_not_spoil_it(driver):
    torch = Torch(driver)
    stream = torch.stream()
    from allocator.shim import ffi

    for retire_first in (True, False):
        assert torch.lib.ekv_route_begin(0, 0, 0) == 0
        address = torch.malloc(MIB, stream)
        reservation = torch.lib.ekv_route_end()
        segments = ffi.new("ekv_segment[]", [(0, MIB, MIB)])
        assert torch.lib.ekv_set_segments(reservation, segments, 1, 1) == 0
        assert torch.lib.ekv_commit([reservation], 1, 1, torch.lib.EKV_COMMIT_ZERO) == 0
        torch.stub.begin_capture()
        if retire_first:  # what the routing does when the storage dies
            assert torch.lib.ekv_retire(reservation, 1) == 0
        torch.free(address, MIB, stream)
        assert torch.stub.end_capture() == 0, torch.stub.text()
        assert torch.stub.live_handles() == 1
        torch.lib.ekv_collect()
        assert torch.stub.live_handles() == 0
        assert torch.stub.live_reservations() == 0


@BOTH
@in_child()
def test_owner_that_cannot_try_again_is_finished_later(driver):
    torch = Torch(driver)
    from allocator.reservation import Reservation

    kind = torch.lib.EKV_CUDA if driver == "cuda" else torch.lib.EKV_HIP
    reservation = Reservation.reserve(kind, 0, MIB)
    reservation.set_segments([(0, MIB, MIB)], 1)
    assert torch.lib.ekv_commit([reservation.id], 1, 1, 0) == 0
    torch.stub.fail_nth({"cuda": "cuMemUnmap", "hip": "hipMemUnmap"}[driver], 1, 999, 0)
    torch.lib.ekv_drop(reservation.id)
    assert torch.stub.live_handles() == 1
    torch.lib.ekv_collect()
    assert not any(torch.stub.live().values())


@BOTH
@in_child()
def test_memory_that_another_stream_used_waits_for_it(driver):
    torch = Torch(driver)
    own, other = torch.stream(), torch.stream()
    address = torch.malloc(MIB, own)
    for stream in (other, other, own):
        torch.lib.ekv_record_stream(pointer(address), pointer(stream))
    waits = torch.calls(WAIT)
    torch.free(address, MIB, own)
    assert torch.calls(WAIT) == waits + 1
    assert torch.malloc(MIB, own) == address
    torch.free(address, MIB, own)
    assert torch.calls(WAIT) == waits + 1
    torch.lib.ekv_empty_cache()


@BOTH
@in_child()
def test_memory_that_many_streams_used_waits_for_the_whole_device(driver):
    torch = Torch(driver)
    own, others = torch.stream(), [torch.stream() for _ in range(9)]
    address = torch.malloc(MIB, own)
    for stream in others:
        torch.lib.ekv_record_stream(pointer(address), pointer(stream))
    synchronize = {"cuda": "cuCtxSynchronize", "hip": "hipDeviceSynchronize"}
    before = torch.calls(synchronize)
    torch.free(address, MIB, own)
    assert torch.calls(synchronize) == before + 1
    assert torch.malloc(MIB, own) == address
    torch.free(address, MIB, own)
    torch.lib.ekv_empty_cache()


@BOTH
@in_child(leaks=True)
def test_memory_that_another_stream_used_and_a_capture_frees_is_not_used_again(driver):
    torch = Torch(driver)
    own, other = torch.stream(), torch.stream()
    address = torch.malloc(MIB, own)
    torch.lib.ekv_record_stream(pointer(address), pointer(other))
    torch.stub.begin_capture()
    waits = torch.calls(WAIT)
    torch.free(address, MIB, own)
    assert torch.calls(WAIT) == waits  # waiting would spoil the capture
    assert torch.malloc(MIB, own) != address  # and nobody has waited
    assert torch.stub.end_capture() == 0, torch.stub.text()
    assert torch.malloc(MIB, own) != address


@BOTH
@in_child(leaks=True)
def test_memory_whose_streams_cannot_be_waited_for_is_not_used_again(driver):
    torch = Torch(driver)
    own, other = torch.stream(), torch.stream()
    address = torch.malloc(MIB, own)
    torch.lib.ekv_record_stream(pointer(address), pointer(other))
    torch.stub.fail_nth(WAIT[driver], 1, 999, 0)
    torch.free(address, MIB, own)
    assert torch.stub.injected()
    torch.stub.fail_clear()
    assert torch.malloc(MIB, own) != address


@BOTH
@in_child()
def test_route_takes_an_allocation_of_its_device_only(driver):
    torch = Torch(driver)
    arguments = ctypes.c_ssize_t(MIB), ctypes.c_int(0), None
    assert torch.lib.ekv_route_begin(1, 0, 0) == 0
    address = torch.shim.ekv_malloc(*arguments)
    assert torch.lib.ekv_route_end() == 0
    assert torch.lib.ekv_num_reservations() == 0
    torch.free(address, MIB)
    torch.lib.ekv_empty_cache()


@BOTH
@in_child()
def test_threads_never_get_the_same_memory(driver):
    torch = Torch(driver)
    held, lock, failures = set(), threading.Lock(), []

    def work(seed):
        draw = random.Random(seed)
        mine = []
        for _ in range(400):
            if mine and draw.random() < 0.5:
                address, size = mine.pop(draw.randrange(len(mine)))
                with lock:
                    held.discard(address)
                torch.free(address, size)
            else:
                size = draw.choice([100, 5000, 200_000, 2 * MIB])
                address = torch.malloc(size)
                with lock:
                    if address in held:
                        failures.append(address)
                    held.add(address)
                mine.append((address, size))
        for address, size in mine:
            with lock:
                held.discard(address)
            torch.free(address, size)

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not failures
    torch.lib.ekv_empty_cache()


def torch_buffer():
    from allocator.shim import ffi

    return ffi.new("char[]", 1024)


def text_of(buffer):
    from allocator.shim import ffi

    return ffi.string(buffer).decode()


def pointer(address):
    from allocator.shim import ffi

    return ffi.cast("void *", address)
