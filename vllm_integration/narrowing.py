"""What a KV connector is shown of the cache: committed blocks, over storages that end where those end."""

from __future__ import annotations

import copy
from typing import Any

__all__ = ["Narrowing", "check_one_handle_each", "narrow_layers"]


class Narrowing:
    """Narrows views of one pool, each of them once; anything else stays as it is.

    Good for as long as the pool's committed size stays, over a release and recommit too. `pool` is None on a
    rank without layers.
    """

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self._narrowed: dict[Any, Any] = {}
        reservations = pool.snapshot()["reservations"] if pool is not None else []
        self._ranges = [range(r["base"], r["base"] + r["size_bytes"]) for r in reservations]

    def __call__(self, value: Any) -> Any:
        """Return `value`, a view or a list or tuple of views, narrowed.

        Raises
        ------
        PoolValueError
            A view of the pool that has no dimension of its blocks, or crosses segments.
        """
        if isinstance(value, list | tuple):
            return type(value)(self(one) for one in value)
        if not hasattr(value, "data_ptr") or not any(value.data_ptr() in r for r in self._ranges):
            return value
        key = (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
        if key not in self._narrowed:
            self._narrowed[key] = self.pool.view_committed(value, self._block_dim(value))
        return self._narrowed[key]

    def _block_dim(self, view: Any) -> int:
        # 0 as vLLM allocates it; what layers hold may be permuted.
        whole = [dim for dim, size in enumerate(view.shape) if size and size % self.pool.capacity_blocks == 0]
        return whole[0] if whole else 0


def narrow_layers(connector: Any, narrow: Narrowing) -> None:
    """Make `connector` see narrowed views also where vLLM shows it the cache of single layers."""
    load, save = connector.start_load_kv, connector.save_kv_layer
    shown: dict[str, Any] = {}

    def start_load_kv(forward_context: Any, **kwargs: Any) -> Any:
        if not shown:
            shown.update((name, _shown(x, narrow)) for name, x in forward_context.no_compile_layers.items())
        context = copy.copy(forward_context)
        context.no_compile_layers = shown
        return load(context, **kwargs)

    def save_kv_layer(layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> Any:
        return save(layer_name, narrow(kv_layer), attn_metadata, **kwargs)

    connector.start_load_kv, connector.save_kv_layer = start_load_kv, save_kv_layer


def check_one_handle_each(pool: Any) -> None:
    """Raise unless the committed part of each segment is one physical allocation.

    What spans several cannot be registered: a transport would look up the first and take it for all.
    """
    from allocator.errors import PoolValueError

    snapshot = pool.snapshot()
    for segment in snapshot["segments"]:
        begin = segment["offset"]
        size = min(snapshot["committed_blocks"] * segment["block_stride"], segment["size_bytes"])
        chunks = [c for c in snapshot["chunks"] if c["reservation"] == segment["reservation"]]
        if not any(c["offset"] <= begin and begin + size <= c["offset"] + c["size"] for c in chunks):
            touched = sum(c["offset"] < begin + size and begin < c["offset"] + c["size"] for c in chunks)
            raise PoolValueError(
                f"{size} bytes at offset {begin} of the KV cache lie in {touched} physical allocations, and "
                "what a KV connector registers must lie in one"
            )


def _shown(layer: Any, narrow: Narrowing) -> Any:
    """Return a layer that is `layer` but for its cache; vLLM's own keeps the views that graphs know."""
    cache = getattr(layer, "kv_cache", None)
    if cache is None:
        return layer
    narrowed = narrow(cache)
    if narrowed is cache:
        return layer
    stand_in = copy.copy(layer)
    stand_in.__dict__["kv_cache"] = narrowed
    return stand_in
