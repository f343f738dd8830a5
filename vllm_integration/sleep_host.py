"""Whether a host has room for what all of its workers keep over a sleep.

Every worker of a host sees the same free memory. They are all asked before one of them takes any.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

__all__ = ["host_name", "lacking", "note_engines"]

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NOTED = "ekv_engines_of_host"


def host_name() -> str:
    """Return what tells this host from others, and is the same in all of its containers."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return platform.node()


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
                f"host: backups of {sum(wanted) * engines} bytes by {len(wanted) * engines} workers, and "
                f"{available} bytes of host memory are available"
            )
            return {**answer, "error": text}
    return None


def _engines_of_host(vllm_config: Any) -> int:
    parallel_config = getattr(vllm_config, "parallel_config", None)
    seen = getattr(parallel_config, "data_parallel_size_local", None)
    return max(1, getattr(parallel_config, NOTED, None) or 1, seen or 1)
