"""Whether a host has room for what all of its workers keep over a sleep.

Every worker of a host sees the same free memory. They are all asked before one of them takes any.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Any

__all__ = ["host_name", "lacking", "note_engines", "weights_need"]

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NOTED = "ekv_engines_of_host"
OFFLOADED = {"weights", "runtime", "cudagraph"}


def host_name() -> str:
    """Return what tells this host from others, and is the same in all of its containers."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return platform.node()


def weights_need() -> int:
    """Return the bytes that vLLM's own sleep of level 1 takes from the host for this worker.

    Source: vLLM 0.33.0, device_allocator/cumem.py and sleep_mode_backend.py: what is tagged so is copied into
    pinned memory, one tensor for each allocation; without the sleep mode there is no allocator.
    """
    cumem = sys.modules.get("vllm.device_allocator.cumem")
    allocator = getattr(getattr(cumem, "CuMemAllocator", None), "instance", None)
    if allocator is None:
        return 0
    from allocator.backup import pinned_need

    kept = [data for data in allocator.pointer_to_data.values() if data.tag in OFFLOADED]
    return pinned_need(data.handle[1] for data in kept if not getattr(data, "is_asleep", False))


def note_engines(parallel_config: Any) -> None:
    """Note how many engines of data parallelism this host runs; where a model is dense, vLLM forgets it."""
    setattr(parallel_config, NOTED, getattr(parallel_config, "data_parallel_size_local", 1))


def lacking(answers: list[dict[str, Any]], vllm_config: Any) -> dict[str, Any] | None:
    """Return a rank's answer, with an error, whose host is too small for all ranks of it; else None.

    Parameters
    ----------
    answers : list of dict
        What `ekv_host_need` of each rank answered, none of them an error. `value` is None on a rank without
        a cache, else host, bytes wanted and bytes that the host has, of which None is unknown.
    vllm_config : VllmConfig or None
        The other engines of this host are taken to want as much as this one, because they sleep when it does.
    """
    engines = _engines_of_host(vllm_config)
    asked = [answer for answer in answers if answer["value"] is not None]
    for answer in asked:
        host, _, available = answer["value"]
        wanted = [other["value"][1] for other in asked if other["value"][0] == host]
        if available is not None and sum(wanted) * engines > available:
            text = (
                f"host: {sum(wanted) * engines} bytes to keep by {len(wanted) * engines} workers (cached "
                f"blocks, and weights that sleep beside them), and {available} bytes of host memory are "
                "available: give the host or the container more, or leave sleep_backup out"
            )
            return {**answer, "error": text}
    return None


def _engines_of_host(vllm_config: Any) -> int:
    parallel_config = getattr(vllm_config, "parallel_config", None)
    seen = getattr(parallel_config, "data_parallel_size_local", None)
    return max(1, getattr(parallel_config, NOTED, None) or 1, seen or 1)
