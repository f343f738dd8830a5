"""KV connectors on a GPU, for `gpu_proof.py --parts connectors`: CPU offload, and prefill/decode over NIXL.

NIXL's part needs the wheels ``nixl`` and ``nixl-cu13`` 1.5.1 (``pip install --no-deps``), which bring UCX.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engines import ENGINE_ENV, FLAG, run_engine, truth, with_shared_compile_cache
from pair import Pair

from allocator import results
from vllm_integration.worker_checks import has_rdma

CACHE_BYTES = 512 << 20  # about 16,000 tokens of 8 layers
OFFLOAD_BYTES = 2 << 30
PAIR_CACHE_BYTES = 4 << 30
# Also where transfers then go through host memory: that it works is to be shown, and what it costs.
ACCEPTED = {"extensible_kv_cache": {"host_staged_transfers": True}}
OFFLOADING = ("OffloadingConnector", "SimpleCPUOffloadConnector")
PAIRS = ("flag", "stock", "default", "napping")
PAIR_ENV = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "TRITON_CACHE_DIR": ENGINE_ENV["TRITON_CACHE_DIR"],
}
# One token more than whole blocks: whoever has the blocks computes that one token, wherever they came from.
PROMPTS = [
    [(7 * i + j * (i + 3)) % 1999 + 300 for j in range(length)] for i, length in enumerate((161, 1601, 2401))
]
LARGE = [[(11 * i + j * (i + 5)) % 1999 + 300 for j in range(4001)] for i in range(6)]


def connector_records(base: dict[str, Any], log: Path, only: list[str] | None) -> Iterator[dict[str, Any]]:
    """Run engines with offloading connectors one after another, then pairs; the names in `only`, or all.

    Raises `ValueError` for a name that there is none of: that would look like a run that kept all limits.
    """
    unknown = sorted(set(only or ()) - {*OFFLOADING, *PAIRS})
    if unknown:
        raise ValueError(f"no {', '.join(unknown)} among {', '.join((*OFFLOADING, *PAIRS))}")
    llm = {**base, "enable_prefix_caching": True, "gpu_memory_utilization": 0.4}
    llm["cudagraph_capture_sizes"] = [1, 2, 4, 8, 16, 32]  # nearly all steps have one request
    cached = [{"do": "cached", "prompts": [prompt], "max_tokens": 32} for prompt in PROMPTS]
    reference = run_engine(llm | {"kv_cache_memory_bytes": PAIR_CACHE_BYTES}, cached * 2, {}, False, log)
    yield truth("connectors_reference_starts", not reference["error"], str(reference["error"] or "")[:500])
    if reference["error"]:
        return
    from_cache = [one for answer in reference["results"][len(PROMPTS) :] for one in answer]
    yield from offload_records(llm, log, cached, from_cache, only)
    yield from nixl_records(llm, log, from_cache, only)


def offload_records(
    llm: dict[str, Any],
    log: Path,
    cached: list[dict[str, Any]],
    from_cache: list[dict[str, Any]],
    only: list[str] | None,
) -> Iterator[dict[str, Any]]:
    """Prompts whose blocks were evicted, and came back from the host."""
    evict = {"do": "load", "num_prompts": 30, "prompt_tokens": 1000, "max_tokens": 1}
    # Less than a block, which is not stored: its steps tell the scheduler of the copies before it.
    short = {"do": "generate", "prompts": [[301, 302, 303]], "max_tokens": 8}
    # vLLM refuses to sleep while copies are under way.
    nap = [short, {"do": "drain"}, {"do": "segments"}, {"do": "sleep"}, {"do": "wake_up"}]
    steps = [*cached, evict, *cached, *nap, *cached]
    for name in OFFLOADING:
        if name not in (only or OFFLOADING):
            continue
        transfer = {"kv_connector": name, "kv_role": "kv_both"}
        transfer["kv_connector_extra_config"] = {"cpu_bytes_to_use": OFFLOAD_BYTES}
        sized = llm | {"kv_cache_memory_bytes": CACHE_BYTES, "kv_transfer_config": transfer}
        run = run_engine(sized, steps, {}, True, log)
        yield truth(f"{name}_ran_all_steps", not run["error"], str(run["error"] or "")[:500])
        answers, count = run["results"], len(cached)
        if len(answers) <= 2 * count:
            continue
        first = [one for answer in answers[:count] for one in answer]
        again = [one for answer in answers[count + 1 : 2 * count + 1] for one in answer]
        hits = [sum(one["cached_tokens"] for one in outputs) for outputs in (first, again)]
        told = any("committed" in line and "Extensible KV cache" in line for line in run["log"])
        yield truth(f"{name}_with_the_extensible_cache", told)
        note = f"first {hits[0]}; between them {evict}"
        whole = sum(len(prompt) - 1 for prompt in PROMPTS)
        yield results.record(
            f"{name}_tokens_from_the_host", hits[1], "tokens", limit=whole, better="equal", note=note
        )
        yield truth(
            f"{name}_output_identical_to_prefix_hits_without", _outputs(again) == _outputs(from_cache)
        )
        if run["error"]:
            continue
        idle, (pool,), asleep, woken = answers[2 * count + 2 : 2 * count + 6]
        napped = [one for answer in answers[2 * count + 6 :] for one in answer]
        yield truth(f"{name}_idle_before_the_nap", idle)
        yield truth(f"{name}_tokens_after_a_nap_identical", _tokens(napped) == _tokens(first))
        held = f"{pool['physical_bytes']} bytes in {pool['chunks']} allocations before"
        slept = asleep["physical_bytes"] == 0 and woken["physical_bytes"] == pool["physical_bytes"]
        yield truth(f"{name}_pool_holds_nothing_asleep", slept, held)


def nixl_records(
    llm: dict[str, Any], log: Path, from_cache: list[dict[str, Any]], only: list[str] | None
) -> Iterator[dict[str, Any]]:
    """Prefill in one process and decode in another, on one device and on two where there are two."""
    if not set(only or PAIRS) & set(PAIRS):
        return
    installed = importlib.util.find_spec("nixl") is not None
    yield truth("nixl_is_installed", installed)
    if not installed:
        return
    import pynvml

    pynvml.nvmlInit()
    places = {"one_gpu": ("0", "0")}
    if pynvml.nvmlDeviceGetCount() > 1:
        places["two_gpus"] = ("0", "1")
    sized = with_shared_compile_cache(llm | {"kv_cache_memory_bytes": PAIR_CACHE_BYTES}, {})
    for name, devices in places.items():
        runs = {}
        flag, default = (sized | {"additional_config": config} for config in (ACCEPTED, FLAG))
        configs = {"stock": (sized, sized), "flag": (flag, flag), "default": (default, default)}
        if name == "one_gpu":
            # With its sleep mode vLLM sets UCX up in another way, so naps have a pair of their own.
            configs["napping"] = (default | {"enable_sleep_mode": True},) * 2
        for kind, llms in configs.items():
            if kind not in (only or PAIRS):
                continue
            run = pair_run(llms, log, PAIR_ENV, devices, nap=kind == "napping")
            error = run["error"]
            yield truth(f"nixl_{name}_{kind}_starts", not error, str(error or "")[:500])
            if error:
                continue
            runs[kind] = run
            if kind == "napping":
                yield from nap_records(name, run, from_cache)
            elif kind != "stock" and "stock" in runs:
                yield from COMPARED[kind](name, run, runs["stock"], from_cache)


def pair_run(
    llms: tuple[dict[str, Any], dict[str, Any]],
    log: Path,
    env: dict[str, str],
    devices: tuple[str, str],
    nap: bool,
) -> dict[str, Any]:
    """What one pair of engines hands over: `PROMPTS`, then `LARGE`, or `PROMPTS` again after both slept."""
    pair = Pair(llms, log, env, devices)
    answers: dict[str, Any] = {"error": pair.error, "started": pair.started}
    try:
        if pair.error is None:
            answers["small"] = pair.hand_over(PROMPTS, 32)
            if nap:
                answers["naps"] = pair.nap()
                answers["after nap"] = pair.hand_over(PROMPTS, 32)
            else:
                answers["large"] = pair.hand_over(LARGE, 1)
            answers["error"] = next(
                (a["error"] for a in answers.values() if isinstance(a, dict) and a.get("error")), None
            )
    except (KeyError, TypeError, BrokenPipeError) as error:  # an engine that ended has no outputs
        answers["error"] = f"{type(error).__name__}: {error}"
    finally:
        answers["exits"] = pair.close()
    return answers


def pair_records(
    name: str, flag: dict[str, Any], stock: dict[str, Any], from_cache: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """What a pair with the flag is held to: the pair without, and one engine without a connector."""
    outputs = flag["small"]["outputs"]
    moved = sum(size for size, _ in flag["small"]["moved"])
    yield results.record(f"nixl_{name}_bytes_moved", moved, "bytes", limit=1, better="higher")
    yield truth(f"nixl_{name}_output_as_the_stock_pair", outputs == stock["small"]["outputs"])
    yield truth(f"nixl_{name}_tokens_as_one_engine_without", _tokens(outputs) == _tokens(from_cache))
    yield truth(f"nixl_{name}_logprobs_as_one_engine_without", _outputs(outputs) == _outputs(from_cache))
    yield truth(f"nixl_{name}_large_output_as_the_stock_pair", *_same(flag["large"], stock["large"]))
    rates = {}
    for kind, run in (("flag", flag), ("stock", stock)):
        rates[kind], note = _rate(run)
        yield results.record(f"nixl_{name}_{kind}_gb_per_s", rates[kind], "GB/s", better="higher", note=note)
    snapshots = [one["snapshot"] for one in flag["started"]]
    yield truth(f"nixl_{name}_flag_has_the_extensible_cache", all(snapshots))
    if not all(snapshots):
        return
    kinds = {snapshot["reservations"][0]["handle_kind"] for snapshot in snapshots}
    pieces = all(len(snapshot["chunks"]) <= len(snapshot["segments"]) for snapshot in snapshots)
    yield truth(f"nixl_{name}_one_allocation_a_layer", pieces, f"handle kinds: {sorted(kinds)}")
    ratio = rates["flag"] / rates["stock"] if rates["stock"] else 0.0
    # Source: libuct_cuda of nixl-cu13 1.5.1: it exports memory like ours by a fabric handle or not at all.
    note = (
        "" if kinds == {"fabric"} else f"no limit: UCX maps such memory by fabric handles only, here {kinds}"
    )
    limit = None if note else 0.9
    yield results.record(
        f"nixl_{name}_bandwidth_flag_vs_stock", ratio, "", limit=limit, better="higher", note=note
    )
    yield truth(f"nixl_{name}_engines_exit_cleanly", flag["exits"] == [0, 0], str(flag["exits"]))


def default_records(
    name: str, default: dict[str, Any], stock: dict[str, Any], from_cache: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """What the switch alone is held to: nothing is slower, and vLLM's normal cache prefills where need be."""
    yield truth(
        f"nixl_{name}_default_output_as_the_stock_pair",
        default["small"]["outputs"] == stock["small"]["outputs"],
    )
    tokens = _tokens(default["small"]["outputs"])
    yield truth(f"nixl_{name}_default_tokens_as_one_engine_without", tokens == _tokens(from_cache))
    prefills, decodes = (one["snapshot"] for one in default["started"])
    kind = prefills["reservations"][0]["handle_kind"] if prefills else "vLLM's normal cache"
    # The prefilling engine's memory is mapped, and the decoding one's is not. Adapters have to reach both.
    limit = None if has_rdma() else True
    mapped = prefills is None or kind == "fabric"
    yield truth(f"nixl_{name}_default_prefills_from_what_can_be_mapped", mapped, kind, limit=limit)
    found = decodes is not None
    yield truth(f"nixl_{name}_default_decodes_into_the_extensible_cache", found, limit=limit)
    (rate, note), (stock_rate, _) = _rate(default), _rate(stock)
    yield results.record(
        f"nixl_{name}_default_gb_per_s", rate, "GB/s", better="higher", note=f"{kind}; {note}"
    )
    ratio = rate / stock_rate if stock_rate else 0.0
    # Single transfers take half a millisecond, and those of one run differ by five times.
    yield results.record(
        f"nixl_{name}_bandwidth_default_vs_stock", ratio, "", limit=0.3, better="higher", note=kind
    )
    yield truth(
        f"nixl_{name}_default_engines_exit_cleanly", default["exits"] == [0, 0], str(default["exits"])
    )


COMPARED = {"flag": pair_records, "default": default_records}


def _rate(run: dict[str, Any]) -> tuple[float, str]:
    """Return how fast `LARGE` was moved in GB/s, and of what that was found."""
    size, seconds = (sum(one[i] for one in run["large"]["moved"]) for i in (0, 1))
    single = ", ".join(f"{s / t / 1e9:.2f}" for s, t in run["large"]["moved"] if t)
    note = f"{size} bytes in {seconds:.4f} s by NIXL's own clock; each transfer: {single}"
    return size / seconds / 1e9 if seconds else 0.0, note


def nap_records(name: str, run: dict[str, Any], from_cache: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """What a pair with the flag is held to over a nap of both engines."""
    naps = run["naps"]
    slept = all(nap["error"] is None and nap["asleep_bytes"] == 0 and nap["awake_bytes"] > 0 for nap in naps)
    yield truth(f"nixl_{name}_pools_hold_nothing_asleep", slept, str(naps))
    tokens = _tokens(run["small"]["outputs"])
    yield truth(f"nixl_{name}_napping_tokens_as_one_engine_without", tokens == _tokens(from_cache))
    yield truth(f"nixl_{name}_output_after_a_nap_identical", *_same(run["after nap"], run["small"]))
    yield truth(f"nixl_{name}_napping_engines_exit_cleanly", run["exits"] == [0, 0], str(run["exits"]))


def _same(one: dict[str, Any], other: dict[str, Any]) -> tuple[bool, str]:
    moved = sum(size for size, _ in one["moved"])
    return one["outputs"] == other["outputs"] and moved > 0, f"{moved} bytes moved"


def _tokens(outputs: list[dict[str, Any]]) -> list[list[int]]:
    return [output["tokens"] for output in outputs]


def _outputs(outputs: list[dict[str, Any]]) -> list[Any]:
    """Tokens, and of each the log-probability."""
    return [
        (
            output["tokens"],
            [
                dict(map(tuple, step))[token]
                for token, step in zip(output["tokens"], output["logprobs"], strict=True)
            ],
        )
        for output in outputs
    ]
