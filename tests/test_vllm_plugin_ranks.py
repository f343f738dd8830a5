"""Several workers and several engines on the CPU build: the smallest rank counts, and all commit or none."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from server import Server
from test_vllm_plugin import (
    ENV,
    MIB,
    OTHER_PROCESS,
    SINGLES,
    SMALL,
    SNAPSHOT,
    check_engine_is_consistent,
)
from test_vllm_plugin_sizes import BLOCK_BYTES, FIGURES

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(280)]

Run = Callable[..., dict[str, Any]]
NEIGHBOUR_BYTES = {"do": "rpc", "method": "neighbour_bytes"}
# With tensor parallelism each rank has one of the two heads.
RANK_BLOCK_BYTES = BLOCK_BYTES // 2


def start(
    run_engine: Run, *steps: dict[str, Any], holds_mib: dict[str, int], length: int = 512, **more: int
) -> dict[str, Any]:
    """Two tensor-parallel ranks of 32 MiB each; a neighbour of rank 1 holds some from the named stages on."""
    after = {stage: mib * MIB for stage, mib in holds_mib.items()}
    neighbour = {"rank": 1, "after": after, **more}
    options = {"margin_bytes": 0} | ({} if more else {"warmup_blocks": 2})
    env = OTHER_PROCESS | {
        "EKV_HOST_GRANULARITY": str(RANK_BLOCK_BYTES // 4),
        "EKV_HOST_BUDGET": str(32 * MIB),
        "EKV_TEST_NEIGHBOUR": json.dumps(neighbour),
        "PYTHONPATH": str(Path(__file__).parent),
    }
    llm = SMALL | {
        "max_model_len": length,
        "tensor_parallel_size": 2,
        "worker_extension_cls": "rank_neighbour.Extension",
        "additional_config": {"extensible_kv_cache": options},
    }
    return run_engine(llm, list(steps), env)


def test_two_ranks_measure_differently_and_all_use_the_smaller(run_engine: Run) -> None:
    """Case 18: rank 1 has 12 MiB less when it measures."""
    steps = [*SINGLES, FIGURES, SNAPSHOT, NEIGHBOUR_BYTES]
    answer = start(run_engine, *steps, holds_mib={"prefix": 12}, prefix_bytes=3 * RANK_BLOCK_BYTES)
    assert answer["error"] is None
    assert answer["results"][4] == [0, 12 * MIB]
    figures, snapshots = answer["results"][2:4]
    assert figures["num_gpu_blocks"] == 20 * MIB // RANK_BLOCK_BYTES == 80
    assert [snapshot["rank"] for snapshot in snapshots] == [0, 1]
    # Rank 0 could back more for warm-up, in which all ranks have to run the same steps.
    assert [snapshot["prefix_blocks"] for snapshot in snapshots] == [3, 3]
    check_engine_is_consistent(figures, snapshots)
    assert "could not back" not in answer["log"]
    # Ranks add up in another order than one process does, so the last bits of its logprobs are its own.
    stock = run_engine(SMALL | {"tensor_parallel_size": 2}, SINGLES, OTHER_PROCESS)
    assert answer["results"][:2] == stock["results"]


def test_commit_that_fails_on_one_rank_falls_back_on_all(run_engine: Run) -> None:
    """Cases 19 and 29: rank 0 has its 128 blocks already when rank 1 comes up short; both go on with 80."""
    answer = start(run_engine, SINGLES[0], FIGURES, SNAPSHOT, holds_mib={"measure": 12})
    assert answer["error"] is None
    figures, snapshots = answer["results"][1:]
    assert figures["num_gpu_blocks"] == 80
    check_engine_is_consistent(figures, snapshots)
    (warning,) = [line for line in answer["log"].splitlines() if "could not back" in line]
    assert re.search(r"rank 1 could not back 128 blocks of the KV cache: .*: host: \w+ failed: ", warning)
    assert "going on with 80 blocks" in warning


def test_commit_that_leaves_too_little_on_one_rank_stops_all(run_engine: Run) -> None:
    """Case 19: what rank 1 has left does not serve one request."""
    error_and_log = start(run_engine, holds_mib={"measure": 31})
    assert error_and_log["error"] is not None
    message = r"SizingError: rank 1 could not back 128 blocks of .*: host: (\w+) failed: (.*?)\. No rank"
    (call, what) = re.search(message, error_and_log["log"]).groups()
    assert call and re.search(r"\(\d+\)", what), "the call and the driver's code"
    assert "4 blocks would fit now, and one request of max_model_len 512 needs 5" in error_and_log["log"]


def test_automatic_length_is_told_to_every_rank_also_after_a_commit_that_came_up_short(
    run_engine: Run,
) -> None:
    """Case 13: rank 1 has 60 blocks when it measures, and 48 when it commits."""
    lengths = {"do": "rpc", "method": "lengths"}
    steps = [SINGLES[0], FIGURES, SNAPSHOT, lengths]
    answer = start(run_engine, *steps, holds_mib={"prefix": 17, "measure": 20}, length=-1)
    assert answer["error"] is None
    figures, snapshots, told = answer["results"][1:]
    assert figures["num_gpu_blocks"] == 48
    assert figures["max_model_len"] == 47 * 128
    assert told == [[47 * 128] * 2] * 2
    check_engine_is_consistent(figures, snapshots)
    assert "rank 1 could not back 60 blocks" in answer["log"]


@pytest.mark.timeout(420)
def test_two_data_parallel_engines_report_each_its_own_pool(
    tiny_model_path: Path, engine_env: dict[str, str], tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    options = json.dumps({"extensible_kv_cache": {"report": str(report)}})
    flags = "--max-model-len 512 --max-num-seqs 8 --dtype float32 --enforce-eager --seed 0".split()
    flags += ["--gpu-memory-utilization", "0.12", "--data-parallel-size", "2"]
    flags += ["--additional-config", options, "--enable-extensible-kv-cache"]
    env = engine_env | ENV
    server = Server(tiny_model_path, tmp_path / "log.txt", env, *flags)
    try:
        server.wait_until_healthy(360)
        metrics = server.get("/metrics")
        answer = server.client().completions.create(model="tiny", prompt="hello", max_tokens=4)
        assert server.stop() == 0
    finally:
        server.kill()
    assert answer.usage.completion_tokens == 4
    found = re.findall(
        r'^extensible_kv:committed_blocks\{engine="(\d)",[^}]*rank="(\d)"\} (\S+)$', metrics, re.M
    )
    reports = [json.loads(path.read_text()) for path in (report, tmp_path / "report.engine1.json")]
    assert [one["engine"] for one in reports] == [0, 1]
    # In the order in which the engines were ready.
    assert sorted((int(engine), float(blocks)) for engine, _, blocks in found) == [
        (one["engine"], one["blocks"]) for one in reports
    ]
    total = re.search(r'cache_config_info\{.*num_gpu_blocks="(\d+)"', metrics)[1]
    assert int(total) == sum(one["blocks"] for one in reports)
