"""Engines asleep on a GPU, for `gpu_proof.py --parts sleep`: with the flag, without it, with content kept."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engines import GIB, budget_left, run_engine, truth, used_note

from allocator import results

# After the naps: as wide as the scheduler goes, beside what the naps may have left of PyTorch's cache.
LOAD = {"do": "load", "num_prompts": 300, "prompt_tokens": 2000, "max_tokens": 16}
OPTION = {"extensible_kv_cache": {"sleep_backup": "cpu"}}
# While asleep the flag may hold this much more than vLLM: the driver's own bookkeeping of addresses.
ALLOWED_GIB = 0.25
# Once awake as much is free as before, but for what an engine takes as it goes, within the margin.
ALLOWED_AWAKE_GIB = 0.1


def sleep_records(base: dict[str, Any], log: Path, prompts: list[list[int]]) -> Iterator[dict[str, Any]]:
    """Run six engines one after another; every record has a limit that must hold."""
    generate = {"do": "generate", "prompts": prompts, "max_tokens": 64}
    nap, wake = {"do": "sleep", "level": 1}, {"do": "wake_up"}
    reload = [
        {"do": "sleep", "level": 2},
        {"do": "wake_up", "tags": ["weights"]},
        {"do": "rpc", "method": "reload_weights"},
        {"do": "wake_up", "tags": ["kv_cache"]},
    ]
    wide = [LOAD, {"do": "figures"}]
    steps = [generate, {"do": "figures"}, nap, wake, generate, *reload, generate, *wide]
    alone = [*steps[:5], {"do": "sleep", "level": 2}, wake, generate, *wide]
    both = {**base, "enable_sleep_mode": True, "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
    runs = {
        "stock": run_engine(both, steps, {}, False, log),
        "flag": run_engine(both, steps, {}, True, log),
        # Without vLLM's sleep mode the weights stay, so that level 2 needs no other ones.
        "alone": run_engine({**both, "enable_sleep_mode": False}, alone, {}, True, log),
        "fp8_stock": run_engine({**both, "kv_cache_dtype": "fp8"}, steps, {}, False, log),
        "fp8_flag": run_engine({**both, "kv_cache_dtype": "fp8"}, steps, {}, True, log),
    }
    for name, run in runs.items():
        yield truth(f"sleep_{name}_ran_all_steps", not run["error"], str(run["error"] or "")[:500])
    for name, run in runs.items():  # an engine that failed in a later step has the results of those before
        outputs = [answer for answer in run["results"] if isinstance(answer, list) and _is_output(answer)]
        which = [output == outputs[0] for output in outputs[1:]]
        same, note = all(which) and bool(which), f"after each nap: {which}"
        yield truth(f"sleep_{name}_output_identical_after_each_nap", same, note)
    first = {name: run["results"][:1] for name, run in runs.items()}
    for name in ("", "fp8_"):
        flag, stock = first[f"{name}flag"], first[f"{name}stock"]
        yield truth(f"sleep_{name}flag_output_as_stock", bool(flag) and flag == stock)
    yield truth("sleep_fp8_output_is_another", first["fp8_flag"] != first["flag"])
    for name in ("flag", "alone", "fp8_flag"):
        if not runs[name]["error"]:
            left = budget_left(runs[name])
            yield results.record(
                f"sleep_{name}_budget_left_gib",
                left,
                "GiB",
                limit=0,
                better="higher",
                note=f"after the naps {LOAD}; {used_note(runs[name])}",
            )
    yield from _memory(runs)
    yield from _hits(both, log, prompts)


def _memory(runs: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    done = min(len(runs[name]["results"]) for name in ("flag", "stock"))
    for number, level in ((2, 1), (5, 2)):
        if number >= done:
            continue
        flag, stock = (runs[name]["results"][number] for name in ("flag", "stock"))
        yield truth(f"sleep_level_{level}_pool_holds_nothing", flag["physical_bytes"] == 0)
        yield results.record(
            f"sleep_level_{level}_free_less_than_stock_gib",
            (stock["device_free_bytes"] - flag["device_free_bytes"]) / GIB,
            "GiB",
            limit=ALLOWED_GIB,
            note=f"free while asleep: {flag['device_free_bytes'] / GIB:.2f} GiB",
        )
    if done < 4:
        return
    before, asleep, awake = runs["flag"]["results"][1:4]
    if done > 8:
        later = runs["flag"]["results"][8]
        differs = [before["device_free_bytes"] - now["device_free_bytes"] for now in (awake, later)]
        yield results.record(
            "sleep_free_when_awake_differs_gib",
            max(map(abs, differs)) / GIB,
            "GiB",
            limit=ALLOWED_AWAKE_GIB,
            note=f"less than before the first nap: {differs} bytes after it, and after the second, in which "
            "the weights were loaded again",
        )
    yield truth("sleep_level_1_same_addresses", asleep["bases"] == awake["bases"], str(awake["error"] or ""))
    gained = (asleep["device_free_bytes"] - awake["device_free_bytes"]) / GIB
    held = awake["physical_bytes"] / GIB
    yield results.record(
        "sleep_level_1_device_gains_gib", gained, "GiB", limit=held, better="higher", note="pool and weights"
    )


def _hits(base: dict[str, Any], log: Path, prompts: list[list[int]]) -> Iterator[dict[str, Any]]:
    cached = {"do": "cached", "prompts": prompts}
    steps = [cached, cached, {"do": "sleep", "level": 1}, {"do": "wake_up"}, cached]
    llm = {**base, "enable_prefix_caching": True, "additional_config": OPTION}
    run = run_engine(llm, steps, {}, False, log)
    yield truth("sleep_backup_starts", not run["error"], str(run["error"] or "")[:500])
    if run["error"]:
        return
    _, before, asleep, _, after = run["results"]
    hits = sum(output["cached_tokens"] for output in after)
    yield results.record("sleep_backup_cached_tokens_after", hits, "tokens", limit=1, better="higher")
    yield truth("sleep_backup_output_and_hits_identical", before == after)
    yield truth("sleep_backup_pool_holds_nothing", asleep["physical_bytes"] == 0)


def _is_output(answer: list[Any]) -> bool:
    return bool(answer) and isinstance(answer[0], dict) and "tokens" in answer[0]
