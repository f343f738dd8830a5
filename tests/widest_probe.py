"""Looks at the widest step of a worker: vLLM imports this module there for ``worker_extension_cls``."""

from contextlib import ExitStack
from typing import Any


class Extension:
    """What vLLM puts among the worker's base classes."""

    def probe_widest_step(self: Any) -> dict[str, Any]:
        """Run the widest step again, and return what it asked the samplers and the model for."""
        from vllm_integration import widest_step

        runner = self.model_runner
        seen: dict[str, Any] = {"verified": [], "sampled": [], "tokens": []}

        def verified(module: Any, args: tuple[Any, ...], output: Any) -> None:
            metadata, _, logits, sampling = args
            mask = list(sampling.allowed_token_ids_mask.shape)
            drafts = metadata.num_draft_tokens
            seen["verified"].append([logits.shape[0], drafts, not sampling.no_penalties, mask])

        def sampled(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            metadata = kwargs["sampling_metadata"]
            rows = kwargs["logits"].shape[0]
            seen["sampled"].append([rows, not metadata.no_penalties, metadata.max_num_logprobs])

        def ran(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            seen["tokens"].append(kwargs["positions"].shape[-1])

        with ExitStack() as stack:
            for module, hook, with_kwargs in (
                (getattr(runner, "rejection_sampler", None), verified, False),
                (runner.sampler, sampled, True),
                (runner.get_model(), ran, True),
            ):
                if module is not None:
                    handle = module.register_forward_hook(hook, with_kwargs=with_kwargs)
                    stack.callback(handle.remove)
            widest_step.run_widest_step(self, self._ekv.pool.committed_blocks)
        return seen
