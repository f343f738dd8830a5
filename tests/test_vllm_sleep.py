"""Engines asleep: memory, addresses, output, prefix-cache hits, failures at wake-up; one rank and two."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_vllm_plugin import ENV, OTHER_PROCESS, PROMPTS, SINGLES, SMALL

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(280)]

Run = Callable[..., dict[str, Any]]
SIZED = SMALL | {"kv_cache_memory_bytes": 256 << 20}
LONG = [700 + (j * j) % 1200 for j in range(429)]  # three whole blocks, and no prefix of another prompt
GENERATE = {"do": "generate", "prompts": PROMPTS, "max_tokens": 16}
CACHED = {"do": "cached", "prompts": [LONG]}
SLEEP, WAKE = {"do": "sleep"}, {"do": "wake_up"}
# name of what a step answers, and the step
STORY: list[tuple[str, dict[str, Any]]] = [
    # From the prefix cache the last bits of log-probabilities differ: like is compared with like.
    ("before, computed", GENERATE),
    ("before, cached", GENERATE),
    ("first", CACHED),
    ("hit", CACHED),
    ("awake", {"do": "wake_up"}),  # awake already
    ("nap", SLEEP),
    ("nap again", SLEEP),
    ("woken", WAKE),
    ("woken again", WAKE),
    ("hit after nap", CACHED),
    ("after nap", GENERATE),
    ("deep", SLEEP | {"level": 2}),
    ("weights only", WAKE | {"tags": ["weights"]}),
    ("weights, then cache", WAKE | {"tags": ["kv_cache"]}),
    ("miss after deep", CACHED),
    ("nap for cache first", SLEEP),
    ("cache only", WAKE | {"tags": ["kv_cache"]}),
    ("cache, then weights", WAKE | {"tags": ["weights"]}),
    ("hit after tags", CACHED),
    ("paused", SLEEP | {"level": 0}),
    ("resumed", WAKE | {"tags": ["scheduling"]}),
    ("hit after pause", CACHED),
    ("nap for failure", SLEEP),
    ("-", {"do": "budget", "bytes": 100 << 20}),
    ("no memory", WAKE),
    ("no memory again", WAKE | {"tags": ["kv_cache"]}),
    ("--", {"do": "budget", "bytes": 0}),
    ("memory again", WAKE),
    ("hit after failure", CACHED),
    ("---", {"do": "host_memory", "bytes": 1000}),
    ("nap without backup", SLEEP),
    ("----", {"do": "host_memory", "bytes": 0}),
    ("woken without backup", WAKE),
    ("miss without backup", CACHED),
    ("discarded", {"do": "release_kv_cache"}),
    ("woken from discard", WAKE),
    ("miss after discard", CACHED),
    ("undisturbed", {"do": "nap_in_flight", "prompt": LONG, "after": 99, "mode": "keep"}),
    ("kept", {"do": "nap_in_flight", "prompt": LONG, "after": 9, "mode": "keep"}),
    ("kept deep", {"do": "nap_in_flight", "prompt": LONG, "after": 9, "mode": "keep", "level": 2}),
    ("aborted", {"do": "nap_in_flight", "prompt": LONG, "after": 9, "mode": "abort"}),
    ("after", GENERATE),
]


@pytest.fixture(scope="module")
def engine(run_engine: Run) -> dict[str, Any]:
    """Return what one engine with `sleep_backup` answered to each step of the story, by name."""
    options = {"additional_config": {"extensible_kv_cache": {"sleep_backup": "cpu"}}}
    answer = run_engine(SIZED | options, [dict(step) for _, step in STORY], ENV)
    assert answer["error"] is None, answer["log"][-6000:]
    assert answer["exit"] == 0
    results = dict(zip((name for name, _ in STORY), answer["results"], strict=True))
    return {**results, "log": answer["log"]}


ASLEEP = ["nap", "nap again", "deep", "weights only", "nap for cache first", "nap for failure"]
ASLEEP += ["no memory", "no memory again", "nap without backup", "discarded"]
AWAKE = [
    "awake",
    "woken",
    "woken again",
    "weights, then cache",
    "cache only",
    "cache, then weights",
    "paused",
]
AWAKE += ["resumed", "memory again", "woken without backup", "woken from discard"]


@pytest.mark.parametrize("name", ASLEEP)
def test_asleep_holds_no_memory_at_the_same_addresses(engine: dict[str, Any], name: str) -> None:
    assert engine[name]["sleeping"]
    assert engine[name]["physical_bytes"] == engine[name]["committed_blocks"] == 0
    assert engine[name]["bases"] == engine["awake"]["bases"]


@pytest.mark.parametrize("name", AWAKE)
def test_awake_holds_what_it_held_before_at_the_same_addresses(engine: dict[str, Any], name: str) -> None:
    assert engine[name]["sleeping"] == (name in ("cache only", "paused"))
    for what in ("physical_bytes", "committed_blocks", "bases"):
        assert engine[name][what] == engine["awake"][what], what
    assert engine["awake"]["physical_bytes"] >= 200 << 20


def test_sleep_gives_memory_back_to_the_machine(engine: dict[str, Any]) -> None:
    assert engine["awake"]["memfd_bytes"] == engine["awake"]["physical_bytes"]
    assert engine["nap"]["memfd_bytes"] == 0


def test_generations_after_naps_equal_those_before(engine: dict[str, Any]) -> None:
    assert engine["after nap"] == engine["before, cached"]
    assert engine["after"] == engine["before, computed"]


@pytest.mark.parametrize(
    "name", ["hit", "hit after nap", "hit after tags", "hit after pause", "hit after failure"]
)
def test_prefix_hits_survive_a_nap_with_identical_output(engine: dict[str, Any], name: str) -> None:
    assert engine[name][0]["cached_tokens"] == 3 * 128
    assert engine[name] == engine["hit"]
    assert engine[name][0]["tokens"] == engine["first"][0]["tokens"]


@pytest.mark.parametrize("name", ["first", "miss after deep", "miss without backup", "miss after discard"])
def test_content_that_is_gone_is_computed_again(engine: dict[str, Any], name: str) -> None:
    assert engine[name][0]["cached_tokens"] == 0
    assert engine[name] == engine["first"]


def test_wake_up_out_of_memory_says_so_and_stays_asleep(engine: dict[str, Any]) -> None:
    for name in ("no memory", "no memory again"):
        assert engine[name]["error"]["type"] == "PoolOutOfMemoryError"
        text = engine[name]["error"]["text"]
        assert "rank 0 could not take its KV cache's memory again, so the engine stays asleep" in text
        assert text.endswith("; free memory on that device and wake the engine up again")
    assert engine["memory again"]["error"] is None


def test_backup_that_does_not_fit_is_left_out_with_a_warning(engine: dict[str, Any]) -> None:
    warnings = [x for x in engine["log"].splitlines() if "WARNING" in x and "xtensible" in x]
    assert len(warnings) == 1
    assert "is not kept over this sleep, because rank 0 cannot" in warnings[0]
    assert "1000 bytes of host memory are available" in warnings[0]


def test_request_in_flight_goes_on_after_a_nap_that_keeps_it(engine: dict[str, Any]) -> None:
    assert engine["undisturbed"]["asleep"] is None
    for name in ("kept", "kept deep"):
        assert engine[name]["asleep"]["physical_bytes"] == 0
        assert engine[name]["tokens"] == engine["undisturbed"]["tokens"]
        assert engine[name]["finish"] == "length"


def test_request_in_flight_is_aborted_by_default(engine: dict[str, Any]) -> None:
    assert 9 <= len(engine["aborted"]["tokens"]) < 24
    assert engine["aborted"]["asleep"]["physical_bytes"] == 0


def test_log_tells_of_memory_and_content(engine: dict[str, Any]) -> None:
    assert "Extensible KV cache: rank 0 gave back" in engine["log"]
    assert "kept in host memory" in engine["log"]
    assert "sleep mode is not supported on CPU" not in engine["log"]


def test_two_ranks_sleep_and_wake_together_or_not_at_all(run_engine: Run) -> None:
    """Rank 1 lacks memory at first: rank 0 gives back what it took, and both wake the next time.

    Then rank 0 cannot sleep: rank 1 wakes again, and no answer of its is left for the calls that follow. The
    same where rank 0 cannot let go of the cache alone.
    """
    lack = {"do": "rpc", "method": "set_host_budget", "args": [16 << 20, 1]}
    plenty = {"do": "rpc", "method": "set_host_budget", "args": [0]}
    refuse = {"do": "rpc", "method": "refuse_to_sleep", "args": [0]}
    steps = [*SINGLES, SLEEP, lack, WAKE, WAKE | {"tags": ["kv_cache"]}, plenty, WAKE, *SINGLES]
    steps += [refuse, {"do": "sleep_in_vain"}, WAKE, *SINGLES, SLEEP, WAKE, *SINGLES]
    steps += [refuse, {"do": "release_in_vain"}, WAKE, *SINGLES]
    llm = SIZED | {
        "kv_cache_memory_bytes": 64 << 20,
        "tensor_parallel_size": 2,
        "worker_extension_cls": "sleep_extension.Budget",
        "additional_config": {"extensible_kv_cache": True},
    }
    env = OTHER_PROCESS | {"PYTHONPATH": str(Path(__file__).parent)}
    answer = run_engine(llm, [dict(step) for step in steps], env)
    assert answer["error"] is None, answer["log"][-6000:]
    results = answer["results"]
    asleep, _, failed, failed_again, _, awake = results[2:8]
    for state in (asleep, failed, failed_again):
        assert state["sleeping"]
        assert state["physical_bytes_of_ranks"] == [0, 0]
    for state in (failed, failed_again):
        assert "rank 1 could not take its KV cache's memory again" in state["error"]["text"]
    assert awake["error"] is None
    assert not awake["sleeping"]
    assert min(awake["physical_bytes_of_ranks"]) >= 60 << 20
    refused, resumed = results[11:13]
    assert "rank 0: RuntimeError: the connector does not let go" in refused["error"]["text"]
    assert refused["sleeping"]  # the scheduler is paused
    assert not resumed["sleeping"]
    for state in (refused, resumed):
        assert state["physical_bytes_of_ranks"] == awake["physical_bytes_of_ranks"]
    assert results[15]["physical_bytes_of_ranks"] == [0, 0]
    refused, resumed = results[20:22]
    assert "rank 0: RuntimeError: the connector does not let go" in refused["error"]["text"]
    assert resumed["error"] is None and not resumed["sleeping"]
    assert resumed["physical_bytes_of_ranks"] == awake["physical_bytes_of_ranks"]
    for first in (8, 13, 17, 22):
        assert results[first : first + 2] == results[:2]
