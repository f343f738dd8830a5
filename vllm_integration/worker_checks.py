"""What only a worker can tell about whether it can have an extensible cache, before anything is reserved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm_integration.allocation import view_specs_of_plan
from vllm_integration.config import Options
from vllm_integration.connectors import staging_reason, takes_one_size
from vllm_integration.prefix import layer_specs

__all__ = ["agreed", "agreed_least", "has_rdma", "layout_reason", "reservable_bytes", "worker_reason"]

# What a container has been given; /sys/class/infiniband shows it the host's adapters all the same.
RDMA_DEVICES = Path("/dev/infiniband")


def worker_reason(worker: Any, options: Options) -> str | None:
    """Return why this worker cannot have an extensible cache, or None. Really allocates, to be sure."""
    device = worker.device
    if device.type not in ("cuda", "cpu"):
        return f"devices of type {device.type} are not supported"
    try:
        from allocator import probe
    except ImportError as error:
        return f"the allocator cannot be loaded: {error}"
    found = probe(device)
    if not found.available:
        return f"virtual memory is unavailable on {device}: {found.reason}"
    return (
        _allocator_reason(device)
        or _backend_reason(worker.vllm_config)
        or _staging_reason(worker, options, found.handle_kind)
    )


def _staging_reason(worker: Any, options: Options, handle_kind: str) -> str | None:
    if options.host_staged_transfers:
        return None
    return staging_reason(worker.vllm_config, handle_kind, has_rdma())


def layout_reason(worker: Any, kv_cache_config: Any) -> str | None:
    """Return why the planned views cannot grow together, or None."""
    from vllm.platforms import current_platform

    from allocator import BlockLayout
    from allocator.views import parse_view

    if not kv_cache_config.kv_cache_tensors:
        return None
    reason = _connector_reason(worker, kv_cache_config)
    if reason:
        return reason
    layout = worker.cache_config.get_resolved_kv_cache_layout()
    # On ROCm vLLM's allocation runs kernels as well, which a plan without memory cannot; binding checks. What
    # a connector is given has to be known before: with several heads this layout has a layer in pieces.
    if current_platform.is_rocm():
        return _pieces_reason(worker, layout) if layout.name == "LHBNC" else None
    for group in kv_cache_config.kv_cache_groups:
        if not getattr(group.kv_cache_spec, "has_layer_views", True):
            return f"{type(group.kv_cache_spec).__name__} lays out the cache by itself"
    size = kv_cache_config.kv_cache_tensors[0].size
    try:
        specs = view_specs_of_plan(kv_cache_config, layout)
        BlockLayout.from_views(0, size, specs)
        in_pieces = any(parse_view(s, 0, size, 0).outer_dims for s in specs)
        return _pieces_reason(worker, layout) if in_pieces else None
    except ValueError as error:
        return f"the layers do not agree on where the blocks are: {error}"


def _pieces_reason(worker: Any, layout: Any) -> str | None:
    name = getattr(worker.vllm_config.kv_transfer_config, "kv_connector", None)
    if name is None:
        return None
    return f"the KV connector {name} is given each layer in one piece, and {layout.name} has it in several"


def _connector_reason(worker: Any, kv_cache_config: Any) -> str | None:
    name = getattr(worker.vllm_config.kv_transfer_config, "kv_connector", None)
    if name is None:
        return None
    sizes = {tensor.block_stride for tensor in kv_cache_config.kv_cache_tensors}
    if len(sizes) > 1 and takes_one_size(worker.vllm_config):
        return f"the KV connector {name} of vLLM 0.29 takes all layers to be of one size"
    sink = any(getattr(spec, "sink_len", None) for spec in layer_specs(kv_cache_config))
    if sink and worker._ekv.registered:
        return f"the KV connector {name} needs memory in one piece, taken after warm-up wrote the sink blocks"
    return None


def reservable_bytes(device: Any, wanted_bytes: int, least_bytes: int) -> int:
    """Return how many bytes of addresses can be reserved: `wanted_bytes`, or less, down to `least_bytes`.

    Returns 0 when not even `least_bytes` can. Tries it for real, and gives the addresses back.
    """
    from allocator.errors import EkvError
    from allocator.reservation import Reservation
    from allocator.torch_routing import driver_of

    while wanted_bytes > 0:
        try:
            Reservation.reserve(*driver_of(device), wanted_bytes).unreserve()
            return wanted_bytes
        except EkvError:
            if wanted_bytes <= least_bytes:
                return 0
            wanted_bytes = max(least_bytes, wanted_bytes * 3 // 4)
    return 0


def agreed(reason: str | None) -> str | None:
    """Return the first reason of any data-parallel rank, so that all of them decide the same.

    Ranks that warm up together must also measure together. Without data parallelism the engine collects the
    answers of its own workers.
    """
    import torch
    from vllm.distributed.parallel_state import get_dp_group

    try:
        group = get_dp_group()
    except AssertionError:
        return reason
    if group.world_size == 1:
        return reason
    reasons: list[str | None] = [None] * group.world_size
    torch.distributed.all_gather_object(reasons, reason, group=group.cpu_group)
    return next((r for r in reasons if r), None)


def agreed_least(value: int) -> int:
    """Return the smallest `value` of all ranks of all engines that warm up together."""
    import torch
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    if group.world_size == 1:
        return value
    least = torch.tensor([value], dtype=torch.int64)
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return int(least)


def has_rdma() -> bool:
    """Return whether this process has an RDMA adapter."""
    try:
        return any(path.name.startswith("uverbs") for path in RDMA_DEVICES.iterdir())
    except OSError:
        return False


def _allocator_reason(device: Any) -> str | None:
    """Return why PyTorch's allocator cannot keep a pool's addresses apart from memory, or None."""
    if device.type != "cuda":
        return None
    import torch

    from allocator.settings import UNCACHED
    from allocator.torch_routing import current_allocator

    if current_allocator() == "cudaMallocAsync":
        return "PyTorch's allocator backend cudaMallocAsync has no memory pools"
    uncached = next((name for name in UNCACHED if os.environ.get(name)), None)
    if uncached is not None:
        return f"PyTorch has no memory pools without its cache ({uncached})"
    limit = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    if limit is not None and (fraction := limit(device)) < 1:
        return f"PyTorch may take {fraction} of {device} in this process, and counts addresses as memory"
    return None


def _backend_reason(vllm_config: Any) -> str | None:
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

    names = {backend.get_name() for backend in get_current_attn_backends(vllm_config)}
    flex = sorted(name for name in names if "FLEX" in name)
    if flex:
        return f"{flex[0]} builds its block mask from the engine's block count"
    return None
