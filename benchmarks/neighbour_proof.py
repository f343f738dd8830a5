"""Another process takes and frees memory of the GPU while an engine starts, for `--parts neighbours`.

The neighbour (`device_neighbour.py`) is still when the engine is loaded, and what it holds then is known, so
that the engine's own use is what the device lost less that.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engines import GIB, UTILIZATION, run_engine, story, truth

from allocator import results

EXTENSION = "device_neighbour.Extension"
LOAD = {"do": "wide_load", "requests": 600, "prompt_tokens": 2000, "max_tokens": 16, "seconds": 10}
# GiB that the neighbour holds first and from the end of a stage on, and whether the commit comes up short.
NEIGHBOURS: dict[str, tuple[int, dict[str, int], bool]] = {
    "frees": (7, {"warm-up": 0}, False),  # between the engine's first and last reading
    "takes": (0, {"reserve": 5}, False),  # before warm-up, and keeps it
    "takes_all": (0, {"measure": 30}, True),  # between the last reading and the commit
}
# Beside so many GiB an explicit size still fits, and the utilization does not.
EXPLICIT_BESIDE, EXPLICIT_BYTES = 100, 8 << 30


def neighbour_records(
    base: dict[str, Any], log: Path, prompts: list[list[int]], only: list[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Start an engine alone, and one beside each neighbour, or those named in `only`, all with the flag.

    Raises `ValueError` for a name that there is none of: that would look like a run that kept all limits.
    """
    unknown = sorted(set(only or ()) - {*NEIGHBOURS, "explicit"})
    if unknown:
        raise ValueError(f"no {', '.join(unknown)} among {', '.join((*NEIGHBOURS, 'explicit'))}")
    llm = {**base, "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
    steps = [
        {"do": "generate", "prompts": prompts, "max_tokens": 64},
        LOAD,
        {"do": "rpc", "method": "ekv_report"},
        {"do": "figures"},
    ]
    alone = run_engine(llm, steps, {}, True, log)
    yield truth("neighbour_none_starts", not alone["error"], str(alone["error"] or "")[:500])
    if alone["error"]:
        return
    yield from _load_records("none", alone, 0)
    for name, (first, after, short) in NEIGHBOURS.items():
        if name not in (only or NEIGHBOURS):
            continue
        with tempfile.TemporaryDirectory() as folder:
            events = Path(folder) / "events"
            sizes = {stage: gib * GIB for stage, gib in after.items()}
            job = {"first": first * GIB, "after": sizes, "events": str(events)}
            beside = llm | {"worker_extension_cls": EXTENSION}
            run = run_engine(beside, steps, {"EKV_NEIGHBOUR": json.dumps(job)}, True, log)
            told = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
        yield truth(f"neighbour_{name}_starts", not run["error"], str(run["error"] or told)[:500])
        if not run["error"]:
            yield from _records(name, run, alone, told, [*after], short)
    if "explicit" in (only or ["explicit"]):
        yield from explicit_records(llm, steps[:1] + steps[2:], log, alone)


def explicit_records(
    llm: dict[str, Any], steps: list[dict[str, Any]], log: Path, alone: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Ask for so many bytes where a neighbour leaves less than the utilization: vLLM refuses to start."""
    for name, on in (("stock", False), ("flag", True)):
        with tempfile.TemporaryDirectory() as folder:
            job = {"first": EXPLICIT_BESIDE * GIB, "after": {}, "events": str(Path(folder) / "events")}
            beside = llm | {"worker_extension_cls": EXTENSION, "kv_cache_memory_bytes": EXPLICIT_BYTES}
            asked = steps if on else steps[:1]
            run = run_engine(beside, asked, {"EKV_NEIGHBOUR": json.dumps(job)}, on, log)
        limit = True if on else None
        yield truth(
            f"neighbour_explicit_{name}_starts", not run["error"], str(run["error"] or "")[:500], limit
        )
    if run["error"]:
        return
    outputs, (report,), figures = run["results"]
    same = [one["tokens"] for one in outputs] == [one["tokens"] for one in alone["results"][0]]
    yield truth("neighbour_explicit_tokens_as_alone", same)
    yield truth(
        "neighbour_explicit_blocks_are_committed", figures["num_gpu_blocks"] == report["committed_blocks"]
    )
    pool = report["snapshot"]
    # One block more would need less than a granule more of every segment, and its own bytes.
    slack = pool["bytes_per_block"] + len(pool["segments"]) * pool["granularity"]
    yield results.record(
        "neighbour_explicit_bytes_not_used",
        EXPLICIT_BYTES - pool["physical_bytes"],
        "bytes",
        limit=slack,
        note=f"{figures['num_gpu_blocks']} blocks in {pool['physical_bytes']} of {EXPLICIT_BYTES} bytes",
    )
    yield truth("neighbour_explicit_is_not_exceeded", pool["physical_bytes"] <= EXPLICIT_BYTES)


def _records(
    name: str,
    run: dict[str, Any],
    alone: dict[str, Any],
    told: list[dict[str, Any]],
    stages: list[str],
    short: bool,
) -> Iterator[dict[str, Any]]:
    """What an engine beside a neighbour is held to."""
    did = [event["stage"] for event in told]
    yield truth(f"neighbour_{name}_came_and_went", did == ["first", *stages], str(told))
    for what in ("tokens", "logprobs"):
        same = all(a[what] == b[what] for a, b in zip(run["results"][0], alone["results"][0], strict=True))
        yield truth(f"neighbour_{name}_{what}_as_alone", same)
    (report,), figures = run["results"][2:4]
    blocks = figures["num_gpu_blocks"]
    yield results.record(
        f"neighbour_{name}_blocks",
        blocks,
        "blocks",
        limit=1,
        better="higher",
        note=f"alone {alone['results'][3]['num_gpu_blocks']}; measured {report['measured']['blocks']}",
    )
    yield truth(f"neighbour_{name}_blocks_are_committed", blocks == report["committed_blocks"])
    warned = any("could not back" in line for line in story(run))
    yield truth(f"neighbour_{name}_commit_comes_up_short", warned, " | ".join(story(run))[:1500], short)
    yield from _load_records(name, run, told[-1]["bytes"] + told[-1]["context_bytes"])


def _load_records(name: str, run: dict[str, Any], held_bytes: int) -> Iterator[dict[str, Any]]:
    """Return whether the load went well, and the budget less what the engine itself held at the most."""
    load, total = run["results"][1], run["results"][3]["device_total_bytes"]
    error = load["error"]
    yield truth(
        f"neighbour_{name}_survives_load", error is None, str(error or f"{load['steps']} steps")[:500]
    )
    moments = [used[0] for at, used in run["use"]["moments"] if load["began"] <= at <= load["ended"]]
    left = (UTILIZATION * total - max(moments, default=total) + held_bytes) / GIB
    note = f"budget {UTILIZATION * total / GIB:.3f} GiB, the neighbour holds {held_bytes / GIB:.3f} GiB"
    yield results.record(
        f"neighbour_{name}_budget_left_gib", left, "GiB", limit=0, better="higher", note=note
    )
