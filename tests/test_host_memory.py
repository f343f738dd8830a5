"""The host driver's view of the machine: container limits, and children that were forked meanwhile."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pools import MIB, run_python

CGROUP = Path("/sys/fs/cgroup")
COMMIT_IN_A_CONTAINER = f"""
import torch
from allocator import PoolOutOfMemoryError, extensible_kv_pool, memory_info
free, total = memory_info("cpu")
assert total == 700 << 20, total
assert 0 < free <= 700 << 20, free
with extensible_kv_pool("cpu", max_chunk_bytes={64 * MIB}) as pool:
    cache = torch.zeros(2048, {MIB}, dtype=torch.int8)
pool.bind(cache)
pool.commit(128)
try:
    pool.commit(2048)
except PoolOutOfMemoryError as error:
    print("refused", pool.committed_blocks)
"""


@pytest.fixture
def container():
    """A control group with a memory limit of 700 MiB: its file of processes."""
    base = CGROUP if (CGROUP / "cgroup.controllers").exists() else CGROUP / "memory"
    group = base / f"ekv-test-{os.getpid()}"
    limit = "memory.max" if base is CGROUP else "memory.limit_in_bytes"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        (group / limit).write_text(str(700 * MIB))
        yield group / "cgroup.procs"
    except FileNotFoundError as error:
        pytest.skip(f"the memory controller is not on here: {error}")
    finally:
        group.rmdir()


def test_commit_over_a_container_limit_is_refused_not_killed(container):  # 8
    def enter():
        container.write_text(str(os.getpid()))

    process = subprocess.run(
        [sys.executable, "-c", COMMIT_IN_A_CONTAINER], preexec_fn=enter, capture_output=True, text=True
    )
    assert (process.returncode, process.stdout) == (0, "refused 128\n"), process.stderr


def test_forked_child_does_not_keep_released_memory():
    code = """
import os, time, torch
from allocator import extensible_kv_pool
with extensible_kv_pool("cpu") as pool:
    cache = torch.zeros(256, 1 << 20, dtype=torch.int8)
pool.bind(cache)
pool.commit(256)
pid = os.fork()
if pid == 0:
    time.sleep(60)
def held():
    files = [os.stat(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")
             if "extensible-kv" in os.readlink(f"/proc/{pid}/fd/{fd}")]
    return sum(file.st_blocks * 512 for file in files)
before = held()
pool.release_physical()
after = held()
os.kill(pid, 9)
print(before >> 20, after >> 20)
"""
    process = run_python(code)
    assert process.stdout == "256 0\n", process.stderr
