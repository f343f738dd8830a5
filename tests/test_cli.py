"""The command line, run for real: exit status, output and files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from allocator import bench, extensible_kv_pool, results
from allocator.cli import cli
from allocator.errors import PoolValueError
from allocator.settings import allocator_options, check_settings
from tests.pools import ON_EVERY_DEVICE, run_python

REPOSITORY = Path(__file__).resolve().parent.parent


def run_cli(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(cli, arguments)


def run_program(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; from allocator.cli import main; main({list(arguments)!r})"
    return run_python(code, timeout=240, **environment)


def findings_of(environ: dict[str, str], **options: Any) -> dict[str, str]:
    options = {"on_gpu": True} | options
    return {finding.name: finding.level for finding in check_settings(environ, **options)}


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("value", "level"),
    [
        ("expandable_segments:True", "note"),  # case 27: works, and says so
        ("expandable_segments:False", "ok"),
        ("max_split_size_mb:128", "ok"),
        ("garbage_collection_threshold:0.8, backend:cudaMallocAsync", "problem"),
        ("per_process_memory_fraction:0.8", "problem"),
        ("per_process_memory_fraction:1.0", "ok"),
        ("per_process_memory_fraction:much", "ok"),  # for PyTorch to refuse
    ],
)
def test_check_settings_allocator_configuration_is_judged(name: str, value: str, level: str) -> None:
    assert findings_of({name: value}) == {name: level}


def test_check_settings_allocator_configuration_on_cpu_is_no_problem() -> None:
    environ = {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    environ["PYTORCH_CUDA_ALLOC_CONF"] = "per_process_memory_fraction:0.8"
    assert "problem" not in findings_of(environ, on_gpu=False).values()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {}),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "problem"}),
        ({"VLLM_PLUGINS": ""}, {"VLLM_PLUGINS": "problem"}),
        ({"VLLM_PLUGINS": "lora,other"}, {"VLLM_PLUGINS": "problem"}),
        ({"VLLM_PLUGINS": "other,extensible_kv"}, {}),
        ({"EKV_HOST_BUDGET": "1000"}, {"EKV_HOST_BUDGET": "note"}),
    ],
)
def test_check_settings_environment_is_judged(environ: dict[str, str], expected: dict[str, str]) -> None:
    assert findings_of(environ) == expected


def test_allocator_options_lists_in_brackets_stay_whole() -> None:
    text = "roundup_power2_divisions:[256:1,512:2,>:4], expandable_segments:True,"
    assert allocator_options(text) == {
        "roundup_power2_divisions": "[256:1,512:2,>:4]",
        "expandable_segments": "True",
    }


@pytest.mark.vllm
def test_doctor_working_machine_exits_with_status_0() -> None:
    done = run_program("doctor", "--json", "--device", "cpu")
    report = json.loads(done.stdout)
    problems = [finding for finding in report["findings"] if finding["level"] == "problem"]
    assert (done.returncode, problems, report["works"]) == (0, [], True), done.stderr
    assert report["probe"]["available"] and report["probe"]["granularity"] > 0
    assert report["reservation_limit_bytes"] >= 1 << 40
    assert report["vllm"]["supported"] is True


@pytest.mark.gpu
def test_doctor_gpu_reports_its_driver() -> None:
    report = json.loads(run_program("doctor", "--json", "--no-vllm", "--device", "cuda").stdout)
    assert report["driver"] in ("cuda", "hip") and report["probe"]["available"]
    assert report["versions"]["driver"]
    assert report["reservation_limit_bytes"] >= report["total_bytes"]


@pytest.mark.parametrize("value", ["many", " -5", "+4096", "2M"])
def test_doctor_unusable_driver_exits_with_status_1_and_the_reason(value: str) -> None:
    done = run_program("doctor", "--no-vllm", "--device", "cpu", EKV_HOST_GRANULARITY=value, COLUMNS="200")
    assert done.returncode == 1, done.stderr
    assert f"EKV_HOST_GRANULARITY='{value}' is not a number of bytes" in done.stdout
    assert "Traceback" not in done.stderr


def test_reservation_limit_little_address_space_is_found_and_given_back() -> None:
    """Case 37 with a real limit: what doctor says can be reserved, and memory still works afterwards."""
    done = run_python(
        """
import resource, torch
from allocator import extensible_kv_pool
from allocator.doctor import reservation_limit
from allocator.shim import lib
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (5 << 30), used + (5 << 30)))
limit = reservation_limit(lib.EKV_HOST, 0)
assert limit == 4 << 30, limit
assert lib.ekv_num_reservations() == 0
with extensible_kv_pool("cpu") as pool:
    cache = torch.zeros(8, 1 << 20, dtype=torch.int8)
pool.bind(cache)
pool.commit(8)
"""
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def snapshot_path(tmp_path: Path) -> Path:
    with extensible_kv_pool("cpu") as pool:
        buffer = torch.zeros(3, 16, 300_000, dtype=torch.int8)
    pool.bind(buffer, 1)
    pool.commit(8)
    (tmp_path / "pool.json").write_text(json.dumps(pool.snapshot()))
    pool.free()
    return tmp_path / "pool.json"


def test_map_snapshot_shows_each_kind_of_segment(snapshot_path: Path) -> None:
    done = run_cli("map", str(snapshot_path))
    assert done.exit_code == 0, done.output
    assert "8 of 16 blocks committed" in done.output
    bars = [line for line in done.output.splitlines() if "█" in line and "░" in line and "MiB" in line]
    assert bars and all(18 <= bar.count("█") <= 22 for bar in bars)


def test_map_of_a_dash_reads_standard_input(snapshot_path: Path) -> None:
    program = [sys.executable, "-m", "allocator.cli", "map"]
    text = snapshot_path.read_text()
    named, piped, cut = (
        subprocess.run([*program, path], input=given, capture_output=True, text=True, cwd=REPOSITORY)
        for path, given in ((str(snapshot_path), ""), ("-", text), ("-", text[:-1]))
    )
    assert piped.returncode == 0, piped.stderr
    assert piped.stdout == named.stdout and "8 of 16 blocks committed" in piped.stdout
    assert cut.returncode == 1 and cut.stderr.startswith("Error: <stdin> is not JSON: ")


@pytest.mark.parametrize("kind", ["folder", "missing"])
def test_map_of_what_cannot_be_read_is_refused(tmp_path: Path, kind: str) -> None:
    done = run_cli("map", str(tmp_path / kind) if kind == "missing" else str(tmp_path))
    assert done.exit_code == 2 and f"'{tmp_path}" in done.output


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_map_output_draws_a_picture(snapshot_path: Path, suffix: str) -> None:
    picture = snapshot_path.with_suffix(suffix)
    assert run_cli("map", str(snapshot_path), "--output", str(picture)).exit_code == 0
    head = picture.read_bytes()[:200]
    assert head.startswith(b"\x89PNG") if suffix == ".png" else b"<?xml" in head


PARTIAL = '{"committed_blocks": 1, "reservations": [], "segments": [], "chunks": []}'


@pytest.mark.parametrize("form", ["report", "answer", "list", "ekv_report"])
def test_map_finds_a_rank_in_what_an_engine_said(tmp_path: Path, snapshot_path: Path, form: str) -> None:
    snapshot = json.loads(snapshot_path.read_text())
    several = [None, {**snapshot, "rank": 1}]
    data = {
        "report": {"kind": "extensible-kv start", "ranks": [{"rank": 1, "snapshot": several[1]}]},
        "answer": {"results": several},
        "ekv_report": [None, {"rank": 1, "snapshot": several[1]}],
        "list": several,
    }[form]
    path = tmp_path / "several.json"
    path.write_text(json.dumps(data))
    assert run_cli("map", str(path), "--rank", "1").output == run_cli("map", str(snapshot_path)).output
    done = run_program("map", str(path))
    assert done.returncode == 1 and "no pool snapshot of rank 0; there are: 1" in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "{}",
            "wrong.json: this is no pool snapshot, which json.dump(pool.snapshot(), file) writes: it has no",
        ),
        ("[", "is not JSON"),
        ("[1]", "no pool snapshot"),
        (PARTIAL, "'physical_bytes'"),
    ],
)
def test_map_wrong_file_is_one_line_and_status_1(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "wrong.json").write_text(text)
    done = run_program("map", str(tmp_path / "wrong.json"))
    assert done.returncode == 1
    assert message in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_map_output_of_other_kind_is_refused(snapshot_path: Path) -> None:
    done = run_cli("map", str(snapshot_path), "--output", str(snapshot_path.with_suffix(".jpg")))
    assert done.exit_code == 2 and ".png" in done.output
    assert "committed" not in done.output  # nothing was drawn before


@ON_EVERY_DEVICE
def test_bench_writes_valid_results(device: str, tmp_path: Path) -> None:
    output = tmp_path / "bench.json"
    options = ["--size", "64MiB", "--segments", "4", "--blocks", "64", "--chunk", "4M", "--repeats", "2"]
    done = run_cli("bench", "--device", device, *options, "--rest", "0", "--output", str(output))
    assert done.exit_code == 0, done.output
    records = {item["name"]: item for item in results.read(output)["records"]}
    assert records["bytes_for says what a commit holds"]["passed"] is True
    assert records["pool: commit all at once, zeroed"]["repeats"] == 2
    assert "64 MiB, 4 segments, 64 blocks, chunks of 4 MiB" in records["torch: allocate and zero"]["note"]


@pytest.mark.parametrize(("size", "message"), [("12Q", "no size"), ("-1", "no size"), ("", "no size")])
def test_bench_wrong_size_is_refused(size: str, message: str) -> None:
    done = run_cli("bench", "--size", size)
    assert done.exit_code == 2 and message in done.output


def test_bench_size_without_a_byte_for_each_block_names_the_numbers() -> None:
    message = "1000 bytes: at least 1 repeat, and 1 byte for each of 1024 blocks of 28"
    with pytest.raises(PoolValueError, match=message):
        bench.run("cpu", size_bytes=1000)


@pytest.mark.parametrize(("size", "budget"), [("64M", str(8 << 20)), ("100TiB", "")])
def test_bench_too_little_memory_is_one_line_and_status_1(size: str, budget: str) -> None:
    done = run_program("bench", "--device", "cpu", "--size", size, "--repeats", "1", EKV_HOST_BUDGET=budget)
    assert done.returncode == 1
    assert re.fullmatch(r"extensible-kv: \S+ \wiB do not fit into .* that are free on cpu\n", done.stderr)


def test_bench_device_that_does_not_exist_is_refused() -> None:
    done = run_cli("bench", "--device", "tpu")
    assert done.exit_code == 2 and "there is no device 'tpu': a pool is on 'cpu', 'cuda'" in done.output


@pytest.mark.vllm
def test_demo_help_comes_from_the_demo() -> None:
    done = run_program("demo", "--help")
    assert done.returncode == 0, done.stderr
    assert "Usage: extensible-kv demo" in done.stdout and "--model" in done.stdout


def test_help_names_every_command_without_loading_torch() -> None:
    code = "import sys; from allocator.cli import cli; print('torch' in sys.modules, sorted(cli.commands))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.stdout.split(maxsplit=1) == ["False", "['bench', 'demo', 'doctor', 'map']\n"], done.stderr
