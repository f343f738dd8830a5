"""KV connectors on the CPU build: what they are given, outputs with them, sleep, standing aside."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_vllm_plugin import ENV, GENERATE, OTHER_PROCESS, PROMPTS, SINGLES, SMALL, warnings_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(280)]

Run = Callable[..., dict[str, Any]]
FLAG = {"additional_config": {"extensible_kv_cache": True}}
NAP, WAKE, SEEN, SEGMENTS = {"do": "sleep"}, {"do": "wake_up"}, {"do": "seen"}, {"do": "segments"}
FIGURES = {"do": "figures"}
HERE = {"PYTHONPATH": str(Path(__file__).parent)}
LAYERS = [f"model.layers.{i}.self_attn.attn" for i in range(4)]


def recording(name: str = "RecordingConnector") -> dict[str, Any]:
    return {"kv_connector": name, "kv_connector_module_path": "recording_connector", "kv_role": "kv_both"}


def example(folder: Path) -> dict[str, Any]:
    extra = {"shared_storage_path": str(folder)}
    return {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def steps(*those: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(step) for step in those]


def whats(seen: list[dict[str, Any]], side: str = "worker") -> list[str]:
    return [one["what"] for one in seen if one["side"] == side]


def tokens(outputs: list[dict[str, Any]]) -> list[list[int]]:
    """Without the log-probabilities, whose last bits depend on what came from a cache."""
    return [output["tokens"] for output in outputs]


@pytest.fixture(scope="module")
def stock(run_engine: Run) -> list[Any]:
    answer = run_engine(SMALL, steps(*SINGLES, GENERATE), ENV)
    assert answer["error"] is None
    return answer["results"]


REFUSALS = [{"do": "refused", "call": "sleep", "level": level} for level in (1, 2)]
REFUSALS += [{"do": "refused", "call": "release_kv_cache"}]
STORY = [FIGURES, SEGMENTS, SEEN, *SINGLES, GENERATE, SEEN, *REFUSALS, SEGMENTS, GENERATE, SEEN]


@pytest.fixture(scope="module")
def recorded(run_engine: Run) -> dict[str, Any]:
    """An engine with the recording connector, whose assertions hold if it works at all."""
    answer = run_engine(SMALL | FLAG | {"kv_transfer_config": recording()}, steps(*STORY), ENV | HERE)
    assert answer["error"] is None, answer["log"][-6000:]
    return answer


def test_connector_is_made_once_with_the_final_size_on_both_sides(recorded: dict[str, Any]) -> None:
    figures, (pool,), seen = recorded["results"][:3]
    made = [one for one in seen if one["what"] == "made"]
    assert [one["side"] for one in made] == ["worker", "scheduler"]
    for one in made:
        assert one["num_blocks"] == one["num_gpu_blocks"] == figures["num_gpu_blocks"]
        assert set(one["sizes"]) == set(figures["tensor_sizes"])
    assert pool["committed_blocks"] == figures["num_gpu_blocks"]


def test_registration_comes_before_the_handshake_and_covers_each_layer(recorded: dict[str, Any]) -> None:
    figures, _, seen = recorded["results"][:3]
    assert whats(seen) == ["made", "registered", "copy operation", "handshake"]
    registered, copy_operation, handshake = [one for one in seen if one["side"] == "worker"][1:]
    assert registered["layers"] == LAYERS
    assert {size for _, size in registered["storages"]} == {figures["tensor_sizes"][0] // 4}
    assert copy_operation["name"] == "copy_kv_blocks"
    assert handshake["registered"] == 4
    (peers,) = [one for one in seen if one["what"] == "peers"]
    assert peers["num_blocks"] == [figures["num_gpu_blocks"]]


def test_memory_that_may_be_registered_is_one_shareable_piece_per_layer(recorded: dict[str, Any]) -> None:
    """Case 33, in an engine."""
    (pool,) = recorded["results"][1]
    assert pool["chunks"] == pool["segments"] == 4
    assert pool["handle_kind"] == "fd"


def test_output_with_a_connector_is_that_without(recorded: dict[str, Any], stock: list[Any]) -> None:
    assert recorded["results"][3:6] == stock
    assert warnings_of(recorded["log"]) == []


def test_each_step_shows_the_connector_committed_layers(recorded: dict[str, Any]) -> None:
    seen = recorded["results"][6]
    loads = [one for one in seen if one["what"] == "load"]
    saved = [one["layer"] for one in seen if one["what"] == "saved layer"]
    touched = {block for one in seen if one["what"] == "step" for block in one["blocks"]}
    assert len(loads) > 30
    assert {one["layers"] for one in loads} == {4}
    assert sorted(set(saved)) == LAYERS
    assert len(touched) > len(PROMPTS)


def test_sleep_is_refused_where_memory_is_registered_for_good(recorded: dict[str, Any]) -> None:
    *refusals, after = recorded["results"][7:11]
    for text in refusals:
        assert "the KV connector RecordingConnector has registered the cache's memory" in text
    assert after == recorded["results"][1]
    assert tokens(recorded["results"][11]) == tokens(recorded["results"][5])


def test_sleeping_connector_registers_again_after_each_nap(run_engine: Run, stock: list[Any]) -> None:
    naps = [NAP, SEEN, WAKE, SEEN, *SINGLES, NAP | {"level": 2}, WAKE | {"tags": ["weights"]}, SEEN]
    naps += [WAKE | {"tags": ["kv_cache"]}, SEEN, {"do": "release_kv_cache"}, WAKE, SEEN, SEGMENTS, *SINGLES]
    llm = SMALL | FLAG | {"kv_transfer_config": recording("SleepingConnector")}
    answer = run_engine(llm, steps(SEEN, SEGMENTS, *naps), ENV | HERE)
    assert answer["error"] is None, answer["log"][-6000:]
    _, pool, nap, asleep, woken, awake, *rest = answer["results"]
    assert nap["physical_bytes"] == 0
    assert whats(asleep) == ["unregistered"]
    assert asleep[0]["readable"], "given up while the memory was still there"
    assert woken["error"] is None
    assert whats(awake)[0] == "registered again"
    assert rest[:2] == stock[:2]
    weights_only, cache, (discarded, again, told, pool_after) = rest[4], rest[6], rest[7:11]
    assert "registered again" not in whats(weights_only)
    assert "registered again" in whats(cache)
    assert discarded["physical_bytes"] == 0
    assert again["error"] is None
    assert [what for what in whats(told) if "registered" in what] == ["unregistered", "registered again"]
    assert pool_after == pool
    assert rest[11:] == stock[:2]


def test_content_that_is_still_being_loaded_is_not_slept_on(run_engine: Run, stock: list[Any]) -> None:
    """vLLM refuses that; with the content kept, half of what comes over the network would be restored."""
    llm = SMALL | {"kv_transfer_config": recording("LoadingConnector")}
    llm |= {"additional_config": {"extensible_kv_cache": {"sleep_backup": "cpu"}}}
    nap = {"do": "nap_while_loading", "prompt": [700 + (j * j) % 1200 for j in range(429)]}
    answer = run_engine(llm, steps(FIGURES, nap, *SINGLES), ENV | HERE)
    assert answer["error"] is None, answer["log"][-6000:]
    figures, told, *outputs = answer["results"]
    assert "waiting for remote KV transfer" in told["error"]
    assert "unregistered" not in told["told"]
    assert told["held"] == figures["num_gpu_blocks"]
    assert told["drained"] and told["asleep"] == 0
    assert outputs == stock[:2]


def test_disk_round_trip_of_two_engines_gives_the_same_output(
    run_engine: Run, stock: list[Any], tmp_path: Path
) -> None:
    """What one engine with the flag saved, another with it and one without load; a nap changes nothing."""
    llm = SMALL | {"kv_transfer_config": example(tmp_path), "enable_prefix_caching": False}
    saved = run_engine(llm | FLAG, steps(SEGMENTS, *SINGLES), ENV)
    assert saved["error"] is None, saved["log"][-6000:]
    assert saved["results"][1:] == stock[:2]
    assert "External Cache Hit!" not in saved["log"]
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 2 * len(LAYERS)
    loaded = run_engine(llm | FLAG, steps(*SINGLES, NAP, WAKE, *SINGLES), ENV)
    without = run_engine(llm, steps(*SINGLES), ENV)
    for answer, times in ((loaded, 4), (without, 2)):
        assert answer["error"] is None, answer["log"][-6000:]
        assert answer["log"].count("External Cache Hit!") == times
    assert loaded["results"][:2] == without["results"]
    assert loaded["results"][4:] == without["results"]
    assert loaded["results"][2]["physical_bytes"] == 0
    for ours, computed in zip(loaded["results"][:2], stock[:2], strict=True):
        assert tokens(ours) == tokens(computed)
    # A connector that only copies leaves the pool as it is without one.
    assert saved["results"][0][0]["handle_kind"] == "none" or saved["results"][0][0]["chunks"] > 4


def test_several_connectors_each_see_committed_memory(
    run_engine: Run, stock: list[Any], tmp_path: Path
) -> None:
    children = [example(tmp_path), recording()]
    multi = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    multi["kv_connector_extra_config"] = {"connectors": children}
    refused = {"do": "refused", "call": "sleep"}
    llm = SMALL | FLAG | {"kv_transfer_config": multi, "enable_prefix_caching": False}
    answer = run_engine(llm, steps(SEGMENTS, SEEN, *SINGLES, *SINGLES, SEEN, refused), ENV | HERE)
    assert answer["error"] is None, answer["log"][-6000:]
    (pool,), seen = answer["results"][:2]
    assert pool["chunks"] == pool["segments"] == 4
    assert whats(seen)[:3] == ["made", "registered", "copy operation"]
    assert answer["results"][2:4] == stock[:2]
    for ours, computed in zip(answer["results"][4:6], stock[:2], strict=True):
        assert tokens(ours) == tokens(computed)
    assert answer["log"].count("External Cache Hit!") == 2
    assert "RecordingConnector has registered" in answer["results"][7]


def test_each_of_two_ranks_makes_its_connector(run_engine: Run, stock: list[Any]) -> None:
    llm = SMALL | FLAG | {"kv_transfer_config": recording(), "pipeline_parallel_size": 2}
    env = OTHER_PROCESS | HERE | {"VLLM_CPU_OMP_THREADS_BIND": "0|0"}
    answer = run_engine(llm, steps(SEGMENTS, *SINGLES), env)
    assert answer["error"] is None, answer["log"][-6000:]
    assert answer["results"][1:] == stock[:2]
    for pool in answer["results"][0]:
        assert pool["chunks"] == pool["segments"] == 2


def test_connector_with_memory_of_its_own_makes_the_plugin_stand_aside(
    run_engine: Run, stock: list[Any]
) -> None:
    llm = SMALL | FLAG | {"kv_transfer_config": recording("PoolConnector")}
    snapshot = {"do": "rpc", "method": "ekv_snapshot"}
    answer = run_engine(llm, steps(*SINGLES, snapshot, SEEN), ENV | HERE)
    assert answer["error"] is None, answer["log"][-6000:]
    assert answer["results"][:2] == stock[:2]
    assert answer["results"][2] == [None]
    assert whats(answer["results"][3])[:2] == ["made", "registered"]
    (warning,) = warnings_of(answer["log"])
    assert "because the KV connector PoolConnector brings a memory pool of its own" in warning
