"""The records of `benchmarks/connector_proof.py`, from runs that are made up: the device is rented."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import connector_proof
from connector_proof import connector_records, default_records, pair_records

OUTPUTS = [{"tokens": [301, 302], "logprobs": [[[301, -0.5], [9, -1.5]], [[302, -0.25], [9, -2.5]]]}]
POOL = {"reservations": [{"handle_kind": "fd+rdma"}], "chunks": [{}], "segments": [{}]}
FABRIC = POOL | {"reservations": [{"handle_kind": "fabric"}]}


def run(gb_per_s: float, *snapshots: dict[str, Any] | None) -> dict[str, Any]:
    """One snapshot for both engines, or that of the prefilling and that of the decoding one."""
    moved = {"outputs": OUTPUTS, "moved": [[10**9, 1 / gb_per_s]]}
    started = [{"error": None, "snapshot": snapshots[n % len(snapshots)]} for n in range(2)]
    return {"error": None, "started": started, "small": moved, "large": moved, "exits": [0, 0]}


def records(items: Any) -> dict[str, Any]:
    found = {item["name"].removeprefix("nixl_one_gpu_"): item for item in items}
    assert all(item["unit"] == "" or item["value"] > 0 for item in found.values())
    return found


def failed(found: dict[str, Any]) -> set[str]:
    return {name for name, item in found.items() if item["passed"] is False}


def test_name_of_no_connector_is_refused_before_an_engine_starts() -> None:
    with pytest.raises(ValueError, match="no V2_LBHNC among OffloadingConnector.*napping"):
        next(connector_records({}, Path("log"), ["stock", "V2_LBHNC"]))


def test_pair_with_the_extensible_cache_is_held_to_the_one_without() -> None:
    found = records(pair_records("one_gpu", run(0.5, POOL), run(250, None), OUTPUTS))
    assert failed(found) == set()
    assert found["bandwidth_flag_vs_stock"]["value"] == pytest.approx(0.002)
    assert found["bandwidth_flag_vs_stock"]["limit"] is None  # without fabric handles
    found = records(pair_records("one_gpu", run(0.5, FABRIC), run(250, None), OUTPUTS))
    assert failed(found) == {"bandwidth_flag_vs_stock"}


def test_pair_that_fell_back_is_told_and_the_rest_still_runs() -> None:
    found = records(pair_records("one_gpu", run(250, None), run(250, None), OUTPUTS))
    assert failed(found) == {"flag_has_the_extensible_cache"}


UNMAPPED, DECODES = "default_prefills_from_what_can_be_mapped", "default_decodes_into_the_extensible_cache"


@pytest.mark.parametrize(
    ("rate", "prefills", "decodes", "rdma", "bad"),
    [
        (200, None, POOL, False, set()),
        (200, FABRIC, FABRIC, False, set()),
        (200, None, None, False, {DECODES}),
        (200, POOL, POOL, False, {UNMAPPED}),
        (200, POOL, POOL, True, set()),
        (200, None, None, True, set()),  # its adapter cannot reach reserved memory
        (0.5, POOL, POOL, True, {"bandwidth_default_vs_stock"}),
    ],
)
def test_switch_alone_is_not_far_slower_and_has_what_can_be_had(
    monkeypatch: pytest.MonkeyPatch, rate: float, prefills: Any, decodes: Any, rdma: bool, bad: set[str]
) -> None:
    monkeypatch.setattr(connector_proof, "has_rdma", lambda: rdma)
    found = records(default_records("one_gpu", run(rate, prefills, decodes), run(250, None), OUTPUTS))
    assert failed(found) == bad
    kind = found["bandwidth_default_vs_stock"]["note"]
    assert kind == (prefills["reservations"][0]["handle_kind"] if prefills else "vLLM's normal cache")
