"""Sizes that were asked for, sizes that do not fit, neighbours, and what makes the plugin stand aside."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from test_vllm_plugin import (
    ENV,
    FLAG,
    MIB,
    PROMPTS,
    SMALL,
    SNAPSHOT,
    SPAWNED,
    check_engine_is_consistent,
    warnings_of,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(280)]

Run = Callable[..., dict[str, Any]]
FIGURES, VIEWS = {"do": "figures"}, {"do": "views"}
GENERATE = {"do": "generate", "prompts": PROMPTS[:4], "max_tokens": 8}
# Of the tiny model in float32: 4 layers, keys and values, 2 heads of 64, 128 tokens.
BLOCK_BYTES = 4 * 2 * 2 * 64 * 4 * 128
# A granule for each block and segment, so that no granule is shared and sizes are whole numbers of blocks.
GRANULE = {"EKV_HOST_GRANULARITY": str(BLOCK_BYTES // 4)}
NO_MARGIN = {"additional_config": {"extensible_kv_cache": {"margin_bytes": 0}}}


def start(
    run_engine: Run,
    llm: dict[str, Any],
    *steps: dict[str, Any],
    env: dict[str, str] | None = None,
    **options: Any,
) -> dict[str, Any]:
    return run_engine(SMALL | FLAG | llm, list(steps), ENV | (env or {}), import_first=True, **options)


def budget(mib: int) -> dict[str, str]:
    return {**GRANULE, "EKV_HOST_BUDGET": str(mib * MIB)}


@pytest.mark.parametrize("share", [0.001, 0.999], ids=["less", "more-than-is-free"])
def test_explicit_bytes_are_committed_exactly(run_engine: Run, share: float) -> None:
    """Case 10: an explicit size is authoritative, whatever the utilization."""
    sizes = {"kv_cache_memory_bytes": 32 * MIB, "gpu_memory_utilization": share}
    answer = start(run_engine, sizes, GENERATE, FIGURES, SNAPSHOT)
    assert answer["error"] is None
    figures, (snapshot,) = answer["results"][1:]
    assert figures["num_gpu_blocks"] == 32 * MIB // BLOCK_BYTES == 64
    assert snapshot["committed_blocks"] == snapshot["capacity_blocks"] == 64
    check_engine_is_consistent(figures, [snapshot])


def test_explicit_bytes_that_do_not_fit_are_named(run_engine: Run) -> None:
    """Case 11: after warm-up, before any load."""
    answer = start(run_engine, {"kv_cache_memory_bytes": 64 * MIB}, GENERATE, env=budget(48))
    error = answer["error"]
    assert error["type"] == "SizingError"
    assert f"128 blocks that was asked for takes {64 * MIB} bytes" in error["text"]
    assert f"rank 0 has {48 * MIB} bytes left" in error["text"]
    assert "at most 96 blocks fit" in error["text"]


def test_override_is_committed_exactly(run_engine: Run) -> None:
    answer = start(run_engine, {"num_gpu_blocks_override": 20}, GENERATE, FIGURES, SNAPSHOT)
    assert answer["error"] is None
    assert answer["results"][1]["num_gpu_blocks"] == 20
    check_engine_is_consistent(*answer["results"][1:])


def test_explicit_bytes_too_few_for_one_request_are_named(run_engine: Run) -> None:
    error = start(run_engine, {"kv_cache_memory_bytes": 4096}, GENERATE)["error"]
    assert error["type"] == "SizingError"
    assert "One request of max_model_len 512 needs 5 blocks" in error["text"]
    assert "4096 bytes are what kv_cache_memory_bytes gives it" in error["text"]


def test_override_too_small_for_one_request_names_both_numbers(run_engine: Run) -> None:
    """Case 12: 512 tokens are 4 blocks and the null block."""
    error = start(run_engine, {"num_gpu_blocks_override": 1}, GENERATE)["error"]
    assert error["type"] == "SizingError"
    assert "One request of max_model_len 512 needs 5 blocks" in error["text"]
    assert "num_gpu_blocks_override allows 1" in error["text"]


def test_auto_length_is_fitted_again_to_the_final_size(run_engine: Run) -> None:
    """Case 13: the reservation would hold the model's 8,192 tokens, what is free does not."""
    answer = start(
        run_engine,
        {"max_model_len": -1} | NO_MARGIN,
        GENERATE,
        FIGURES,
        SNAPSHOT,
        VIEWS,
        env=budget(16),
    )
    assert answer["error"] is None
    figures, snapshots, view = answer["results"][1:]
    assert figures["num_gpu_blocks"] == 16 * MIB // BLOCK_BYTES
    assert figures["max_model_len"] == (figures["num_gpu_blocks"] - 1) * 128
    assert view["max_model_len"] == figures["max_model_len"]
    check_engine_is_consistent(figures, snapshots)


def test_smallest_prefixes_hold_every_dummy_block_and_give_the_same_tokens(run_engine: Run) -> None:
    """Cases 14 and 15: 2 and 3 blocks, and a widest step of 512 requests of a model length of 64.

    On the host driver a block past the prefix that warm-up touches ends the process. A prefix of 1 is the
    null block alone, and the option refuses it.
    """
    said = []
    for blocks in (2, 3):
        options = {"extensible_kv_cache": {"warmup_blocks": blocks}}
        llm = {"max_model_len": 64, "max_num_seqs": 512, "additional_config": options}
        generate = GENERATE | {"prompts": [prompt[:40] for prompt in PROMPTS]}
        answer = start(run_engine, llm, generate, FIGURES, SNAPSHOT)
        assert (answer["error"], answer["exit"]) == (None, 0)
        tokens, figures, (snapshot,) = answer["results"]
        assert snapshot["prefix_blocks"] == blocks < snapshot["committed_blocks"]
        assert figures["num_gpu_blocks"] == figures["scheduler_num_blocks"] == snapshot["committed_blocks"]
        said.append([output["tokens"] for output in tokens])
    assert said[0] == said[1]


def test_too_little_for_one_request_names_both_numbers(run_engine: Run) -> None:
    answer = start(
        run_engine,
        {"max_model_len": 4096} | NO_MARGIN,
        GENERATE,
        env=budget(8),
    )
    error = answer["error"]
    assert error["type"] == "SizingError"
    assert "One request of max_model_len 4096 needs 33 blocks" in error["text"]
    assert "16 fit: of " in error["text"]


def test_commit_that_comes_up_too_short_names_rank_call_and_code(run_engine: Run) -> None:
    """Case 19: what is left does not serve one request; no rank keeps more than its prefix."""
    options = {"extensible_kv_cache": {"margin_bytes": 0, "warmup_blocks": 2}}
    answer = start(
        run_engine,
        {"additional_config": options},
        GENERATE,
        env=budget(64),
        neighbour={"after": "measure", "bytes": 62 * MIB},
    )
    error = answer["error"]
    assert error["type"] == "SizingError"
    assert re.search(
        r"rank 0 could not back 128 blocks of the KV cache: .*: host: \w+ failed: ", error["text"]
    )
    assert "4 blocks would fit now, and one request of max_model_len 512 needs 5" in error["text"]


def test_engine_core_without_the_plugin_is_told_of(run_engine: Run) -> None:
    """The flag came in through an import, and the other process was told not to load plugins."""
    env = SPAWNED | {"VLLM_PLUGINS": "none"}
    answer = run_engine(SMALL | FLAG, [FIGURES, SNAPSHOT], env, import_first=True)
    assert answer["error"] is None
    (warning,) = warnings_of(answer["log"])
    assert "the process of the engine core has not loaded the plugin" in warning
    assert answer["results"][1] == [None]
