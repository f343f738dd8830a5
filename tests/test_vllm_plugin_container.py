"""An engine and a neighbour process in one container, whose limit is all the memory that they have."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_host_memory import container  # noqa: F401  (a fixture)
from test_vllm_plugin import ENV, MIB, SINGLES, SMALL, SNAPSHOT, check_engine_is_consistent
from test_vllm_plugin_sizes import FIGURES

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(280)]

Run = Callable[..., dict[str, Any]]
LIMIT = 1536 * MIB


def start(run_engine: Run, group: Path, after_mib: dict[str, int]) -> dict[str, Any]:
    """Start an engine that may have twice as much as its container."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        if (group.parent / name).exists():
            (group.parent / name).write_text(str(LIMIT))
    job = {"procs": str(group), "after": {stage: mib * MIB for stage, mib in after_mib.items()}}
    env = ENV | {"EKV_TEST_CHILD": json.dumps(job), "PYTHONPATH": str(Path(__file__).parent)}
    llm = {"worker_extension_cls": "child_neighbour.Extension", "gpu_memory_utilization": 0.2}
    options = {"additional_config": {"extensible_kv_cache": {"max_chunk_bytes": 32 * MIB}}}
    return run_engine(SMALL | llm | options, [*SINGLES, FIGURES, SNAPSHOT], env)


@pytest.fixture(scope="module")
def stock(run_engine: Run) -> dict[str, Any]:
    return run_engine(SMALL, SINGLES, ENV)


@pytest.mark.parametrize(
    ("after_mib", "short"),
    [
        ({"reserve": 600, "warm-up": 300}, False),  # frees some before the last reading
        ({"prefix": 100, "measure": 600}, True),  # takes between the last reading and the commit
    ],
    ids=["frees", "takes"],
)
def test_neighbour_process_leaves_the_engine_what_is_free(
    run_engine: Run,
    stock: dict[str, Any],
    container: Path,  # noqa: F811
    after_mib: dict[str, int],
    short: bool,
) -> None:
    """Cases 8 and 29. Beyond the limit the kernel would have killed one of the two."""
    answer = start(run_engine, container, after_mib)
    assert (answer["error"], answer["exit"]) == (None, 0)
    *outputs, figures, (snapshot,) = answer["results"]
    check_engine_is_consistent(figures, [snapshot])
    held = list(after_mib.values())[-1] * MIB
    assert 256 * MIB < snapshot["physical_bytes"] < LIMIT - held
    warnings = [line for line in answer["log"].splitlines() if "could not back" in line]
    assert bool(warnings) == short
    assert all(re.search(r"host: \w+ failed: .*going on with \d+ blocks", line) for line in warnings)
    assert outputs == stock["results"]
