"""KV connectors in a worker: made when the cache has its final size, and handed committed memory only.

While vLLM allocates the cache and warms up, a stand-in is where vLLM looks for its connector and remembers
what it is told. After the final commit the real one is made and told the same, with every view narrowed to
the committed blocks, over a storage that ends where they end.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from vllm_integration.connectors import MULTI, SIMPLE_OFFLOAD, uses_layers
from vllm_integration.measure import replaced
from vllm_integration.narrowing import Narrowing, narrow_layers

__all__ = [
    "Deferred",
    "connect",
    "current",
    "deferred",
    "final_config",
    "give_up_memory",
    "take_memory_again",
    "wait_until_idle",
]

IDLE_TIMEOUT_S = 30.0


class Deferred:
    """Stands for the connector until there is one. `config` is the plan that the cache was made from."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.caches: dict[str, Any] = {}
        self.copy_operation: Any = None

    # From here on, what vLLM calls while the cache is allocated.

    def get_mem_pool_context(self) -> None:
        """Leave the allocation to the worker: with a pool of a connector's own the plugin stands aside."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Remember the views."""
        self.caches = kv_caches

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        """Remember the operation."""
        self.copy_operation = copy_operation


@contextmanager
def deferred(worker: Any, kv_cache_config: Any) -> Iterator[Deferred | None]:
    """Have vLLM's set-up of the connector inside the block go to a stand-in; no connector is left after it.

    Without a connector in the configuration there is no stand-in either.
    """
    from vllm.distributed.kv_transfer import kv_transfer_state

    if getattr(worker.vllm_config.kv_transfer_config, "kv_connector", None) is None:
        yield None
        return
    # A runner may add groups that are no business of a connector.
    stand_in = Deferred(copy.deepcopy(kv_cache_config))
    kv_transfer_state._KV_CONNECTOR_AGENT = stand_in
    try:
        yield stand_in
    finally:
        kv_transfer_state._KV_CONNECTOR_AGENT = None
        if _is_v2(worker.model_runner):
            from vllm.v1.worker.gpu.kv_connector import NO_OP_KV_CONNECTOR

            worker.model_runner.kv_connector = NO_OP_KV_CONNECTOR


def connect(worker: Any, told: Deferred, pool: Any, num_blocks: int) -> None:
    """Make the connector, and tell it what `told` was told, narrowed to the `num_blocks` of `pool`.

    `pool` is None on a rank without layers. Raises what the connector raises.
    """
    from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_initialized

    config, narrow = final_config(told.config, num_blocks), Narrowing(pool)
    caches = {name: narrow(cache) for name, cache in told.caches.items()}
    with replaced(worker.cache_config, "num_gpu_blocks", num_blocks):  # else it stays at the capacity
        ensure_kv_transfer_initialized(worker.vllm_config, config)
        connector = current()
        for one in _flattened(connector):
            if type(one).__name__ == SIMPLE_OFFLOAD and getattr(one, "worker_handler", None) is not None:
                one.worker_handler.kv_cache_config = _sized_by_region(config)
        if uses_layers(worker.vllm_config):
            narrow_layers(connector, narrow)
        if _is_v2(worker.model_runner):
            from vllm.v1.worker.gpu.kv_connector import get_kv_connector

            worker.model_runner.kv_connector = get_kv_connector(worker.vllm_config, caches)
        elif connector is not None:
            connector.register_kv_caches(caches)
            connector.set_host_xfer_buffer_ops(told.copy_operation)


def current() -> Any:
    """Return this process's connector, or None."""
    state = sys.modules.get("vllm.distributed.kv_transfer.kv_transfer_state")
    return state._KV_CONNECTOR_AGENT if state is not None else None


def final_config(config: Any, num_blocks: int) -> Any:
    """Return `config` as a plan of `num_blocks` blocks, where the views that connectors are given lie.

    Layers that each have a place of their own become one tensor each, which begins where its storage does.
    Sizes stay those of all layers together, as vLLM has them.
    """
    tensors: list[Any] = []
    for tensor in config.kv_cache_tensors:
        size = math.ceil(tensor.size * num_blocks / config.num_blocks)
        if tensor.layer_stride < config.num_blocks * tensor.block_stride:
            tensors.append(replace(tensor, size=size))
            continue
        stride = num_blocks * tensor.block_stride
        tensors += [
            replace(tensor, size=size, layers=[layer], layer_stride=stride, offset=0)
            for layer in tensor.layers
        ]
    return replace(config, num_blocks=num_blocks, kv_cache_tensors=tensors)


def give_up_memory() -> None:
    """Have the connector forget what it registered, where it can (0.33). A second time changes nothing."""
    _call("unregister_kv_caches")


def take_memory_again() -> None:
    """Have the connector register again what it gave up. A second time changes nothing."""
    _call("restore_kv_caches")


def _call(hook: str) -> None:
    getattr(current(), hook, lambda: None)()


def wait_until_idle() -> str | None:
    """Wait for copies that a connector's own threads have still to start; return what is wrong, or None.

    Copies on streams need no waiting here: giving memory back waits for the device.
    """
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    for one in _flattened(current()):
        handler = getattr(one, "worker_handler", None) if type(one).__name__ == SIMPLE_OFFLOAD else None
        while handler is not None and _is_copying(handler):
            if time.monotonic() > deadline:
                return f"the KV connector {SIMPLE_OFFLOAD} is still copying after {IDLE_TIMEOUT_S:.0f} s"
            time.sleep(0.001)
    return None


def _is_copying(handler: Any) -> bool:
    # Asking moves the marks that the next step reads, and loses nothing.
    loads, stores = handler._pending_load_event_indices, handler._pending_store_event_indices
    return bool(
        (loads and max(loads) > handler._poll_stream_events(is_store=False))
        or (stores and max(stores) > handler._poll_stream_events(is_store=True))
    )


def _sized_by_region(config: Any) -> Any:
    """Return `config` for SimpleCPUOffload of 0.29, which takes a size for that of one storage.

    Later releases do not look at the size in a worker.
    """
    tensors = [replace(t, size=config.num_blocks * t.block_stride) for t in config.kv_cache_tensors]
    return replace(config, kv_cache_tensors=tensors)


def _flattened(connector: Any) -> list[Any]:
    if connector is None:
        return []
    if type(connector).__name__ != MULTI:
        return [connector]
    return [one for child in connector._connectors for one in _flattened(child)]


def _is_v2(model_runner: Any) -> bool:
    return hasattr(model_runner, "kv_connector")
