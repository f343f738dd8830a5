"""Steps for `tests/engine_runner.py` that load an engine as wide as its scheduler goes.

    {"do": "wide_load", "requests": n, "prompt_tokens": n, "max_tokens": n, "seconds": at least, "kind": ...}
    {"do": "cache"}    the size of the cache, without touching a device from the engine's process

``kind`` names the prompts and what they ask for: "mixed" (penalties, top-k, logprobs, logprobs of prompts),
"drafts" (repeating prompts whose continuations an n-gram lookup finds), "lora" (with ``adapters``, paths) or
"images" (with ``image_size``, pixels).  What the engine raises is part of the answer: an engine that runs out
of memory under load is a result.
"""

import random
import signal
import time
from typing import Any

# An engine that died under load may hang where it ends: its process is killed then.
EXIT_LIMIT_S = 15
# All tokens of "drafts", in prompts and continuations: each was seen before, so there is always a draft.
FEW_TOKENS = (301, 302, 303, 304)


class Widest:
    """The widest steps of the engine core in this process, read where its scheduler makes them."""

    def __init__(self, llm: Any) -> None:
        self.tokens = self.requests = self.drafts = self.steps = 0
        core = getattr(llm.llm_engine.engine_core, "engine_core", None)
        if core is None:
            return
        schedule = core.scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            drafts = sum(len(tokens) for tokens in output.scheduled_spec_decode_tokens.values())
            self.steps += 1
            self.tokens = max(self.tokens, output.total_num_scheduled_tokens)
            self.requests = max(self.requests, len(output.num_scheduled_tokens))
            self.drafts = max(self.drafts, drafts)
            return output

        core.scheduler.schedule = watched

    def figures(self) -> dict[str, int]:
        """Return the largest numbers of tokens, requests and drafts of one step, and how many steps ran."""
        names = ("tokens", "requests", "drafts", "steps")
        return {f"widest_{name}" if name != "steps" else name: getattr(self, name) for name in names}


def wide_load(
    llm: Any,
    requests: int,
    prompt_tokens: int,
    max_tokens: int,
    seconds: float,
    kind: str = "mixed",
    adapters: list[str] | None = None,
    image_size: int = 0,
) -> dict[str, Any]:
    """Serve rounds of `requests` prompts for at least `seconds`; `error` is what was raised, or None."""
    widest = Widest(llm)
    draw = random.Random(0)
    answer: dict[str, Any] = {"error": None, "rounds": 0, "generated_tokens": 0}
    answer["began"] = time.time()
    start = time.perf_counter()
    try:
        while not answer["rounds"] or time.perf_counter() - start < seconds:
            prompts, params, loras = [], [], []
            for number in range(requests):
                prompts.append(_prompt(draw, number, prompt_tokens, kind, image_size))
                params.append(_sampling(number, max_tokens, kind))
                loras.append(_adapter(number, adapters or []))
            extra = {"lora_request": loras} if adapters else {}
            outputs = llm.generate(prompts, params, use_tqdm=False, **extra)
            answer["generated_tokens"] += sum(len(request.outputs[0].token_ids) for request in outputs)
            answer["rounds"] += 1
    except Exception as error:
        signal.alarm(EXIT_LIMIT_S)
        answer["error"] = {"type": type(error).__name__, "text": str(error)}
    return {**answer, **widest.figures(), "seconds": time.perf_counter() - start, "ended": time.time()}


def _prompt(draw: random.Random, number: int, prompt_tokens: int, kind: str, image_size: int) -> Any:
    if kind == "images":
        from PIL import Image

        colour = tuple(draw.randrange(256) for _ in range(3))
        image = Image.new("RGB", (image_size, image_size), colour)
        tokens = [draw.randrange(300, 2000) for _ in range(prompt_tokens)]
        return {"prompt_token_ids": tokens, "multi_modal_data": {"image": image}}
    # Lengths differ, so that prefills and decodes share steps and end at different times.
    length = max(1, prompt_tokens - 7 * (number % 16))
    if kind == "drafts":
        return {"prompt_token_ids": [FEW_TOKENS[(number + i) % len(FEW_TOKENS)] for i in range(length)]}
    return {"prompt_token_ids": [draw.randrange(300, 2000) for _ in range(length)]}


def _sampling(number: int, max_tokens: int, kind: str) -> Any:
    from vllm import SamplingParams

    values: dict[str, Any] = {"temperature": 0.8, "max_tokens": max_tokens, "ignore_eos": True}
    if number % 4 == 1:
        values |= {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    # vLLM refuses min_p together with drafts, and its CPU build fails in top_k there.
    if number % 4 == 2 and kind != "drafts":
        values |= {"top_k": 50, "top_p": 0.9, "min_p": 0.05}
    if number % 16 == 3:
        values |= {"logprobs": 5}
    if number % 64 == 7 and kind == "mixed":
        values |= {"prompt_logprobs": 1}
    if kind == "drafts":
        values |= {"allowed_token_ids": list(FEW_TOKENS)}
    return SamplingParams(**values)


def _adapter(number: int, adapters: list[str]) -> Any:
    """Return a request's adapter: all of them in turn, and for one request in as many none."""
    which = number % (len(adapters) + 1)
    if which == len(adapters):
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"adapter-{which}", which + 1, adapters[which])


def cache(llm: Any) -> dict[str, Any]:
    """Return the size of the cache that the engine believes in."""
    config = llm.llm_engine.vllm_config.cache_config
    return {"num_gpu_blocks": config.num_gpu_blocks, "kv_cache_size_tokens": config.kv_cache_size_tokens}


STEPS = {"wide_load": wide_load, "cache": cache}
