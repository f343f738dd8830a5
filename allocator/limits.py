"""Limits that a shell, a container or a machine sets on this process, and what they mean for a cache."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from allocator.pool_map import format_bytes
from allocator.settings import Finding

__all__ = ["Limits", "check_limits", "container_free_bytes", "read_limits"]

# Less than this and no cache of a useful size can be reserved.
SMALL_ADDRESS_SPACE = 1 << 40
# Source: vLLM 0.33, distributed/device_communicators/shm_broadcast.py: 240 MiB for each message queue.
SMALL_SHARED_MEMORY = 1 << 30
# Control groups of version 2 and 1: what is used of a limit, and in memory.stat what of that are idle files.
_USED = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
_CACHED = {"memory.max": r"^inactive_file (\d+)$", "memory.limit_in_bytes": r"^total_inactive_file (\d+)$"}


@dataclass(frozen=True)
class Limits:
    """Bytes of each; None where there is no limit, or where nothing tells.

    Attributes
    ----------
    address_space_bytes, locked_bytes : int or None
        Of this process (`ulimit -v`, `ulimit -l`).
    container_bytes : int or None
        The smallest memory limit of the control groups around this process, where the machine has more.
    shared_memory_bytes : int or None
        The size of /dev/shm.
    """

    address_space_bytes: int | None = None
    locked_bytes: int | None = None
    container_bytes: int | None = None
    shared_memory_bytes: int | None = None


def read_limits(root: Path = Path("/")) -> Limits:
    """Return the limits that the files below `root` tell; never raises for one that is missing."""
    return Limits(
        address_space_bytes=_process_limit(root, "Max address space"),
        locked_bytes=_process_limit(root, "Max locked memory"),
        container_bytes=_container_bytes(root),
        shared_memory_bytes=_shared_memory_bytes(root),
    )


def check_limits(limits: Limits, *, on_gpu: bool) -> list[Finding]:
    """Return what is worth knowing of `limits`, and what to do about it; pure."""
    found: list[tuple[str, int, str]] = []
    space, container = limits.address_space_bytes, limits.container_bytes
    shared, locked = limits.shared_memory_bytes, limits.locked_bytes
    if space is not None and space < SMALL_ADDRESS_SPACE:
        advice = "reservations and CUDA itself need addresses, not memory: raise `ulimit -v`"
        found.append(("address space limit", space, advice))
    if container is not None:
        held = "what sleep_backup keeps" if on_gpu else "the cache, and what sleep_backup keeps,"
        advice = f"{held} counts against it: raise `docker run --memory`, or the pod's limits.memory"
        found.append(("container memory limit", container, advice))
    if shared is not None and shared < SMALL_SHARED_MEMORY:
        advice = (
            "vLLM's processes talk, and offload, through it: `docker run --ipc=host`, or a larger --shm-size"
        )
        found.append(("/dev/shm", shared, advice))
    if locked is not None and on_gpu:
        advice = "memory that a network card registers counts against it, pinned memory with some drivers: "
        found.append(("locked memory limit", locked, advice + "`ulimit -l unlimited`, `--ulimit memlock=-1`"))
    return [Finding(name, format_bytes(size), "note", advice) for name, size, advice in found]


def _process_limit(root: Path, name: str) -> int | None:
    """Return the soft limit of that name in /proc/self/limits."""
    found = re.search(rf"^{name} +(\d+) ", _text(root / "proc/self/limits"), re.MULTILINE)
    return int(found.group(1)) if found else None


def _container_bytes(root: Path) -> int | None:
    limits = [number for file in _limit_files(root) if (number := _text(file).strip()).isdigit()]
    memory = re.search(r"^MemTotal: +(\d+) kB$", _text(root / "proc/meminfo"), re.MULTILINE)
    least = min(map(int, limits), default=None)
    # Version 1 has no word for "no limit", only a number that no machine reaches.
    return None if least is None or (memory and least >= int(memory.group(1)) * 1024) else least


def container_free_bytes(root: Path = Path("/")) -> int | None:
    """Return what the control groups around this process let it take now; None where none has a limit.

    Cached files that nobody used lately count as free, as Kubernetes has it.
    """
    free = []
    for file in _limit_files(root):
        limit = _text(file).strip()
        used = _text(file.with_name(_USED[file.name])).strip()
        if limit.isdigit() and used.isdigit():
            cached = re.search(_CACHED[file.name], _text(file.with_name("memory.stat")), re.MULTILINE)
            free.append(max(0, int(limit) - int(used) + (int(cached.group(1)) if cached else 0)))
    return min(free, default=None)


def _limit_files(root: Path) -> Iterator[Path]:
    """Yield the file of each group that this process is in, up to the root: each may have a limit."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            top, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        own = PurePosixPath(group)
        for each in (own, *own.parents):
            yield top / each.relative_to("/") / name


def _shared_memory_bytes(root: Path) -> int | None:
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError:
        return None
    return found.f_blocks * found.f_frsize


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
