"""The widest step the scheduler can schedule, once more on a model that is warmed up.

vLLM's `profile_run` does most of it: a prefill of `max_num_batched_tokens`, with the multimodal encoder's
outputs held beside it. What it leaves out is added here: the rows of speculative decoding, the features of
sampling that need memory only while they are used, and the part of the encoder cache that its dummy inputs do
not fill.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from vllm_integration.least_cache import run_in_least_cache
from vllm_integration.log import logger
from vllm_integration.measure import quiet_random

__all__ = [
    "clamped",
    "draft_tokens_per_request",
    "encoder_shortfall_tokens",
    "run_widest_step",
    "samples",
]


@contextmanager
def clamped(plan: Any, num_blocks: int) -> Iterator[None]:
    """Let the runner that holds `plan` believe inside the block that its cache has `num_blocks` blocks."""
    capacity = plan.num_blocks
    plan.num_blocks = num_blocks
    try:
        yield
    finally:
        plan.num_blocks = capacity


def run_widest_step(worker: Any, num_blocks: int) -> None:
    """Run the widest step, and leave in PyTorch's cache what it took.

    Parameters
    ----------
    worker : Worker
        Warmed up, with graphs captured, and with PyTorch's cache empty.
    num_blocks : int
        Blocks that are backed; only speculative decoding on the V2 runner touches any.
    """
    import torch
    import vllm.envs as envs
    from vllm.config import CompilationMode, set_current_vllm_config

    runner, device = worker.model_runner, worker.device
    if device.type == "cpu" and envs.VLLM_CPU_CI_ENV:
        return
    with ExitStack() as stack:
        # As vLLM profiles: without gradients, and with the same guards for compiled code.
        stack.enter_context(torch.inference_mode())
        stack.enter_context(set_current_vllm_config(worker.vllm_config))
        stack.enter_context(quiet_random(device))
        held = _rest_of_encoder_cache(worker)
        stack.enter_context(_widest_sampling(worker))
        if device.type == "cuda":

            def forward() -> None:
                runner.profile_run()
                _verify_drafts(worker, num_blocks)

            run_in_least_cache(worker, lambda: _sample_most_rows(worker), forward)
        else:
            _sample_most_rows(worker)
            compiled = worker.compilation_config.mode != CompilationMode.NONE
            runner.warming_up_model() if compiled else runner.profile_run()
        del held
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def draft_tokens_per_request(max_requests: int, max_tokens: int, draft_tokens: int) -> int:
    """Return how many drafts of each request one step can verify, when all requests are in it; at least 1."""
    return max(1, min(draft_tokens, max_tokens // max_requests - 1))


def encoder_shortfall_tokens(budget: Any) -> int:
    """Return the tokens of the encoder cache that vLLM's dummy inputs leave empty.

    `budget` is vLLM's `MultiModalBudget`. The dummies are as many items of the largest modality as one batch
    may hold, while entries of requests that have ended stay in the cache until their room is needed.
    """
    if budget.get_encoder_budget() <= 0:
        return 0
    filled = 0
    if budget.mm_max_toks_per_item:
        modality = budget.get_modality_with_max_tokens()
        filled = budget.mm_max_items_per_batch[modality] * budget.mm_max_toks_per_item[modality]
    return max(0, budget.encoder_cache_size - filled)


def _rest_of_encoder_cache(worker: Any) -> Any:
    """Return a tensor as large as the part of the encoder cache that `profile_run` does not fill, or None."""
    import torch
    from vllm.distributed.parallel_state import get_pp_group

    runner, model_config = worker.model_runner, worker.model_config
    multimodal = getattr(model_config, "multimodal_config", None)
    if not getattr(runner, "supports_mm_inputs", False) or multimodal is None:
        return None
    if multimodal.skip_mm_profiling or not get_pp_group().is_first_rank:
        return None
    budget = getattr(runner, "mm_budget", None)
    if budget is None:
        from vllm.multimodal.encoder_budget import MultiModalBudget

        budget = MultiModalBudget(worker.vllm_config, runner.mm_registry, enable_cache=False)
    size = (encoder_shortfall_tokens(budget), model_config.get_inputs_embeds_size())
    return torch.empty(size, dtype=model_config.dtype, device=worker.device)


def _sample_most_rows(worker: Any) -> None:
    import torch

    if not samples(worker):
        return
    size = (_max_requests(worker), worker.model_config.get_hidden_size())
    hidden = torch.zeros(size, dtype=worker.model_config.dtype, device=worker.device)
    worker.model_runner._dummy_sampler_run(hidden)


@contextmanager
def _widest_sampling(worker: Any) -> Iterator[None]:
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
                    _max_requests(worker),
                    worker.scheduler_config.max_num_batched_tokens,
                    speculative.num_speculative_tokens,
                )
                handle = verifier.register_forward_pre_hook(_use_every_draft(drafts))
                stack.callback(handle.remove)
        elif sampler is not None and worker.device.type == "cuda":
            _stage_every_feature(sampler, _max_requests(worker))
        yield


def _use_every_feature(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    metadata = kwargs.get("sampling_metadata")
    # Inside of the rejection sampler, which was given wide ones, it is called with metadata of its own.
    if metadata is not None and metadata.max_num_logprobs is None:
        kwargs = {**kwargs, "sampling_metadata": _wide(metadata, kwargs["logits"].shape[0], 0)}
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
        return wide, draft_probs, rows, _wide(sampling, requests, drafts)

    return hook


def _wide(metadata: Any, requests: int, drafts: int) -> Any:
    """Return V1 sampling metadata of requests that all ask for penalties and for logprobs."""
    import torch

    device = metadata.frequency_penalties.device
    return replace(
        metadata,
        max_num_logprobs=1,
        no_penalties=False,
        prompt_token_ids=torch.zeros((requests, 1), dtype=torch.int64, device=device),
        output_token_ids=[[0] for _ in range(requests)],
        spec_token_ids=[[0] * drafts for _ in range(requests)],
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
        _not_measured("the features of sampling", error)


def _verify_drafts(worker: Any, num_blocks: int) -> None:
    """On the V2 runner, verify drafts of as many requests as the backed blocks hold, as warm-up does."""
    import torch

    runner = worker.model_runner
    config = worker.vllm_config
    is_v2 = worker.device.type == "cuda" and getattr(worker, "use_v2_model_runner", False)
    # Without it warm-up has not run these kernels, and what they resize may be what graphs point at.
    warmed_up = getattr(getattr(config, "kernel_config", None), "enable_jit_warmup", True)
    if not is_v2 or config.speculative_config is None or not warmed_up or runner.is_pooling_model:
        return
    try:
        from vllm.v1.worker.gpu.warmup import warmup_kernels

        with clamped(runner.kv_cache_config, num_blocks):
            warmup_kernels(runner, worker.execute_model, worker.sample_tokens)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        _not_measured("the rows of speculative decoding", error)


def _not_measured(what: str, error: Exception) -> None:
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


def _max_requests(worker: Any) -> int:
    scheduler = worker.scheduler_config
    return min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
