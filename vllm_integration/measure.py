"""What is really free after warm-up: the widest step once more, then the driver's reading.

PyTorch's cache is emptied before the step and not after it: what the cache then holds is what the widest step
needs, the first real batch of that width takes it again, and so it must not be given to the KV cache.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = [
    "free_bytes",
    "model_bytes",
    "own_bytes",
    "quiet_random",
    "replaced",
    "settle",
    "without_graph_estimation",
]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give attribute `name` of `owner` another value inside the block, and then what it had of its own."""
    own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)  # its class has it


@contextmanager
def without_graph_estimation(runner: Any) -> Iterator[None]:
    """Make `runner` report 0 bytes of graph memory instead of capturing graphs only to estimate them."""
    with replaced(runner, "profile_cudagraph_memory", lambda: 0):
        yield


def free_bytes(device: Any) -> int:
    """Return the driver's free bytes of `device`, by the ruler that vLLM's budget is made with."""
    if device.type == "cuda":
        from vllm.utils.mem_utils import MemorySnapshot

        return int(MemorySnapshot(device=device).free_memory)
    from allocator import memory_info

    return int(memory_info(device)[0])


def own_bytes(device: Any) -> int:
    """Return what this process is known to hold: the least that can count against its budget.

    On a GPU these are the bytes that PyTorch's allocators hold, less those that it only takes for memory; on
    a CPU the resident memory that is not shared, which leaves out what the host driver backs.
    """
    if device.type == "cuda":
        import torch

        from allocator import reserved_bytes

        return int(torch.cuda.memory_reserved(device)) - reserved_bytes(device) - _trimmed_bytes()
    with open("/proc/self/status", encoding="ascii") as status:
        sizes = dict(line.split(":", 1) for line in status)
    return sum(int(sizes[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))


def _trimmed_bytes() -> int:
    """Return what PyTorch counts as held although vLLM's cumem allocator has given it back to the driver.

    Source: vLLM 0.29.0 to 0.33.0, device_allocator/cumem.py: unused segments of its pools are unmapped there,
    and PyTorch is not told.
    """
    module = sys.modules.get("vllm.device_allocator.cumem")
    cumem = getattr(getattr(module, "CuMemAllocator", None), "instance", None)
    if cumem is None:
        return 0
    pools = []
    for (
        entry
    ) in cumem.allocator_and_pools.values():  # a pair of pool and allocator, since 0.32 a list of such
        pools += [pair[0] for pair in entry] if isinstance(entry, list) else [entry[0]]
    segments = (segment for pool in pools for segment in pool.snapshot())
    return sum(s["total_size"] for s in segments if s["address"] not in cumem.pointer_to_data)


def model_bytes(worker: Any) -> int:
    """Return the bytes of weights and buffers, each storage once: what the cache can never have."""
    model = worker.model_runner.get_model()
    storages = {}
    for tensor in (*model.parameters(), *model.buffers()):
        for part in _with_storage(tensor):
            if part.device.type == worker.device.type:
                storage = part.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _with_storage(tensor: Any) -> Iterator[Any]:
    """Yield `tensor`, or the tensors that it wraps: torchao's quantized weights have no storage of their own.

    What tells of no storage at all is left out, which makes the figure smaller and not wrong.
    """
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _with_storage(getattr(tensor, name))
        return
    try:
        tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return
    yield tensor


def settle(device: Any) -> None:
    """Wait for the device and give back what Python and PyTorch only keep for later."""
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


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
