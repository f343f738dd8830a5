"""Run one vLLM engine: `engine_runner.py JOB ANSWER`, both JSON files; see the fixture `run_engine`.

JOB: ``llm`` (keywords of `vllm.LLM`), ``steps``, ``import_first`` (import `vllm_integration` before vLLM).
A step is one of
    {"do": "generate", "prompts": [token ids or text, ...], "max_tokens": n, ...other sampling parameters}
    {"do": "rpc", "method": name, "args": [...]}         a method of every worker
    {"do": "figures"}                                    what the engine believes about its cache
    {"do": "load", "num_prompts": n, "prompt_tokens": n, "max_tokens": n, "seconds": at least}
or one that looks inside the engine, see `engine_steps`.
ANSWER: ``results``, one a step; ``error``, type and text of what `vllm.LLM` or a step raised, after which no
step is run; ``seconds`` of the whole start, and of the engine core's `_initialize_kv_caches` where it runs in
this process.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import engine_steps

# An engine that failed at its start may hang where it ends, in the middle of a capture for one.
EXIT_LIMIT_S = int(os.environ.get("EKV_EXIT_LIMIT_S", "60"))

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def main() -> None:
    """Run the job that the command line names."""
    run(*map(Path, sys.argv[1:]))


def run(job_file: Path, answer_file: Path) -> None:
    """Read the job, run it, write the answer."""
    job = json.loads(job_file.read_text())
    if job.get("import_first"):
        import vllm_integration  # noqa: F401
    from vllm import LLM

    if "neighbour" in job:
        engine_steps.start_neighbour(**job["neighbour"])
    if "addresses" in job:
        engine_steps.limit_addresses(**job["addresses"])
    answer: dict[str, Any] = {"error": None, "results": [], "seconds": {}}
    time_initialization(answer["seconds"])
    start = time.perf_counter()
    try:
        llm = LLM(**job["llm"])
        answer["seconds"]["start"] = time.perf_counter() - start
    except Exception as error:  # the test decides whether it was the right one
        answer["error"] = {"type": type(error).__name__, "text": str(error)}
        signal.alarm(EXIT_LIMIT_S)
    else:
        try:
            for step in job["steps"]:
                answer["results"].append(STEPS[step.pop("do")](llm, **step))
        except Exception as error:
            number = len(answer["results"])
            answer["error"] = {"type": type(error).__name__, "text": f"in step {number}: {error}"}
            answer_file.write_text(json.dumps(answer))
            signal.alarm(EXIT_LIMIT_S)
            raise
    answer_file.write_text(json.dumps(answer))


def time_initialization(seconds: dict[str, float]) -> None:
    """Time `_initialize_kv_caches` as it is called: around the plugin's wrapper, where there is one."""
    import vllm.v1.engine.core as core
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    original = core.EngineCore._initialize_kv_caches

    def timed(*args: Any, **kwargs: Any) -> Any:
        print(f"[engine_runner {time.strftime('%H:%M:%S')}] _initialize_kv_caches begins", flush=True)
        start = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            seconds["initialize_kv_caches"] = time.perf_counter() - start
            print(f"[engine_runner {time.strftime('%H:%M:%S')}] _initialize_kv_caches ends", flush=True)

    core.EngineCore._initialize_kv_caches = timed


def generate(llm: Any, prompts: list[Any], max_tokens: int = 32, **sampling: Any) -> list[dict[str, Any]]:
    """Generate greedily unless told otherwise; token ids and the log-probabilities of the best three."""
    from vllm import SamplingParams

    params = SamplingParams(**{"temperature": 0.0, "logprobs": 3, "max_tokens": max_tokens, **sampling})
    inputs = [prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt} for prompt in prompts]
    outputs = [request.outputs[0] for request in llm.generate(inputs, params, use_tqdm=False)]
    return [
        {
            "tokens": list(output.token_ids),
            "logprobs": [
                {str(t): entry.logprob for t, entry in step.items()} for step in output.logprobs or []
            ],
            "text": output.text,
            "finish": output.finish_reason,
        }
        for output in outputs
    ]


def rpc(llm: Any, method: str, args: list[Any] | None = None) -> list[Any]:
    """Call a method of every worker."""
    return llm.collective_rpc(method, args=tuple(args or ()))


def figures(llm: Any) -> dict[str, Any]:
    """Return the engine's figures for its cache; those of the scheduler only where it is in this process."""
    config = llm.llm_engine.vllm_config
    values = {
        "num_gpu_blocks": config.cache_config.num_gpu_blocks,
        "block_size": config.cache_config.block_size,
        "max_model_len": config.model_config.max_model_len,
        "kv_cache_size_tokens": getattr(config.cache_config, "kv_cache_size_tokens", None),
    }
    import torch

    if torch.cuda.is_available():
        values["device_free_bytes"], values["device_total_bytes"] = torch.cuda.mem_get_info()
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is not None:
        scheduler = core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        values |= {
            "scheduler_num_blocks": scheduler.kv_cache_config.num_blocks,
            "pool_num_blocks": pool.num_gpu_blocks,
            "pool_free_blocks": pool.get_num_free_blocks(),
            "tensor_sizes": [tensor.size for tensor in scheduler.kv_cache_config.kv_cache_tensors],
        }
    return values


def load(
    llm: Any, num_prompts: int, prompt_tokens: int, max_tokens: int, seconds: float = 0.0
) -> dict[str, Any]:
    """Serve rounds of random prompts, as wide as the scheduler goes, for at least `seconds`."""
    import random

    from vllm import SamplingParams

    draw = random.Random(0)
    params = SamplingParams(temperature=0.8, max_tokens=max_tokens, ignore_eos=True, seed=1)
    start, rounds, tokens = time.perf_counter(), 0, 0
    while not rounds or time.perf_counter() - start < seconds:
        prompts = [
            {"prompt_token_ids": [draw.randrange(512) for _ in range(prompt_tokens)]}
            for _ in range(num_prompts)
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens += sum(len(request.outputs[0].token_ids) for request in outputs)
        rounds += 1
    return {"seconds": time.perf_counter() - start, "rounds": rounds, "generated_tokens": tokens}


STEPS = {"generate": generate, "rpc": rpc, "figures": figures, "load": load, **engine_steps.STEPS}

if __name__ == "__main__":
    main()
