"""Two ranks on two GPUs, with graphs, for `gpu_proof.py --parts tp2`: about three minutes on two H200s.

Each device is sampled by NVML from outside. Neither this process nor the engine's own touches a device: the
ranks do, and what a third context took would count against the budget.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engines import GIB, run_engine, story, truth

from allocator import results

RANKS = 2
# NVLink multicast is left alone: a program that fails with it can take a whole host's devices out of service.
ENV = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",  # a machine without a network may have no name that resolves
}
LOAD = {"do": "wide_load", "requests": 600, "prompt_tokens": 2000, "max_tokens": 16}


def tp_records(
    base: dict[str, Any], log: Path, prompts: list[list[int]], load_seconds: float
) -> Iterator[dict[str, Any]]:
    """Run stock and flag with tensor parallelism: same output, same blocks on both ranks, and budgets."""
    llm = {**base, "tensor_parallel_size": RANKS, "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 64]}
    load = {**LOAD, "seconds": load_seconds}
    steps = [{"do": "generate", "prompts": prompts, "max_tokens": 64}, {"do": "cache"}, load]
    report = [{"do": "rpc", "method": "ekv_report"}]
    stock = run_engine(llm, steps, ENV, False, log, RANKS)
    flag = run_engine(llm, [*steps, *report], ENV, True, log, RANKS)
    for name, run in (("stock", stock), ("flag", flag)):
        yield truth(f"tp2_{name}_starts", not run["error"], _text(run["error"]))
    if stock["error"] or flag["error"]:
        return
    pairs = list(zip(stock["results"][0], flag["results"][0], strict=True))
    for what in ("tokens", "logprobs"):
        yield truth(f"tp2_{what}_identical", all(a[what] == b[what] for a, b in pairs))
    distinct = len({token for output in flag["results"][0] for token in output["tokens"]})
    yield results.record("tp2_distinct_tokens", distinct, "tokens", limit=200, better="higher")
    for name, run in (("stock", stock), ("flag", flag)):
        did = run["results"][2]
        yield truth(f"tp2_{name}_survives_load", did["error"] is None, _text(did["error"]))
        yield results.record(f"tp2_{name}_start_s", run["seconds"]["start"], "s")
        tokens = run["results"][1]["kv_cache_size_tokens"]
        yield results.record(f"tp2_{name}_kv_tokens", tokens, "tokens", better="higher")
    yield from _ranks(flag, stock)


def _ranks(flag: dict[str, Any], stock: dict[str, Any]) -> Iterator[dict[str, Any]]:
    reports = flag["results"][3]
    blocks = [report["committed_blocks"] for report in reports]
    measured = [report["measured"]["blocks"] for report in reports]
    yield truth("tp2_ranks_commit_the_same", blocks == [min(measured)] * RANKS, f"{blocks} of {measured}")
    for rank, report in enumerate(reports):
        budget = report["measured"]["requested_bytes"]
        note = f"budget {budget / GIB:.3f} GiB, NVML every 5 ms, the context included"
        left = (budget - flag["use"]["peaks"][rank]) / GIB
        yield results.record(
            f"tp2_rank{rank}_budget_left_gib", left, "GiB", limit=0, better="higher", note=note
        )
        left = (budget - stock["use"]["peaks"][rank]) / GIB
        yield results.record(f"tp2_rank{rank}_budget_left_stock_gib", left, "GiB", better="higher", note=note)
    yield truth(
        "tp2_only_the_flag_grew", bool(story(flag)) and not story(stock), " | ".join(story(flag))[:1500]
    )


def _text(error: dict[str, str] | None) -> str:
    return f"{error['type']}: {error['text']}"[:500] if error else ""
