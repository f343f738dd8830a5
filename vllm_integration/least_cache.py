"""Bring PyTorch's cache to the state that serves the widest step with the fewest bytes kept.

What a caching allocator keeps depends on the order of its first requests, not only on their sizes. Seen on an
H200 (Qwen3-0.6B's shape, 16,384 tokens, 1,024 rows of 151,936 logits): 1,505 MiB kept for tensors of at most
932 MiB, because the forward pass left its 32 MiB result inside the block that the logits would have fitted.
So several orders are tried on an empty cache, each followed by narrower steps, and the best one is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm_integration import measure
from vllm_integration.widest_sampling import samples
from vllm_integration.worker_checks import agreed_least

__all__ = ["dummy_options", "leave_least", "run_in_least_cache"]

# Parts of the widest step's tokens: real steps are narrower, and their sizes cut the kept blocks differently.
NARROWER = (0.75, 0.5, 0.25)
# Tensors of a step's tokens by the hidden size that live at once: residual, a layer's input, its output.
HIDDEN_STATES = 3


def run_in_least_cache(worker: Any, sample: Callable[[], None], forward: Callable[[], None]) -> None:
    """Run the widest step on a CUDA device, and leave in PyTorch's cache the least that it can do with.

    Parameters
    ----------
    worker : Worker
        Warmed up, with graphs captured.
    sample : callable
        Samples the most rows.
    forward : callable
        The forward pass of the most tokens, and sampling after it.
    """
    import torch

    device = worker.device

    def large_first() -> None:
        # Seeds: what outlives a forward pass finds its place in them, and not in the middle of larger blocks.
        shape = (worker.model_runner.max_num_tokens, worker.model_config.get_hidden_size())
        seeds = [
            torch.empty(shape, dtype=worker.model_config.dtype, device=device) for _ in range(HIDDEN_STATES)
        ]
        del seeds
        sample()
        forward()

    def kept_after(order: Callable[[], None]) -> int:
        measure.settle(device)
        before = torch.cuda.memory_reserved(device)
        order()
        _narrower_steps(worker)
        torch.cuda.synchronize(device)
        kept = torch.cuda.memory_reserved(device) - before
        return -agreed_least(-kept)  # the most of any rank: all have to choose the same

    leave_least((forward, large_first), kept_after)


def leave_least(
    orders: Sequence[Callable[[], None]], kept_after: Callable[[Callable[[], None]], int]
) -> list[int]:
    """Try `orders` and make the one that kept least the last that ran; return what each kept, in bytes."""
    kept = [kept_after(order) for order in orders]
    best = kept.index(min(kept))
    if best != len(orders) - 1:
        kept_after(orders[best])
    return kept


def dummy_options(worker: Any) -> dict[str, bool]:
    """Return what vLLM's worker tells its dummy steps: since 0.31 whether tokens go to experts at random."""
    return {"randomize_inputs": True} if getattr(worker, "randomize_dummy_inputs", False) else {}


def _narrower_steps(worker: Any) -> None:
    runner = worker.model_runner
    # The V2 runner has no attention in a profile's steps; the V1 runner has none unless it is asked for.
    options = dummy_options(worker)
    if getattr(worker, "use_v2_model_runner", False):
        options["skip_attn"] = True
    for part in NARROWER:
        tokens = max(1, int(runner.max_num_tokens * part))
        hidden, sampled = runner._dummy_run(tokens, is_profile=True, **options)
        if samples(worker) and sampled is not None:
            runner._dummy_sampler_run(sampled)
        del hidden, sampled
