"""The allocation of the KV cache inside a worker: a pool takes the one big tensor, and binds its views."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["bind_views", "pooled", "view_specs_of_plan", "wrap_allocate_kv_cache"]

_LOCAL = threading.local()


@contextmanager
def pooled(take: Callable[..., dict[str, Any]]) -> Iterator[None]:
    """Hand the allocations that this thread makes inside the block to `take(original, *args, **kwargs)`."""
    previous = getattr(_LOCAL, "take", None)
    _LOCAL.take = take
    try:
        yield
    finally:
        _LOCAL.take = previous


def wrap_allocate_kv_cache(original: Any) -> Any:
    """Wrap the name `allocate_kv_cache` of a runner's module; outside of `pooled` it is the original."""

    @functools.wraps(original)
    def allocate_kv_cache(*args: Any, **kwargs: Any) -> Any:
        take = getattr(_LOCAL, "take", None)
        return original(*args, **kwargs) if take is None else take(original, *args, **kwargs)

    return allocate_kv_cache


def bind_views(pool: Any, caches: dict[str, Any], num_blocks: int) -> int:
    """Bind every distinct view in `caches` to `pool`; return how many there were.

    Views are bound as they were allocated: what the layers hold later may be re-strided or squeezed. Block
    dimension 0 counts kernel blocks, a whole number of which make one of the `num_blocks` manager blocks.
    """
    seen = set()
    for name, view in caches.items():
        key = (view.data_ptr(), tuple(view.shape), view.stride(), view.dtype)
        if key in seen:
            continue
        seen.add(key)
        pool.bind(view, 0, kernel_blocks_per_block=_ratio(name, view, num_blocks))
    return len(seen)


def view_specs_of_plan(kv_cache_config: Any, layout: Any) -> list[Any]:
    """Return the views that `kv_cache_config` will be given, as `ViewSpec`s at address 0, without memory."""
    import torch
    from vllm.v1.worker.utils import allocate_kv_cache

    from allocator.views import ViewSpec

    caches = allocate_kv_cache(kv_cache_config, torch.device("meta"), layout, None)
    specs = []
    for name, view in caches.items():
        itemsize = view.element_size()
        specs.append(
            ViewSpec(
                shape=tuple(view.shape),
                strides_bytes=tuple(stride * itemsize for stride in view.stride()),
                itemsize=itemsize,
                address=view.storage_offset() * itemsize,
                kernel_blocks_per_block=_ratio(name, view, kv_cache_config.num_blocks),
            )
        )
    return specs


def _ratio(name: str, view: Any, num_blocks: int) -> int:
    ratio, remainder = divmod(view.shape[0], num_blocks)
    if remainder or not ratio:
        raise ValueError(f"{name}: {view.shape[0]} kernel blocks do not divide into {num_blocks} blocks")
    return ratio
