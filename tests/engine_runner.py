"""Run one vLLM engine: `engine_runner.py JOB ANSWER`, both JSON files; see the fixture `run_engine`.

JOB: ``llm`` (keywords of `vllm.LLM`), ``steps``, ``import_first`` (import `vllm_integration` before vLLM).
A step is one of
    {"do": "generate", "prompts": [token ids or text, ...], "max_tokens": n, ...other sampling parameters}
    {"do": "rpc", "method": name, "args": [...]}         a method of every worker
    {"do": "figures"}                                    what the engine believes about its cache
ANSWER: ``results``, one a step, or ``error`` (type and text of what `vllm.LLM` raised).
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def main() -> None:
    """Read the job, run it, write the answer."""
    job = json.loads(Path(sys.argv[1]).read_text())
    if job.get("import_first"):
        import vllm_integration  # noqa: F401
    from vllm import LLM

    try:
        llm = LLM(**job["llm"])
    except Exception as error:  # the test decides whether it was the right one
        answer = {"error": {"type": type(error).__name__, "text": str(error)}, "results": []}
    else:
        answer = {"error": None, "results": [STEPS[step.pop("do")](llm, **step) for step in job["steps"]]}
    Path(sys.argv[2]).write_text(json.dumps(answer))


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


STEPS = {"generate": generate, "rpc": rpc, "figures": figures}

if __name__ == "__main__":
    main()
