"""The logits of the most drafts on vLLM's V2 runner, as large as one step can make them.

vLLM's own warm-up verifies drafts of requests that also had to fit a prefill of one token more, and of no
more requests than the blocks for it: up to a third fewer rows than a step of decodes has, with one draft a
request. Sampling makes only two tensors that grow with the rows, so it is enough to make these: all logits in
the model's type, and one chunk of them in fp32.
"""

from __future__ import annotations

from typing import Any

from vllm_integration.widest_sampling import max_requests, not_measured, samples

__all__ = ["make_draft_logits", "most_draft_rows"]


def most_draft_rows(requests: int, tokens: int, drafts: int) -> int:
    """Return how many rows of logits one step verifies at most.

    Parameters
    ----------
    requests, tokens : int
        What one step may have at most; the last request in it may be left with fewer drafts.
    drafts : int
        Of each request; it has one row more than drafts.
    """
    return min(requests * (drafts + 1), tokens)


def make_draft_logits(worker: Any) -> None:
    """Make the two tensors and leave their memory in PyTorch's cache, if the V2 runner speculates."""
    import torch

    speculative = worker.vllm_config.speculative_config
    runner = worker.model_runner
    if speculative is None or not samples(worker) or not getattr(worker, "use_v2_model_runner", False):
        return
    if getattr(runner, "batch_sharder", None) is not None:
        not_measured("the logits of all drafts", RuntimeError("each rank samples a part of the requests"))
        return
    tokens = worker.scheduler_config.max_num_batched_tokens
    rows = most_draft_rows(max_requests(worker), tokens, speculative.num_speculative_tokens)
    try:
        _make(worker, tokens, rows)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        not_measured("the logits of all drafts", error)


def _make(worker: Any, tokens: int, rows: int) -> None:
    import torch
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

    config = worker.model_config
    size = (tokens, config.get_hidden_size())
    # A step holds the hidden states of all its tokens beside those that have logits.
    hidden = torch.zeros(size, dtype=config.dtype, device=worker.device)
    sampled = hidden[torch.arange(rows, device=worker.device)]
    logits = worker.model_runner.model.compute_logits(sampled)
    chunk = min(rows, get_max_chunk_logits(logits.shape[1]))
    processed = torch.empty((chunk, logits.shape[1]), dtype=torch.float32, device=worker.device)
    del hidden, sampled, logits, processed
