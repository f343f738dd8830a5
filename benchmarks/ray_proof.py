#!/usr/bin/env python3
"""Two tensor-parallel ranks under Ray on the CPU build: the flag there, against stock vLLM's own processes.

    python benchmarks/ray_proof.py --output FILE        needs `pip install ray`, and takes a minute or two

vLLM's CPU platform names no resource for Ray's scheduler, and its Ray executor refuses it for that alone.
Here it is told to ask for GPUs, of which Ray is told that this machine has two; nothing else is changed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from allocator import results

HERE = Path(__file__).resolve().parent
RANKS = 2
PROMPTS = [[(7 * i + j * (i + 3)) % 1500 + 300 for j in range(20 + 40 * i)] for i in range(8)]
SIZES = {"max_model_len": 1024, "max_num_seqs": 32, "max_num_batched_tokens": 2048}
COMMON = {**SIZES, "gpu_memory_utilization": 0.08, "enforce_eager": True, "seed": 0}
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def main() -> int:
    """Run both engines, each in a process of its own, and write the records."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("ray.json"))
    parser.add_argument("--engine", choices=("ray", "mp"), help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        args.output.write_text(json.dumps(engine(args.engine == "ray", args.model)))
        return 0
    from vllm_integration.tiny_model import make_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model")
        answers = {name: _run(name, model, Path(folder) / name) for name in ("mp", "ray")}
    data = results.build(
        list(_records(answers["mp"], answers["ray"])), command="python benchmarks/ray_proof.py"
    )
    results.write(args.output, data)
    results.print_table(data)
    return 1 if results.failed(data) else 0


def _run(name: str, model: Path, answer: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--engine", name, "--model", str(model), "--output", str(answer)]
    paths = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, **SETTINGS, "PYTHONPATH": paths}
    subprocess.run(command, check=True, timeout=500, env=env)
    return json.loads(answer.read_text())


def engine(on_ray: bool, model: str) -> dict[str, Any]:
    """Generate in this process: on Ray with the flag, or in vLLM's own processes without it."""
    extra: dict[str, Any] = {"distributed_executor_backend": "mp"}
    version = None
    if on_ray:
        import ray

        version = ray.__version__
        variables = {name: os.environ[name] for name in ("PYTHONPATH", *SETTINGS)}
        hook = {"worker_process_setup_hook": "ray_proof.offer_to_ray", "env_vars": variables}
        ray.init(num_cpus=RANKS, num_gpus=RANKS, include_dashboard=False, runtime_env=hook)
        offer_to_ray()
        extra = {"distributed_executor_backend": "ray", "additional_config": {"extensible_kv_cache": True}}
    from vllm import LLM, SamplingParams

    llm = LLM(model, tensor_parallel_size=RANKS, **COMMON, **extra)
    params = SamplingParams(temperature=0.0, max_tokens=48, logprobs=3)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    core = llm.llm_engine.engine_core.engine_core
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "executor": type(core.model_executor).__name__,
        "blocks": llm.llm_engine.vllm_config.cache_config.num_gpu_blocks,
        "reports": llm.collective_rpc("ekv_report") if on_ray else None,
        "ray": version,
    }


def offer_to_ray() -> None:
    """Have vLLM's CPU platform ask Ray for GPUs; Ray calls this in each of its workers."""
    from vllm.platforms import current_platform

    type(current_platform).ray_device_key = "GPU"


def _records(stock: dict[str, Any], flag: dict[str, Any]) -> Any:
    told = f"executor {flag['executor']}, ray {flag['ray']}; stock in {stock['executor']}"
    yield results.record("ray_ranks", len(flag["reports"]), "ranks", limit=RANKS, better="equal", note=told)
    same = flag["tokens"] == stock["tokens"]
    yield results.record("ray_tokens_as_stock", same, "", limit=True, better="equal")
    distinct = len({token for tokens in flag["tokens"] for token in tokens})
    yield results.record("ray_distinct_tokens", distinct, "tokens", limit=100, better="higher")
    reports = flag["reports"]
    yield results.record(
        "ray_rank_numbers", str([report["rank"] for report in reports]), "", limit="[0, 1]", better="equal"
    )
    measured = [report["measured"]["blocks"] for report in reports]
    committed = [report["committed_blocks"] for report in reports]
    yield results.record(
        "ray_ranks_commit_the_smallest",
        committed == [min(measured)] * RANKS == [flag["blocks"]] * RANKS,
        "",
        limit=True,
        better="equal",
        note=f"committed {committed}, measured {measured}, the engine has {flag['blocks']}",
    )


if __name__ == "__main__":
    sys.exit(main())
