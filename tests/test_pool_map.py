"""The map of a pool: rows against a byte-by-byte model, and pictures that show what they should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator import extensible_kv_pool
from allocator.errors import PoolValueError
from allocator.plots import plot_pool_map, plot_stages
from allocator.pool_map import format_bytes, rows_of, straddled_granules

COLOURS = {"committed": "1f6f8b", "backed": "8cc5d6", "reserved": "e6eaed", "straddled": "e07b00"}


@st.composite
def snapshots(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a snapshot of one or two reservations with any segments and any chunks of whole granules."""
    granularity = draw(st.sampled_from([8, 16]))
    reservations, segments, chunks = [], [], []
    blocks = draw(st.integers(1, 6))
    for index in range(draw(st.integers(1, 2))):
        offset = 0
        for _ in range(draw(st.integers(1, 6))):
            offset += draw(st.sampled_from([0, 0, 3, 20]))
            stride = draw(st.integers(1, 12))
            segments.append(
                {
                    "reservation": index,
                    "offset": offset,
                    "block_stride": stride,
                    "size_bytes": stride * blocks,
                }
            )
            offset += stride * blocks
        granules = -(-offset // granularity)
        reservations.append({"granularity": granularity})
        start = 0
        while start < granules:
            length = draw(st.integers(1, 4))
            end = min(start + length, granules)
            if draw(st.booleans()):
                size = (end - start) * granularity
                chunks.append({"reservation": index, "offset": start * granularity, "size": size})
            start = end
    return {
        "committed_blocks": draw(st.integers(0, blocks)),
        "reservations": reservations,
        "segments": draw(st.permutations(segments)),
        "chunks": draw(st.permutations(chunks)),
    }


@settings(max_examples=300, deadline=None)
@given(snapshots())
def test_rows_of_any_snapshot_match_the_bytes(snapshot: dict[str, Any]) -> None:
    """Invariants 1 and 2, drawn: what is committed, what is backed, and which granules two segments share."""
    rows = rows_of(snapshot)
    assert len(rows) == len(snapshot["segments"])
    for index, reservation in enumerate(snapshot["reservations"]):
        mine = [row for row in rows if row.reservation == index]
        granularity = reservation["granularity"]
        size = 2000
        chunk_of, owners = np.full(size, -1), np.zeros((len(mine), size), dtype=bool)
        for number, chunk in enumerate(snapshot["chunks"]):
            if chunk["reservation"] == index:
                chunk_of[chunk["offset"] : chunk["offset"] + chunk["size"]] = number
        for row in mine:
            owners[row.index, row.offset : row.offset + row.size_bytes] = True
        per_granule = owners.reshape(len(mine), -1, granularity).any(axis=2).sum(axis=0)
        shared = np.repeat(per_granule > 1, granularity)
        for row in mine:
            here = chunk_of[row.offset : row.offset + row.size_bytes]
            assert (marked(row.backed, row.size_bytes) == (here >= 0)).all()
            assert list(row.chunk_borders) == (np.flatnonzero(np.diff(here)) + 1).tolist()
            expected = shared[row.offset : row.offset + row.size_bytes]
            assert (marked(row.straddled, row.size_bytes) == expected).all()


def marked(spans: tuple[tuple[int, int], ...], size: int) -> np.ndarray:
    result = np.zeros(size, dtype=bool)
    for start, end in spans:
        assert 0 <= start < end <= size and not result[start:end].any()
        result[start:end] = True
    return result


def test_straddled_granules_many_segments_in_one_granule_list_it_once() -> None:
    assert straddled_granules([(0, 3), (3, 3), (6, 3), (16, 8)], 8) == [0]


@pytest.mark.parametrize("missing", ["segments", "chunks", "committed_blocks", "reservations"])
def test_rows_of_incomplete_snapshot_names_the_field(missing: str) -> None:
    snapshot = real_snapshot()
    del snapshot[missing]
    with pytest.raises(PoolValueError, match=missing):
        rows_of(snapshot)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (2 << 20, "2 MiB"),
        (3 << 30, "3 GiB"),
        (2 << 40, "2 TiB"),
    ],
)
def test_format_bytes_picks_the_readable_unit(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def real_snapshot(
    layers: int = 2, blocks: int = 64, commit: int = 32, chunk_bytes: int = 0
) -> dict[str, Any]:
    """Snapshot of a real pool on the host driver; layers are 100 KiB short of whole granules."""
    block_bytes = (8 << 20) // blocks - (100 << 10) // blocks
    with extensible_kv_pool("cpu", max_chunk_bytes=chunk_bytes) as pool:
        buffer = torch.zeros(layers, blocks, block_bytes, dtype=torch.int8)
    pool.bind(buffer, 1)
    pool.commit(2)
    pool.commit(commit)
    snapshot = pool.snapshot()
    pool.free()
    return json.loads(json.dumps(snapshot))


def test_rows_of_real_pool_add_up_to_its_physical_bytes() -> None:
    """Invariant 6: the chunks of the map are what the driver was asked for."""
    snapshot = real_snapshot()
    rows = rows_of(snapshot)
    assert [row.committed_bytes for row in rows] == [
        32 * item["block_stride"] for item in snapshot["segments"]
    ]
    assert sum(chunk["size"] for chunk in snapshot["chunks"]) == snapshot["physical_bytes"]
    assert all(row.straddled for row in rows)


def test_rows_of_released_pool_show_nothing_committed() -> None:
    with extensible_kv_pool("cpu") as pool:
        buffer = torch.zeros(4, 1 << 20, dtype=torch.int8)
    pool.bind(buffer)
    pool.commit(4)
    pool.release_physical()
    rows = rows_of(pool.snapshot())
    assert [(row.committed_bytes, row.backed) for row in rows] == [(0, ())]
    pool.free()


def pixels(path: Path) -> dict[str, np.ndarray]:
    """Where each colour of the map is in the picture."""
    import matplotlib.image

    image = (matplotlib.image.imread(path)[:, :, :3] * 255).round().astype(int)
    wanted = {name: [int(code[i : i + 2], 16) for i in (0, 2, 4)] for name, code in COLOURS.items()}
    return {name: (np.abs(image - colour).max(axis=2) <= 2) for name, colour in wanted.items()}


def test_plot_pool_map_half_committed_shows_half_of_the_row(tmp_path: Path) -> None:
    plot_pool_map(real_snapshot(layers=1), tmp_path / "map.png")
    found = pixels(tmp_path / "map.png")
    row = np.argmax(found["committed"].sum(axis=1))
    committed, others = (
        found["committed"][row].sum(),
        found["backed"][row].sum() + found["reserved"][row].sum(),
    )
    assert 0.47 < committed / (committed + others) < 0.53


def test_plot_pool_map_shared_granule_is_marked(tmp_path: Path) -> None:
    plot_pool_map(real_snapshot(layers=3), tmp_path / "shared.png")
    assert pixels(tmp_path / "shared.png")["straddled"].sum() > 100


def test_plot_pool_map_same_snapshot_gives_the_same_svg(tmp_path: Path) -> None:
    snapshot = real_snapshot(chunk_bytes=2 << 20)
    for name in ("a.svg", "b.svg"):
        plot_pool_map(snapshot, tmp_path / name, title="twice")
    assert (tmp_path / "a.svg").read_text() == (tmp_path / "b.svg").read_text()
    assert (tmp_path / "a.svg").stat().st_size > 1000


def test_plot_pool_map_640_segments_stays_a_picture(tmp_path: Path) -> None:
    snapshot = real_snapshot(layers=4)
    stride, size = 4096, 4096 * 64
    snapshot["segments"] = [
        {"reservation": 0, "offset": i * size, "block_stride": stride, "size_bytes": size} for i in range(640)
    ]
    snapshot["chunks"] = [{"reservation": 0, "offset": i << 21, "size": 1 << 21} for i in range(40)]
    plot_pool_map(snapshot, tmp_path / "many.png")
    import matplotlib.image

    height, width, _ = matplotlib.image.imread(tmp_path / "many.png").shape
    assert height <= 1.1 * width


def test_plot_pool_map_nothing_bound_raises(tmp_path: Path) -> None:
    snapshot = real_snapshot() | {"segments": [], "chunks": []}
    with pytest.raises(PoolValueError, match="0 segments"):
        plot_pool_map(snapshot, tmp_path / "map.png")
    assert not (tmp_path / "map.png").exists()


@pytest.mark.parametrize("longest", [0.0, 0.05, 30.0])
def test_plot_stages_bars_are_proportional_to_memory(longest: float, tmp_path: Path) -> None:
    """With times alike, far apart (logarithmic axis) and all zero."""
    sizes = [0, 1 << 30, 4 << 30]
    stages = [
        {"stage": f"s{i}", "committed_blocks": i, "physical_bytes": size, "seconds": longest / (1 + i * 1000)}
        for i, size in enumerate(sizes)
    ]
    plot_stages(stages, tmp_path / "stages.png", title="start")
    widths = pixels(tmp_path / "stages.png")["committed"].sum(axis=1)
    half, full = sorted({int(width) for width in widths if width > 10})
    assert 0.24 < half / full < 0.26


def test_plot_stages_none_raises(tmp_path: Path) -> None:
    with pytest.raises(PoolValueError, match="0 stages"):
        plot_stages([], tmp_path / "stages.png")
