"""How many blocks warm-up needs: the prefix that is backed before anything is measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["layer_specs", "warmup_blocks"]

# vLLM's kernel warm-up prefills each request and decodes it up to 5 times; 8 leaves room for a release that
# does more. It asks for at most what num_blocks allows, so a prefix that is too short only warms up less.
WARMUP_STEPS = 8


def warmup_blocks(
    worker: Any, kv_cache_config: Any, capacity: int, bytes_per_block: int, most_bytes: int
) -> int:
    """Return the number of blocks to back for warm-up, between 2 and `capacity`.

    Block 0 is the null block. The V2 runner's warm-up gives each request blocks of its own and runs one full
    prefill, as far as `num_blocks` allows, so these stay within `most_bytes`. Sink attention writes its first
    blocks whatever `num_blocks` says, so they count in full.
    """
    scheduler = worker.scheduler_config
    max_tokens, max_requests = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    speculative = getattr(worker.vllm_config.speculative_config, "num_speculative_tokens", 0) or 0
    request_tokens = (1 + speculative) * WARMUP_STEPS + 2
    encoder_tokens = getattr(getattr(worker.model_runner, "model_state", None), "max_encoder_len", 0)
    specs = list(layer_specs(kv_cache_config))

    def blocks(num_tokens: int) -> int:
        return sum(_blocks(spec, num_tokens, encoder_tokens) for spec in specs)

    for_requests = max_requests * blocks(request_tokens)
    for_prefill = blocks(max_tokens) + blocks(request_tokens)
    wanted = 1 + max(for_requests, for_prefill)
    affordable = max(2, most_bytes // bytes_per_block)

    fixed = 2
    for spec in specs:
        sink_len = getattr(spec, "sink_len", None) or 0
        fixed = max(fixed, 1 + -(-sink_len // spec.block_size))
    return min(capacity, max(fixed, min(wanted, affordable)))


def layer_specs(kv_cache_config: Any) -> Iterable[Any]:
    """Return the specification of each group, that of its first layer where they differ."""
    for group in kv_cache_config.kv_cache_groups:
        nested = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        yield next(iter(nested.values())) if nested else group.kv_cache_spec


def _blocks(spec: Any, num_tokens: int, encoder_tokens: int) -> int:
    if type(spec).__name__ == "CrossAttentionSpec" and encoder_tokens:
        num_tokens = encoder_tokens  # whatever the request's own length (0.33, v1/worker/gpu/warmup.py)
    return -(-num_tokens // spec.block_size) + (getattr(spec, "num_speculative_blocks", 0) or 0)
