"""The story of a start: a few lines and one table in the log, and everything as plain data.

The data is what `build` returns; with the option ``report`` it is also written to a JSON file, from which
``extensible-kv map`` draws the pools.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm_integration.log import format_bytes, logger
from vllm_integration.start_table import format_table

__all__ = ["build", "path_for", "tell", "write"]

KIND = "extensible-kv start"


def build(sizing: Any, config: Any, sizes: Any, seconds: float) -> dict[str, Any]:
    """Return what a start came to, as plain data.

    Parameters
    ----------
    sizing : TwoPhaseSizing
        The start that has ended.
    config : KVCacheConfig
        The scheduler's, with the final size.
    sizes : Sizes
        What was committed.
    seconds : float
        Wall time of the start of the cache, profile and warm-up included.

    Returns
    -------
    dict
        ``kind``, ``engine`` (its index in data parallelism), ``blocks`` and ``tokens`` (the final size),
        ``max_model_len``, ``seconds``, ``asked_for`` (the setting that gave the size, or None), and
        ``ranks``: what each worker that has a cache answers to `ekv_report`.
    """
    vllm_config = sizing.vllm_config
    asked_for = None
    if vllm_config.cache_config.num_gpu_blocks_override is not None:
        asked_for = "num_gpu_blocks_override"
    elif any(proposal["explicit"] for proposal in sizing.proposals):
        asked_for = "kv_cache_memory_bytes"
    return {
        "kind": KIND,
        "engine": getattr(sizing.core, "engine_index", 0),
        "blocks": sizes.blocks,
        "tokens": vllm_config.cache_config.kv_cache_size_tokens or 0,
        "max_model_len": vllm_config.model_config.max_model_len,
        "asked_for": asked_for,
        "seconds": seconds,
        "ranks": [rank for rank in sizing.rpc("ekv_report") if rank is not None],
    }


def tell(report: Mapping[str, Any]) -> None:
    """Log what was reserved, measured and committed. Figures are those of the tightest rank."""
    ranks = report["ranks"]
    if not ranks:
        return
    m = min(ranks, key=lambda rank: rank["measured"]["blocks"])["measured"]
    rank = next(r for r in ranks if r["rank"] == m["rank"])
    logger.info(
        "Extensible KV cache: reserved %s of addresses for up to %d blocks in %d segments, "
        "and backed %d blocks (%s) for warm-up.",
        format_bytes(m["reserved_bytes"]),
        m["capacity_blocks"],
        m["num_segments"],
        m["prefix_blocks"],
        format_bytes(m["prefix_bytes"]),
    )
    # With an explicit size the requested memory is no limit: the table is of what is held.
    logger.info(
        "Extensible KV cache: where %s%s go on rank %d, graphs measured and not estimated:\n%s",
        format_bytes(sum(row["measured_bytes"] or 0 for row in rank["table"])),
        " held with the cache's size as asked for" if m["explicit"] else " requested",
        m["rank"],
        "\n".join(format_table(rank["table"])),
    )
    stock_blocks = (m["stock_bytes"] or 0) // m["bytes_per_block"]
    logger.info(
        "Extensible KV cache: %d blocks (%s tokens) committed, %s on each of %d ranks, in %.3f s; "
        "%s. Ready after %.2f s.",
        report["blocks"],
        f"{report['tokens']:,}",
        format_bytes(rank["physical_bytes"]),
        len(ranks),
        max(r["commit_seconds"] for r in ranks),
        f"{asked_for} asked for that"
        if (asked_for := report["asked_for"])
        else f"vLLM's profile, graphs not counted, allowed {stock_blocks} blocks",
        report["seconds"],
    )


def path_for(path: str, engine: int) -> Path:
    """Return where engine number `engine` writes: `path`, and for others than the first a name beside it."""
    first = Path(path)
    return first if engine == 0 else first.with_name(f"{first.stem}.engine{engine}{first.suffix}")


def write(report: Mapping[str, Any], path: str) -> None:
    """Write `report` as JSON, whole or not at all, and make its folder; failing is only worth a warning."""
    unfinished = None
    try:
        target = path_for(path, report["engine"])
        unfinished = target.with_name(f"{target.name}.{os.getpid()}.part")
        with suppress(FileExistsError):  # a file where the folder should be: writing says it better
            target.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(target)
    except (OSError, ValueError) as error:  # a path may have no name, or a zero byte
        why = getattr(error, "strerror", None) or error  # without the name of the unfinished file
        logger.warning("Extensible KV cache: the report could not be written to %r: %s", path, why)
        with suppress(OSError, ValueError):
            if unfinished is not None:
                unfinished.unlink(missing_ok=True)
