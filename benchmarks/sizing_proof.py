"""Stock vLLM against the flag at the edge of the device, for `gpu_proof.py --parts sizing` on one H200.

Each of `sizing_configurations.py` starts twice, without the flag and with it, and is loaded as wide as its
scheduler goes. Memory is what the device lost by NVML, every 5 ms, the engine's CUDA context included;
`budget_left` is the budget less the most that was in use over the engine's whole life.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import adapters
import image_model
from engines import GIB, model_path, portable, run_engine, story, truth
from sizing_configurations import CONFIGURATIONS, Configuration

from allocator import results
from vllm_integration.config import DEFAULT_MARGIN_BYTES

MIB = 1 << 20


def sizing_records(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run the configurations of `args`, stock first; the last record is what the margin is for."""
    names = (args.configurations or ",".join(CONFIGURATIONS)).split(",")
    lefts: dict[str, float] = {}
    for name in names:
        configuration = CONFIGURATIONS[name]
        yield results.record(
            f"{name}_layers",
            configuration.sizes["layers"],
            "layers",
            note=f"Qwen3-0.6B's shape with {configuration.sizes}, utilization {configuration.utilization}, "
            f"{configuration.llm}, load {configuration.load}, environment {configuration.env}",
        )
        llm, load = _job(configuration, args.load_seconds)
        steps = [{"do": "figures"}, load, {"do": "figures"}]
        stock, flag = (
            run_engine(llm, steps, configuration.env, on, args.output / "engines.log") for on in (False, True)
        )
        for kind, run in (("stock", stock), ("flag", flag)):
            yield from _records(f"{name}_{kind}", configuration, run, args.load_seconds, kind == "flag")
        if _total_bytes(flag):
            lefts[name] = _left(flag, configuration)
    if lefts:
        needed = {name: DEFAULT_MARGIN_BYTES / MIB - left / MIB for name, left in lefts.items()}
        yield results.record(
            "margin_needed_mib",
            max(needed.values()),
            "MiB",
            limit=DEFAULT_MARGIN_BYTES / MIB,
            note=f"the margin less what is left of the budget: {_rounded(needed)}",
        )


def _job(configuration: Configuration, seconds: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keywords of `vllm.LLM`, and the step that loads it."""
    make = image_model.make_image_model if configuration.images else model_path
    llm = {
        "model": str(make(**configuration.sizes)),
        "max_model_len": 4096,
        "gpu_memory_utilization": configuration.utilization,
        "enable_prefix_caching": False,
        "seed": 0,
        **configuration.llm,
    }
    load = {"do": "wide_load", "seconds": seconds, **configuration.load}
    if configuration.adapters:
        load["adapters"] = adapters.make_adapters(llm["model"], configuration.adapters, llm["max_lora_rank"])
    return llm, load


def _records(
    name: str, configuration: Configuration, run: dict[str, Any], load_seconds: float, is_flag: bool
) -> Iterator[dict[str, Any]]:
    """Return the records of one engine; with the flag it is to start, to survive, and to keep its budget."""
    told = " | ".join(story(run))
    started = "start" in run["seconds"]  # an engine that started may still fail in a step
    yield truth(
        f"{name}_starts", started, _text(run["error"]) or told, _expected(configuration, "start", is_flag)
    )
    if not started:
        return
    if len(run["results"]) < 2:
        yield truth(
            f"{name}_survives_load", False, _text(run["error"]), _expected(configuration, "load", is_flag)
        )
        return
    before, load = run["results"][:2]
    yield results.record(
        f"{name}_start_s", run["seconds"]["start"], "s", note="compile caches not controlled"
    )
    yield results.record(f"{name}_kv_tokens", before["kv_cache_size_tokens"], "tokens", better="higher")
    survived = load["error"] is None
    did = {key: load[key] for key in load if key.startswith("widest") or key in ("steps", "generated_tokens")}
    yield truth(
        f"{name}_survives_load",
        survived,
        _text(load["error"]) or str(did),
        _expected(configuration, "load", is_flag),
    )
    most = configuration.llm.get("max_num_batched_tokens")
    if survived:
        yield results.record(f"{name}_load_s", load["seconds"], "s", limit=load_seconds, better="higher")
    if is_flag and most and configuration.load.get("kind") != "drafts":
        yield results.record(
            f"{name}_widest_step", load["widest_tokens"], "tokens", limit=most, better="higher"
        )
    peak = _peak(run, load["began"], load["ended"])
    budget = configuration.utilization * _total_bytes(run)
    note = f"budget {budget / GIB:.3f} GiB, {configuration.utilization} of {_total_bytes(run) / GIB:.3f}"
    yield results.record(f"{name}_peak_in_load_gib", peak / GIB, "GiB", note=note)
    yield results.record(
        f"{name}_budget_left_gib",
        _left(run, configuration) / GIB,
        "GiB",
        limit=0.0 if is_flag else None,
        better="higher",
        note=note,
    )


def _expected(configuration: Configuration, stage: str, is_flag: bool) -> bool | None:
    """Return whether the engine is to get through "start" or "load"; None where stock vLLM may fail."""
    return True if is_flag else {stage: False, None: None}.get(configuration.stock, True)


def _peak(run: dict[str, Any], began: float, ended: float) -> int:
    return max((max(used) for time, used in run["use"]["moments"] if began <= time <= ended), default=0)


def _left(run: dict[str, Any], configuration: Configuration) -> float:
    return configuration.utilization * _total_bytes(run) - run["use"]["peak_bytes"]


def _total_bytes(run: dict[str, Any]) -> int:
    return next((r["device_total_bytes"] for r in run["results"] if "device_total_bytes" in r), 0)


def _text(error: dict[str, str] | None) -> str:
    return portable(f"{error['type']}: {error['text']}")[:600] if error else ""


def _rounded(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in values.items())
