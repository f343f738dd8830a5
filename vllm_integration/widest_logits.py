"""The widest logits of vLLM's V2 runner which neither its profile nor its warm-up makes.

Drafts: warm-up verifies those of requests that also had to fit a prefill of one token more, and of no more
requests than the blocks for it: up to a third fewer rows than a step of decodes has, with one draft a
request. Verifying makes only two tensors that grow with the rows: all logits in the model's type, and one
chunk of them in fp32.

Logprobs of prompts: their logits are made in chunks of 1,024 tokens, however few requests there may be, and
a chunk is there until the next one has been made.
"""

from __future__ import annotations

from typing import Any

from vllm_integration.widest_sampling import max_requests, not_measured, samples

__all__ = ["make_widest_logits", "most_draft_rows"]


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


def make_widest_logits(worker: Any) -> None:
    """Make them on a V2 runner, one after the other, and leave their memory in PyTorch's cache."""
    import torch

    if not samples(worker) or not getattr(worker, "use_v2_model_runner", False):
        return
    for what, make in (("drafts", _of_drafts), ("logprobs of prompts", _of_prompts)):
        try:
            make(worker)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            not_measured(f"the logits of {what}", error)


def _of_drafts(worker: Any) -> None:
    import torch
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

    speculative = worker.vllm_config.speculative_config
    if speculative is None:
        return
    if getattr(worker.model_runner, "batch_sharder", None) is not None:
        raise NotImplementedError("each rank samples a part of the requests")
    tokens = worker.scheduler_config.max_num_batched_tokens
    rows = most_draft_rows(max_requests(worker), tokens, speculative.num_speculative_tokens)
    logits = _logits(worker, rows)
    chunk = (min(rows, get_max_chunk_logits(logits.shape[1])), logits.shape[1])
    torch.empty(chunk, dtype=torch.float32, device=worker.device)


def _of_prompts(worker: Any) -> None:
    from vllm.v1.worker.gpu.sample import prompt_logprob

    chunk = getattr(prompt_logprob, "CHUNK_SIZE", 1024)  # in vLLM 0.29 and 0.30 it is a local variable
    tokens = worker.scheduler_config.max_num_batched_tokens
    held = _logits(worker, min(chunk, tokens))
    if tokens > chunk:
        _logits(worker, min(chunk, tokens - chunk))
    del held


def _logits(worker: Any, rows: int) -> Any:
    """Return the logits of `rows` tokens of a step that has as many as it may have."""
    import torch

    config = worker.model_config
    size = (worker.scheduler_config.max_num_batched_tokens, config.get_hidden_size())
    hidden = torch.zeros(size, dtype=config.dtype, device=worker.device)
    sampled = hidden[torch.arange(rows, device=worker.device)]
    if worker.vllm_config.lora_config is None:
        return worker.model_runner.model.compute_logits(sampled)
    # The kernels of adapters look up one for each row, and have not been told of so many rows.
    return torch.empty((rows, config.get_vocab_size()), dtype=config.dtype, device=worker.device)
