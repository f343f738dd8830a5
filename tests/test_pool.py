"""PoolController and ExtensibleTensor on every device. Numbers are the design's reservation invariants."""

import gc
import signal
import sys
import threading
import time

import numpy
import pytest
import torch
from pools import MIB, ON_EVERY_DEVICE, assert_filled, fill, make_pool, num_reservations, run_python

from allocator import (
    DriverError,
    ExtensibleTensor,
    PoolOutOfMemoryError,
    PoolValueError,
    UnsupportedError,
    extensible_kv_pool,
    memory_info,
    probe,
    torch_routing,
)
from allocator.shim import check, ids_argument, lib


@ON_EVERY_DEVICE
def test_commit_new_blocks_read_as_zero_and_old_ones_keep_their_content(device):  # 3, 5
    pool, view = make_pool(device)
    address = view.data_ptr()
    for before, after in [(0, 1), (1, 2), (2, 3), (3, 40), (40, 64)]:
        pool.commit(after)
        assert not view[:, before:after].any()
        assert_filled(view, 0, before)
        fill(view, before, after)
    assert pool.committed_blocks == pool.capacity_blocks == 64
    assert view.data_ptr() == address
    assert_filled(view, 0, 64)


@ON_EVERY_DEVICE
def test_commit_physical_bytes_are_what_bytes_for_says(device):  # 6, 7
    for n in (1, 2, 21, 22, 63, 64):
        pool, _view = make_pool(device)
        pool.commit(n)
        assert pool.physical_bytes == pool.bytes_for(n)
        assert pool.max_blocks_within(pool.bytes_for(n)) >= n
        assert pool.max_blocks_within(pool.bytes_for(n) - 1) < n
    assert [pool.bytes_for(n) for n in range(65)] == sorted(pool.bytes_for(n) for n in range(65))


@ON_EVERY_DEVICE
def test_commit_fewer_blocks_than_committed_changes_nothing(device):
    pool, view = make_pool(device)
    pool.commit(30)
    fill(view, 0, 30)
    before = pool.snapshot()
    pool.commit(7)
    assert {**pool.snapshot(), "last_commit_seconds": 0} == {**before, "last_commit_seconds": 0}
    assert_filled(view, 0, 30)


@ON_EVERY_DEVICE
def test_commit_after_shrink_does_not_show_old_content(device):  # 5
    pool, view = make_pool(device, max_chunk_bytes=2 * MIB)
    pool.commit(64)
    fill(view, 0, 64)
    full = pool.physical_bytes
    pool.shrink(5)
    assert pool.committed_blocks == 5
    assert pool.physical_bytes < full
    assert_filled(view, 0, 5)
    pool.commit(64)
    assert_filled(view, 0, 5)
    assert not view[:, 5:].any()


@ON_EVERY_DEVICE
def test_shrink_to_more_blocks_than_committed_changes_nothing(device):
    pool, view = make_pool(device)
    pool.commit(10)
    fill(view, 0, 10)
    pool.shrink(11)
    pool.shrink(10)
    assert pool.committed_blocks == 10
    assert_filled(view, 0, 10)


@ON_EVERY_DEVICE
def test_release_and_recommit_same_size_zeroed_same_address(device):  # 3; case 30
    pool, view = make_pool(device, num_layers=2, num_blocks=512, block_bytes=64 * 1024)  # 64 MiB
    address = view.data_ptr()
    pool.commit(512)
    pool.release_physical()
    baseline, _ = memory_info(device)
    for _ in range(100):
        pool.recommit()
        assert pool.committed_blocks == 512
        pool.release_physical()
        pool.release_physical()
        assert (pool.physical_bytes, pool.committed_blocks) == (0, 0)
    if device == "cuda":  # on the host the machine's other processes move the figure
        assert abs(memory_info(device)[0] - baseline) <= 8 * MIB
    pool.recommit()
    assert view.data_ptr() == address
    assert not view.any()
    fill(view, 0, 512)
    assert_filled(view, 0, 512)


@ON_EVERY_DEVICE
def test_commit_while_released_is_refused(device):
    pool, _view = make_pool(device)
    pool.commit(3)
    pool.release_physical()
    with pytest.raises(PoolValueError, match="commit of 9 blocks while the physical memory is released"):
        pool.commit(9)
    pool.recommit()
    assert pool.committed_blocks == 3


@ON_EVERY_DEVICE
def test_defragment_leaves_one_chunk_per_segment_of_zeros(device):
    pool, view = make_pool(device)
    for n in (1, 22, 44):
        pool.commit(n)
    fill(view, 0, 44)
    assert len(pool.snapshot()["chunks"]) > pool.num_segments
    pool.commit(50, defragment=True)
    assert len(pool.snapshot()["chunks"]) == pool.num_segments
    assert pool.physical_bytes == pool.bytes_for(50)
    assert not view[:, :50].any()
    pool.commit(50, defragment=True)  # the same size again
    assert len(pool.snapshot()["chunks"]) == pool.num_segments


@ON_EVERY_DEVICE
def test_defragment_to_fewer_blocks_keeps_the_committed_size(device):
    pool, _view = make_pool(device)
    for n in (1, 22, 44):
        pool.commit(n)
    pool.commit(4, defragment=True)
    assert pool.committed_blocks == 44
    assert len(pool.snapshot()["chunks"]) == pool.num_segments


@pytest.mark.parametrize("count", [1 << 63, 1 << 64, -1])
def test_counts_that_no_pool_can_have_are_named(count):
    pool, _view = make_pool("cpu")
    for use in (pool.commit, pool.shrink):
        with pytest.raises(PoolValueError, match=str(count)):
            use(count)
    with pytest.raises(PoolValueError, match=str(count)):
        ExtensibleTensor(count, "cpu")
    with pytest.raises(PoolValueError, match=str(count)), extensible_kv_pool("cpu", max_chunk_bytes=count):
        pass


def test_device_cpu_0_is_the_cpu():
    with extensible_kv_pool("cpu:0") as pool:
        cache = torch.zeros(4, MIB, dtype=torch.int8)
    pool.bind(cache)
    pool.commit(4)
    assert not cache.any()


@ON_EVERY_DEVICE
def test_commit_max_chunk_bytes_bounds_every_chunk(device):
    pool, _view = make_pool(device, num_layers=2, num_blocks=256, max_chunk_bytes=3 * MIB)
    pool.commit(256)
    sizes = {chunk["size"] for chunk in pool.snapshot()["chunks"]}
    assert max(sizes) <= 4 * MIB  # rounded up to the granularity
    assert pool.physical_bytes == pool.bytes_for(256)


@ON_EVERY_DEVICE
def test_commit_packed_rows_of_all_layers_is_one_segment(device):
    with extensible_kv_pool(device) as pool:
        flat = torch.zeros(100 * 8 * 64 * 1024, dtype=torch.int8, device=device)
    rows = flat.view(100, 8, 64 * 1024)
    for layer in range(8):
        pool.bind(rows[:, layer])
    assert (pool.num_segments, pool.capacity_blocks) == (1, 100)
    pool.commit(10)
    rows[:10] = 1
    pool.commit(100)
    assert int(rows.sum(dtype=torch.int64)) == 10 * 8 * 64 * 1024


@ON_EVERY_DEVICE
def test_several_tensors_commit_together(device):
    with extensible_kv_pool(device) as pool:
        caches = [torch.zeros(2, 40, 32 * 1024, dtype=torch.int16, device=device) for _ in range(3)]
    for cache in caches:
        pool.bind(cache, 1)
    assert (pool.num_segments, pool.capacity_blocks) == (6, 40)
    pool.commit(17)
    for cache in caches:
        assert not cache[:, :17].any()
        cache[:, :17] = 3
    pool.commit(40)
    assert all(int(cache.sum()) == 2 * 17 * 32 * 1024 * 3 for cache in caches)


def test_commit_out_of_memory_names_bytes_and_changes_nothing(host_budget):  # 4, 8; case 28
    pool, view = make_pool("cpu", num_layers=4, num_blocks=400, max_chunk_bytes=2 * MIB)
    pool.commit(40)
    fill(view, 0, 40)
    before = pool.snapshot()
    host_budget(20 * MIB)
    free, total = memory_info("cpu")
    with pytest.raises(
        PoolOutOfMemoryError,
        match=r"commit of 400 blocks, \d+ bytes of which \d+ are held, on cpu, "
        rf"with {free} of {total} bytes free: host: create failed: ENOMEM \(12\), device 0, 2097152 bytes",
    ):
        pool.commit(400)
    assert pool.snapshot() == before
    assert_filled(view, 0, 40)
    with pytest.raises(MemoryError):
        pool.commit(400)
    with pytest.raises(torch.OutOfMemoryError):
        pool.commit(400)
    host_budget(None)
    pool.commit(400)
    assert_filled(view, 0, 40)
    assert not view[:, 40:].any()


@pytest.mark.parametrize(("allowed", "times"), [({}, 1), ({"may_empty_cache": False}, 0)])
@pytest.mark.parametrize("defragment", [False, True])
def test_commit_short_of_memory_empties_the_cache_of_pytorch_where_it_may(
    host_budget, monkeypatch, allowed, times, defragment
):
    pool, _ = make_pool("cpu")
    host_budget(MIB)
    emptied = []
    monkeypatch.setattr(torch_routing, "empty_cache", emptied.append)
    with pytest.raises(PoolOutOfMemoryError, match="commit of 64 blocks, .* bytes free"):
        pool.commit(64, defragment, **allowed)
    assert emptied == [torch.device("cpu")] * times


def test_recommit_out_of_memory_stays_released_and_works_later(host_budget):  # case 31
    pool, view = make_pool("cpu")
    pool.commit(64)
    size = pool.physical_bytes
    pool.release_physical()
    host_budget(size - 1)
    with pytest.raises(PoolOutOfMemoryError):
        pool.recommit()
    assert (pool.physical_bytes, pool.committed_blocks) == (0, 0)
    host_budget(size)
    pool.recommit()
    assert pool.committed_blocks == 64
    assert not view.any()


def test_defragment_out_of_memory_keeps_the_content(host_budget):  # 4
    pool, view = make_pool("cpu")
    pool.commit(20)
    pool.commit(40)
    fill(view, 0, 40)
    before = pool.snapshot()
    host_budget(MIB)
    with pytest.raises(PoolOutOfMemoryError):
        pool.commit(64, defragment=True)
    assert pool.snapshot() == before
    assert_filled(view, 0, 40)


@ON_EVERY_DEVICE
def test_bad_input_names_the_numbers(device):
    with extensible_kv_pool(device) as pool:
        cache = torch.zeros(10, MIB, dtype=torch.int8, device=device)
    with pytest.raises(PoolValueError, match="commit of 1 blocks before bind"):
        pool.commit(1)
    other = torch.zeros(10, MIB, dtype=torch.int8, device=device)
    with pytest.raises(PoolValueError, match=f"0x{other.data_ptr():x} lies outside"):
        pool.bind(other)
    with pytest.raises(PoolValueError, match="on meta cannot be bound to a pool on"):
        pool.bind(torch.empty(10, 10, device="meta"))
    with pytest.raises(PoolValueError, match="2"):
        pool.bind(cache, 2)
    pool.bind(cache)
    with pytest.raises(PoolValueError, match=r"5 blocks.*10"):
        pool.bind(cache[:5])
    with pytest.raises(PoolValueError, match="commit of 11 blocks exceeds the capacity of 10 blocks"):
        pool.commit(11)
    with pytest.raises(PoolValueError, match="-1"):
        pool.commit(-1)
    with pytest.raises(ValueError, match="-2"):
        pool.shrink(-2)
    assert (pool.committed_blocks, pool.physical_bytes) == (0, 0)
    pool.commit(2)
    with pytest.raises(PoolValueError, match="after 2 blocks were committed"):
        pool.bind(cache)
    pool.free()
    pool.free()
    assert memory_info(device)[0] > 0
    for use in (lambda: pool.commit(1), lambda: pool.bind(cache), pool.recommit, lambda: pool.bytes_for(1)):
        with pytest.raises(PoolValueError, match="freed"):
            use()


def test_views_that_disagree_across_tensors_are_refused():
    with extensible_kv_pool("cpu") as pool:
        a = torch.zeros(10, MIB, dtype=torch.int8)
        b = torch.zeros(11, MIB, dtype=torch.int8)
    pool.bind(a)
    with pytest.raises(PoolValueError, match=r"11 blocks.*10 blocks"):
        pool.bind(b)
    pool.bind(b[:10])
    pool.commit(10)


@ON_EVERY_DEVICE
def test_lifetime_pool_first_or_tensor_first_freed_exactly_once(device):  # case 24
    gc.collect()
    before = num_reservations(device)
    free = memory_info(device)[0]
    pool, view = make_pool(device, num_blocks=1024)
    pool.commit(1024)
    assert num_reservations(device) == before + 1
    del pool
    fill(view, 0, 1)
    assert_filled(view, 0, 1)
    del view
    assert num_reservations(device) == before
    pool, view = make_pool(device, num_blocks=1024)
    pool.commit(1024)
    del view
    assert num_reservations(device) == before
    with pytest.raises(PoolValueError, match="freed"):
        pool.commit(2)
    pool.free()
    if device == "cuda":
        assert memory_info(device)[0] >= free - 8 * MIB


@ON_EVERY_DEVICE
def test_lifetime_any_view_keeps_the_memory(device):
    before = num_reservations(device)
    pool, view = make_pool(device)
    pool.commit(64)
    fill(view, 0, 64)
    layer = view[2]
    expected = layer.clone()
    del view
    gc.collect()
    assert num_reservations(device) == before + 1
    assert torch.equal(layer, expected)
    del layer
    assert num_reservations(device) == before


def test_touching_the_first_block_past_the_prefix_faults():  # 2
    code = """
import torch
from allocator import extensible_kv_pool
with extensible_kv_pool("cpu") as pool:
    cache = torch.zeros(8, 2 << 20, dtype=torch.int8)
pool.bind(cache)
pool.commit(3)
cache[:3] = 1
print("committed blocks work", flush=True)
cache[3, 0] = 1
print("not reached")
"""
    process = run_python(code, EKV_HOST_GRANULARITY=2 << 20)
    assert process.stdout == "committed blocks work\n"
    assert process.returncode == -signal.SIGSEGV


def test_fork_after_import_works_and_after_use_is_refused():  # 10; case 38
    code = """
import os, sys, torch, allocator
from allocator import extensible_kv_pool
def child(body):
    pid = os.fork()
    if pid == 0:
        try:
            body()
        except BaseException as error:
            print(type(error).__name__, str(error)[:40], file=sys.stderr, flush=True)
            os._exit(3)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
def use():
    global cache, pool
    with extensible_kv_pool("cpu") as pool:
        cache = torch.zeros(4, 2 << 20, dtype=torch.int8)
    pool.bind(cache); pool.commit(2); cache[:2] = 5
assert child(use) == 0          # only imported before the fork
use()
assert child(use) == 3          # a driver was used before the fork
assert child(lambda: pool.commit(3)) == 3
assert child(lambda: int(cache[0, 0])) < 0   # the parent's memory is not there
pool.commit(4)
assert int(cache.sum(dtype=torch.int64)) == 2 * (2 << 20) * 5
"""
    process = run_python(code)
    assert process.returncode == 0, process.stderr
    assert process.stderr.count("DriverError process") == 2


def test_fork_while_another_thread_holds_the_lock_is_refused_and_does_not_wait():
    code = """
import os, signal, sys, threading, torch
from allocator import DriverError, extensible_kv_pool
with extensible_kv_pool("cpu") as pool:
    cache = torch.zeros(4, 2 << 20, dtype=torch.int8)
pool.bind(cache)
held, forked = threading.Event(), threading.Event()
def hold():
    with pool._lock:
        held.set()
        forked.wait()
thread = threading.Thread(target=hold)
thread.start()
held.wait()
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    try:
        pool.commit(1)
    except DriverError:
        os._exit(3)
    os._exit(0)
status = os.waitpid(pid, 0)[1]
forked.set()
thread.join()
pool.commit(1)
sys.exit(os.waitstatus_to_exitcode(status))
"""
    assert run_python(code).returncode == 3


def test_tensors_that_die_while_other_threads_use_the_pool_disturb_nobody():
    failures, interval = [], sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def repeat(call, stop):
        while not stop.is_set():
            try:
                call()
            except BaseException as error:
                failures.append(error)

    for _ in range(25):
        with extensible_kv_pool("cpu") as pool:
            tensors = [torch.zeros(16, MIB // 8, dtype=torch.uint8) for _ in range(40)]
        for tensor in tensors:
            pool.bind(tensor)
        del tensor
        stop = threading.Event()
        calls = [
            lambda pool=pool: pool.commit(8),
            lambda pool=pool: pool.shrink(2),
            lambda pool=pool: pool.physical_bytes,
            lambda pool=pool: pool.committed_blocks,
            pool.snapshot,
            pool.committed_regions,
        ]
        threads = [threading.Thread(target=repeat, args=(call, stop)) for call in calls]
        for thread in threads:
            thread.start()
        while len(tensors) > 1:
            tensors.pop()
            time.sleep(0.0005)
        stop.set()
        for thread in threads:
            thread.join()
        assert len(pool.snapshot()["reservations"]) == 1
    sys.setswitchinterval(interval)
    assert not failures, failures[:3]


@pytest.mark.parametrize("count", [numpy.int64(3), torch.tensor(3)])
def test_counts_of_numpy_and_pytorch_are_counts(count):
    pool, _ = make_pool("cpu")
    pool.commit(count)
    assert pool.committed_blocks == 3


def test_death_of_a_tensor_keeps_the_text_of_a_failed_call():
    with extensible_kv_pool("cpu"):
        tensor = torch.zeros(2 * MIB, dtype=torch.int8)
    before = lib.ekv_num_reservations()
    status = lib.ekv_commit(*ids_argument([1 << 40]), 1, 0)
    del tensor  # as garbage collection does it, between a call and the reading of its record
    with pytest.raises(PoolValueError, match=f"reservation {1 << 40}"):
        check(status)
    assert lib.ekv_num_reservations() == before - 1


def test_threads_commit_shrink_and_read_at_the_same_time():  # 9
    pools = [make_pool("cpu", num_layers=2, num_blocks=64, max_chunk_bytes=2 * MIB) for _ in range(2)]
    failures = []

    def work(pool, view):
        try:
            for _ in range(40):
                pool.commit(64)
                fill(view, 0, 2)
                pool.shrink(3)
                assert_filled(view, 0, 2)
                with extensible_kv_pool("cpu") as other:
                    torch.zeros(4 * MIB, dtype=torch.int8)
                assert other.reserved_bytes in (0, 4 * MIB)
                pool.release_physical()
                pool.recommit()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=p, daemon=True) for p in pools]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "deadlock"
    assert not failures


@ON_EVERY_DEVICE
def test_committed_regions_cover_exactly_the_committed_blocks(device):
    pool, view = make_pool(device)
    pool.commit(5)
    size = 5 * view[0, 0].numel() * 4
    assert pool.committed_regions() == [(layer.data_ptr(), size) for layer in view]
    pool.commit(64)
    assert pool.committed_regions() == [(view.data_ptr(), view.numel() * 4)]


@ON_EVERY_DEVICE
def test_probe_says_what_works(device):
    found = probe(device)
    assert found.available and not found.reason
    assert found.granularity >= 4096 and found.granularity & (found.granularity - 1) == 0
    assert found.handle_kind in ("none", "fd", "fd+rdma", "fabric")
    free, total = memory_info(device)
    assert 0 < free <= total


def test_probe_of_an_unknown_device_says_why():
    found = probe("meta")
    assert not found.available
    assert "meta" in found.reason
    with pytest.raises(DriverError, match="meta"):
        ExtensibleTensor(MIB, "meta")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:7", 0])
def test_a_gpu_that_is_not_there_is_named_with_what_to_do(device):
    for use in (lambda: extensible_kv_pool(device).__enter__(), lambda: ExtensibleTensor(MIB, device)):
        with pytest.raises(UnsupportedError, match=f"device {device} was asked for.*no GPU here: use 'cpu'"):
            use()
    assert "no GPU" in probe(device).reason


@ON_EVERY_DEVICE
@pytest.mark.parametrize("shareable", [False, True])
def test_extensible_tensor_grows_in_place(device, shareable):
    buffer = ExtensibleTensor(10 * MIB, device, shareable=shareable)
    assert (buffer.num_bytes, buffer.physical_bytes) == (0, 0)
    assert buffer.capacity_bytes >= 10 * MIB and buffer.capacity_bytes % probe(device).granularity == 0
    first = buffer.resize_(1000, zero_new=True)
    assert first.dtype == torch.uint8 and first.shape == (1000,) and not first.any()
    first.fill_(9)
    tail = buffer.append(5 * MIB, zero_new=True)
    assert tail.shape == (5 * MIB,) and not tail.any()
    assert buffer.tensor.data_ptr() == buffer.base_ptr
    assert int(buffer.tensor.sum()) == 9000
    assert buffer.full_view().shape == (10 * MIB,)
    with pytest.raises(ValueError, match="999 bytes per segment"):
        buffer.resize_(999)
    with pytest.raises(ValueError, match=str(10 * MIB + 1)):
        buffer.resize_(10 * MIB + 1)
    assert buffer.append(0).shape == (0,)
    buffer.release_physical()
    assert buffer.physical_bytes == 0
    buffer.recommit()
    assert not buffer.tensor.any() and buffer.num_bytes == 1000 + 5 * MIB
    buffer.free()
    buffer.free()
    with pytest.raises(ValueError, match="freed"):
        _ = buffer.tensor


@ON_EVERY_DEVICE
def test_extensible_tensor_segments_grow_side_by_side(device):
    buffer = ExtensibleTensor(12 * MIB, device, num_segments=3)
    buffer.resize_per_segment_(MIB + 1, zero_new=True)
    parts = buffer.full_view().view(3, 4 * MIB)
    parts[:, : MIB + 1] = torch.tensor([1, 2, 3], dtype=torch.uint8, device=device)[:, None]
    buffer.resize_per_segment_(4 * MIB, zero_new=True)
    assert (buffer.bytes_per_segment, buffer.num_bytes) == (4 * MIB, 12 * MIB)
    assert [int(p.sum()) for p in parts] == [k * (MIB + 1) for k in (1, 2, 3)]
    for use in (lambda: buffer.tensor, lambda: buffer.resize_(MIB), lambda: buffer.append(1)):
        with pytest.raises(ValueError, match="3"):
            use()
    with pytest.raises(ValueError, match="cannot be divided into 3 segments"):
        ExtensibleTensor(MIB, device, num_segments=3)
