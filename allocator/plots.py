"""Pictures: what a demo went through, and where the memory of a pool lies. Written to files, never shown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from allocator.errors import PoolValueError
from allocator.pool_map import MapRow, format_bytes, rows_of, summary_of

__all__ = ["plot_pool_map", "plot_stages"]

_COMMITTED, _BACKED, _RESERVED = "#1f6f8b", "#8cc5d6", "#e6eaed"
_STRADDLED, _BORDER, _TEXT, _TIME = "#e07b00", "#ffffff", "#24313a", "#8a6fa8"
_STYLE = {
    "font.size": 10,
    "text.color": _TEXT,
    "axes.labelcolor": _TEXT,
    "axes.edgecolor": "#9aa5ad",
    "xtick.color": _TEXT,
    "ytick.color": _TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "extensible-kv",
}
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_MAX_LABELLED_ROWS = 40


def plot_stages(stages: Sequence[Mapping[str, Any]], path: str | Path, *, title: str = "") -> None:
    """Draw memory and time of each stage of a start, one row each, top to bottom, into a PNG or SVG file.

    Parameters
    ----------
    stages : sequence of mappings
        Each with `stage` (its name), `committed_blocks`, `physical_bytes` and `seconds`.
    path : str or Path
        The file; its suffix decides the format.
    title : str
        Above both panels.
    """
    if not stages:
        raise PoolValueError("there are 0 stages to draw")
    plt = _pyplot()
    unit, scale = _unit(max(stage["physical_bytes"] for stage in stages))
    names = [str(stage["stage"]) for stage in stages]
    sizes = [stage["physical_bytes"] / scale for stage in stages]
    times = [stage["seconds"] * 1000 for stage in stages]
    rows = range(len(stages))
    with plt.rc_context(_STYLE):
        figure, (memory, clock) = plt.subplots(
            1,
            2,
            sharey=True,
            figsize=(10.5, 1.6 + 0.46 * len(stages)),
            gridspec_kw={"width_ratios": [1.7, 1]},
            layout="constrained",
        )
        memory.barh(rows, sizes, height=0.62, color=_COMMITTED)
        clock.barh(rows, times, height=0.62, color=_TIME)
        _set_time_scale(clock, times)
        for row, stage in enumerate(stages):
            label = f" {format_bytes(stage['physical_bytes'])}, {stage['committed_blocks']:,} blocks"
            memory.text(sizes[row], row, label, va="center", fontsize=9)
            end = max(times[row], 0 if clock.get_xscale() == "linear" else clock.get_xlim()[0])
            clock.text(end, row, f" {_duration(times[row])}", va="center", fontsize=9)
        memory.set_yticks(rows, names)
        memory.invert_yaxis()
        memory.set_xlim(0, (max(sizes) or 1) * 1.42)
        memory.set_xlabel(f"physical memory of the pool after the stage ({unit})")
        for axes in (memory, clock):
            axes.tick_params(axis="y", length=0)
            axes.xaxis.grid(True, color="#e3e7ea", linewidth=0.8)
            axes.set_axisbelow(True)
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        _save(figure, path)
        plt.close(figure)


def plot_pool_map(snapshot: Mapping[str, Any], path: str | Path, *, title: str = "") -> None:
    """Draw the segments of `PoolController.snapshot()` as rows into a PNG or SVG file.

    Light is reserved, mid is backed beyond the committed blocks, dark is committed; white lines are chunk
    borders, orange marks granules that two segments share.
    """
    rows = rows_of(snapshot)
    if not rows:
        raise PoolValueError("the snapshot has 0 segments: nothing was bound")
    plt = _pyplot()
    unit, scale = _unit(max(row.size_bytes for row in rows))
    height = min(max(0.2 * len(rows), 0.9), 9.0)
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(10.5, height + 1.5), layout="constrained")
        _draw_rows(axes, rows, scale, height * 72 / len(rows))
        axes.set_xlim(0, max(row.size_bytes for row in rows) / scale)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlabel(f"distance from the start of the segment ({unit})")
        step = -(-len(rows) // _MAX_LABELLED_ROWS)
        several = len({row.reservation for row in rows}) > 1
        labels = [f"{row.reservation}.{row.index}" if several else str(row.index) for row in rows]
        axes.set_yticks(range(0, len(rows), step), labels[::step], fontsize=8)
        axes.set_ylabel("reservation.segment" if several else "segment")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        figure.suptitle(title or summary_of(snapshot), x=0.01, ha="left", fontsize=11, fontweight="bold")
        figure.legend(handles=_legend(rows), loc="outside lower left", ncols=5, frameon=False, fontsize=9)
        _save(figure, path)
        plt.close(figure)


def _draw_rows(axes: Any, rows: Sequence[MapRow], scale: int, row_points: float) -> None:
    from matplotlib.collections import LineCollection, PolyCollection

    half = 0.36 if row_points > 6 else 0.5  # rows too thin for gaps touch each other

    def boxes(spans: Sequence[tuple[int, float, float]], colour: str, top: float = -half) -> None:
        corners = [
            [(low, row + top), (high, row + top), (high, row + half), (low, row + half)]
            for row, low, high in spans
        ]
        axes.add_collection(PolyCollection(corners, facecolors=colour, edgecolors="none"))

    boxes([(i, 0, row.size_bytes / scale) for i, row in enumerate(rows)], _RESERVED)
    boxes([(i, low / scale, high / scale) for i, row in enumerate(rows) for low, high in row.backed], _BACKED)
    committed = [(i, 0, row.committed_bytes / scale) for i, row in enumerate(rows)]
    boxes(committed, _COMMITTED)
    borders = [(i, edge / scale) for i, row in enumerate(rows) for edge in row.chunk_borders]
    lines = [[(edge, i - half), (edge, i + half)] for i, edge in borders]
    axes.add_collection(LineCollection(lines, colors=_BORDER, linewidths=0.7))
    least = max(row.size_bytes for row in rows) / scale / 250  # a granule is often thinner than a pixel
    shared = []
    for i, row in enumerate(rows):
        for low, high in row.straddled:
            start, end = low / scale, max(high / scale, low / scale + least)
            shift = max(0.0, end - row.size_bytes / scale)
            shared.append((i, max(0.0, start - shift), end - shift))
    boxes(shared, _STRADDLED, top=half / 3 if row_points > 6 else -half)  # a strip, so that the state shows


def _legend(rows: Sequence[MapRow]) -> list[Any]:
    from matplotlib.patches import Patch

    handles = [
        Patch(color=_COMMITTED, label="committed"),
        Patch(color=_BACKED, label="backed, not committed"),
    ]
    handles.append(Patch(color=_RESERVED, label="addresses only"))
    if any(row.chunk_borders for row in rows):
        handles.append(Patch(facecolor=_BORDER, edgecolor="#9aa5ad", label="chunk border (white line)"))
    if any(row.straddled for row in rows):
        handles.append(Patch(color=_STRADDLED, label="granule shared by segments"))
    return handles


def _set_time_scale(axes: Any, times: Sequence[float]) -> None:
    """Choose a logarithmic axis where the longest stage would hide the others."""
    longest = max(times)
    shortest = min((time for time in times if time > 0), default=longest)
    if longest > 50 * shortest > 0:
        low, high = math.log10(shortest), math.log10(longest)
        axes.set_xscale("log")
        axes.set_xlim(10 ** (low - 0.15 * (high - low)), 10 ** (high + 0.35 * (high - low)))
        axes.set_xlabel("time of the stage (ms, logarithmic)")
    else:
        axes.set_xlim(0, (longest or 1) * 1.32)
        axes.set_xlabel("time of the stage (ms)")


def _duration(milliseconds: float) -> str:
    if milliseconds >= 1000:
        return f"{milliseconds / 1000:.3g} s"
    return f"{milliseconds:.3g} ms"


def _unit(largest: float) -> tuple[str, int]:
    return next(((name, size) for name, size in _UNITS if largest >= size), ("bytes", 1))


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(figure: Any, path: str | Path) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    # no date in the file, so that the same data gives the same bytes
    metadata = {"Date": None} if Path(path).suffix == ".svg" else {}
    figure.savefig(path, dpi=150, facecolor="white", metadata=metadata)
