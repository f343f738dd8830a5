"""Whole engines on the CPU build: the same output as without the flag, and the right figures everywhere."""

import re
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(280)]

MIB = 1 << 20
Run = Callable[..., dict[str, Any]]
# float32: with bfloat16 the choice of words depends on which requests share a batch.
SMALL = {
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "dtype": "float32",
    "enforce_eager": True,
    "seed": 0,
    "gpu_memory_utilization": 0.15,
}
FLAG = {"enable_extensible_kv_cache": True}
# Different lengths around a block of 128 tokens, two with a common prefix of one block.
PROMPTS = [
    [300 + (7 * i + j * j) % 1500 for j in range(n)] for i, n in enumerate((1, 5, 127, 128, 129, 300))
] + [[400 + j % 900 for j in range(128)] + tail for tail in ([5, 6, 7], [8, 9])]
GENERATE = {"do": "generate", "prompts": PROMPTS, "max_tokens": 24}
SAMPLE = {"do": "generate", "prompts": PROMPTS[:4], "max_tokens": 12, "temperature": 1.0, "seed": 11}
SNAPSHOT = {"do": "rpc", "method": "ekv_snapshot"}
# How many threads compute, and which requests share a batch, decides the last bits; the latter is a matter of
# time when the engine is another process.
ENV = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
OTHER_PROCESS = ENV | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
# As a user's: each further process imports vLLM and knows only what it was sent.
SPAWNED = OTHER_PROCESS | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
SINGLES = [{"do": "generate", "prompts": [prompt], "max_tokens": 16} for prompt in (PROMPTS[2], PROMPTS[5])]
STEPS = [*SINGLES, GENERATE, GENERATE, SAMPLE]


@pytest.fixture(scope="module")
def stock(run_engine: Run) -> list[Any]:
    """What an engine without the flag generates."""
    answer = run_engine(SMALL, STEPS, ENV)
    assert answer["error"] is None
    assert "xtensible" not in answer["log"]
    return answer["results"]


@pytest.fixture(scope="module")
def flagged(run_engine: Run) -> dict[str, Any]:
    """An engine with the flag, as a user starts it in one process, sized by what is free."""
    steps = [*STEPS, {"do": "figures"}, SNAPSHOT, {"do": "views"}]
    return run_engine(SMALL | FLAG, steps, ENV, fresh=True, import_first=True)


def warnings_of(log: str) -> list[str]:
    return [line for line in log.splitlines() if "WARNING" in line and "xtensible" in line]


def check_engine_is_consistent(figures: dict[str, Any], snapshots: list[dict[str, Any]]) -> None:
    """All the engine's figures are the final size, and every block it may hand out is backed."""
    blocks = figures["num_gpu_blocks"]
    for snapshot in snapshots:
        assert snapshot["committed_blocks"] == blocks
        assert snapshot["physical_bytes"] >= blocks * snapshot["bytes_per_block"]
    if "scheduler_num_blocks" in figures:
        assert figures["scheduler_num_blocks"] == figures["pool_num_blocks"] == blocks
        assert figures["pool_free_blocks"] == blocks - 1
        assert set(figures["tensor_sizes"]) == {blocks * snapshots[0]["bytes_per_block"]}
    assert figures["kv_cache_size_tokens"] <= blocks * figures["block_size"]
    assert figures["kv_cache_size_tokens"] >= (blocks - 1) * figures["block_size"] * 0.9


def check_stands_aside(
    answer: dict[str, Any], reason: str, figures: dict[str, Any], snapshots: list[Any], view: dict[str, Any]
) -> None:
    """One warning with the reason, and a cache of exactly the engine's size."""
    (warning,) = warnings_of(answer["log"])
    assert "falling back to vLLM's normal KV cache, because " + reason in warning
    assert snapshots == [None]
    assert view["view_blocks"] == [figures["num_gpu_blocks"]]


def test_flag_gives_tokens_and_logprobs_of_stock(flagged: dict[str, Any], stock: list[Any]) -> None:
    assert flagged["error"] is None
    assert flagged["results"][: len(STEPS)] == stock
    assert warnings_of(flagged["log"]) == []


def test_outputs_depend_on_the_prompt(stock: list[Any]) -> None:
    """The comparison could not fail with a model that says the same whatever it is asked."""
    outputs = stock[STEPS.index(GENERATE)]
    assert len({tuple(output["tokens"]) for output in outputs}) == len(PROMPTS)
    assert all(len(set(output["tokens"])) > 12 for output in outputs)


def test_flag_figures_are_the_committed_size(flagged: dict[str, Any]) -> None:
    figures, snapshots, views = flagged["results"][len(STEPS) :]
    check_engine_is_consistent(figures, snapshots)
    (snapshot,), view = snapshots, views
    # The reservation is an upper bound, and the worker goes on with its capacity.
    assert snapshot["capacity_blocks"] > snapshot["committed_blocks"] > snapshot["prefix_blocks"] >= 2
    assert view["view_blocks"] == [view["runner_num_blocks"]] == [snapshot["capacity_blocks"]]
    assert view["worker_class"] == "ExtensibleCPUWorker"


def test_log_tells_the_story_once(flagged: dict[str, Any]) -> None:
    log = flagged["log"]
    figures, (snapshot,), _ = flagged["results"][len(STEPS) :]
    lines = [line for line in log.splitlines() if "Extensible KV cache:" in line]
    assert len(lines) == 3
    assert len(re.findall(r"vLLM's profile +measured", log)) == 1  # the head of the table
    assert re.search(r"; vLLM's profile, graphs not counted, allowed \d+ blocks\. Ready", lines[2])
    assert f"for up to {snapshot['capacity_blocks']} blocks in 4 segments" in lines[0]
    assert f"backed {snapshot['prefix_blocks']} blocks" in lines[0]
    assert "requested go on rank 0" in lines[1]
    table = re.findall(r"\]   ([a-zA-Z -]+?) {2,}(- |-?[\d.]+ [MG]iB) +(-?[\d.]+ [MG]iB)$", log, re.M)
    parts = ["weights", "other", "graphs and warm-up", "widest step", "margin", "KV cache", "unused"]
    assert [row[0] for row in table] == parts
    assert f"{figures['num_gpu_blocks']} blocks ({figures['kv_cache_size_tokens']:,} tokens)" in lines[2]
    sizes = re.findall(r"KV cache size: ([\d,]+) tokens", log)
    assert sizes == [f"{figures['kv_cache_size_tokens']:,}"], "only the final size is logged"


def test_additional_config_without_import_first_works(run_engine: Run, stock: list[Any]) -> None:
    """The plugin is loaded by vLLM, and an option travels with the switch."""
    options = {"extensible_kv_cache": {"warmup_blocks": 3, "max_chunk_bytes": 4 * MIB, "margin_bytes": 0}}
    answer = run_engine(SMALL | {"additional_config": options}, [*SINGLES, SNAPSHOT], ENV)
    assert answer["error"] is None
    assert answer["results"][:2] == stock[:2]
    (snapshot,) = answer["results"][2]
    assert snapshot["prefix_blocks"] == 3
    assert max(chunk["size"] for chunk in snapshot["chunks"]) <= 4 * MIB


def test_engine_in_its_own_process_is_the_same(run_engine: Run, stock: list[Any]) -> None:
    answer = run_engine(
        SMALL | FLAG,
        [*SINGLES, {"do": "figures"}, SNAPSHOT],
        SPAWNED,
        import_first=True,
    )
    assert answer["error"] is None
    assert answer["results"][:2] == stock[:2]
    check_engine_is_consistent(*answer["results"][2:])


def test_zeroing_a_block_in_use_changes_the_output(run_engine: Run) -> None:
    """The negative control: without it, equal outputs would prove nothing about the cache."""
    prompt = PROMPTS[5]
    steps = [
        {"do": "zeroed", "prompt": prompt, "after": 4},
        {"do": "generate", "prompts": [prompt], "max_tokens": 16},
    ]
    answer = run_engine(SMALL | FLAG | {"enable_prefix_caching": False}, steps, ENV, import_first=True)
    assert answer["error"] is None
    tokens, (whole,) = answer["results"]
    assert tokens[:4] == whole["tokens"][:4]
    assert tokens != whole["tokens"]


def test_two_ranks_commit_the_same_blocks(run_engine: Run, stock: list[Any]) -> None:
    answer = run_engine(
        SMALL | FLAG | {"pipeline_parallel_size": 2},
        [*SINGLES, {"do": "figures"}, SNAPSHOT],
        OTHER_PROCESS,
        import_first=True,
    )
    assert answer["error"] is None
    assert answer["results"][:2] == stock[:2]
    assert len(answer["results"][3]) == 2
    check_engine_is_consistent(*answer["results"][2:])


def test_no_virtual_memory_makes_the_plugin_stand_aside_with_one_warning(
    run_engine: Run, stock: list[Any]
) -> None:
    """Case 36, with a granularity that the host driver refuses."""
    steps = [*SINGLES, {"do": "figures"}, SNAPSHOT, {"do": "views"}]
    env = ENV | {"EKV_HOST_GRANULARITY": "12345"}
    answer = run_engine(SMALL | FLAG, steps, env, import_first=True)
    assert answer["error"] is None
    assert answer["results"][:2] == stock[:2]
    check_stands_aside(answer, "virtual memory is unavailable on cpu", *answer["results"][2:])


def test_too_few_addresses_make_a_smaller_reservation(
    run_engine: Run, stock: list[Any], flagged: dict[str, Any]
) -> None:
    """Case 37: memory is free, but a limit stands between what is wanted and what vLLM would take."""
    steps = [*SINGLES, {"do": "figures"}, SNAPSHOT, {"do": "rpc", "method": "ekv_report"}]
    answer = run_engine(SMALL | FLAG, steps, ENV, import_first=True, addresses={"share": 0.8})
    assert answer["error"] is None
    assert answer["results"][:2] == stock[:2]
    assert warnings_of(answer["log"]) == []
    figures, (snapshot,), (report,) = answer["results"][2:]
    (unlimited,) = flagged["results"][len(STEPS) + 1]
    assert report["measured"]["stock_bytes"] <= snapshot["reserved_bytes"] + MIB < unlimited["reserved_bytes"]
    assert snapshot["capacity_blocks"] < unlimited["capacity_blocks"]
    check_engine_is_consistent(figures, [snapshot])


def test_no_addresses_make_the_plugin_stand_aside_with_one_warning(run_engine: Run, stock: list[Any]) -> None:
    """Case 37, its end: a granule that the host driver aligns to takes more addresses than are left."""
    size, room = 16 * MIB, 400 * MIB
    env = ENV | {"EKV_HOST_GRANULARITY": str(256 * MIB)}
    steps = [*SINGLES, {"do": "figures"}, SNAPSHOT, {"do": "views"}]
    answer = run_engine(
        SMALL | FLAG | {"kv_cache_memory_bytes": size},
        steps,
        env,
        import_first=True,
        addresses={"bytes": room},
    )
    assert answer["error"] is None
    assert answer["results"][:2] == stock[:2]
    reason = f"rank 0 cannot reserve {size} bytes of addresses, nor {size}"
    check_stands_aside(answer, reason, *answer["results"][2:])
