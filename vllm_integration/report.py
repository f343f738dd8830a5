"""The story of a start, in a few lines of the log."""

from __future__ import annotations

from typing import Any

from vllm_integration.log import format_bytes, logger

__all__ = ["tell"]


def tell(vllm_config: Any, config: Any, sizes: Any, seconds: float) -> None:
    """Log what was reserved, measured and committed. Figures are those of the tightest rank."""
    ranks = [m for m in sizes.measured if m["blocks"] is not None]
    if not ranks:
        return
    m = min(ranks, key=lambda rank: rank["blocks"])
    commits = {c["rank"]: c for c in sizes.commits}
    logger.info(
        "Extensible KV cache: reserved %s of addresses for up to %d blocks in %d segments, "
        "and backed %d blocks (%s) for warm-up.",
        format_bytes(m["reserved_bytes"]),
        m["capacity_blocks"],
        m["num_segments"],
        m["prefix_blocks"],
        format_bytes(m["prefix_bytes"]),
    )
    logger.info(
        "Extensible KV cache: warm-up and graphs took %s and the widest step keeps %s "
        "(vLLM's profile: %s for activations, graphs not estimated); in use without the cache: "
        "%s of %s requested, margin %s.",
        format_bytes(max(0, m["warm_up_bytes"])),
        format_bytes(max(0, m["widest_step_bytes"])),
        format_bytes(m["stock_peak_activation_bytes"]),
        format_bytes(m["used_bytes"]),
        format_bytes(m["requested_bytes"]),
        format_bytes(m["margin_bytes"]),
    )
    logger.info(
        "Extensible KV cache: %d blocks (%s tokens) committed, %s on each of %d ranks, in %.3f s; "
        "without it the profile allowed %d blocks. Ready after %.2f s.",
        sizes.blocks,
        f"{vllm_config.cache_config.kv_cache_size_tokens or 0:,}",
        format_bytes(commits[m["rank"]].get("physical_bytes", 0)),
        len(ranks),
        max(c["seconds"] for c in sizes.commits),
        (m["stock_bytes"] or 0) // m["bytes_per_block"],
        seconds,
    )
