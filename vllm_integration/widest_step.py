"""The widest step the scheduler can schedule, once more on a model that is warmed up.

vLLM's `profile_run` does most of it: a prefill of `max_num_batched_tokens`, with the multimodal encoder's
outputs held beside it. What it leaves out is added here: the logits of drafts and of prompts, the features of
sampling that need memory only while they are used, and the part of the encoder cache that its dummy inputs do
not fill.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from vllm_integration.least_cache import dummy_options, run_in_least_cache
from vllm_integration.log import logger
from vllm_integration.measure import quiet_random, replaced
from vllm_integration.widest_logits import make_widest_logits
from vllm_integration.widest_sampling import max_requests, not_measured, samples, widest_sampling

__all__ = ["encoder_shortfall_tokens", "run_widest_step"]


def run_widest_step(worker: Any, num_blocks: int) -> bool:
    """Run the widest step, and leave in PyTorch's cache what it took; return whether that worked.

    A step that fails for anything but a lack of memory must not end a start that vLLM would have got through:
    there the profile's peak has to do.

    Parameters
    ----------
    worker : Worker
        Warmed up, with graphs captured, and with PyTorch's cache empty.
    num_blocks : int
        Blocks that are backed; only speculative decoding on the V2 runner touches any.
    """
    import torch
    import vllm.envs as envs

    device = worker.device
    if device.type == "cpu" and envs.VLLM_CPU_CI_ENV:
        return True
    try:
        _run(worker, num_blocks)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        logger.warning(
            "Extensible KV cache: rank %d could not run the widest step, so the peak of vLLM's profile "
            "stands for it, and the margin has to hold what comes on top: %s: %s",
            worker.rank,
            type(error).__name__,
            error,
        )
        return False
    return True


def _run(worker: Any, num_blocks: int) -> None:
    import torch
    from vllm.config import CompilationMode, set_current_vllm_config

    runner, device = worker.model_runner, worker.device
    options = dummy_options(worker)
    with ExitStack() as stack:
        # As vLLM profiles: without gradients, and with the same guards for compiled code.
        stack.enter_context(torch.inference_mode())
        stack.enter_context(set_current_vllm_config(worker.vllm_config))
        stack.enter_context(quiet_random(device))
        # Since 0.33 the V2 runner's warm-up, which verifies drafts, leaves the record of experts' load alone.
        suppress = getattr(getattr(runner, "eplb", None), "suppress", nullcontext)
        stack.enter_context(suppress())
        held = _rest_of_encoder_cache(worker)
        stack.enter_context(widest_sampling(worker))
        if device.type == "cuda":
            verifies = _verifies_drafts(worker)

            def sample() -> None:
                make_widest_logits(worker)
                _sample_most_rows(worker)

            def forward() -> None:
                runner.profile_run(**options)
                make_widest_logits(worker)
                if verifies:
                    _verify_drafts(worker, num_blocks)

            run_in_least_cache(worker, sample, forward)
        else:
            _sample_most_rows(worker)
            compiled = worker.compilation_config.mode != CompilationMode.NONE
            runner.warming_up_model() if compiled else runner.profile_run(**options)
        del held
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
    rows = max_requests(worker)
    size = (rows, worker.model_config.get_hidden_size())
    hidden = torch.zeros(size, dtype=worker.model_config.dtype, device=worker.device)
    with _dummy_adapters(worker, rows):
        worker.model_runner._dummy_sampler_run(hidden)


def _dummy_adapters(worker: Any, requests: int) -> AbstractContextManager[None]:
    """Give each of `requests` rows a LoRA adapter: what the last step chose for them may be out of bounds."""
    import numpy

    lora = worker.vllm_config.lora_config
    if lora is None:
        return nullcontext()
    one_each = numpy.ones(requests, dtype=numpy.int32)
    return worker.model_runner.maybe_dummy_run_with_lora(
        lora, one_each, one_each, num_active_loras=lora.max_loras
    )


def _verifies_drafts(worker: Any) -> bool:
    """Return whether to verify drafts as the V2 runner's warm-up does; says so where that is left out."""
    runner, config = worker.model_runner, worker.vllm_config
    is_v2 = getattr(worker, "use_v2_model_runner", False)
    if not is_v2 or config.speculative_config is None or runner.is_pooling_model:
        return False
    # Since 0.31 warm-up leaves these kernels out then, and what they resize may be what graphs point at.
    if not getattr(getattr(config, "kernel_config", None), "enable_jit_warmup", True):
        logger.warning(
            "Extensible KV cache: with enable_jit_warmup off, as it is with enforce_eager, drafts of all "
            "requests are not verified in the widest step; the margin has to hold what that takes"
        )
        return False
    return True


def _verify_drafts(worker: Any, num_blocks: int) -> None:
    """Verify drafts of as many requests as the backed blocks hold, as vLLM's warm-up does."""
    import torch

    try:
        from vllm.v1.worker.gpu.warmup import warmup_kernels

        with replaced(worker.model_runner.kv_cache_config, "num_blocks", num_blocks):
            warmup_kernels(worker.model_runner, worker.execute_model, worker.sample_tokens)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        not_measured("the rows of speculative decoding", error)
