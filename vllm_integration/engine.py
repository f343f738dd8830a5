"""The engine's side: vLLM's own flow, with a reservation in the middle and the real size at the end.

`EngineCore._initialize_kv_caches` is wrapped, not copied. While it runs, its call of `get_kv_cache_configs`
plans a reservation at an upper bound; when it has returned, everything is warm, every worker is measured, and
`get_kv_cache_configs` is called again with what is really free.
"""

from __future__ import annotations

import copy
import functools
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from vllm_integration import connectors, fallback, final_size, report, sleep
from vllm_integration.config import Options, options_of
from vllm_integration.worker_names import PREFIX

__all__ = ["TwoPhaseSizing", "wrap_get_kv_cache_configs", "wrap_initialize_kv_caches"]

_LOCAL = threading.local()


def wrap_initialize_kv_caches(original: Any) -> Any:
    """Wrap `EngineCore._initialize_kv_caches`; without the switch it is the original."""

    @functools.wraps(original)
    def _initialize_kv_caches(self: Any, vllm_config: Any) -> Any:
        options = options_of(vllm_config)
        if options is None:
            return original(self, vllm_config)
        return TwoPhaseSizing(self, vllm_config, options).run(original)

    return _initialize_kv_caches


def wrap_get_kv_cache_configs(original: Any) -> Any:
    """Wrap the name in the engine core's module; outside of `TwoPhaseSizing.run` it is the original."""

    @functools.wraps(original)
    def get_kv_cache_configs(*args: Any, **kwargs: Any) -> Any:
        sizing = getattr(_LOCAL, "sizing", None)
        return original(*args, **kwargs) if sizing is None else sizing.plan(original, args, kwargs)

    return get_kv_cache_configs


class TwoPhaseSizing:
    """One engine core's start. Every method runs on its main thread."""

    def __init__(self, core: Any, vllm_config: Any, options: Options) -> None:
        self.core, self.vllm_config, self.options = core, vllm_config, options
        self.plan_again: Any = None
        self.proposals: list[dict[str, Any]] = []
        self.reason: str | None = None

    def run(self, original: Any) -> Any:
        """Return what `original` would, with the final size in it and in the engine's configuration."""
        start = time.perf_counter()
        self.reason = fallback.engine_reason(self.vllm_config) or self._begin()
        if self.reason:
            fallback.warn(self.reason)
            return original(self.core, self.vllm_config)
        _LOCAL.sizing = self
        try:
            with _without_first_size_in_log():
                config = original(self.core, self.vllm_config)
        finally:
            _LOCAL.sizing = None
        if self.reason:
            return config
        sizes = final_size.settle(self, config)
        connectors.settle(self, sizes.blocks)
        sleep.attach(self.core, self.options)
        told = report.build(self, config, sizes, time.perf_counter() - start)
        report.tell(told)
        if self.options.report is not None:
            report.write(told, self.options.report)
        self.core._ekv_report = told  # for the ready message
        return config

    def plan(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Stand in for `get_kv_cache_configs`: plan the reservation, or the normal cache if that fails."""
        values = list(args)
        specs, stock_available = values[1], values[2]
        # The original may change what it is given, and it is called again later.
        pristine = copy.deepcopy((specs, values[3:], kwargs))
        max_model_len = self.vllm_config.model_config.max_model_len

        def plan_again(available: list[int]) -> list[Any]:
            again_specs, rest, again_kwargs = copy.deepcopy(pristine)
            return original(self.vllm_config, again_specs, available, *rest, **again_kwargs)

        self.plan_again = plan_again
        configs: list[Any] = []
        if not any(specs):
            self.reason = "the model has no KV cache"
        else:
            self.proposals = self.rpc("ekv_propose")
            self.reason = next((p["reason"] for p in self.proposals if p["reason"]), None)
        if self.reason is None:
            try:
                configs = plan_again([p["upper_bytes"] for p in self.proposals])
            except ValueError as error:
                raise final_size.explain(self, error) from error
            self.reason = next((r for r in self.rpc("ekv_check_layout", configs) if r), None)
        if self.reason is None:
            return configs
        fallback.warn(self.reason)
        self.vllm_config.model_config.max_model_len = max_model_len
        abandoned = self.rpc("ekv_abandon")  # an answer for each worker, of use where there was a profile
        available = abandoned if any(specs) else stock_available
        return original(args[0], specs, available, *args[3:], **kwargs)

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call `method` on every worker, and return their answers in rank order."""
        return self.core.model_executor.collective_rpc(method, args=args)

    def _begin(self) -> str | None:
        worker_cls = self.vllm_config.parallel_config.worker_cls
        if not str(worker_cls).startswith(PREFIX):
            return f"the worker class is {worker_cls}: the configuration was not made by EngineArgs"
        reasons = self.rpc("ekv_begin", asdict(self.options))
        failed = next((reason for reason in reasons if reason), None)
        if failed and not all(reasons):
            self.rpc("ekv_abandon")
        return failed


@contextmanager
def _without_first_size_in_log() -> Iterator[None]:
    # vLLM logs the size it plans with, which here is the reservation's; the final one is logged again.
    def keep(record: logging.LogRecord) -> bool:
        return "KV cache size" not in record.getMessage()

    logger = logging.getLogger("vllm.v1.core.kv_cache_utils")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
