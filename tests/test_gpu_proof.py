"""What `benchmarks/gpu_proof.py` does with what its parts bring, without a GPU."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import engine_server
import engines
import gpu_proof
import pair
import sleep_proof
import test_gpu_pool
import test_pool
from test_vllm_plugin import ENV, SMALL

from allocator import results
from allocator.results_schema import check_record

ARGUMENTS = {"layers": 8, "configurations": None, "load_seconds": 60.0}
PATHS = [
    "/opt/venv/lib/x.py:3",
    "see /tmp/a",
    "error:/tmp/a/b",
    "file '/opt/a-b/c+d.so'",
    "(/srv/x/)",
    "a=/x/y, /z/w",
]


def two_records(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    yield results.record("first", 1, "s")
    yield results.record("second", 2, "s", limit=1)


def one_and_an_error(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    yield results.record("first", 1, "s")
    raise OSError("no such file: /tmp/some/where")


def test_part_that_raises_keeps_its_records_and_is_one_that_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parts = {"good": two_records, "bad": one_and_an_error}
    monkeypatch.setattr(gpu_proof, "PARTS", parts)
    args = argparse.Namespace(**ARGUMENTS, output=tmp_path)
    assert [gpu_proof.run_part(part, args) for part in ("bad", "good")] == [
        ["bad_ran_to_its_end"],
        ["second"],
    ]
    bad, good = (results.read(tmp_path / f"{part}.json")["records"] for part in ("bad", "good"))
    assert [item["name"] for item in bad] == ["first", "bad_ran_to_its_end"]
    assert "OSError" in bad[1]["note"] and "/tmp" not in bad[1]["note"]
    assert [item["passed"] for item in good] == [None, False, True]


def test_records_are_on_disk_before_the_next_one_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = []

    def watched(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
        yield results.record("first", 1, "s")
        seen.append(json.loads((tmp_path / "watched.json").read_text())["records"][0]["name"])

    monkeypatch.setattr(gpu_proof, "PARTS", {"watched": watched})
    assert gpu_proof.run_part("watched", argparse.Namespace(**ARGUMENTS, output=tmp_path)) == []
    assert seen == ["first"]


@pytest.mark.parametrize("text", PATHS)
def test_notes_hold_no_path_of_a_machine(text: str) -> None:
    note = engines.portable(text)
    check_record(results.record("name", 1, "s", note=note), "record")
    assert note != text
    kept = "vllm/v1/core.py: 2/3 of https://host/page, n/a"
    assert engines.portable(kept) == kept


def test_sanitizer_tells_errors_of_memory_from_calls_that_failed() -> None:
    call = (
        '========= Program hit CUDA_ERROR_NOT_PERMITTED (error 800) due to "operation not permitted" '
        "on CUDA API call to cuMemCreate.\n"
    )
    invalid = "========= Invalid __global__ read of size 4 bytes\n"
    end = "12 passed in 60.1s\n========= ERROR SUMMARY: {} errors\n"

    def values(output: str) -> list[Any]:
        return [item["value"] for item in gpu_proof.sanitizer_records(output, 99)]

    assert values(call + end.format(1)) == [0, 1, 12, 0]
    assert values(call + invalid + end.format(2)) == [1, 1, 12, 0]
    assert values("compute-sanitizer: no device") == [-1, 0, 0, 0]
    assert values("2 failed, " + end.format(0)) == [0, 0, 12, 2]
    assert values("12 passed, 1 error in 60.1s\n========= ERROR SUMMARY: 0 errors\n") == [0, 0, 12, 1]


def test_sanitizer_selects_tests_without_processes_of_their_own_or_figures_of_free_memory() -> None:
    words, selected = gpu_proof.SANITIZED.split(" or "), {}
    for module in (test_pool, test_gpu_pool):
        for name, test in vars(module).items():
            parameters = [m.args for m in getattr(test, "pytestmark", ()) if m.name == "parametrize"]
            on_gpu = module is test_gpu_pool or any(args[0] == "device" for args in parameters)
            if name.startswith("test_") and on_gpu and any(word in f"{name}{parameters}" for word in words):
                selected[name] = set(test.__code__.co_names)
    assert len(selected) >= 8
    for name, used in selected.items():
        assert not {"run_python", "subprocess", "memory_info", "OutOfMemoryError"} & used, name


def test_engines_share_what_they_compile_only_where_it_is_the_same_code() -> None:
    def folder(llm: dict[str, Any], env: dict[str, str] | None = None) -> str:
        return engines.with_shared_compile_cache(llm, env or {})["compilation_config"]["cache_dir"]

    base = {"model": "m", "max_num_batched_tokens": 16384, "gpu_memory_utilization": 0.9}
    same = folder(base)
    assert folder({**base, "gpu_memory_utilization": 0.985, "cudagraph_capture_sizes": [1]}) == same
    assert folder(base, {"VLLM_KV_CACHE_LAYOUT": "LHBNC"}) == same
    others = [
        folder({**base, "max_num_batched_tokens": 8192}),
        folder({**base, "model": "n"}),
        folder({**base, "tensor_parallel_size": 2}),
        folder({**base, "enable_lora": True}),
        folder(base, {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    ]
    assert len({same, *others}) == 6


def test_engine_that_does_not_answer_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    silent = tmp_path / "silent.py"
    silent.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(pair, "__file__", str(silent))
    monkeypatch.setattr(pair, "LIMIT_S", 0.2)
    engine = pair.Engine({}, {}, tmp_path / "log")
    assert "no answer in 0.2 s" in engine.ready()["error"]
    with pytest.raises(BrokenPipeError):
        engine.do(do="nap")
    assert engine.close() == -9


@pytest.mark.parametrize("status", [3, 0])
def test_workers_that_a_failed_engine_leaves_running_are_ended(status: int, tmp_path: Path) -> None:
    told = tmp_path / "worker"
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        worker = subprocess.Popen(["sleep", "60"])
        told.write_text(str(worker.pid))
        os._exit(status)
    assert engine_server._wait(child, 10) == status
    worker = int(told.read_text())
    deadline = time.monotonic() + 5
    while status and _runs(worker) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _runs(worker) is (status == 0)
    if status == 0:
        os.kill(worker, signal.SIGKILL)


def _runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.vllm
@pytest.mark.timeout(280)
def test_engine_whose_step_failed_keeps_the_steps_before_it(run_engine: Any) -> None:
    failing = {"do": "rpc", "method": "no_such_method"}
    answer = run_engine(SMALL, [{"do": "figures"}, {"do": "figures"}, failing, {"do": "figures"}], ENV)
    assert [one["block_size"] for one in answer["results"]] == [128, 128]
    assert answer["error"]["text"].startswith("in step 2: ") and "no_such_method" in answer["error"]["text"]
    assert answer["exit"] == 1


def test_sleep_tells_of_every_engine_what_it_came_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The engine with the flag fails at its second sleep, and the last one does not start."""
    output = [{"tokens": [1], "logprobs": [], "cached_tokens": 0}]
    fp8 = [{**output[0], "tokens": [2]}]
    loaded = [{"seconds": 1.0}, {"device_total_bytes": 10 << 30}]
    asleep = {"physical_bytes": 0, "device_free_bytes": 3 << 30, "bases": [7]}
    awake = {"physical_bytes": 1 << 30, "device_free_bytes": 2 << 30, "bases": [7], "error": None}
    before = {"device_free_bytes": 2 << 30, "device_total_bytes": 10 << 30}
    whole = [output, before, asleep, awake, output, asleep, asleep, [None], awake, output]
    died = {"type": "RuntimeError", "text": "in step 5: no"}
    runs = iter(
        [
            {"error": None, "results": whole},
            {"error": died, "results": whole[:5]},
            {"error": None, "results": [*whole[:5], *loaded], "use": {"peak_bytes": 8 << 30}},
            {"error": None, "results": [fp8, *whole[1:4], fp8]},
            {"error": None, "results": [fp8, *whole[1:4], output, *loaded], "use": {"peak_bytes": 10 << 30}},
            {"error": {"type": "exit", "text": "1"}, "results": []},
        ]
    )
    monkeypatch.setattr(sleep_proof, "run_engine", lambda *arguments: next(runs))
    found = {item["name"]: item["passed"] for item in sleep_proof.sleep_records({}, tmp_path, [[1]])}
    assert [name for name, passed in found.items() if not passed] == [
        "sleep_flag_ran_all_steps",
        "sleep_fp8_flag_output_identical_after_each_nap",
        "sleep_fp8_flag_budget_left_gib",
        "sleep_backup_starts",
    ]
    assert found["sleep_flag_output_identical_after_each_nap"] and found["sleep_level_1_device_gains_gib"]
    assert "sleep_level_2_pool_holds_nothing" not in found


@pytest.mark.parametrize(("left_mib", "passed"), [(100, True), (208, False), (-1000, False)])
def test_memory_that_a_nap_leaves_behind_or_loses_fails(left_mib: int, passed: bool) -> None:
    asleep = {"physical_bytes": 0, "device_free_bytes": 3 << 30, "bases": [7]}
    awake = {"physical_bytes": 1 << 30, "device_free_bytes": 2 << 30, "bases": [7], "error": None}
    later = awake | {"device_free_bytes": (2 << 30) - (left_mib << 20)}
    answers = [[], {"device_free_bytes": 2 << 30}, asleep, awake, [], asleep, asleep, [None], later, []]
    made = sleep_proof._memory({name: {"results": answers} for name in ("stock", "flag")})
    found = {item["name"]: item["passed"] for item in made}
    assert found.pop("sleep_free_when_awake_differs_gib") is passed
    assert all(found.values())


@pytest.mark.parametrize(
    ("visible", "handle"), [("", ("index", 1)), ("3,2", ("index", 2)), ("GPU-a, GPU-b", ("uuid", "GPU-b"))]
)
def test_nvml_reads_the_devices_that_cuda_sees(
    monkeypatch: pytest.MonkeyPatch, visible: str, handle: tuple[str, Any]
) -> None:
    by = {
        f"nvmlDeviceGetHandleBy{key.title() if key == 'index' else 'UUID'}": key for key in ("index", "uuid")
    }
    made = {name: lambda value, key=key: (key, value) for name, key in by.items()}
    monkeypatch.setitem(sys.modules, "pynvml", types.SimpleNamespace(nvmlInit=lambda: None, **made))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert engines.nvml_handle(1) == handle
