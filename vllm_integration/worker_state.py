"""One worker's cache: its pool, and the figures that are read on the way from reservation to final size."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from vllm_integration import connectors, measure, worker_connectors
from vllm_integration.budget import budget_now, requested_and_free, uncounted_bytes
from vllm_integration.config import Options
from vllm_integration.log import logger
from vllm_integration.narrowing import check_one_handle_each
from vllm_integration.stages import Stages
from vllm_integration.start_table import start_table
from vllm_integration.step_memory import StepMemory
from vllm_integration.widest_step import run_widest_step
from vllm_integration.worker_checks import reservable_bytes

__all__ = ["WorkerCache"]

# At most this part of the budget goes into the warm-up prefix, where blocks are large and requests many.
PREFIX_PART = 8


class WorkerCache:
    """Belongs to one worker, and is used from its thread only. Sizes are bytes of this worker's device."""

    def __init__(self, options: Options, worker: Any) -> None:
        self.options = options
        self.pool: Any = None
        self.registered = connectors.registers_memory(worker.vllm_config)
        self.connector: worker_connectors.Deferred | None = None  # until the real one is made
        self.num_views = 0
        self.prefix_blocks = 0
        self.has_sinks = False  # whether warm-up wrote blocks that are read for good
        self.bytes_per_block = 0
        self.stock_bytes: int | None = None
        self.stock_error: AssertionError | None = None
        self.set_aside_bytes = 0  # kept for the front end's decoders
        self.peak_activation_bytes = 0
        self.stages = Stages()
        self.rank = worker.rank
        self.context_bytes = worker._ekv_context_bytes
        self.requested_bytes, self.initial_free_bytes = requested_and_free(worker)
        self.explicit = False
        self.profile_free_bytes = 0
        self.uncounted_bytes = self.context_bytes  # of this process, which PyTorch does not count
        self.unseen_bytes = 0  # of a widest step that could not run
        self.measured: dict[str, Any] = {}
        self.step_memory: StepMemory | None = None  # until it is measured

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Record the block as one stage of this worker's start."""
        return self.stages.stage(name, lambda: self.pool)

    def note_profile(self, worker: Any) -> None:
        """Keep what vLLM's profile found, and settle whether the size is an explicit one."""
        # Read here and not in the engine: a saved start-up plan sets it in the worker.
        given = worker.cache_config.kv_cache_memory_bytes
        # vLLM's GPU worker takes 0 for "not given", and its CPU worker for a size.
        self.explicit = given is not None if worker.device.type == "cpu" else bool(given)
        available = getattr(worker, "available_kv_cache_memory_bytes", None)
        if self.explicit:
            available = worker.cache_config.kv_cache_memory_bytes
        if available is not None and self.stock_bytes is not None:
            self.set_aside_bytes = max(0, int(available) - self.stock_bytes)
        if hasattr(worker, "peak_activation_memory"):
            # Where it is set, warm-up logs a size for a cache like stock's, and may save it for next time.
            self.peak_activation_bytes = int(worker.peak_activation_memory)
            del worker.peak_activation_memory
        measure.settle(worker.device)
        self.profile_free_bytes = measure.free_bytes(worker.device)
        self.uncounted_bytes = uncounted_bytes(self, worker)

    def propose(self, worker: Any) -> dict[str, Any]:
        """Return an upper bound of the final size; addresses are free, so it may be far above what fits."""
        stock = self.stock_bytes or 0
        wanted = stock
        if not self.explicit:
            wanted = max(stock, self.requested_bytes - measure.model_bytes(worker) - self.set_aside_bytes)
        reservable = reservable_bytes(worker.device, wanted, max(1, stock)) if wanted > 0 else wanted
        reason = None
        if wanted > 0 and not reservable:
            reason = f"rank {self.rank} cannot reserve {wanted} bytes of addresses, nor {stock}"
        return {
            "rank": self.rank,
            "explicit": self.explicit,
            "upper_bytes": reservable,
            "stock_bytes": stock,
            "reason": reason,
        }

    def stock_available(self, worker: Any) -> int:
        """Return vLLM's own figure, with the estimation of graph memory that was left out until now."""
        import vllm.envs as envs
        from vllm.config import CUDAGraphMode

        if self.stock_error is not None:
            raise self.stock_error
        if self.stock_bytes is None:  # not profiled yet, vLLM is still to do so
            return 0
        available = self.stock_bytes or 0
        mode = worker.compilation_config.cudagraph_mode
        if self.explicit or worker.device.type != "cuda" or mode == CUDAGraphMode.NONE:
            return available
        estimate = worker.model_runner.profile_cudagraph_memory()
        return available - (estimate if envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS else 0)

    def adopt(self, pool: Any, num_blocks: int, size_bytes: int) -> None:
        """Take `pool`, which holds a cache of `num_blocks` blocks in `size_bytes`, as this worker's."""
        self.pool = pool
        self.bytes_per_block = size_bytes // num_blocks

    def memory_settings(self) -> dict[str, Any]:
        """Return the pool's settings: one allocation for each segment, shareable, where it is registered."""
        if self.registered:
            return {"max_chunk_bytes": 0, "shareable": True}
        chunk = self.options.max_chunk_bytes
        return {} if chunk is None else {"max_chunk_bytes": chunk}

    def prefix_limit_bytes(self, worker: Any) -> int:
        """Return how much of the device the warm-up prefix may take."""
        return max(0, min(self.requested_bytes, measure.free_bytes(worker.device)) // PREFIX_PART)

    def commit_prefix(self, num_blocks: int) -> None:
        """Back the blocks that warm-up touches."""
        from allocator.errors import EkvError
        from allocator.sizing import SizingError

        self.prefix_blocks = num_blocks
        try:
            with self.stage("prefix"):
                self.pool.commit(num_blocks)
        except EkvError as error:
            raise SizingError(
                f"rank {self.rank} could not back the {num_blocks} blocks that warm-up needs: {error}"
            ) from error

    def measure(self, worker: Any) -> dict[str, Any]:
        """Return the budget in bytes, and the largest number of blocks within it."""
        device, pool = worker.device, self.pool
        if pool is None:
            return {"rank": self.rank, "blocks": None}
        with self.stage("measure"):
            measure.settle(device)
            warm_free = measure.free_bytes(device)
            runs = not (device.type == "cpu" and self.explicit)
            if runs and not run_widest_step(worker, pool.committed_blocks):
                measure.settle(device)
                self.unseen_bytes = self.peak_activation_bytes
            free = max(0, measure.free_bytes(device) - self.unseen_bytes)
        self.step_memory = StepMemory(device)
        committed = pool.physical_bytes
        budget, used = budget_now(self, worker, free, committed)
        self.measured = {
            "rank": self.rank,
            "explicit": self.explicit,
            "blocks": pool.max_blocks_within(budget),
            # What an explicit size may take: anything but the memory that the widest step needs.
            "blocks_free": pool.max_blocks_within(free + committed),
            "budget_bytes": budget,
            "bytes_per_block": self.bytes_per_block,
            "capacity_blocks": pool.capacity_blocks,
            "capacity_bytes": pool.bytes_for(pool.capacity_blocks),
            "reserved_bytes": pool.reserved_bytes,
            "num_segments": pool.num_segments,
            "prefix_blocks": self.prefix_blocks,
            "prefix_bytes": committed,
            "requested_bytes": self.requested_bytes,
            "used_bytes": used,
            "free_bytes": free,
            "margin_bytes": self.options.margin_bytes,
            "set_aside_bytes": self.set_aside_bytes,
            "context_bytes": self.context_bytes,
            "warm_up_bytes": self.profile_free_bytes - warm_free - committed,
            "widest_step_bytes": warm_free - free,
            "widest_step_ran": runs,
            "stock_bytes": self.stock_bytes,
            "stock_peak_activation_bytes": self.peak_activation_bytes,
            "weights_bytes": measure.model_bytes(worker),
        }
        return self.measured

    def commit(self, worker: Any, num_blocks: int) -> dict[str, Any]:
        """Back `num_blocks`; on failure nothing is changed and the answer names rank, call and code."""
        if self.pool is None:
            return {"rank": self.rank, "error": None, "seconds": 0.0, "physical_bytes": 0}
        from allocator.errors import EkvError

        try:
            with self.stage("commit"):
                self._back(num_blocks)
        except (EkvError, MemoryError) as error:
            return {"rank": self.rank, "error": str(error), "seconds": 0.0}
        return {
            "rank": self.rank,
            "error": None,
            "seconds": self.pool.last_commit_seconds,
            "physical_bytes": self.pool.physical_bytes,
        }

    def rollback(self, worker: Any) -> dict[str, Any]:
        """Give back everything behind the prefix; return how many blocks would fit now beside the margin."""
        if self.pool is None:
            return {"rank": self.rank, "blocks": None}
        if self.registered:
            self._back(self.prefix_blocks)
        self.pool.shrink(self.prefix_blocks)
        most = measure.free_bytes(worker.device) - self.unseen_bytes + self.pool.physical_bytes
        if not self.explicit:
            most = max(0, most - self.set_aside_bytes - self.options.margin_bytes)
        return {"rank": self.rank, "blocks": self.pool.max_blocks_within(most)}

    def _back(self, num_blocks: int) -> None:
        """Back `num_blocks` blocks; where they are registered, each segment anew and in one piece.

        What PyTorch's cache holds is the widest step's memory, and the cache must not grow into it.
        """
        if not self.registered:
            return self._back_or_shorten(num_blocks)
        # Nothing of warm-up's is needed any more, and its memory is: there may be no room beside it.
        self.pool.shrink(0)
        try:
            self.pool.commit(num_blocks, defragment=True, may_empty_cache=False)
            check_one_handle_each(self.pool)
        except BaseException:
            self.pool.shrink(0)
            self.pool.commit(self.prefix_blocks, may_empty_cache=False)
            raise

    def _back_or_shorten(self, num_blocks: int) -> None:
        if num_blocks < self.pool.committed_blocks:
            self.pool.shrink(num_blocks)
            if self.pool.physical_bytes > self.pool.bytes_for(num_blocks) and not self.has_sinks:
                self.pool.shrink(0)  # whole chunks go back, and smaller ones follow
        try:
            self.pool.commit(num_blocks, may_empty_cache=False)
        except BaseException:
            self.pool.commit(self.prefix_blocks, may_empty_cache=False)
            raise

    def connect(self, worker: Any, num_blocks: int) -> None:
        """Make this worker's KV connector over the committed blocks."""
        told, self.connector = self.connector, None
        if told is not None:
            worker_connectors.connect(worker, told, self.pool, num_blocks)

    def handle_kind(self) -> str | None:
        """Return what the cache's memory can be shared by, or None where nobody asked for that."""
        if self.pool is None or not self.registered:
            return None
        return str(self.pool.snapshot()["reservations"][0]["handle_kind"])

    def report(self, worker: Any) -> dict[str, Any]:
        """Return what was measured, the start-up table, and the pool as it is now."""
        pool = self.pool
        return {
            "rank": self.rank,
            "capacity_blocks": pool.capacity_blocks,
            "capacity_bytes": pool.capacity_blocks * self.bytes_per_block,
            "committed_blocks": pool.committed_blocks,
            "committed_bytes": pool.committed_blocks * self.bytes_per_block,
            "physical_bytes": pool.physical_bytes,
            "commit_seconds": pool.last_commit_seconds,
            "table": start_table(self.measured, pool.physical_bytes) if self.measured else [],
            "measured": self.measured,
            "snapshot": self.snapshot(worker),
        }

    def snapshot(self, worker: Any) -> dict[str, Any]:
        """Return the pool's snapshot with this worker's rank and its block size in bytes."""
        return {
            **self.pool.snapshot(),
            "rank": self.rank,
            "bytes_per_block": self.bytes_per_block,
            "prefix_blocks": self.prefix_blocks,
            "stages": list(self.stages.records),
        }

    def close(self) -> None:
        """Give the memory and the addresses back; the views must not be used any more."""
        from allocator.errors import EkvError

        pool, self.pool = self.pool, None
        try:
            pool.free()
        except EkvError as error:
            # A device that has failed refuses this too, and what it failed with is what should be seen.
            logger.debug("Extensible KV cache: rank %d could not give its memory back: %s", self.rank, error)
