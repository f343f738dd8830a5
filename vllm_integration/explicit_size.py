"""An explicit size of the KV cache is authoritative: the share of the device is no condition for a start.

With `kv_cache_memory_bytes` vLLM's workers do not use `gpu_memory_utilization`, yet its GPU worker refuses to
start where less than that share is free. Its CPU worker does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm_integration.log import format_bytes, logger
from vllm_integration.measure import replaced

__all__ = ["share_is_no_condition"]


@contextmanager
def share_is_no_condition(worker: Any) -> Iterator[None]:
    """Let `init_device` inside the block go on with less free than the share, if the size is explicit."""
    import vllm.v1.worker.gpu_worker as module

    if not worker.cache_config.kv_cache_memory_bytes:  # this worker takes 0 for "not given"
        yield
        return
    original = module.request_memory

    def request_memory(init_snapshot: Any, cache_config: Any, *args: Any, **kwargs: Any) -> int:
        try:
            return int(original(init_snapshot, cache_config, *args, **kwargs))
        except ValueError:
            share = cache_config.gpu_memory_utilization
            logger.info(
                "Extensible KV cache: %s are free, less than the share of %s; the size of the cache is an "
                "explicit one, so that this is no condition.",
                format_bytes(init_snapshot.free_memory),
                share,
            )
            return math.ceil(init_snapshot.total_memory * share)

    with replaced(module, "request_memory", request_memory):
        yield
