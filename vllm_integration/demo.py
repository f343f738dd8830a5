"""The demo: a vLLM engine whose KV cache grows after warm-up, from the first address to the last token.

Run ``python -m vllm_integration.demo`` or ``make demo``. It uses the CUDA device where there is one and the
CPU otherwise, with a model that it makes itself unless ``--model`` names one. Every figure is what the
engine's worker wrote down when it happened.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from vllm_integration.demo_display import StageDisplay
from vllm_integration.log import format_bytes
from vllm_integration.stages import listen
from vllm_integration.tiny_model import SHAPES

__all__ = ["main", "run"]

PROMPTS = (
    "Tell me what you keep in mind.",
    "A cache that grows after warm-up:",
    "The addresses never move, and",
    "Once upon a time, in block zero,",
)
# On a CPU the share of the machine's memory is chosen so that about this much is left for engine and cache.
CPU_BUDGET_BYTES = 4 << 30


@click.command()
@click.option("--model", help="Model to serve, a path or a name; left out, a small one is made.")
@click.option("--shape", type=click.Choice(sorted(SHAPES)), help="Shape of the model that is made.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("demo-output"), show_default=True)
@click.option("--max-tokens", type=click.IntRange(1, 4096), default=128, show_default=True)
@click.option("--num-prompts", type=click.IntRange(1, 1024), default=16, show_default=True)
@click.option("--max-model-len", type=click.IntRange(64), default=1024, show_default=True)
@click.option(
    "--gpu-memory-utilization", type=click.FloatRange(0.01, 0.99), help="Share of the memory to use."
)
@click.option("--compile/--eager", "compiled", default=None, help="Default: compiled with graphs on a GPU.")
def main(model: str | None, shape: str | None, output: Path, **options: Any) -> None:
    """Start vLLM with a KV cache that takes its memory after warm-up, and show how it went."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the display listens to the worker in this process
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    output.mkdir(parents=True, exist_ok=True)
    log = output / "engine.log"
    with tempfile.TemporaryDirectory(prefix="extensible-kv-") as folder, _output_to(log) as console:
        on_gpu = _on_gpu()
        try:
            if model is None:
                shape = shape or ("qwen3-0.6b" if on_gpu else "tiny")
                console.print(f"making a model of shape {shape} ...")
                model = str(Path(folder) / shape)
                # In a process of its own: what it does on a device is no part of what the engine measures.
                command = [sys.executable, "-m", "vllm_integration.tiny_model", model, shape]
                subprocess.run(command, check=True)
            result = run(console, model, on_gpu, **options)
        except BaseException:
            console.print(f"that failed, and {log} says why; its last lines:")
            console.print(log.read_text(errors="replace")[-3000:], markup=False, highlight=False)
            raise
        if result is None:
            console.print(f"vLLM fell back to its normal KV cache, and {log} says why")
            sys.exit(1)
        _show(console, *result, output)


def run(
    console: Console,
    model: str,
    on_gpu: bool,
    *,
    max_tokens: int,
    num_prompts: int,
    max_model_len: int,
    gpu_memory_utilization: float | None,
    compiled: bool | None,
) -> tuple[dict[str, Any], list[dict[str, Any]], list[str]] | None:
    """Start the engine and generate, with a live display on `console`.

    Returns
    -------
    tuple or None
        The pool's snapshot, the records of all stages and the texts; None when vLLM used its normal cache.
    """
    with StageDisplay(console) as display, listen(display):
        display.begin("load")
        from vllm import LLM

        llm = LLM(
            model=model,
            max_model_len=max_model_len,
            max_num_seqs=min(num_prompts, 256),
            gpu_memory_utilization=gpu_memory_utilization or (0.9 if on_gpu else _cpu_utilization()),
            enforce_eager=not (on_gpu if compiled is None else compiled),
            distributed_executor_backend="uni",
            seed=0,
            disable_log_stats=True,
            additional_config={"extensible_kv_cache": True},
        )
        (snapshot,) = llm.collective_rpc("ekv_snapshot")
        if snapshot is None:
            return None
        display.begin("generate")
        start = time.perf_counter()
        texts = _generate(llm, num_prompts, max_tokens, display)
        seconds = time.perf_counter() - start
        (snapshot,) = llm.collective_rpc("ekv_snapshot")
        sizes = {key: snapshot[key] for key in ("committed_blocks", "physical_bytes", "reserved_bytes")}
        generated = {"stage": "generate", **sizes, "seconds": seconds}
        display("generate", generated)
    return snapshot, [*snapshot["stages"], generated], texts


def _show(
    console: Console,
    snapshot: dict[str, Any],
    stages: list[dict[str, Any]],
    texts: list[str],
    output: Path,
) -> None:
    from allocator.plots import plot_pool_map, plot_stages

    device, driver = snapshot["device"], snapshot["driver"]
    console.print(f"\n[bold]{texts[0][:150]} ...[/bold]\n")
    table = Table(
        title=f"KV cache on {device} ({driver} driver), {snapshot['capacity_blocks']:,} blocks reserved"
    )
    table.add_column("stage")
    for column in ("committed blocks", "physical bytes", "rounded", "seconds"):
        table.add_column(column, justify="right")
    for stage in stages:
        table.add_row(
            stage["stage"],
            f"{stage['committed_blocks']:,}",
            f"{stage['physical_bytes']:,}",
            format_bytes(stage["physical_bytes"]),
            f"{stage['seconds']:.4f}",
        )
    console.print(table)
    title = f"KV cache on {device}: from addresses to {snapshot['committed_blocks']:,} blocks"
    plot_stages(stages, output / "stages.png", title=title)
    plot_pool_map(snapshot, output / "pool-map.png")
    for name in ("stages.png", "pool-map.png", "engine.log"):
        console.print(f"wrote {output / name}", highlight=False)


def _generate(llm: Any, num_prompts: int, max_tokens: int, display: StageDisplay) -> list[str]:
    """Generate step by step, so that the display can follow; return the texts in the prompts' order."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    prompts = [f"{PROMPTS[i % len(PROMPTS)]} ({i})" for i in range(num_prompts)]
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, sampling)
    done = {}
    produced: dict[str, int] = {}
    while engine.has_unfinished_requests():
        for answer in engine.step():
            produced[answer.request_id] = len(answer.outputs[0].token_ids)
            if answer.finished:
                done[int(answer.request_id.split("-")[0])] = answer.outputs[0].text
        display.advance("generate", sum(produced.values()) / (num_prompts * max_tokens))
    return [prompts[i] + done[i] for i in range(num_prompts)]


def _on_gpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


def _cpu_utilization() -> float:
    return min(0.9, CPU_BUDGET_BYTES / (os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))


@contextmanager
def _output_to(file: Path) -> Iterator[Console]:
    """Send everything that this process prints into `file`, and yield a console on what was standard output.

    File descriptors are moved, because vLLM's libraries also print from C and would break up the display.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(1), os.dup(2)]
    try:
        with file.open("wb") as log, os.fdopen(saved[0], "w", closefd=False) as terminal:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            yield Console(file=terminal)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, copy in enumerate(saved, start=1):
            os.dup2(copy, descriptor)
            os.close(copy)


if __name__ == "__main__":
    main()
