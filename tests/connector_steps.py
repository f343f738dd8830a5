"""Steps for `engine_runner.py` about KV connectors in this process.

{"do": "seen"}: what `recording_connector` was told since the last time
{"do": "segments"}: of each worker's pool, how many segments and physical allocations it has, and of what kind
{"do": "refused", "call": "sleep" or "release_kv_cache", ...}: the error of a step that is to fail
"""

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


STEPS = {"seen": seen, "segments": segments, "refused": refused}
