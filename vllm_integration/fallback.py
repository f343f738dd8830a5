"""When to leave the KV cache to vLLM: the reasons, and the one warning that tells them.

What the engine can tell from its configuration is here; what only a worker knows (its device, the attention
backends that were chosen, the layout) is in `worker_checks`.
"""

from __future__ import annotations

import os
from typing import Any

from vllm_integration.connectors import connector_reason
from vllm_integration.log import logger

__all__ = ["engine_reason", "warn"]


def warn(reason: str) -> None:
    """Say why the normal KV cache is used. Called once for each engine."""
    logger.warning("Extensible KV cache: falling back to vLLM's normal KV cache, because %s", reason)


def engine_reason(vllm_config: Any) -> str | None:
    """Return why this configuration cannot have an extensible cache, or None."""
    checks = (_elastic_launch, _external_launcher, _sleep_backend, _hisparse, _cache_dtype, connector_reason)
    for check in checks:
        reason = check(vllm_config)
        if reason:
            return reason
    return None


def _elastic_launch(vllm_config: Any) -> str | None:
    if os.environ.get("VLLM_ELASTIC_EP_SCALE_UP_LAUNCH", "0") not in ("", "0", "false", "False"):
        return "this engine is launched by an elastic scale-up, which warms up outside of the engine's start"
    return None


def _external_launcher(vllm_config: Any) -> str | None:
    if vllm_config.parallel_config.distributed_executor_backend == "external_launcher":
        return "an external launcher starts one engine for each rank, and each would settle on its own size"
    return None


def _sleep_backend(vllm_config: Any) -> str | None:
    # A mechanism that moves the whole device, our memory with it, would find it in the middle of that.
    backend = getattr(vllm_config.model_config, "sleep_mode_backend", "cumem")
    return None if backend == "cumem" else f"the sleep-mode backend is {backend}, not cumem"


def _hisparse(vllm_config: Any) -> str | None:
    attention_config = getattr(vllm_config, "attention_config", None)
    if getattr(attention_config, "hisparse_config", None) is not None:
        return "HiSparse keeps part of the cache on the host"
    return None


def _cache_dtype(vllm_config: Any) -> str | None:
    dtype = str(vllm_config.cache_config.cache_dtype)
    if "per_token_head" in dtype:
        return f"a cache of type {dtype} writes the scales of every block at its first use"
    return None
