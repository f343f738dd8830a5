"""How `benchmarks/pool_bench.py` times commits: one process a sample, and what is made of them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import commit_samples
import pool_bench
from commit_samples import Kind, SampleError, collect, in_child

from allocator import results

TWO = (Kind("stock", None, rounds=None), Kind("default", 0, rounds=2))
STOCK, DEFAULT, GRANULE = [52.0, 40.0, 41.0], [43.0, 30.0, 40.0], [2100.0, 2200.0, 1900.0]
DEFAULT_AGAIN, STOCK_AGAIN = [50.0, 60.0, 55.0], [55.0, 50.0, 50.0]
GRANULE_AGAIN = [2475.0, 2530.0, 2300.0]


@pytest.fixture(autouse=True)
def no_cuda_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget that other tests have started it: no child of these tests uses it."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)


def records(default: list[float] = DEFAULT, device: str = "cuda") -> dict[str, dict[str, Any]]:
    samples = {
        "stock": {"first": STOCK, "again": STOCK_AGAIN},
        "default": {"first": default, "again": DEFAULT_AGAIN, "shrink": [1.0, 3.0, 2.0]},
        **{name: {"first": [9.0, 7.0], "shrink": [5.0]} for name in ("segment", "1gib", "64mib")},
        "granule": {"first": GRANULE, "again": GRANULE_AGAIN},
    }
    return {item["name"]: item for item in pool_bench.commit_records(samples, 100, device)}


def test_dry_run_takes_every_sample_in_a_process_of_its_own(tmp_path: Path) -> None:
    """Over real memory; were the pool used before a fork, the shim would refuse it in the child."""
    file = tmp_path / "pool.json"
    command = [sys.executable, pool_bench.__file__, "--device", "cpu", "--gib", "0.02"]
    process = subprocess.run(
        [*command, "--rounds", "4", "--output", str(file)], capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr[-3000:]
    found = {item["name"]: item for item in results.read(file)["records"]}
    assert {name: item["repeats"] for name, item in found.items()} == {
        "torch_zeros": 4,
        **{f"commit_zero_chunk_{name}": 3 for name in ("segment", "1gib", "64mib", "granule")},
        **{f"shrink_to_half_chunk_{name}": 3 for name in ("segment", "1gib", "64mib")},
        "commit_zero_chunk_default": 4,
        "shrink_to_half_chunk_default": 4,
        "commit_zero_0.02gib_vs_cudamalloc": 4,
        "commit_zero_granule_chunks_over_default": 3,
        "torch_zeros_again": 4,
        "commit_zero_again_chunk_default": 4,
        "commit_zero_again_chunk_granule": 3,
        "commit_zero_again_0.02gib_vs_cudamalloc": 4,
        "commit_zero_again_granule_chunks_over_default": 3,
    }
    assert all(item["value"] > 0 and item["passed"] is None for item in found.values())
    expected = found["commit_zero_chunk_default"]["value"] / found["torch_zeros"]["value"]
    assert found["commit_zero_0.02gib_vs_cudamalloc"]["value"] == pytest.approx(expected)


def test_samples_take_turns_on_a_rested_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(commit_samples.REST_SECONDS, "cpu", 5.0)

    def measure(kind: Kind, num_bytes: int, device: str, rested: float) -> dict[str, float]:
        return {"process": os.getpid(), "rested": rested, "end": time.monotonic()}

    monkeypatch.setattr(commit_samples, "measure", measure)
    start = time.monotonic()
    samples = collect(1 << 20, 3, "cpu", TWO)
    assert [len(samples[name]["end"]) for name in ("stock", "default")] == [3, 2]
    turns = sorted((end, name) for name, of in samples.items() for end in of["end"])
    assert [name for _, name in turns] == ["stock", "default", "default", "stock", "stock"]
    processes = {process for of in samples.values() for process in of["process"]}
    assert len(processes | {os.getpid()}) == 6
    rested = sorted(at for of in samples.values() for at in of["rested"])
    for previous, at in zip([start, *(end for end, _ in turns[:-1])], rested, strict=True):
        assert 5 <= at - previous < 10


def test_rest_ends_when_the_device_has_rested() -> None:
    start = time.monotonic()
    commit_samples._rest(torch.zeros(1), start + 0.2)
    assert 0.2 <= time.monotonic() - start < 2


def test_sample_is_taken_again_in_the_same_process_after_another_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(commit_samples.REST_SECONDS, "cpu", 5.0)
    rests: list[float] = []
    monkeypatch.setattr(commit_samples, "_rest", lambda work, rested: rests.append(rested))
    start = time.monotonic()
    times = commit_samples.measure(Kind("stock", None, again=True, shrink=False), 28 << 10, "cpu", start)
    assert set(times) == {"first", "again"} and rests[0] == start
    assert 5 <= rests[1] - start < 10


def answer_and_die() -> dict[str, float]:
    """In the child: end with another status than the one it asks for."""
    end = os._exit
    os._exit = lambda status: end(5)  # type: ignore[assignment]
    return {"first": 1.0}


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (answer_and_die, "status 5$"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "status -9, no answer"),
        (lambda: 1 / 0, "status 1, no answer"),
        (lambda: os._exit(0), "status 0, no answer"),
        (lambda: time.sleep(60), "did not end in 0.3 s"),
    ],
)
def test_sample_whose_process_dies_or_hangs_is_named(
    end: Callable[[], Any], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(kind: Kind, num_bytes: int, device: str, rested: float) -> dict[str, float]:
        return end() if kind.name == "default" else {"first": 1.0}

    monkeypatch.setattr(commit_samples, "measure", measure)
    monkeypatch.setattr(commit_samples, "in_child", lambda name, body: in_child(name, body, limit_s=0.3))
    children, fork = [], os.fork
    monkeypatch.setattr(os, "fork", lambda: children.append(fork()) or children[-1])
    with pytest.raises(SampleError, match=f"^sample 1 of default: .*{error}"):
        collect(1 << 20, 2, "cpu", TWO)
    assert len(children) == 2
    for child in children:
        with pytest.raises(ChildProcessError):
            os.waitpid(child, os.WNOHANG)  # has ended and was waited for


def test_process_that_has_started_cuda_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="sample 1 of stock: this process has started CUDA"):
        collect(1 << 20, 1, "cpu", TWO)


def test_records_are_medians_and_the_limits_are_for_first_and_repeated_commits() -> None:
    found = records()
    assert found["torch_zeros"]["value"] == 41 and found["torch_zeros_again"]["value"] == 50
    assert found["commit_zero_chunk_default"]["value"] == 40
    assert found["commit_zero_again_chunk_default"]["value"] == 55
    assert found["commit_zero_chunk_granule"] | {"note": ""} == results.from_samples(
        "commit_zero_chunk_granule", GRANULE, "ms"
    )
    assert found["shrink_to_half_chunk_default"]["value"] == 2
    ratio = found["commit_zero_100gib_vs_cudamalloc"]
    assert (ratio["value"], ratio["limit"], ratio["passed"]) == (40 / 41, 1.1, True)
    assert ratio["spread"] == pytest.approx(40 / 41 - 30 / 40)
    assert "pool 43.0/30.0/40.0, stock 52.0/40.0/41.0 ms" in ratio["note"]
    times = found["commit_zero_granule_chunks_over_default"]
    assert (times["value"], times["limit"], times["better"], times["passed"]) == (52.5, 50, "higher", True)
    assert (
        "one chunk per 2 MiB granule 2100.0/2200.0/1900.0, default chunks 43.0/30.0/40.0 ms" in times["note"]
    )
    again = found["commit_zero_again_granule_chunks_over_default"]
    assert (again["value"], again["limit"], again["better"], again["passed"]) == (45, 50, "higher", False)
    again = found["commit_zero_again_100gib_vs_cudamalloc"]
    assert (again["value"], again["limit"], again["passed"]) == (1.1, 1.1, True)


def test_records_of_a_slow_pool_fail_and_a_dry_run_has_no_limits() -> None:
    slow = [46.0, 47.0, 44.0]
    bad = {name for name, item in records(slow).items() if item["passed"] is False}
    again = "commit_zero_again_granule_chunks_over_default"  # not of `slow`
    assert bad == {"commit_zero_100gib_vs_cudamalloc", "commit_zero_granule_chunks_over_default", again}
    assert all(item["passed"] is None for item in records(slow, "cpu").values())
