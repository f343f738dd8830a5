"""What is really free after warm-up: the widest step once more, then the driver's reading.

PyTorch's cache is emptied before the step and not after it: what the cache then holds is what the widest step
needs, the first real batch of that width takes it again, and so it must not be given to the KV cache.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["free_bytes", "own_bytes", "quiet_random", "run_widest_step", "settle", "without_graph_estimation"]


@contextmanager
def without_graph_estimation(runner: Any) -> Iterator[None]:
    """Make `runner` report 0 bytes of graph memory instead of capturing graphs only to estimate them."""
    runner.profile_cudagraph_memory = lambda: 0
    try:
        yield
    finally:
        del runner.profile_cudagraph_memory


def free_bytes(device: Any) -> int:
    """Return the driver's free bytes of `device`, by the ruler that vLLM's budget is made with."""
    if device.type == "cuda":
        from vllm.utils.mem_utils import MemorySnapshot

        return int(MemorySnapshot(device=device).free_memory)
    from allocator import memory_info

    return int(memory_info(device)[0])


def own_bytes(device: Any) -> int:
    """Return what this process is known to hold: the least that can count against its budget.

    On a GPU these are the bytes that PyTorch's allocators hold, less the addresses that it takes for memory;
    on a CPU the resident memory that is not shared, which leaves out what the host driver backs.
    """
    if device.type == "cuda":
        import torch

        from allocator import reserved_bytes

        return int(torch.cuda.memory_reserved(device)) - reserved_bytes(device)
    with open("/proc/self/status", encoding="ascii") as status:
        sizes = dict(line.split(":", 1) for line in status)
    return sum(int(sizes[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))


def settle(device: Any) -> None:
    """Wait for the device and give back what Python and PyTorch only keep for later."""
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def run_widest_step(worker: Any) -> None:
    """Run the widest step that vLLM's own profiling knows, on a model that is warmed up.

    Full `max_num_batched_tokens`, the sampler or pooler at its widest, the multimodal encoder at its budget.
    It runs without attention metadata, so no block of the cache is touched, and eagerly, so no graph is
    captured or replayed.
    """
    import torch
    import vllm.envs as envs
    from vllm.config import CompilationMode, set_current_vllm_config

    runner = worker.model_runner
    # As vLLM profiles: without gradients, and with the same guards for compiled code.
    with torch.inference_mode(), set_current_vllm_config(worker.vllm_config), quiet_random(worker.device):
        if worker.device.type != "cpu":
            _run_widest_sampling(worker)
            runner.profile_run()
        elif envs.VLLM_CPU_CI_ENV:
            pass
        elif worker.compilation_config.mode == CompilationMode.NONE:
            runner.profile_run()
        else:
            runner.warming_up_model()
    if worker.device.type == "cuda":
        torch.cuda.synchronize(worker.device)


def _run_widest_sampling(worker: Any) -> None:
    """Sample the most rows first, while PyTorch's cache is empty.

    The logits are the largest single tensors of a step. A cache that starts with them serves the forward pass
    from their pieces; one that starts with the forward pass keeps its smaller pieces beside them for good.
    """
    import torch
    from vllm.distributed.parallel_state import get_pp_group

    runner, scheduler = worker.model_runner, worker.scheduler_config
    if runner.is_pooling_model or not get_pp_group().is_last_rank:
        return
    rows = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    size = (rows, worker.model_config.get_hidden_size())
    runner._dummy_sampler_run(torch.zeros(size, dtype=worker.model_config.dtype, device=worker.device))


@contextmanager
def quiet_random(device: Any) -> Iterator[None]:
    """Leave every random state as it was found: dummy inputs must not change what requests sample."""
    import numpy
    import torch

    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            numpy.random.set_state(numpy_state)
