"""`export` and `import_`: two processes over the same physical memory, and the death of one of them."""

import gc
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from pools import MIB, ON_EVERY_DEVICE, assert_filled, fill, make_pool

from allocator import PoolValueError, export, extensible_kv_pool, import_, memory_info
from allocator.shim import lib
from allocator.torch_routing import empty_cache

IMPORTER = """
import os, signal, socket, sys
sys.path.insert(0, {tests!r})
import torch
from pools import assert_filled, fill
from allocator import import_
connection = socket.socket(fileno={fileno})
pool = import_(connection, {device!r})
[flat] = pool.tensors
view = flat.view(torch.int32)[: 4 * 64 * 24576].view(4, 64, 24576)
assert pool.committed_blocks == 40
assert_filled(view, 0, 40)
fill(view[:, 1:], 0, 1)             # block 1 gets block 0's pattern
if {device!r} == "cuda":
    torch.cuda.synchronize()
connection.sendall(b"written")
{end}
"""
ENDS = {
    "frees": "pool.free(); del view, flat; connection.sendall(b'!')",
    "exits": "",
    "is killed": "os.kill(os.getpid(), signal.SIGKILL)",
}


def start(code, device, end=""):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.settimeout(60)
    code = code.format(tests=str(Path(__file__).parent), fileno=theirs.fileno(), device=device, end=end)
    process = subprocess.Popen(
        [sys.executable, "-c", code], pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True
    )
    theirs.close()
    return ours, process


def shared_memory_bytes():
    """What this process holds in the host driver's memory files."""
    files = [int(number) for number in os.listdir("/proc/self/fd")]
    links = {file: f"/proc/self/fd/{file}" for file in files if os.path.lexists(f"/proc/self/fd/{file}")}
    ours = [file for file, link in links.items() if "extensible-kv" in os.readlink(link)]
    return sum(os.fstat(file).st_blocks * 512 for file in ours)


def held(device):
    """What this process holds, in bytes, and how many files it has open."""
    gc.collect()
    empty_cache(torch.device(device, 0) if device == "cuda" else torch.device(device))
    files = len(os.listdir("/proc/self/fd"))
    return shared_memory_bytes() if device == "cpu" else -memory_info(device)[0], files


@ON_EVERY_DEVICE
def test_importer_that_is_killed_leaves_nothing_in_the_exporting_process(device):
    warm, view = make_pool(device)  # a GPU's first kernels take memory for good
    warm.commit(1)
    fill(view, 0, 1)
    del warm, view
    before = held(device)
    pool, view = make_pool(device, shareable=True)
    pool.commit(40)
    fill(view, 0, 40)
    if device == "cuda":
        torch.cuda.synchronize()
    connection, process = start(IMPORTER, device, ENDS["is killed"])
    export(pool, connection)
    assert connection.recv(7) == b"written", process.stderr.read()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    connection.close()
    del view
    pool.free()
    time.sleep(0.5)
    after = held(device)
    assert after[0] - before[0] < 12 * MIB  # the pool had 15 MiB
    assert after[1] <= before[1] + (8 if device == "cuda" else 0)


def test_memory_that_the_exporter_gives_back_stays_with_the_importer():
    gc.collect()
    before = shared_memory_bytes()
    pool, view = make_pool("cpu")
    pool.commit(40)
    fill(view, 0, 40)
    ours, theirs = socket.socketpair()
    export(pool, ours)
    imported = import_(theirs, "cpu")
    pool.shrink(0)
    pool.commit(40)
    fill(view, 0, 1)
    pool.free()
    copy = imported.tensors[0].view(torch.int32)[: 4 * 64 * 24576].view(4, 64, 24576)
    assert_filled(copy, 0, 40)
    imported.free()
    assert shared_memory_bytes() == before  # although a view keeps the addresses
    del copy
    ours.close()
    theirs.close()


def test_import_that_fails_leaves_neither_files_nor_memory():
    with extensible_kv_pool("cpu", max_chunk_bytes=2 * MIB) as pool:
        caches = [torch.zeros(16, MIB, dtype=torch.uint8) for _ in range(2)]
    for cache in caches:
        pool.bind(cache)
    pool.commit(16)
    before = held("cpu"), lib.ekv_num_reservations()
    ours, theirs = socket.socketpair()
    pool._members[1].reservation.granularity = 4096  # the second of the two does not fit here
    export(pool, ours)
    with pytest.raises(PoolValueError, match="granularity of 4096 bytes") as caught:
        import_(theirs, "cpu")
    assert shared_memory_bytes() == before[0][0]  # also while the error, and what it refers to, is kept
    del caught
    ours.close()
    theirs.close()
    gc.collect()
    assert (held("cpu"), lib.ekv_num_reservations()) == before


@ON_EVERY_DEVICE
@pytest.mark.parametrize("end", ENDS)
def test_export_two_processes_read_and_write_the_same_block(device, end):
    pool, view = make_pool(device, max_chunk_bytes=2 * MIB, shareable=True)
    pool.commit(40)
    fill(view, 0, 40)
    if device == "cuda":
        torch.cuda.synchronize()
    connection, process = start(IMPORTER, device, ENDS[end])
    export(pool, connection)
    assert connection.recv(7) == b"written", process.stderr.read()
    assert torch.equal(view[:, 1], view[:, 0])
    process.wait(60)
    assert process.returncode == (-signal.SIGKILL if end == "is killed" else 0), process.stderr.read()
    assert_filled(view, 2, 40)
    pool.commit(64)
    assert not view[:, 40:].any()
    pool.shrink(1)
    pool.commit(2)
    assert not view[:, 1].any()
    assert_filled(view, 0, 1)


EXPORTER = """
import os, signal, socket, sys
sys.path.insert(0, {tests!r})
import torch
from pools import fill, make_pool
from allocator import export
connection = socket.socket(fileno={fileno})
pool, view = make_pool({device!r}, shareable=True)
pool.commit(64)
fill(view, 0, 64)
if {device!r} == "cuda":
    torch.cuda.synchronize()
export(pool, connection)
connection.recv(1)
os.kill(os.getpid(), signal.SIGKILL)
"""


@ON_EVERY_DEVICE
def test_import_outlives_the_exporting_process_and_leaks_nothing(device):
    memory_info(device)
    before = shared_memory_bytes() if device == "cpu" else memory_info(device)[0]
    connection, process = start(EXPORTER, device)
    pool = import_(connection, device)
    connection.sendall(b"!")
    process.wait(60)
    assert process.returncode == -signal.SIGKILL
    view = pool.tensors[0].view(torch.int32)[: 4 * 64 * 24576].view(4, 64, 24576)
    assert_filled(view, 0, 64)
    assert pool.physical_bytes >= 24 * MIB
    del view
    pool.free()
    assert (pool.tensors, pool.committed_blocks, pool.physical_bytes) == ([], 0, 0)
    time.sleep(0.5)
    after = shared_memory_bytes() if device == "cpu" else memory_info(device)[0]
    assert abs(after - before) < 12 * MIB


def test_export_of_a_pool_without_blocks_sends_nothing():
    pool, _view = make_pool("cpu")
    ours, theirs = socket.socketpair()
    with pytest.raises(PoolValueError, match="0 committed blocks"):
        export(pool, ours)
    ours.close()
    assert theirs.recv(1) == b""


def test_export_leaves_out_a_tensor_that_has_died():
    with extensible_kv_pool("cpu") as pool:
        kept, dropped = (torch.zeros(16, MIB // 4, dtype=torch.uint8) for _ in range(2))
    pool.bind(kept)
    pool.bind(dropped)
    pool.commit(4)
    kept[:4] = 7
    del dropped
    ours, theirs = socket.socketpair()
    export(pool, ours)
    imported = import_(theirs, "cpu")
    assert [int(tensor[:MIB].sum()) for tensor in imported.tensors] == [7 * MIB]


@pytest.mark.gpu
def test_export_of_memory_that_is_not_shareable_is_refused():
    pool, _view = make_pool("cuda")
    pool.commit(1)
    ours, _theirs = socket.socketpair()
    with pytest.raises(PoolValueError, match="shareable=True"):
        export(pool, ours)


@pytest.mark.parametrize("cut", [0, 3, 8, 40])
def test_import_from_a_connection_that_breaks_names_the_bytes(cut):
    pool, _view = make_pool("cpu")
    pool.commit(1)
    ours, theirs = socket.socketpair()
    export(pool, ours)
    ours.close()
    partial, end = socket.socketpair()
    end.sendall(theirs.recv(cut) if cut else b"")
    end.close()
    with pytest.raises(PoolValueError, match=r"closed the connection after \d+ of \d+"):
        import_(partial, "cpu")


def test_export_does_not_block_the_pool_while_the_other_side_does_not_read():
    pool, view = make_pool("cpu", num_blocks=4096, block_bytes=64 * 1024, max_chunk_bytes=2 * MIB)
    pool.commit(2000)
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(export, pool, ours)
        time.sleep(0.5)
        start = time.perf_counter()
        pool.commit(2001)
        assert time.perf_counter() - start < 5
        assert not view[:, 2000].any()
        assert not sending.done()
        theirs.close()
        assert isinstance(sending.exception(timeout=30), ConnectionError)
