"""The second sizing: from measured bytes to blocks on every worker, all or none, and into every figure."""

from __future__ import annotations

import math
from typing import Any

from vllm_integration.log import format_bytes, logger

__all__ = ["Sizes", "explain", "required_blocks", "settle"]

MAX_ATTEMPTS = 4


class Sizes:
    """What was measured and committed, for the report. `blocks` is the final number, of every rank."""

    def __init__(self, blocks: int, measured: list[dict[str, Any]], commits: list[dict[str, Any]]) -> None:
        self.blocks, self.measured, self.commits = blocks, measured, commits


def settle(sizing: Any, config: Any) -> Sizes:
    """Measure, plan again, commit, and correct `config` and the engine's configuration in place.

    Raises
    ------
    SizingError
        One request of `max_model_len`, a state for each of `max_num_seqs` Mamba sequences, or an explicit
        size does not fit; both numbers are named.
    """
    measured = sizing.rpc("ekv_measure")
    capacity = config.num_blocks
    cache_config = sizing.vllm_config.cache_config
    told = any(p["explicit"] for p in sizing.proposals) or cache_config.num_gpu_blocks_override is not None
    if told:
        _check_explicit(measured, capacity)
        blocks, states = capacity, 0  # vLLM's own check has seen that size
    else:
        blocks, states = min(capacity, _plan(sizing, measured)[0].num_blocks), _state_blocks(sizing, config)
        _check_states(states, blocks)
    blocks, commits = _commit(sizing, config, blocks, measured, states, may_shrink=not told)
    _correct(sizing, config, blocks, measured)
    return Sizes(blocks, measured, commits)


def required_blocks(vllm_config: Any, config: Any) -> int:
    """Return the blocks that one request of `max_model_len` needs, the null block included."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity

    _, concurrency = get_kv_cache_capacity(vllm_config, config)
    # concurrency is num_blocks over the blocks of one request, which is a whole number.
    return round(config.num_blocks / concurrency) + 1 if concurrency > 0 else 1


def explain(sizing: Any, error: ValueError) -> ValueError:
    """Return vLLM's `error` about a size that is too small, with the numbers of blocks."""
    from allocator.sizing import SizingError

    cache_config, model_config = sizing.vllm_config.cache_config, sizing.vllm_config.model_config
    override = cache_config.num_gpu_blocks_override
    try:
        cache_config.num_gpu_blocks_override = None
        enormous = sizing.plan_again([1 << 50] * len(sizing.proposals))
        needed = required_blocks(sizing.vllm_config, enormous[0])
        size = max((tensor.size for tensor in enormous[0].kv_cache_tensors), default=0)
        needed_bytes = size // enormous[0].num_blocks * needed
    except (ValueError, ArithmeticError):
        return error
    finally:
        cache_config.num_gpu_blocks_override = override
    return SizingError(
        f"{error} One request of max_model_len {model_config.max_model_len} needs {needed} blocks of the "
        f"extensible KV cache, {needed_bytes} bytes on rank 0; {_offered(sizing, override)}."
    )


def _offered(sizing: Any, override: int | None) -> str:
    if override is not None:
        return f"num_gpu_blocks_override allows {override} blocks: raise it, or lower max_model_len"
    measured = getattr(sizing, "measured", None)
    if not measured:
        least = min(sizing.proposals, key=lambda proposal: proposal["upper_bytes"])
        if least["explicit"]:
            given = f"{least['upper_bytes']} bytes are what kv_cache_memory_bytes gives it"
            return f"{given}: raise it, or lower max_model_len"
        return f"{least['upper_bytes']} bytes are there for it"
    least = min((m for m in measured if m["blocks"] is not None), key=lambda m: m["blocks"])
    return (
        f"{least['blocks']} fit: of {format_bytes(least['requested_bytes'])} requested, "
        f"{format_bytes(least['used_bytes'])} are in use on rank {least['rank']} after warm-up and the "
        f"widest step, and {format_bytes(least['margin_bytes'])} are the margin (margin_bytes)"
    )


def _plan(sizing: Any, measured: list[dict[str, Any]]) -> list[Any]:
    sizing.measured = measured
    model_config = sizing.vllm_config.model_config
    before = model_config.max_model_len
    available = []
    for proposal, found in zip(sizing.proposals, measured, strict=True):
        if found["blocks"] is None:  # a rank without layers
            available.append(proposal["upper_bytes"])
        else:
            available.append(found["blocks"] * found["bytes_per_block"])
    try:
        planned = sizing.plan_again(available)
    except ValueError as error:
        raise explain(sizing, error) from error
    if model_config.max_model_len != before:
        sizing.rpc("update_max_model_len", model_config.max_model_len)
    return planned


def _check_explicit(measured: list[dict[str, Any]], blocks: int) -> None:
    from allocator.sizing import SizingError

    for found in measured:
        if found["blocks"] is not None and found["blocks_free"] < blocks:
            there = found["free_bytes"] + found["prefix_bytes"]
            raise SizingError(
                f"the KV cache of {blocks} blocks that was asked for takes {found['capacity_bytes']} bytes, "
                f"and rank {found['rank']} has {there} bytes left for it after warm-up and its widest step, "
                f"which takes {found['widest_step_bytes']} bytes: at most {found['blocks_free']} blocks fit"
            )


def _state_blocks(sizing: Any, config: Any) -> int:
    """Return the blocks that vLLM asks for where it captures whole decode steps of Mamba layers, or 0.

    Source: vLLM 0.29.0 to 0.33.0, config/compilation.py. Its own check has seen the reservation only.
    """
    captures = config.has_mamba_layers and any(sizing.rpc("ekv_captures_decode_steps"))
    return sizing.vllm_config.scheduler_config.max_num_seqs if captures else 0


def _check_states(states: int, blocks: int) -> None:
    from allocator.sizing import SizingError

    if blocks < states:
        raise SizingError(
            f"max_num_seqs {states} needs {states} blocks, one for the state of each sequence in the Mamba "
            f"layers whose decode steps are captured, and {blocks} blocks of the KV cache fit after warm-up: "
            f"lower max_num_seqs to at most {blocks}, or raise gpu_memory_utilization"
        )


def _commit(
    sizing: Any, config: Any, blocks: int, measured: list[dict[str, Any]], states: int, *, may_shrink: bool
) -> tuple[int, list[dict[str, Any]]]:
    """Commit on every worker or on none, falling back to what fits while that serves one request."""
    from allocator.sizing import SizingError

    model_config = sizing.vllm_config.model_config
    fitted = model_config.original_max_model_len == -1  # one request is as long as the cache allows
    least = 2 if fitted else required_blocks(sizing.vllm_config, config)
    request = "any request" if fitted else f"one request of max_model_len {model_config.max_model_len}"
    if states > least:
        least, request = states, f"max_num_seqs {states} with Mamba layers"
    for attempt in range(1, MAX_ATTEMPTS + 1):
        commits = sizing.rpc("ekv_commit", blocks)
        failed = next((c for c in commits if c["error"]), None)
        if failed is None:
            return blocks, commits
        fits = [r["blocks"] for r in sizing.rpc("ekv_rollback") if r["blocks"] is not None]
        smaller = min(min(fits), blocks - 1)
        message = f"rank {failed['rank']} could not back {blocks} blocks of the KV cache: {failed['error']}"
        if not may_shrink or smaller < least or attempt == MAX_ATTEMPTS:
            raise SizingError(
                f"{message}. No rank keeps more than its warm-up prefix; {smaller} blocks would fit now, "
                f"and {request} needs {least}"
            )
        if fitted:
            smaller = _fit_again(sizing, measured, smaller, message)
        logger.warning("Extensible KV cache: %s; going on with %d blocks, which fit now.", message, smaller)
        blocks = smaller
    raise AssertionError("unreachable")


def _fit_again(sizing: Any, measured: list[dict[str, Any]], blocks: int, why: str) -> int:
    """Fit `max_model_len` to `blocks` and tell every worker; return the blocks of vLLM's plan for it."""
    from allocator.sizing import SizingError

    fits = [m if m["blocks"] is None else {**m, "blocks": min(m["blocks"], blocks)} for m in measured]
    try:
        return min(blocks, int(_plan(sizing, fits)[0].num_blocks))
    except ValueError as error:
        raise SizingError(f"{why}. {error}") from error


def _correct(sizing: Any, config: Any, blocks: int, measured: list[dict[str, Any]]) -> None:
    """Write the final size wherever the engine side shows it; the workers keep their views' capacity."""
    import vllm.v1.engine.core as core_module

    vllm_config = sizing.vllm_config
    for tensor in config.kv_cache_tensors:
        tensor.size = math.ceil(tensor.size * blocks / config.num_blocks)
    config.num_blocks = blocks
    vllm_config.cache_config.num_gpu_blocks = blocks
    core_module.update_kv_cache_capacity(vllm_config, config)
    first = next((m for m in measured if m["blocks"] is not None), None)
    if first is not None:
        sizing.core.available_gpu_memory_for_kv_cache = blocks * first["bytes_per_block"]
