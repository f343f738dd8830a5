"""Steps for `engine_runner.py` that look inside an engine in this process.

    {"do": "zeroed", "prompt": [token ids], "after": n}  generate, zeroing the request's first block meanwhile
    {"do": "views"}                                      what the worker keeps for itself
JOB's ``neighbour`` ({"after": stage, "bytes": n}): another pool takes n bytes when that stage has ended.
JOB's ``addresses`` ({"bytes": n} or {"share": x}): what is left of them once the cache is planned.
"""

import resource
from contextlib import ExitStack
from typing import Any

import connector_steps
import sleep_steps

NEIGHBOURS = ExitStack()


def zeroed(llm: Any, prompt: list[int], after: int, max_tokens: int = 16) -> list[int]:
    """Generate step by step; after `after` tokens zero the first block of the prompt in every layer."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    engine.add_request("zeroed", {"prompt_token_ids": prompt}, params)
    tokens: list[int] = []
    zeroed_block = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens = list(output.outputs[0].token_ids)
        if zeroed_block is None and len(tokens) >= after:
            (running,) = scheduler.running
            (blocks,) = scheduler.kv_cache_manager.get_block_ids(running.request_id)
            zeroed_block = blocks[0]
            for cache in _worker(llm).model_runner.kv_caches:
                cache[zeroed_block].zero_()
    assert zeroed_block is not None
    return tokens


def views(llm: Any) -> dict[str, Any]:
    """Return what the worker keeps: the capacity of its views and configuration, and its model length."""
    runner = _worker(llm).model_runner
    return {
        "view_blocks": sorted({cache.shape[0] for cache in runner.kv_caches}),
        "runner_num_blocks": runner.kv_cache_config.num_blocks,
        "max_model_len": runner.max_model_len,
        "worker_class": type(_worker(llm)).__name__,
    }


def start_neighbour(after: str, bytes: int) -> None:
    """Take memory of the host driver as soon as the stage `after` has ended, and keep it."""
    from allocator import ExtensibleTensor
    from vllm_integration import stages

    taken: list[Any] = []

    def listener(name: str, record: dict[str, Any] | None) -> None:
        if name == after and record is not None and not taken:
            taken.append(ExtensibleTensor(bytes, "cpu"))
            taken[0].resize_(bytes)

    NEIGHBOURS.enter_context(stages.listen(listener))


def limit_addresses(bytes: int = 0, share: float = 0.0) -> None:
    """Leave this process that many bytes of addresses from the moment on that it looks for its reservation.

    `share` is that part of the way from vLLM's own size to the reservation that is wanted.
    """
    from vllm_integration import worker_state

    look = worker_state.reservable_bytes

    def limited(device: Any, wanted_bytes: int, least_bytes: int) -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        room = bytes or least_bytes + int(share * (wanted_bytes - least_bytes))
        resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
        return look(device, wanted_bytes, least_bytes)

    worker_state.reservable_bytes = limited


def _worker(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


STEPS = {"zeroed": zeroed, "views": views, **sleep_steps.STEPS, **connector_steps.STEPS}
