"""Steps for `engine_runner.py` that put an engine in this process to sleep.

{"do": "sleep", "level": n, "mode": m}, {"do": "wake_up", "tags": [...]}, {"do": "release_kv_cache"}
{"do": "sleep_in_vain"}, {"do": "release_in_vain"}: a sleep or a release that is to fail
{"do": "cached", "prompts": [token ids]}: generate, and tell how many tokens came from the prefix cache
{"do": "nap_in_flight", "prompt": [...], "after": n, "mode": m}: sleep and wake in the middle of a request
{"do": "budget", "bytes": n}: what the host driver may hold in this process; 0: no limit
{"do": "host_memory", "bytes": n}: what a backup finds available; 0: what there really is
"""

import time
from collections.abc import Callable
from typing import Any

from sleep_extension import Budget

from allocator import backup
from allocator.shim import lib

REALLY_AVAILABLE = backup._available_host_bytes


def sleep(llm: Any, level: int = 1, mode: str = "abort") -> dict[str, Any]:
    llm.sleep(level=level, mode=mode)
    return _state(llm)


def sleep_in_vain(llm: Any) -> dict[str, Any]:
    return _attempt(llm, llm.sleep)


def release_in_vain(llm: Any) -> dict[str, Any]:
    llm.sleep(level=0)
    return _attempt(llm, llm.release_kv_cache_memory)


def wake_up(llm: Any, tags: list[str] | None = None) -> dict[str, Any]:
    return _attempt(llm, lambda: llm.wake_up(tags))


def _attempt(llm: Any, call: Callable[[], Any]) -> dict[str, Any]:
    error = None
    try:
        call()
    except Exception as failure:
        error = {"type": type(failure).__name__, "text": str(failure)}
    return {**_state(llm), "error": error}


def release_kv_cache(llm: Any) -> dict[str, Any]:
    llm.llm_engine.step()  # tells the workers which requests have ended, without which vLLM refuses
    llm.sleep(level=0)
    llm.release_kv_cache_memory()
    return _state(llm)


def cached(llm: Any, prompts: list[list[int]], max_tokens: int = 16) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=2)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [
        {
            "cached_tokens": output.num_cached_tokens,
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [sorted((t, e.logprob) for t, e in s.items()) for s in output.outputs[0].logprobs],
        }
        for output in outputs
    ]


def nap_in_flight(
    llm: Any, prompt: list[int], after: int, mode: str, level: int = 1, max_tokens: int = 24
) -> dict[str, Any]:
    from vllm import SamplingParams

    engine, asleep, awake = llm.llm_engine, None, None
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    engine.add_request(f"nap-{mode}-{level}", {"prompt_token_ids": prompt}, params)
    tokens: list[int] = []
    finish = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens, finish = list(output.outputs[0].token_ids), output.outputs[0].finish_reason
        if asleep is None and len(tokens) >= after:
            asleep = sleep(llm, level, mode)
            awake = wake_up(llm)
            if mode == "abort":
                engine.abort_request([f"nap-{mode}-{level}"])
    return {"tokens": tokens, "finish": finish, "asleep": asleep, "awake": awake}


def budget(llm: Any, bytes: int) -> None:
    lib.ekv_host_configure(0, bytes)


def host_memory(llm: Any, bytes: int) -> None:
    backup._available_host_bytes = (lambda: bytes) if bytes else REALLY_AVAILABLE


def _state(llm: Any) -> dict[str, Any]:
    import torch

    state: dict[str, Any] = {"sleeping": bool(llm.llm_engine.is_sleeping())}
    if torch.cuda.is_available():
        state["device_free_bytes"] = _settled_free_bytes()
    if not llm.llm_engine.vllm_config.additional_config:
        return state  # vLLM as it is
    ranks = llm.collective_rpc("ekv_snapshot")
    return {
        **state,
        "physical_bytes": ranks[0]["physical_bytes"],
        "physical_bytes_of_ranks": [rank["physical_bytes"] for rank in ranks],
        "committed_blocks": ranks[0]["committed_blocks"],
        "bases": [reservation["base"] for reservation in ranks[0]["reservations"]],
        "memfd_bytes": Budget().memfd_bytes(),
    }


def _settled_free_bytes(seconds: float = 3.0) -> int:
    """Return what is free once it has stopped changing: a driver clears freed memory in the background."""
    import torch

    deadline, before, free = time.monotonic() + seconds, -1, torch.cuda.mem_get_info()[0]
    while free != before and time.monotonic() < deadline:
        time.sleep(0.1)
        before, free = free, torch.cuda.mem_get_info()[0]
    return int(free)


STEPS = {
    "sleep": sleep,
    "sleep_in_vain": sleep_in_vain,
    "release_in_vain": release_in_vain,
    "wake_up": wake_up,
    "release_kv_cache": release_kv_cache,
    "cached": cached,
    "nap_in_flight": nap_in_flight,
    "budget": budget,
    "host_memory": host_memory,
}
