"""What `PoolController.snapshot()` says, as rows to draw: pure, and shared by the terminal and the plots."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allocator.errors import PoolValueError

__all__ = ["MapRow", "format_bytes", "rows_of", "snapshot_in", "straddled_granules", "summary_of"]


@dataclass(frozen=True)
class MapRow:
    """One segment. All positions are bytes from the segment's own start.

    Attributes
    ----------
    reservation, index : int
        Which reservation of the pool, and which segment of it.
    offset, size_bytes : int
        Start in the reservation, and bytes at full capacity.
    committed_bytes : int
        Length of the committed prefix.
    backed : tuple of (int, int)
        `(start, end)` of each chunk, cut to this segment.
    chunk_borders : tuple of int
        Where a chunk starts or ends inside this segment.
    straddled : tuple of (int, int)
        `(start, end)`, cut to this segment, of granules that hold bytes of another segment too.
    """

    reservation: int
    index: int
    offset: int
    size_bytes: int
    committed_bytes: int
    backed: tuple[tuple[int, int], ...]
    chunk_borders: tuple[int, ...]
    straddled: tuple[tuple[int, int], ...]


def rows_of(snapshot: Mapping[str, Any]) -> list[MapRow]:
    """Return the rows of `PoolController.snapshot()`, by reservation and offset.

    Raises
    ------
    PoolValueError
        `snapshot` lacks a field; the message names it.
    """
    try:
        return [row for index in range(_num_reservations(snapshot)) for row in _rows(snapshot, index)]
    except (KeyError, TypeError) as error:
        raise _no_snapshot(error) from None


def snapshot_in(data: Any, rank: int = 0) -> Any:
    """Return the snapshot of `rank` in what an engine said of its workers; a snapshot is returned as it is.

    `data` is an engine's report (``{"ranks": [{"rank", "snapshot"}, ...]}``), the answer of its server to a
    ``/collective_rpc`` (``{"results": [snapshot, ...]}``), or the list in it; of `ekv_report` as of
    `ekv_snapshot`.

    Raises
    ------
    PoolValueError
        There is no such rank with a pool; the message names those that there are.
    """
    if isinstance(data, Mapping) and isinstance(data.get("ranks"), list):
        several = data["ranks"]
    elif isinstance(data, Mapping) and isinstance(data.get("results"), list):
        several = data["results"]
    elif isinstance(data, list):
        several = data
    else:
        return data
    several = [entry.get("snapshot", entry) for entry in several if isinstance(entry, Mapping)]
    found = {entry.get("rank"): entry for entry in several if isinstance(entry, Mapping)}
    if rank not in found:
        ranks = ", ".join(str(name) for name in found) or "none"
        raise PoolValueError(f"there is no pool snapshot of rank {rank}; there are: {ranks}")
    return found[rank]


def summary_of(snapshot: Mapping[str, Any]) -> str:
    """Return one line with the sums of `PoolController.snapshot()`. Raises as `rows_of` does."""
    try:
        backed, reserved = format_bytes(snapshot["physical_bytes"]), format_bytes(snapshot["reserved_bytes"])
        return (
            f"{snapshot['device']} ({snapshot['driver']} driver): {snapshot['committed_blocks']:,} of "
            f"{snapshot['capacity_blocks']:,} blocks committed, {backed} of {reserved} backed, "
            f"{_count(snapshot['segments'], 'segment')}, {_count(snapshot['chunks'], 'chunk')}"
        )
    except (KeyError, TypeError) as error:
        raise _no_snapshot(error) from None


def _no_snapshot(error: KeyError | TypeError) -> PoolValueError:
    what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
    return PoolValueError(f"this is no pool snapshot, which json.dump(pool.snapshot(), file) writes: {what}")


def straddled_granules(segments: list[tuple[int, int]], granularity: int) -> list[int]:
    """Return the offsets of granules that hold bytes of two or more segments, sorted `(offset, size)`."""
    found: list[int] = []
    covered = 0  # end of the last granule that an earlier segment touches
    for offset, size in segments:
        first = offset - offset % granularity
        if size and first < covered and (not found or found[-1] != first):
            found.append(first)
        covered = max(covered, offset + size + -(offset + size) % granularity)
    return found


def format_bytes(num_bytes: float) -> str:
    """Return `num_bytes` in the binary unit that reads best, such as "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


def _count(items: Sequence[object], noun: str) -> str:
    return f"{len(items):,} {noun}{'' if len(items) == 1 else 's'}"


def _num_reservations(snapshot: Mapping[str, Any]) -> int:
    used = [item["reservation"] for item in snapshot["segments"]]
    return max([*used, len(snapshot["reservations"]) - 1], default=-1) + 1


def _rows(snapshot: Mapping[str, Any], reservation: int) -> list[MapRow]:
    granularity = snapshot["reservations"][reservation]["granularity"]
    committed_blocks = snapshot["committed_blocks"]
    items = [item for item in snapshot["segments"] if item["reservation"] == reservation]
    items.sort(key=lambda item: item["offset"])
    chunks = sorted(
        (chunk["offset"], chunk["offset"] + chunk["size"])
        for chunk in snapshot["chunks"]
        if chunk["reservation"] == reservation
    )
    starts, ends = [start for start, _ in chunks], [end for _, end in chunks]
    shared = straddled_granules([(item["offset"], item["size_bytes"]) for item in items], granularity)
    rows = []
    for index, item in enumerate(items):
        low, high = item["offset"], item["offset"] + item["size_bytes"]
        # chunks do not overlap, so both their starts and their ends are sorted
        inside = chunks[bisect.bisect_right(ends, low) : bisect.bisect_left(starts, high)]
        borders = {edge - low for chunk in inside for edge in chunk if low < edge < high}
        near = shared[bisect.bisect_right(shared, low - granularity) : bisect.bisect_left(shared, high)]
        rows.append(
            MapRow(
                reservation=reservation,
                index=index,
                offset=low,
                size_bytes=high - low,
                committed_bytes=min(committed_blocks * item["block_stride"], high - low),
                backed=tuple((max(start, low) - low, min(end, high) - low) for start, end in inside),
                chunk_borders=tuple(sorted(borders)),
                straddled=tuple(
                    (max(start, low) - low, min(start + granularity, high) - low) for start in near
                ),
            )
        )
    return rows
