"""Steps for `engine_runner.py` about KV connectors in this process.

{"do": "seen"}: what `recording_connector` was told since the last time
{"do": "segments"}: of each worker's pool, how many segments and physical allocations it has, and of what kind
{"do": "drain"}: step until no request and no copy of a connector's is left; whether it came to that
{"do": "nap_while_loading", "prompt": [...]}: a sleep in the middle of a `LoadingConnector`'s load, and later
{"do": "refused", "call": "sleep" or "release_kv_cache", ...}: the error of a step that is to fail
"""

import time
from typing import Any

import sleep_steps


def seen(llm: Any) -> list[dict[str, Any]]:
    import recording_connector

    told = list(recording_connector.SEEN)
    recording_connector.SEEN.clear()
    return told


def segments(llm: Any) -> list[dict[str, Any]]:
    return [
        {
            "segments": len(snapshot["segments"]),
            "chunks": len(snapshot["chunks"]),
            "handle_kind": snapshot["reservations"][0]["handle_kind"],
            "committed_blocks": snapshot["committed_blocks"],
            "physical_bytes": snapshot["physical_bytes"],
        }
        for snapshot in llm.collective_rpc("ekv_snapshot")
    ]


def drain(llm: Any, seconds: float = 10.0) -> bool:
    """Step on as an engine in a process of its own would; one in this process only steps for requests."""
    scheduler, deadline = llm.llm_engine.engine_core.engine_core.scheduler, time.monotonic() + seconds
    while scheduler.has_requests() and time.monotonic() < deadline:
        llm.llm_engine.step()
        time.sleep(0.001)
    return not scheduler.has_requests()


def refused(llm: Any, call: str, **arguments: Any) -> str:
    """Return the error, and leave the engine awake."""
    try:
        sleep_steps.STEPS[call](llm, **arguments)
    except Exception as error:
        text = str(error)
    else:
        text = "no error"
    if call == "release_kv_cache":
        llm.wake_up(["scheduling"])  # it paused the scheduler first
    return text


def nap_while_loading(llm: Any, prompt: list[int]) -> dict[str, Any]:
    """Return the first sleep's error and what the pool held then, and how request and second nap went."""
    from recording_connector import SEEN, LoadingConnector
    from vllm import SamplingParams

    engine = llm.llm_engine
    engine.add_request("remote-1", {"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=8))
    for _ in range(4):
        engine.step()
    assert LoadingConnector.loading
    SEEN.clear()
    answer = {"error": refused(llm, "sleep", mode="keep"), "told": [one["what"] for one in SEEN]}
    answer["held"] = segments(llm)[0]["committed_blocks"]
    LoadingConnector.may_finish = True
    llm.wake_up(["scheduling"])
    answer["drained"] = drain(llm)
    llm.sleep(mode="keep")
    answer["asleep"] = segments(llm)[0]["committed_blocks"]
    llm.wake_up()
    return answer


STEPS = {
    "seen": seen,
    "segments": segments,
    "drain": drain,
    "refused": refused,
    "nap_while_loading": nap_while_loading,
}
