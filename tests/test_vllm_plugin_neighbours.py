"""Another user of the same memory comes and goes at every stage of a start (cases 8 and 29).

It is in the engine's own process, so what it keeps from warm-up on stands for graphs too, and what it gives
back there for a transient of capture (cases 1 and 3).
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_vllm_plugin import ENV, MIB, PROMPTS, SMALL, SNAPSHOT, check_engine_is_consistent
from test_vllm_plugin_sizes import BLOCK_BYTES, FIGURES, GRANULE

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(280)]

Run = Callable[..., dict[str, Any]]
BUDGET = 64 * MIB
GENERATE = {"do": "generate", "prompts": PROMPTS[:4], "max_tokens": 8}


def start(run_engine: Run, holds_mib: dict[str, int], warmup_blocks: int = 4) -> dict[str, Any]:
    """Start with 64 MiB, of which a neighbour holds so many from the end of each named stage on."""
    after = {stage: mib * MIB for stage, mib in holds_mib.items()}
    env = ENV | GRANULE
    env |= {"EKV_HOST_BUDGET": str(BUDGET), "PYTHONPATH": str(Path(__file__).parent)}
    env |= {"EKV_TEST_NEIGHBOUR": json.dumps({"rank": 0, "after": after})}
    options = {"margin_bytes": 0, "warmup_blocks": warmup_blocks}
    llm = {
        "worker_extension_cls": "rank_neighbour.Extension",
        "additional_config": {"extensible_kv_cache": options},
    }
    return run_engine(SMALL | llm, [GENERATE, FIGURES, SNAPSHOT], env)


@pytest.mark.parametrize(
    ("holds_mib", "mib"),
    [
        # What counts is what is free when it is measured; what is freed later stays with the machine.
        ({"reserve": 40, "prefix": 8, "warm-up": 24, "measure": 0}, 40),
        # Freed between the first and the last reading, and taken again before the commit.
        ({"reserve": 32, "warm-up": 0, "measure": 16, "commit": 0}, 48),
    ],
    ids=["frees-at-the-end", "takes-again"],
)
def test_neighbour_at_every_stage_leaves_cache_what_is_free(
    run_engine: Run, holds_mib: dict[str, int], mib: int
) -> None:
    answer = start(run_engine, holds_mib)
    assert answer["error"] is None
    _, figures, snapshots = answer["results"]
    assert figures["num_gpu_blocks"] == mib * MIB // BLOCK_BYTES
    check_engine_is_consistent(figures, snapshots)
    warnings = [line for line in answer["log"].splitlines() if "could not back" in line]
    assert len(warnings) == (mib == 48)
    for warning in warnings:
        assert re.search(r"rank 0 could not back 128 blocks of the KV cache: .*: host: \w+ failed: ", warning)
        assert "going on with 96 blocks" in warning


def test_neighbour_that_leaves_nothing_for_warm_up_is_named(run_engine: Run) -> None:
    error = start(run_engine, {"reserve": 63})["error"]
    assert error["type"] == "SizingError"
    assert re.search(r"rank 0 could not back the 4 blocks that warm-up needs: .*: host: ", error["text"])
    assert "(12)" in error["text"]
