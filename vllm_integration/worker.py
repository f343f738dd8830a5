"""The worker's side: reserve, bind, warm up inside the prefix, measure, commit.

`extend` puts `ExtensibleWorker` in front of a worker class. Its overrides do nothing until the engine has
asked `ekv_begin` and every worker agreed. The `ekv_*` methods are called by the engine through
`collective_rpc`; they return plain data and report expected failures in it, because an exception would leave
the other ranks' answers unread.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm_integration import allocation, fallback, measure, own_context, worker_checks, worker_connectors
from vllm_integration.config import Options
from vllm_integration.explicit_size import share_is_no_condition
from vllm_integration.log import logger
from vllm_integration.prefix import layer_specs, warmup_blocks
from vllm_integration.worker_sleep import SleepingWorker
from vllm_integration.worker_state import WorkerCache

__all__ = ["ExtensibleWorker", "UnsupportedWorker", "extend"]

NOT_LOADED = (
    "the process of the engine core has not loaded the plugin; "
    "it may be left out of VLLM_PLUGINS, or not be installed there"
)


@functools.cache
def extend(worker_class: type) -> type:
    """Return `worker_class` with the extensible cache, or with the reason why it cannot have it."""
    from vllm.v1.worker.gpu_worker import Worker

    mixin = ExtensibleWorker if issubclass(worker_class, Worker) else UnsupportedWorker
    return type(f"Extensible{worker_class.__name__}", (mixin, worker_class), {"__module__": __name__})


class UnsupportedWorker:
    """Put in front of a worker class that is not one of vLLM's GPU or CPU workers."""

    def ekv_begin(self, options: dict[str, Any]) -> str | None:
        """Return why this worker class cannot have an extensible cache."""
        return (
            f"the worker class {type(self).__mro__[2].__qualname__} is not a vllm.v1.worker.gpu_worker.Worker"
        )


class ExtensibleWorker(SleepingWorker):
    """Overrides for a worker class that comes after it in the method resolution order."""

    _ekv: WorkerCache | None = None
    _ekv_asked = False
    _ekv_before = own_context.Before()
    _ekv_context_bytes = 0

    # From here on, what vLLM calls.

    def init_device(self: Any) -> None:
        """Take the device as vLLM does, and note what the process took before vLLM's first reading."""
        self._ekv_before = own_context.look()
        with share_is_no_condition(self):
            super().init_device()
        self._ekv_context_bytes = 0
        if self._ekv_before.free and self.device.type == "cuda":
            after = own_context.free_by_device()
            self._ekv_context_bytes = own_context.bytes_before_snapshot(self, after)

    def determine_available_memory(self: Any) -> int:
        """Profile as vLLM does, without capturing graphs only to estimate them."""
        cache = self._ekv
        if cache is None:
            return super().determine_available_memory()
        with measure.without_graph_estimation(self.model_runner):
            try:
                cache.stock_bytes = super().determine_available_memory()
            except AssertionError as error:
                # vLLM gives up when a neighbour frees memory meanwhile; what is free is read again later.
                cache.stock_error = error
        cache.note_profile(self)
        return cache.stock_bytes or 0

    def initialize_from_config(self: Any, kv_cache_config: Any) -> None:
        """Reserve the whole cache where vLLM allocates it, bind its views, back the prefix."""
        cache = self._ekv
        if cache is None or cache.pool is not None:
            if not self._ekv_asked and self.rank == 0 and fallback.engine_reason(self.vllm_config) is None:
                fallback.warn(NOT_LOADED)
            return super().initialize_from_config(kv_cache_config)
        blocks = self._ekv_prefix_blocks(kv_cache_config)
        with (
            worker_connectors.deferred(self, kv_cache_config) as cache.connector,
            allocation.pooled(functools.partial(self._ekv_allocate, blocks)),
        ):
            super().initialize_from_config(kv_cache_config)

    def compile_or_warm_up_model(self: Any) -> Any:
        """Warm up and capture with no more blocks than are backed."""
        cache = self._ekv
        if cache is None or cache.pool is None:
            return super().compile_or_warm_up_model()
        plan = self.model_runner.kv_cache_config
        # What the runner believes of its cache while only the prefix is backed.
        with measure.replaced(plan, "num_blocks", cache.pool.committed_blocks), cache.stage("warm-up"):
            return super().compile_or_warm_up_model()

    def get_simple_cpu_offload_num_cpu_blocks(self: Any) -> int | None:
        """Return what vLLM would (0.33), or, while the connector is still to be made, anything but None."""
        if self._ekv is not None and self._ekv.connector is not None:
            return 1  # `connectors.settle` asks again
        return super().get_simple_cpu_offload_num_cpu_blocks()

    def shutdown(self: Any) -> None:
        """Shut down as vLLM does, then give the memory and the addresses back."""
        super().shutdown()
        cache, self._ekv = self._ekv, None
        if cache is not None and cache.pool is not None:
            cache.close()

    # From here on, what the engine calls.

    def ekv_begin(self: Any, options: dict[str, Any]) -> str | None:
        """Get ready, and return None; or return why not, and stay an ordinary worker."""
        self._ekv_asked = True
        asked_for = Options(**options)
        reason = worker_checks.worker_reason(self, asked_for)
        if reason is None:
            from vllm_integration.patches import PatchError
            from vllm_integration.plugin import apply_allocation_patches

            try:
                apply_allocation_patches()
            except PatchError as error:
                reason = str(error)
        reason = worker_checks.agreed(reason)
        self._ekv = None if reason else WorkerCache(asked_for, self)
        return reason

    def ekv_abandon(self: Any) -> int:
        """Become an ordinary worker again; return the bytes that vLLM would have sized its cache with."""
        cache, self._ekv = self._ekv, None
        return cache.stock_available(self) if cache else 0

    def ekv_propose(self: Any) -> dict[str, Any]:
        """Return the bytes to reserve addresses for, and what vLLM's own profile came to."""
        proposal = self._ekv.propose(self)
        return {**proposal, "reason": worker_checks.agreed(proposal["reason"])}

    def ekv_check_layout(self: Any, kv_cache_configs: list[Any]) -> str | None:
        """Return why the planned cache cannot grow, or None."""
        return worker_checks.agreed(worker_checks.layout_reason(self, kv_cache_configs[self.rank]))

    def ekv_measure(self: Any) -> dict[str, Any]:
        """Run the widest step, and return what the cache may hold."""
        return self._ekv.measure(self)

    def ekv_captures_decode_steps(self: Any) -> bool:
        """Return whether graphs of whole decode steps were captured, which the runner settles."""
        return bool(self.vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs())

    def ekv_commit(self: Any, num_blocks: int) -> dict[str, Any]:
        """Back the first `num_blocks` blocks; the answer says whether it worked."""
        return self._ekv.commit(self, num_blocks)

    def ekv_rollback(self: Any) -> dict[str, Any]:
        """Go back to the prefix, and return how many blocks would fit now."""
        return self._ekv.rollback(self)

    def ekv_connect(self: Any, num_blocks: int) -> dict[str, Any]:
        """Make the KV connector over the first `num_blocks` blocks; the answer says whether it worked."""
        try:
            self._ekv.connect(self, num_blocks)
        except Exception as error:  # of a connector's own, of any kind
            logger.exception("Extensible KV cache: rank %d could not set up its KV connector", self.rank)
            return {"rank": self.rank, "error": f"{type(error).__name__}: {error}"}
        found = {"handle_kind": self._ekv.handle_kind(), "has_rdma": worker_checks.has_rdma()}
        return {"rank": self.rank, "error": None, **found}

    def ekv_report(self: Any) -> dict[str, Any] | None:
        """Return what was measured and committed, with the pool as plain data; or None without one."""
        cache = self._ekv
        return None if cache is None or cache.pool is None else cache.report(self)

    def ekv_snapshot(self: Any) -> dict[str, Any] | None:
        """Return the pool as plain data, or None without one."""
        cache = self._ekv
        return None if cache is None or cache.pool is None else cache.snapshot(self)

    def _ekv_prefix_blocks(self: Any, config: Any) -> int:
        cache = self._ekv
        blocks = cache.options.warmup_blocks or config.num_blocks
        if config.kv_cache_tensors and not cache.options.warmup_blocks:
            bytes_per_block = config.kv_cache_tensors[0].size // config.num_blocks
            most_bytes = cache.prefix_limit_bytes(self)
            blocks = warmup_blocks(self, config, config.num_blocks, bytes_per_block, most_bytes)
        # Warm-up makes as many requests as its blocks allow, and ranks have to run the same steps.
        return min(config.num_blocks, worker_checks.agreed_least(blocks))

    def _ekv_allocate(self: Any, prefix_blocks: int, original: Any, *args: Any, **kwargs: Any) -> Any:
        from allocator import extensible_kv_pool

        cache = self._ekv
        plan = args[0] if args else kwargs["kv_cache_config"]
        if not plan.kv_cache_tensors:
            return original(*args, **kwargs)
        size = plan.kv_cache_tensors[0].size
        settings = {"min_bytes": size, **cache.memory_settings()}
        with cache.stage("reserve"):
            with extensible_kv_pool(self.device, **settings) as pool:
                caches = original(*args, **kwargs)
            cache.adopt(pool, plan.num_blocks, size)
            cache.has_sinks = any(getattr(spec, "sink_len", None) for spec in layer_specs(plan))
            cache.num_views = allocation.bind_views(pool, caches, plan.num_blocks)
        cache.commit_prefix(prefix_blocks)
        return caches
