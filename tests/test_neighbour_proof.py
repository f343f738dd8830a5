"""The records of `benchmarks/neighbour_proof.py`, from runs that are made up: the device is rented."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import neighbour_proof

from vllm_integration.stages import Stages

GIB = 1 << 30
TOKENS = [{"tokens": [301, 302], "logprobs": [{"301": -0.5}, {"302": -0.25}]}]


def engine(
    used_gib: float, blocks: int = 900, log: tuple[str, ...] = (), committed: int | None = None
) -> dict[str, Any]:
    """Answer as an engine would on a device of 100 GiB, which lost `used_gib` at the most in its load."""
    load = {"error": None, "steps": 9, "began": 10.0, "ended": 20.0}
    report = {"committed_blocks": committed or blocks, "measured": {"blocks": 1000}}
    figures = {"num_gpu_blocks": blocks, "device_total_bytes": 100 * GIB}
    moments = [[5.0, [99 * GIB]], [12.0, [int(used_gib * GIB)]], [15.0, [GIB]], [25.0, [99 * GIB]]]
    return {
        "error": None,
        "results": [TOKENS, load, [report], figures],
        "log": [f"Extensible KV cache: {line}" for line in log],
        "use": {"moments": moments},
    }


def told(*stages: str, held_gib: float = 0) -> list[dict[str, Any]]:
    return [{"stage": s, "bytes": int(held_gib * GIB), "context_bytes": GIB // 2} for s in ("first", *stages)]


def failed(run: dict[str, Any], events: list[dict[str, Any]], stages: list[str], short: bool) -> set[str]:
    made = [*neighbour_proof._records("n", run, engine(89, 1000), events, stages, short)]
    assert len(made) == 8
    return {item["name"].removeprefix("neighbour_n_") for item in made if item["passed"] is False}


def test_engine_that_keeps_its_budget_beside_a_neighbour_passes() -> None:
    # Of 120 GiB lost in the load 30.5 are the neighbour's.
    short = engine(120, log=("rank 0 could not back 1000 blocks", "900 blocks committed"))
    assert failed(short, told("measure", held_gib=30), ["measure"], True) == set()
    assert failed(engine(90), told("warm-up"), ["warm-up"], False) == set()


@pytest.mark.parametrize(
    ("run", "events", "name"),
    [
        (engine(90.6), told("warm-up"), "budget_left_gib"),
        (engine(90), told(), "came_and_went"),
        (engine(90, committed=899), told("warm-up"), "blocks_are_committed"),
        (engine(90, blocks=0, committed=0), told("warm-up"), "blocks"),
        (engine(90, log=("rank 0 could not back",)), told("warm-up"), "commit_comes_up_short"),
    ],
)
def test_engine_that_does_not_fails(run: dict[str, Any], events: list[dict[str, Any]], name: str) -> None:
    assert failed(run, events, ["warm-up"], False) == {name}


def test_other_output_or_a_load_that_fails_are_failures() -> None:
    other = engine(90)
    other["results"][0] = [{**TOKENS[0], "tokens": [301, 303]}]
    assert failed(other, told("warm-up"), ["warm-up"], False) == {"tokens_as_alone"}
    broken = engine(90)
    broken["results"][1]["error"] = {"type": "OutOfMemoryError", "text": "CUDA out of memory"}
    assert failed(broken, told("warm-up"), ["warm-up"], False) == {"survives_load"}


def explicit(committed: int, physical: int, tokens: list[int]) -> set[str]:
    """Names of failed records, where vLLM refused to start and an engine with the flag committed so much."""
    pool = {
        "bytes_per_block": 1 << 20,
        "granularity": 2 << 20,
        "segments": [{}] * 4,
        "physical_bytes": physical,
    }
    report = {"committed_blocks": committed, "snapshot": pool}
    flag = {"error": None, "results": [[{"tokens": tokens}], [report], {"num_gpu_blocks": 900}]}
    runs = iter([{"error": {"type": "ValueError", "text": "less than desired"}}, flag])
    asked = []

    def run_engine(llm: dict[str, Any], steps: list[Any], *others: Any) -> dict[str, Any]:
        asked.append((llm["kv_cache_memory_bytes"], len(steps)))
        return next(runs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbour_proof, "run_engine", run_engine)
        made = [*neighbour_proof.explicit_records({}, [{}, {}, {}], Path("log"), {"results": [TOKENS]})]
    assert asked == [(8 << 30, 1), (8 << 30, 3)] and len(made) == 6
    assert made[0]["passed"] is None
    return {r["name"].removeprefix("neighbour_explicit_") for r in made if r["passed"] is False}


def test_explicit_size_is_filled_to_the_granule_and_not_exceeded() -> None:
    slack = (1 << 20) + 4 * (2 << 20)
    assert explicit(900, (8 << 30) - slack, [301, 302]) == set()
    assert explicit(900, (8 << 30) - slack - 1, [301, 302]) == {"bytes_not_used"}
    assert explicit(900, (8 << 30) + 1, [301, 302]) == {"is_not_exceeded"}
    assert explicit(899, 8 << 30, [301, 303]) == {"tokens_as_alone", "blocks_are_committed"}


TORCH = """
import pynvml
class cuda:
    synchronize = empty_cache = staticmethod(lambda: None)
class zeros:
    def __init__(self, size, device, dtype=None):
        self.size = size
        pynvml.free -= size if size > 1 else 600  # the context
    def __del__(self):
        pynvml.free += self.size
int8 = "int8"
"""
PYNVML = """
import types
free = 1000
nvmlInit = lambda: None
nvmlDeviceGetHandleByIndex = lambda index: index
nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(free=free)
"""


class _Pool:
    committed_blocks = physical_bytes = reserved_bytes = 0


def test_neighbour_holds_what_it_is_told_at_the_end_of_each_stage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The neighbour's own process is real, and what it imports is not."""
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "pynvml.py").write_text(PYNVML)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    job = {"first": 7, "after": {"warm-up": 0, "measure": 30}, "events": str(tmp_path / "events")}
    monkeypatch.setenv("EKV_NEIGHBOUR", json.dumps(job))
    neighbour = importlib.import_module("device_neighbour")
    try:
        stages = Stages()
        for name in ("prefix", "warm-up", "measure"):
            with stages.stage(name, _Pool):
                pass
    finally:
        neighbour._LISTENING.__exit__(None, None, None)
        neighbour._PROCESS.communicate(timeout=30)
    assert neighbour._PROCESS.returncode == 0
    told = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    expected = {"first": 7, "warm-up": 0, "measure": 30}
    assert told == [{"stage": s, "bytes": n, "context_bytes": 599} for s, n in expected.items()]
