"""The start-up table, the report's file, and the way of its figures into the front end's metrics."""

import json
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_integration import report
from vllm_integration.start_table import format_table, start_table

pytestmark = pytest.mark.vllm

MIB = 1 << 20
sizes = st.integers(0, 1 << 38)


def measured(**changes: Any) -> dict[str, Any]:
    return {
        "explicit": False,
        "requested_bytes": 1000 * MIB,
        "weights_bytes": 300 * MIB,
        "warm_up_bytes": 20 * MIB,
        "widest_step_bytes": 100 * MIB,
        "widest_step_ran": True,
        "used_bytes": 470 * MIB,
        "margin_bytes": 30 * MIB,
        "set_aside_bytes": 0,
        "stock_bytes": 550 * MIB,
        "stock_peak_activation_bytes": 90 * MIB,
    } | changes


def test_table_shows_estimate_against_measurement() -> None:
    rows = {
        row["part"]: (row["stock_bytes"], row["measured_bytes"]) for row in start_table(measured(), 490 * MIB)
    }
    assert rows == {
        "weights": (300 * MIB, 300 * MIB),
        "other": (60 * MIB, 50 * MIB),
        "graphs and warm-up": (None, 20 * MIB),
        "widest step": (90 * MIB, 100 * MIB),
        "margin": (None, 30 * MIB),
        "KV cache": (550 * MIB, 490 * MIB),
        "unused": (None, 10 * MIB),
    }


@given(
    sizes,
    sizes,
    st.integers(-(1 << 30), 1 << 38),
    st.integers(-(1 << 30), 1 << 38),
    sizes,
    sizes,
    sizes,
    sizes,
    sizes,
)
def test_table_of_any_figures_adds_up_to_what_was_requested(
    requested: int,
    weights: int,
    graphs: int,
    widest: int,
    used: int,
    aside: int,
    stock: int,
    peak: int,
    kv: int,
) -> None:
    figures = measured(
        requested_bytes=requested,
        weights_bytes=weights,
        warm_up_bytes=graphs,
        widest_step_bytes=widest,
        used_bytes=used,
        set_aside_bytes=aside,
        stock_bytes=stock,
        stock_peak_activation_bytes=peak,
    )
    rows = start_table(figures, kv)
    for source in ("stock_bytes", "measured_bytes"):
        assert sum(row[source] or 0 for row in rows) == requested
    assert all(row["measured_bytes"] >= 0 for row in rows if row["part"] not in ("other", "unused"))


@pytest.mark.parametrize(
    ("explicit", "told"),
    [
        (False, "where 1000.0 MiB requested go on rank 0"),
        (True, "where 1.14 GiB held with the cache's size as asked for go on rank 0"),
    ],
)
def test_log_names_what_the_table_divides(
    caplog: pytest.LogCaptureFixture, explicit: bool, told: str
) -> None:
    kv = (700 if explicit else 490) * MIB
    figures = measured(explicit=explicit) | {"rank": 0, "blocks": 9, "bytes_per_block": MIB}
    figures |= dict.fromkeys(("reserved_bytes", "capacity_blocks", "num_segments"), 9)
    figures |= {"prefix_blocks": 1, "prefix_bytes": MIB}
    rank = {"rank": 0, "measured": figures, "table": start_table(figures, kv)}
    rank |= {"physical_bytes": kv, "commit_seconds": 0.5}
    asked_for = "kv_cache_memory_bytes" if explicit else None
    with caplog.at_level("INFO", logger=report.logger.name):
        report.logger.addHandler(caplog.handler)
        try:
            report.tell({"blocks": 9, "tokens": 144, "seconds": 1.5, "ranks": [rank], "asked_for": asked_for})
        finally:
            report.logger.removeHandler(caplog.handler)
    assert told in caplog.text
    stock = "vLLM's profile, graphs not counted, allowed 550 blocks"
    tail = "kv_cache_memory_bytes asked for that" if explicit else stock
    assert f"in 0.500 s; {tail}. Ready after 1.50 s." in caplog.text


def test_table_of_explicit_size_leaves_out_what_vllm_did_not_profile() -> None:
    rows = {row["part"]: row for row in start_table(measured(explicit=True), 700 * MIB)}
    assert "unused" not in rows
    assert rows["other"]["stock_bytes"] is rows["widest step"]["stock_bytes"] is None
    assert rows["margin"]["measured_bytes"] is None
    assert rows["widest step"]["measured_bytes"] == 100 * MIB
    rows = {r["part"]: r for r in start_table(measured(explicit=True, widest_step_ran=False), 700 * MIB)}
    assert rows["widest step"]["measured_bytes"] is None  # a CPU's, which nobody runs for such a size


def test_table_lines_are_aligned() -> None:
    lines = format_table(start_table(measured(requested_bytes=4000 * MIB), 3000 * MIB))
    assert len({len(line) for line in lines}) == 1
    assert lines[1].split() == ["weights", "300.0", "MiB", "300.0", "MiB"]
    assert lines[3].split() == ["graphs", "and", "warm-up", "-", "20.0", "MiB"]


@pytest.mark.parametrize(("engine", "name"), [(0, "start.json"), (1, "start.engine1.json")])
def test_report_is_written_whole(tmp_path: Path, engine: int, name: str) -> None:
    (tmp_path / name).write_text("old")
    report.write({"engine": engine, "blocks": 7}, str(tmp_path / "start.json"))
    assert json.loads((tmp_path / name).read_text()) == {"engine": engine, "blocks": 7}
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("engine", [0, 1])
def test_report_makes_the_folder_it_is_written_to(tmp_path: Path, engine: int) -> None:
    folder = tmp_path / "missing" / "too"
    for blocks in (7, 8):  # the folder may be there as well
        report.write({"engine": engine, "blocks": blocks}, str(folder / "start.json"))
        (written,) = folder.iterdir()
        assert json.loads(written.read_text()) == {"engine": engine, "blocks": blocks}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("file/start.json", "Not a directory"),
        ("file/missing/start.json", "Not a directory"),
        ("a\0b", "null byte"),
        ("x" * 300, "File name too long"),
        ("/", ""),
    ],
)
@pytest.mark.parametrize("engine", [0, 1])
def test_report_that_cannot_be_written_is_only_a_warning(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    why: str,
    engine: int,
) -> None:
    import logging

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    (tmp_path / "file").write_text("")
    path = name if name == "/" else f"{tmp_path}/{name}"
    report.write({"engine": engine}, path)
    assert f"the report could not be written to {path!r}: " in caplog.text
    assert why in caplog.text
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def ready_response() -> Any:
    """vLLM's own message, with a value for every field that has no default."""
    import dataclasses

    from vllm.v1.engine import EngineCoreReadyResponse

    values = {"int": 3, "str": "x", "bool": False, "str | None": None}
    fields = [f for f in dataclasses.fields(EngineCoreReadyResponse) if f.default is dataclasses.MISSING]
    return EngineCoreReadyResponse(
        **{
            f.name: values[f.type if isinstance(f.type, str) else getattr(f.type, "__name__", str(f.type))]
            for f in fields
        }
    )


def figures(rank: int, blocks: int) -> dict[str, Any]:
    names = ("capacity_blocks", "capacity_bytes", "committed_blocks", "committed_bytes", "physical_bytes")
    sizes = {name: blocks + i for i, name in enumerate(names)}
    return {
        "rank": rank,
        **sizes,
        "commit_seconds": 0.5,
        "table": start_table(measured(), 490 * MIB),
        "more": [],
    }


def test_figures_cross_in_the_ready_message() -> None:
    """Through vLLM's own encoding, into gauges; and a front end without the plugin reads the same message."""
    import msgspec
    from prometheus_client import REGISTRY
    from vllm.v1.engine import EngineCoreReadyResponse

    from vllm_integration import metrics

    response = ready_response()
    core = types.SimpleNamespace(_ekv_report={"ranks": [figures(0, 100), figures(1, 200)]})
    sent = metrics.wrap_make_ready_response(lambda self: response)(core)
    payload = msgspec.msgpack.encode(sent)
    assert msgspec.msgpack.decode(payload, type=EngineCoreReadyResponse) == response

    model = types.SimpleNamespace(served_model_name="crossing")
    client = types.SimpleNamespace(vllm_config=types.SimpleNamespace(model_config=model))
    applied: list[bytes] = []
    apply = metrics.wrap_apply_ready_response(lambda self, payload: applied.append(payload))
    for _ in range(2):  # an engine that comes back overwrites
        apply(client, payload)
    apply(client, b"")
    assert applied == [payload, payload, b""]
    labels = {"model_name": "crossing", "engine": str(response.data_parallel_rank)}
    for rank, blocks in ((0, 100), (1, 200)):
        here = labels | {"rank": str(rank)}
        assert REGISTRY.get_sample_value("extensible_kv:capacity_blocks", here) == blocks
        assert REGISTRY.get_sample_value("extensible_kv:physical_bytes", here) == blocks + 4
        assert REGISTRY.get_sample_value("extensible_kv:commit_seconds", here) == 0.5
        row = here | {"part": "widest step", "source": "measured"}
        assert REGISTRY.get_sample_value("extensible_kv:memory_bytes", row) == 100 * MIB


def test_ready_message_without_the_cache_is_vllms_own() -> None:
    from vllm_integration import metrics

    response = ready_response()
    assert metrics.wrap_make_ready_response(lambda self: response)(types.SimpleNamespace()) is response


@pytest.mark.parametrize("path", ["", 3, True])
def test_option_report_that_is_no_path_is_refused(path: Any) -> None:
    from vllm_integration.config import Options

    with pytest.raises(ValueError, match="report must be a path"):
        Options(report=path)
