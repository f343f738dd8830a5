"""Limits of containers and shells: read from files that a test has written, and judged."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from allocator.limits import Limits, check_limits, container_free_bytes, read_limits
from tests.pools import run_python

GIB = 1 << 30
# What version 1 of control groups says where there is no limit.
V1_UNLIMITED = 9223372036854771712


def container(root: Path, files: dict[str, str]) -> Path:
    """Write files below `root`, with those of a machine of 64 GiB without limits where none are given."""
    no_limits = (
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max locked memory         unlimited            unlimited            bytes     \n"
        "Max address space         unlimited            unlimited            bytes     \n"
    )
    machine = {"proc/meminfo": f"MemTotal:       {64 << 20} kB\n", "proc/self/limits": no_limits}
    for name, text in (machine | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/memory.max": f"{8 * GIB}\n"}, 8 * GIB),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/memory.max": "max\n"}, None),
        ({"proc/self/cgroup": "0::/pod/a\n", f"{V2}/pod/memory.max": f"{4 * GIB}\n"}, 4 * GIB),
        (
            {
                "proc/self/cgroup": "0::/pod/a\n",
                f"{V2}/pod/memory.max": f"{9 * GIB}\n",
                f"{V2}/pod/a/memory.max": f"{3 * GIB}\n",
            },
            3 * GIB,
        ),
        (
            {"proc/self/cgroup": "5:cpu:/\n4:memory:/docker/x\n0::/\n", f"{V1}/memory.limit_in_bytes": "7\n"},
            7,
        ),
        (
            {"proc/self/cgroup": "4:hugetlb,memory:/x\n", f"{V1}/x/memory.limit_in_bytes": f"{6 * GIB}\n"},
            6 * GIB,
        ),
        ({"proc/self/cgroup": "4:memory:/\n", f"{V1}/memory.limit_in_bytes": f"{V1_UNLIMITED}\n"}, None),
        ({"proc/self/cgroup": "5:cpu:/\n", f"{V1}/memory.limit_in_bytes": "7\n"}, None),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/memory.max": f"{64 * GIB}\n"}, None),  # all the machine has
    ],
)
def test_read_limits_finds_the_containers_memory(
    tmp_path: Path, files: dict[str, str], expected: int | None
) -> None:
    assert read_limits(container(tmp_path, files)).container_bytes == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/memory.max": "max\n", f"{V2}/memory.current": "7\n"}, None),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/memory.max": "90\n", f"{V2}/memory.current": "70\n"}, 20),
        (
            {
                "proc/self/cgroup": "0::/pod/a\n",
                f"{V2}/pod/memory.max": "900\n",
                f"{V2}/pod/memory.current": "890\n",
                f"{V2}/pod/memory.stat": "anon 500\ninactive_file 30\nactive_file 360\n",
                f"{V2}/pod/a/memory.max": "400\n",
                f"{V2}/pod/a/memory.current": "100\n",
            },
            40,
        ),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/memory.max": "90\n", f"{V2}/memory.current": "95\n"}, 0),
        (
            {
                "proc/self/cgroup": "4:memory:/x\n",
                f"{V1}/x/memory.limit_in_bytes": "100\n",
                f"{V1}/x/memory.usage_in_bytes": "80\n",
                f"{V1}/x/memory.stat": "inactive_file 1\ntotal_inactive_file 15\n",
                f"{V1}/memory.limit_in_bytes": f"{V1_UNLIMITED}\n",
                f"{V1}/memory.usage_in_bytes": "9000\n",
            },
            35,
        ),
    ],
)
def test_container_free_bytes_is_what_the_tightest_group_lets_it_take(
    tmp_path: Path, files: dict[str, str], expected: int | None
) -> None:
    assert container_free_bytes(container(tmp_path, files)) == expected


def test_read_limits_process_limits_and_shared_memory(tmp_path: Path) -> None:
    limits = (
        "Max locked memory         8388608              unlimited            bytes     \n"
        "Max address space         4294967296           unlimited            bytes     \n"
    )
    root = container(tmp_path, {"proc/self/limits": limits, "dev/shm/x": ""})
    found = read_limits(root)
    assert (found.locked_bytes, found.address_space_bytes) == (8 << 20, 4 * GIB)
    size = os.statvfs(tmp_path)
    assert found.shared_memory_bytes == size.f_blocks * size.f_frsize > 0
    assert read_limits(tmp_path / "nothing") == Limits()


def test_read_limits_tells_what_is_set_here() -> None:
    """The kernel's own files, not ours."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    assert read_limits().locked_bytes == (None if soft == resource.RLIM_INFINITY else soft)
    code = """
import resource
from allocator.limits import read_limits
resource.setrlimit(resource.RLIMIT_AS, (77 << 30, 77 << 30))
assert read_limits().address_space_bytes == 77 << 30, read_limits()
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("limits", "on_gpu", "expected"),
    [
        (Limits(), True, {}),
        (Limits(8 * GIB), True, {"address space limit": "ulimit -v"}),  # case 37
        (Limits(1 << 46), True, {}),
        (Limits(container_bytes=GIB), True, {"container memory limit": "what sleep_backup keeps counts"}),
        (Limits(container_bytes=GIB), False, {"container memory limit": "the cache, and what sleep_backup"}),
        (Limits(shared_memory_bytes=64 << 20), False, {"/dev/shm": "--shm-size"}),
        (Limits(shared_memory_bytes=8 * GIB), True, {}),
        (Limits(locked_bytes=8 << 20), True, {"locked memory limit": "ulimit -l"}),
        (Limits(locked_bytes=8 << 20), False, {}),  # nothing is pinned or registered there
        (
            Limits(GIB, 1 << 20, GIB, 1 << 20),
            True,
            {
                "address space limit": "ulimit -v",
                "container memory limit": "docker run --memory",
                "/dev/shm": "--ipc=host",
                "locked memory limit": "--ulimit memlock=-1",
            },
        ),
    ],
)
def test_check_limits_says_what_to_do(limits: Limits, on_gpu: bool, expected: dict[str, str]) -> None:
    findings = {finding.name: finding for finding in check_limits(limits, on_gpu=on_gpu)}
    assert findings.keys() == expected.keys()
    for name, advice in expected.items():
        assert findings[name].level == "note" and advice in findings[name].advice
