"""The records of `benchmarks/serve_proof.py`, from servers that are made up: the device is rented."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import serve_proof

GIB = 1 << 30
ANSWERS = [
    {"text": f"answer {i}", "tokens": [f"t{i * 50 + j}" for j in range(50)], "logprobs": [-0.5], "top": [{}]}
    for i in range(5)
]
METRICS = """
vllm:cache_config_info{block_size="16",num_gpu_blocks="900",engine="0"} 1.0
extensible_kv:committed_blocks{engine="0",rank="0"} 900.0
"""
STORY = ["Extensible KV cache: 900 blocks committed"]


def served(peak_gib: float, **changes: Any) -> dict[str, Any]:
    return {
        "answers": ANSWERS,
        "streamed": "answer 0",
        "load_tokens": [16] * serve_proof.AT_ONCE,
        "start_s": 60.0,
        "load_s": 5.0,
        "exit": 0,
        "peak_bytes": int(peak_gib * GIB),
        "left_bytes": 0,
        "log": [],
        "metrics": METRICS,
    } | changes


def failed(**changes: Any) -> set[str]:
    """Names of the records that a server with the flag fails; the one without it is over its budget."""
    report = {"measured": {"requested_bytes": 90 * GIB}, "committed_blocks": 900}
    asked = {
        "report": report | {"snapshot": {"physical_bytes": 80 * GIB}},
        "sleep": {"physical_bytes": 0, "gives_back_bytes": 81 * GIB},
        "answers_after_sleep": ANSWERS,
    }
    made = [*serve_proof._records(served(91), served(89.9, **({"log": STORY} | asked | changes)))]
    assert len(made) == 22
    return {item["name"].removeprefix("serve_") for item in made if item["passed"] is False}


def test_server_that_keeps_its_budget_and_its_words_passes() -> None:
    assert failed() == set()


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"peak_bytes": 91 * GIB}, {"flag_budget_left_gib"}),
        ({"exit": -9}, {"flag_exit_status"}),
        ({"left_bytes": GIB}, {"flag_left_on_device_gib"}),
        ({"streamed": "answer"}, {"stream_joins_to_whole"}),
        ({"load_tokens": [16]}, {"load_answered"}),
        ({"metrics": METRICS.replace("900.0", "901.0")}, {"metrics_show_committed_blocks"}),
        ({"sleep": {"physical_bytes": 0, "gives_back_bytes": 79 * GIB}}, {"sleep_gives_back_gib"}),
        ({"sleep": {"physical_bytes": 1, "gives_back_bytes": 81 * GIB}}, {"sleep_pool_holds_nothing"}),
        ({"answers_after_sleep": ANSWERS[1:]}, {"output_identical_after_sleep"}),
        ({"log": []}, {"only_the_flag_grew"}),
    ],
)
def test_server_that_does_not_fails(changes: dict[str, Any], names: set[str]) -> None:
    assert failed(**changes) == names


@pytest.mark.parametrize("what", ["text", "tokens", "logprobs", "top"])
def test_other_output_than_without_the_flag_fails(what: str) -> None:
    other = [ANSWERS[0] | {what: "other"}, *ANSWERS[1:]]
    names = failed(answers=other, answers_after_sleep=other)
    assert f"{what}_identical" in names and names <= {f"{what}_identical", "stream_joins_to_whole"}
