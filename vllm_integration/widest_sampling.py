"""Dummy sampling at its widest: every feature that takes memory only while it is used, and every draft."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from vllm_integration.log import logger

__all__ = ["draft_tokens_per_request", "max_requests", "not_measured", "samples", "widest_sampling"]


def draft_tokens_per_request(max_requests: int, max_tokens: int, draft_tokens: int) -> int:
    """Return how many drafts of each request one step can verify, when all requests are in it; at least 1."""
    return max(1, min(draft_tokens, max_tokens // max_requests - 1))


@contextmanager
def widest_sampling(worker: Any) -> Iterator[None]:
    """Make dummy sampling inside the block use every feature that takes memory, and every draft."""
    import torch

    runner = worker.model_runner
    with ExitStack() as stack:
        sampler = getattr(runner, "sampler", None) if samples(worker) else None
        if isinstance(sampler, torch.nn.Module):  # the V1 runner's
            handle = sampler.register_forward_pre_hook(_use_every_feature, with_kwargs=True)
            stack.callback(handle.remove)
            speculative = worker.vllm_config.speculative_config
            verifier = getattr(runner, "rejection_sampler", None)
            if speculative is not None and isinstance(verifier, torch.nn.Module):
                drafts = draft_tokens_per_request(
                    max_requests(worker),
                    worker.scheduler_config.max_num_batched_tokens,
                    speculative.num_speculative_tokens,
                )
                handle = verifier.register_forward_pre_hook(_use_every_draft(drafts))
                stack.callback(handle.remove)
        elif sampler is not None and worker.device.type == "cuda":
            _stage_every_feature(sampler, max_requests(worker))
        yield


def _use_every_feature(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    metadata = kwargs.get("sampling_metadata")
    # Inside of the rejection sampler, which was given wide ones, it is called with metadata of its own.
    if metadata is not None and metadata.max_num_logprobs is None:
        rows, vocabulary = kwargs["logits"].shape
        kwargs = {**kwargs, "sampling_metadata": _wide(metadata, rows, vocabulary, 0)}
    return args, kwargs


def _use_every_draft(drafts: int) -> Any:
    def hook(module: Any, args: tuple[Any, ...]) -> Any:
        import torch
        from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

        metadata, draft_probs, logits, sampling = args
        requests = len(metadata.num_draft_tokens)
        wide = SpecDecodeMetadata.make_dummy([[0] * drafts for _ in range(requests)], logits.device)
        if draft_probs is not None:
            draft_probs = draft_probs.repeat_interleave(drafts, 0)
        shape = (requests * (drafts + 1), logits.shape[-1])
        # The caller keeps the narrow logits, two rows a request, which is what this measures too much.
        rows = torch.randn(shape, device=logits.device, dtype=logits.dtype)
        return wide, draft_probs, rows, _wide(sampling, requests, logits.shape[-1], drafts)

    return hook


def _wide(metadata: Any, requests: int, vocabulary: int, drafts: int) -> Any:
    """Return V1 sampling metadata of requests that all ask for penalties, logprobs and allowed tokens."""
    import torch

    device = metadata.frequency_penalties.device
    return replace(
        metadata,
        max_num_logprobs=1,
        no_penalties=False,
        prompt_token_ids=torch.zeros((requests, 1), dtype=torch.int64, device=device),
        output_token_ids=[[0] for _ in range(requests)],
        spec_token_ids=[[0] * drafts for _ in range(requests)],
        # The runner keeps such a mask from the first request on that asks for it.
        allowed_token_ids_mask=torch.zeros((requests, vocabulary), dtype=torch.bool, device=device),
    )


def _stage_every_feature(sampler: Any, requests: int) -> None:
    """Give the V2 sampler's rows the parameters that vLLM warms its kernels up with.

    Real requests replace them. From vLLM 0.33 on `_dummy_sampler_run` does this itself.
    """
    import inspect

    import torch
    from vllm import SamplingParams

    try:
        parameters = SamplingParams.for_sampler_warmup()
        # Source: vLLM 0.29 and 0.30, v1/worker/gpu/sample/sampler.py: there the prompt's length comes second.
        prompt_len = (1,) if "prompt_len" in inspect.signature(sampler.add_request).parameters else ()
        for row in range(requests):
            sampler.add_request(row, *prompt_len, parameters)
        sampler.apply_staged_writes()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        not_measured("the features of sampling", error)


def not_measured(what: str, error: Exception) -> None:
    """Say that the margin has to hold `what`, because of `error`."""
    logger.warning(
        "Extensible KV cache: %s could not be measured, the margin has to hold them: %s: %s",
        what,
        type(error).__name__,
        error,
    )


def samples(worker: Any) -> bool:
    """Whether this worker's steps end with sampling."""
    from vllm.distributed.parallel_state import get_pp_group

    return not worker.model_runner.is_pooling_model and get_pp_group().is_last_rank


def max_requests(worker: Any) -> int:
    """Return how many requests one step can have."""
    scheduler = worker.scheduler_config
    return min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
