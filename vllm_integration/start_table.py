"""The start-up table: where the requested memory goes, by vLLM's profile and as measured. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_integration.log import format_bytes

__all__ = ["format_table", "start_table"]

Row = dict[str, Any]
NOTHING = "-"


def start_table(measured: Mapping[str, Any], physical_bytes: int) -> list[Row]:
    """Return the rows, each ``{"part", "stock_bytes", "measured_bytes"}``; None where there is no figure.

    Parameters
    ----------
    measured : mapping
        One rank's answer to `ekv_measure`.
    physical_bytes : int
        What the KV cache holds in the end.

    Each column adds up to what was requested, unless the size of the cache was an explicit one, for which
    vLLM profiles nothing and the requested memory is no limit. "other" is the rest of what is in use: the
    device context, libraries, and whatever the weights and PyTorch's rounding take beyond their tensors.
    """
    requested, explicit = measured["requested_bytes"], measured["explicit"]
    weights, aside, margin = (measured[f"{n}_bytes"] for n in ("weights", "set_aside", "margin"))
    # A process can give memory back meanwhile; then there is nothing to show for that part.
    graphs, widest = (max(0, measured[f"{n}_bytes"]) for n in ("warm_up", "widest_step"))
    other = measured["used_bytes"] - weights - graphs - widest
    stock, stock_peak = measured["stock_bytes"] or 0, measured["stock_peak_activation_bytes"]
    stock_other = None if explicit else requested - stock - aside - stock_peak - weights
    rows = [
        ("weights", weights, weights),
        ("other", stock_other, other),
        ("graphs and warm-up", None, graphs),
        ("widest step", None if explicit else stock_peak, widest if measured["widest_step_ran"] else None),
        ("margin", None, None if explicit else margin),
        ("set aside", aside, aside),
        ("KV cache", stock, physical_bytes),
        ("unused", None, requested - measured["used_bytes"] - margin - aside - physical_bytes),
    ]
    left_out = {part for part, out in (("set aside", not aside), ("unused", explicit)) if out}
    return [
        {"part": part, "stock_bytes": by_profile, "measured_bytes": by_measure}
        for part, by_profile, by_measure in rows
        if part not in left_out
    ]


def format_table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of the table, aligned, the headings first."""
    texts = [("", "vLLM's profile", "measured")]
    texts += [(row["part"], _text(row["stock_bytes"]), _text(row["measured_bytes"])) for row in rows]
    widths = [max(len(text[column]) for text in texts) for column in range(3)]
    return [f"  {a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}" for a, b, c in texts]


def _text(num_bytes: int | None) -> str:
    return NOTHING if num_bytes is None else format_bytes(num_bytes)
