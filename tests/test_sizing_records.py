"""What `benchmarks/sizing_proof.py` makes of an engine's answer: which limits hold, and which must not."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import sizing_proof
from sizing_configurations import CONFIGURATIONS, Configuration

GIB = 1 << 30
PLAIN = Configuration({"layers": 1}, 0.9, {"max_num_batched_tokens": 4096}, {})


def engine(peak_gib: float, load_error: str | None = None, widest: int = 4096) -> dict[str, Any]:
    """Answer as an engine would on a device of 100 GiB that it loaded from second 10 to second 70."""
    load = {"error": load_error and {"type": "OutOfMemoryError", "text": load_error}, "seconds": 60.5}
    load |= {"began": 10.0, "ended": 70.0, "widest_tokens": widest, "steps": 9, "generated_tokens": 99}
    figures = {"kv_cache_size_tokens": 1000, "device_total_bytes": 100 * GIB}
    moments = [[5.0, [95 * GIB]], [30.0, [int(peak_gib * GIB)]], [80.0, [1 * GIB]]]
    use = {"peak_bytes": int(peak_gib * GIB), "moments": moments}
    return {
        "error": None,
        "results": [figures, load, figures],
        "seconds": {"start": 20},
        "log": [],
        "use": use,
    }


def died_at_start(text: str) -> dict[str, Any]:
    error = {"type": "OutOfMemoryError", "text": text}
    return {"error": error, "results": [], "seconds": {"initialize_kv_caches": 9}, "log": [], "use": {}}


def records(
    configuration: Configuration, run: dict[str, Any], flag: bool = False
) -> dict[str, dict[str, Any]]:
    name = "flag" if flag else "stock"
    made = sizing_proof._records(name, configuration, run, 60, flag)
    return {item["name"].removeprefix(f"{name}_"): item for item in made}


def test_flag_within_its_budget_passes_and_beyond_it_fails() -> None:
    kept = records(PLAIN, engine(89.5), flag=True)
    assert all(item["passed"] is not False for item in kept.values())
    assert kept["budget_left_gib"]["value"] == 0.5
    assert kept["peak_in_load_gib"]["value"] == 89.5  # not the 95 before the load
    broken = records(PLAIN, engine(90.5), flag=True)
    assert [name for name, item in broken.items() if item["passed"] is False] == ["budget_left_gib"]


def test_load_that_was_not_as_wide_as_it_could_be_fails() -> None:
    assert records(PLAIN, engine(80, widest=4095), flag=True)["widest_step"]["passed"] is False


@pytest.mark.parametrize(
    ("expected", "passed"), [("start", True), ("load", False), ("", False), (None, None)]
)
def test_stock_that_dies_at_start(expected: str | None, passed: bool | None) -> None:
    configuration = Configuration({}, 0.9, {}, {}, stock=expected)
    made = records(configuration, died_at_start("tried to allocate, see /opt/some/where for more"))
    assert made["starts"]["passed"] is passed
    assert "OutOfMemoryError" in made["starts"]["note"] and "/opt" not in made["starts"]["note"]


@pytest.mark.parametrize(("expected", "passed"), [("load", True), ("", False), (None, None)])
def test_stock_that_dies_under_load(expected: str | None, passed: bool | None) -> None:
    made = records(Configuration({}, 0.9, {}, {}, stock=expected), engine(95, "out of memory"))
    assert made["survives_load"]["passed"] is passed
    assert made["starts"]["passed"] is (None if expected is None else True)
    assert made["budget_left_gib"]["passed"] is None  # of stock vLLM only recorded
    assert records(PLAIN, engine(80, "out of memory"), flag=True)["survives_load"]["passed"] is False


def test_engine_that_fails_in_a_step_has_started() -> None:
    """A device that failed under load refuses the figures after it, and so does one that had none before."""
    configuration = Configuration({}, 0.9, {}, {}, stock="load")
    run = engine(95, "out of memory")
    run |= {"error": {"type": "AcceleratorError", "text": "in step 2: unspecified launch failure"}}
    for results in (run["results"][:2], run["results"][:1]):
        made = records(configuration, run | {"results": results})
        assert made["starts"]["value"] is True and made["starts"]["passed"] is True
        assert made["survives_load"]["value"] is False and made["survives_load"]["passed"] is True
        assert (
            records(configuration, run | {"results": results}, flag=True)["survives_load"]["passed"] is False
        )


def test_configurations_promise_both_ways_for_stock_to_fail() -> None:
    expected = [configuration.stock for configuration in CONFIGURATIONS.values()]
    assert {"start", "load", ""} <= set(expected) and len(expected) >= 6
