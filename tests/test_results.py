"""The results schema: what it computes, what it refuses, and every file of this repository."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator import results
from allocator.machine import describe_hardware, describe_versions

REPOSITORY = Path(__file__).resolve().parent.parent
FILES = sorted(REPOSITORY.glob("benchmarks/results/**/*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_read_file_of_this_repository_is_valid(path: Path) -> None:
    results.read(path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file_of_this_repository_says_which_side_is_better(path: Path) -> None:
    """Also where there is no limit: of rates, tokens and what is left, more is better."""
    for item in results.read(path)["records"]:
        left = "budget_left" in item["name"] and item["limit"] is None
        if item["unit"] in ("GB/s", "GiB/s", "tokens", "blocks") or left:
            assert item["better"] != "lower", item["name"]


def sample() -> dict[str, Any]:
    return results.build(
        [
            results.record(
                "commit 4 GiB", 41.5, "ms", limit=60, repeats=5, spread=3.25, note="rested device"
            ),
            results.record("blocks", 71_845, "blocks", limit=71_598, better="higher"),
            results.record("tokens", "identical", "", limit="identical", better="equal"),
            results.record("free after start", 1 << 30, "bytes"),
        ],
        command="bench --repeats 5",
    )


@pytest.mark.parametrize(
    ("value", "limit", "better", "passed"),
    [
        (1, 1, "lower", True),
        (1.1, 1, "lower", False),
        (1, 1, "higher", True),
        (0.9, 1, "higher", False),
        (3, 3, "equal", True),
        (3, 4, "equal", False),
        ("a", "a", "equal", True),
        ("a", "b", "equal", False),
        (True, True, "equal", True),
        (5, None, "higher", None),
    ],
)
def test_record_value_and_limit_decide_passed(
    value: Any, limit: Any, better: str, passed: bool | None
) -> None:
    assert results.record("x", value, "", limit=limit, better=better)["passed"] is passed


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=20))
def test_from_samples_any_samples_keep_median_number_and_spread(samples: list[float]) -> None:
    item = results.from_samples("x", samples, "ms")
    assert min(samples) <= item["value"] <= max(samples)
    assert item["repeats"] == len(samples)
    assert item["spread"] == (max(samples) - min(samples) if len(samples) > 1 else None)


def test_from_samples_none_raises() -> None:
    with pytest.raises(results.ResultsError, match="0 samples"):
        results.from_samples("x", [], "ms")


def test_write_then_read_returns_the_same(tmp_path: Path) -> None:
    data = sample()
    results.write(tmp_path / "deep" / "run.json", data)
    assert results.read(tmp_path / "deep" / "run.json") == data


def test_write_invalid_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    results.write(path, sample())
    before = path.read_text()
    with pytest.raises(results.ResultsError):
        results.write(path, sample() | {"date": "yesterday"})
    assert path.read_text() == before


def test_read_not_json_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(results.ResultsError, match=r"run\.json is not JSON"):
        results.read(tmp_path / "run.json")


@pytest.mark.parametrize("field", ["date", "command", "hardware", "versions", "commit", "records"])
def test_validate_missing_field_is_named(field: str) -> None:
    data = sample()
    del data[field]
    with pytest.raises(results.ResultsError, match=rf"^file\.{field}: missing"):
        results.validate(data)


@pytest.mark.parametrize(
    "field", ["name", "value", "unit", "limit", "better", "passed", "repeats", "spread", "note"]
)
def test_validate_missing_record_field_is_named(field: str) -> None:
    data = sample()
    del data["records"][1][field]
    with pytest.raises(results.ResultsError, match=rf"^records\[1\]\.{field}: missing"):
        results.validate(data)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("date", "2024-13-01"),
        ("date", "2024-12-01T00:00:00"),
        ("date", 5),
        ("command", ""),
        ("command", "python /data/bench.py"),
        ("hardware", None),
        ("commit", None),
        ("versions", {"torch": "2"}),
        ("versions", {"python": 3}),
        ("versions", []),
        ("records", []),
        ("records", {}),
        ("extra", 1),
    ],
)
def test_validate_wrong_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(results.ResultsError, match=rf"^file\.{field}"):
        results.validate(sample() | {field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("value", None),
        ("value", float("nan")),
        ("value", float("inf")),
        ("value", "fast"),
        ("unit", None),
        ("limit", "60"),
        ("better", "faster"),
        ("passed", False),
        ("passed", None),
        ("passed", 1),
        ("repeats", 0),
        ("repeats", 2.0),
        ("spread", -1),
        ("spread", "3"),
        ("note", "see /data/log/x"),
        ("extra", 1),
    ],
)
def test_validate_wrong_record_field_is_named(field: str, value: Any) -> None:
    data = sample()
    data["records"][0][field] = value
    with pytest.raises(results.ResultsError, match=rf"^records\[0\]\.{field}"):
        results.validate(data)


def test_validate_two_records_of_one_name_raise() -> None:
    data = sample()
    data["records"].append(copy.deepcopy(data["records"][0]))
    with pytest.raises(results.ResultsError, match="2 records have the name 'commit 4 GiB'"):
        results.validate(data)


def test_build_default_command_holds_no_path_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/bench", "--out", "benchmarks/results/x y.json"])
    data = results.build([results.record("x", 1, "")])
    assert data["command"] == "bench --out 'benchmarks/results/x y.json'"


def test_failed_names_records_that_break_their_limit() -> None:
    data = results.build([results.record("a", 2, "", limit=1), results.record("b", 1, "", limit=1)])
    assert results.failed(data) == ["a"]


@pytest.mark.parametrize("rich_installed", [True, False])
def test_print_table_with_or_without_rich_shows_each_record(
    rich_installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    if not rich_installed:
        monkeypatch.setitem(sys.modules, "rich", None)
    out = io.StringIO()
    results.print_table(sample(), file=out)
    for text in ("commit 4 GiB", "41.5", "≤ 60", "71,845", "≥ 71,598", "= identical", "rested device", "ok"):
        assert text in out.getvalue()


def test_describe_machine_fills_every_part() -> None:
    assert "cores" in describe_hardware()
    versions = describe_versions()
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"torch", "cffi"} <= versions.keys()


def test_import_results_loads_neither_torch_nor_driver() -> None:
    """Invariant 10: reading results must work where nothing but Python is installed."""
    code = "import sys, allocator.results; sys.exit('torch' in sys.modules or 'rich' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY)
