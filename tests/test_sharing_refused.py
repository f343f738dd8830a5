"""`export` and `import_` at the limit of open files, and between peers that do not fit."""

import json
import os
import re
import socket
import struct

import pytest
from pools import run_python

from allocator import PoolValueError, import_
from allocator.errors import DriverError

MANY_CHUNKS = """
import os, resource, socket, torch
resource.setrlimit(resource.RLIMIT_NOFILE, (128, {hard}))
from allocator import export, extensible_kv_pool, import_

def limit_files(hard):  # the commit has raised the soft limit, which a GPU's does not
    soft = len(os.listdir("/proc/self/fd")) + 100
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard or soft))

with extensible_kv_pool("cpu", max_chunk_bytes=2 << 20) as pool:
    caches = [torch.zeros(60, 2 << 20, dtype=torch.int8) for _ in range(5)]
for number, cache in enumerate(caches):
    pool.bind(cache)
pool.commit(60)
for number, cache in enumerate(caches):
    cache[59].fill_(number)
ours, theirs = socket.socketpair()
limit_files({hard})
export(pool, ours)
limit_files({hard_of_import})
imported = import_(theirs, "cpu")
for number, tensor in enumerate(imported.tensors):
    assert int(tensor[59 << 21]) == number
print(len(imported.tensors), imported.committed_blocks)
"""


def test_more_chunks_than_the_soft_limit_of_open_files():
    process = run_python(MANY_CHUNKS.format(hard=4096, hard_of_import=4096))
    assert (process.returncode, process.stdout) == (0, "5 60\n"), process.stderr


def test_more_chunks_than_the_hard_limit_of_open_files_names_the_limit():
    process = run_python(MANY_CHUNKS.format(hard=200, hard_of_import=200))
    assert process.returncode == 1
    assert "EMFILE" in process.stderr, process.stderr


def test_more_chunks_than_an_importer_may_have_files_names_its_limit():
    process = run_python(MANY_CHUNKS.format(hard=4096, hard_of_import=None))
    assert process.returncode == 1
    assert re.search(r"DriverError: 300 handles do not fit: \d+ were received.*ulimit -n", process.stderr)


HALF_AN_EXPORT = """
import os, resource, socket, torch
from allocator import export, extensible_kv_pool
from allocator.errors import DriverError
with extensible_kv_pool("cpu", max_chunk_bytes=2 << 20) as pool:
    cache = torch.zeros(20, 2 << 20, dtype=torch.int8)
pool.bind(cache)
pool.commit(20)
ours, theirs = socket.socketpair()
files = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (files + 10, files + 10))
try:
    export(pool, ours)
except DriverError as error:
    print("EMFILE" in str(error), len(os.listdir("/proc/self/fd")) - files)
"""


def test_export_that_fails_halfway_closes_its_files():
    process = run_python(HALF_AN_EXPORT)
    assert (process.returncode, process.stdout) == (0, "True 0\n"), process.stderr


def test_import_of_something_else_is_refused():
    ours, theirs = socket.socketpair()
    theirs.sendall(b"HTTP/1.1 200 OK")
    with pytest.raises(PoolValueError, match="HTTP"):
        import_(ours, "cpu")


@pytest.mark.parametrize("text", [b"{}", b"[]", b"abc", b"\xff", b'{"driver": "host"}'])
def test_import_of_a_description_that_is_none_is_refused(text):
    ours, theirs = socket.socketpair()
    theirs.sendall(struct.pack("!4sI", b"EKV1", len(text)) + text)
    with pytest.raises(PoolValueError, match=f"the {len(text)} bytes .* describe no export"):
        import_(ours, "cpu")


def describe(connection, **other):
    """Send what an export begins with."""
    description = {"driver": "host", "device": "this machine", "num_blocks": 1, "reservations": [], **other}
    text = json.dumps(description).encode()
    connection.sendall(struct.pack("!4sI", b"EKV1", len(text)) + text)


@pytest.mark.parametrize(("driver", "device"), [("cuda", "this machine"), ("host", "GPU-7")])
def test_import_from_another_device_names_both(driver, device):
    ours, theirs = socket.socketpair()
    describe(theirs, driver=driver, device=device)
    with pytest.raises(PoolValueError, match=f"of {driver} {device}, and cpu is host this machine"):
        import_(ours, "cpu")


@pytest.mark.parametrize(
    ("messages", "error", "text"),
    [
        ([0], PoolValueError, "closed the connection after 0 of 2 handles"),
        ([1, 0], PoolValueError, "closed the connection after 1 of 2 handles"),
        ([3], DriverError, "2 handles do not fit: 2 were received"),
    ],
)
def test_import_of_fewer_or_more_files_than_described_closes_them(messages, error, text):
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    describe(theirs, reservations=[{"chunks": [[], []]}])
    for count in messages:
        socket.send_fds(theirs, [b"F"], [theirs.fileno()] * count)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(error, match=text):
        import_(ours, "cpu")
    assert os.listdir("/proc/self/fd") == before
