"""Sleep in the engine core: all ranks wake or none, and prefix-cache hits that survive a nap.

vLLM's own flow stays: pause the scheduler, reset its caches, put every worker to sleep. With the option
``sleep_backup`` a sleep of level 1 leaves the hashes of cached blocks where they are, and has the workers
keep the content of those blocks; everything else, running requests included, goes vLLM's way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm_integration import connectors, sleep_failure, sleep_host
from vllm_integration.log import format_bytes, logger
from vllm_integration.measure import replaced

__all__ = [
    "EngineSleep",
    "attach",
    "wrap_core_sleep",
    "wrap_discard",
    "wrap_finish_pause",
    "wrap_release",
    "wrap_resume_scheduler",
    "wrap_sleep",
    "wrap_wake_up",
]

TAG = "kv_cache"
KEEPING_LEVEL = 1  # on level 2 other weights may follow, for which the content would be wrong


class _KeepHashes:
    """What stands for `clear_cache` while a pause is one that keeps the prefix cache; true, as it is."""


KEEP_HASHES = _KeepHashes()


def attach(core: Any, options: Any) -> None:
    """Make the executor of `core`, whose workers all have an extensible cache, sleep with it."""
    refusal = connectors.sleep_reason(core.vllm_config)
    core.model_executor.ekv_sleep = EngineSleep(core, options.sleep_backup is not None, refusal)


def wrap_core_sleep(original: Any) -> Any:
    """Wrap `EngineCore.sleep`: a pause before a nap that keeps content must not reset the prefix cache."""

    @functools.wraps(original)
    def sleep(self: Any, level: int = 1, mode: str = "abort") -> Any:
        mine = _of(self.model_executor)
        if mine is not None and level > 0:
            mine.check_allowed()  # before any request is aborted
        if mine is None or not mine.keeps(level):
            return original(self, level, mode)
        pause = self.pause_scheduler

        def keeping(mode: str, clear_cache: Any) -> Any:
            return pause(mode=mode, clear_cache=KEEP_HASHES)

        with replaced(self, "pause_scheduler", keeping):
            return original(self, level, mode)

    return sleep


def wrap_resume_scheduler(original: Any) -> Any:
    """Wrap `EngineCore.resume_scheduler`, which `/resume` calls whether there is a cache or not."""
    return _checked(original, EngineSleep.check_awake)


def wrap_release(original: Any) -> Any:
    """Wrap `EngineCore.release_kv_cache_memory` (0.31 and later), which resets caches before it discards."""
    return _checked(original, EngineSleep.check_allowed)


def _checked(original: Any, check: Callable[[EngineSleep], None]) -> Any:
    """Wrap a method of the engine core so that `check` may refuse it first."""

    @functools.wraps(original)
    def checked(self: Any) -> Any:
        mine = _of(self.model_executor)
        if mine is not None:
            check(mine)
        return original(self)

    return checked


def wrap_finish_pause(original: Any) -> Any:
    """Wrap `EngineCore._finish_pause`, where the caches are reset, perhaps long after `sleep` returned."""

    @functools.wraps(original)
    def _finish_pause(self: Any, clear_cache: Any) -> Any:
        if clear_cache is not KEEP_HASHES:
            return original(self, clear_cache)
        with _hashes_kept(self.scheduler.kv_cache_manager):
            return original(self, True)

    return _finish_pause


def wrap_sleep(original: Any) -> Any:
    """Wrap `Executor.sleep`."""

    @functools.wraps(original)
    def sleep(self: Any, level: int = 1) -> Any:
        mine = _of(self)
        return original(self, level) if mine is None else mine.sleep(functools.partial(original, self), level)

    return sleep


def wrap_discard(original: Any) -> Any:
    """Wrap `Executor.discard` (0.31 and later), which counts its tags as gone even where it fails."""

    @functools.wraps(original)
    def discard(self: Any, tags: tuple[str, ...]) -> Any:
        mine = _of(self)
        if mine is None:
            return original(self, tags)
        if TAG in tags:
            mine.check_idle()
        with sleep_failure.answered(self):
            return original(self, tags)

    return discard


def wrap_wake_up(original: Any) -> Any:
    """Wrap `Executor.wake_up`."""

    @functools.wraps(original)
    def wake_up(self: Any, tags: list[str] | None = None) -> Any:
        mine = _of(self)
        if mine is None:
            return original(self, tags)
        mine.before_wake_up(tags)
        slept = TAG in self.sleeping_tags
        try:
            with sleep_failure.answered(self):
                result = original(self, tags)
        except Exception:
            if slept:
                mine.sleep_again()
            raise
        if slept and TAG not in self.sleeping_tags:
            self.collective_rpc("ekv_forget")
        return result

    return wake_up


class EngineSleep:
    """Belongs to one engine core, and is used from its main thread."""

    def __init__(self, core: Any, backup: bool, refusal: str | None = None) -> None:
        self.core, self.executor, self.backup, self.refusal = core, core.model_executor, backup, refusal

    def check_allowed(self) -> None:
        """Raise if a KV connector would be left with memory that is gone."""
        if self.refusal is not None:
            raise RuntimeError(f"the engine cannot sleep: {self.refusal}")

    def keeps(self, level: int) -> bool:
        """Return whether the content of cached blocks is to survive a sleep of this level."""
        if not self.backup or level != KEEPING_LEVEL:
            return False
        # Since 0.31: what is kept beside the cache for its blocks would be reset all the same.
        return getattr(self.core.scheduler, "aux_output_connector", None) is None

    def check_awake(self) -> None:
        """Raise if requests would run over a cache that has no memory."""
        if TAG in self.executor.sleeping_tags:
            raise RuntimeError(
                "the engine sleeps, and its KV cache has no memory: wake it up (/wake_up), which resumes it"
            )

    def check_idle(self) -> None:
        """Raise if a KV connector may not give up its memory, or is still using it."""
        self.check_allowed()
        reasons = self.executor.collective_rpc("ekv_wait_until_idle")
        busy = next((reason for reason in reasons if reason), None)
        if busy is not None:
            raise RuntimeError(f"the engine cannot sleep: {busy}")

    def sleep(self, original: Any, level: int) -> Any:
        """Put all ranks to sleep with vLLM's `original`, or raise what it raises with all of them awake."""
        if not self.core.is_scheduler_paused():  # since it was told to sleep, and waited for its requests
            raise RuntimeError("the engine was woken up before it slept, and stays awake")
        kept = self.before_sleep(level)
        try:
            with sleep_failure.answered(self.executor):
                return original(level)
        except Exception as error:
            self._undo_sleep(level, kept, error)
            raise

    def _undo_sleep(self, level: int, kept: bool, error: Exception) -> None:
        """Wake every rank again; where that is impossible, raise with the whole engine counting as asleep."""
        awake = sleep_failure.TAGS - self.executor.sleeping_tags
        if not awake:
            return  # it slept before
        with sleep_failure.counted_as_asleep(self.executor):
            if sleep_failure.loses_weights(getattr(self.core, "vllm_config", None), level):
                raise RuntimeError(
                    f"{error}. Other ranks may have dropped their weights, so the engine counts as asleep: "
                    f"wake it up as after any sleep of level {level}"
                ) from error
            try:
                if not kept and TAG in awake:
                    self.core._reset_caches()
                if TAG in awake:
                    self._back_all()
                with sleep_failure.answered(self.executor):
                    tags = None if awake == sleep_failure.TAGS else sorted(awake)
                    self.executor.collective_rpc("wake_up", args=(tags,))
                if TAG in awake:
                    self.executor.collective_rpc("ekv_forget")  # a rank that never came to its sleep
                    self._tell_peers()
            except Exception as second:
                raise RuntimeError(
                    f"{error}. The ranks could not be woken again either, so the engine counts as asleep "
                    f"and can be woken once that works: {second}"
                ) from error

    def _tell_peers(self) -> None:
        """Have the scheduler's side hand out what the connectors registered anew (0.33 and later)."""
        collect = getattr(self.core, "_set_kv_connector_handshake_metadata", None)
        if collect is not None:
            collect()

    def before_sleep(self, level: int) -> bool:
        """Have the workers keep what is cached; when one cannot, none does, and the hashes are reset.

        Before that their KV connectors must be idle, or RuntimeError is raised and nothing has changed.
        Returns whether they keep it.
        """
        self.check_idle()
        if not self.keeps(level) or self.executor.sleeping_tags:
            return False  # where any part is asleep, a cache that is awake stays so
        failed = self._save(self._cached_blocks())
        if failed is None:
            return True
        self.executor.collective_rpc("ekv_forget")
        self.core._reset_caches()
        logger.warning(
            "Extensible KV cache: the content is not kept over this sleep, because rank %d cannot: %s",
            failed["rank"],
            failed["error"],
        )
        return False

    def _save(self, blocks: list[int]) -> dict[str, Any] | None:
        """Have every rank keep `blocks`; return the answer of one that cannot, or whose host cannot."""
        needs = self.executor.collective_rpc("ekv_host_need", args=(blocks,))
        failed = _failed(needs) or sleep_host.lacking(needs, getattr(self.core, "vllm_config", None))
        if failed is None:
            answers = self.executor.collective_rpc("ekv_save", args=(blocks,))
            failed = _failed(answers)
        if failed is None:
            kept = max((answer["value"] or 0 for answer in answers), default=0)
            logger.info("Extensible KV cache: %s of each rank's cache are kept asleep.", format_bytes(kept))
        return failed

    def before_wake_up(self, tags: list[str] | None) -> None:
        """Back the cache on every rank, or raise with all of them asleep as before."""
        asleep = self.executor.sleeping_tags
        wanted = asleep if tags is None else tags
        if TAG in wanted and asleep.issuperset(wanted):
            self._back_all()

    def sleep_again(self) -> None:
        """Have every rank give its cache's memory back that took it in a wake-up which failed on another."""
        try:
            failed = _failed(self.executor.collective_rpc("ekv_sleep_again"))
        except Exception:  # the wake-up's own error says more
            logger.exception("Extensible KV cache: the ranks that were awake could not be put to sleep.")
            return
        if failed is not None:
            logger.warning(
                "Extensible KV cache: rank %d was awake when another rank failed to wake up, and could not "
                "be put to sleep: %s",
                failed["rank"],
                failed["error"],
            )

    def _back_all(self) -> None:
        from allocator.errors import DriverError, PoolOutOfMemoryError

        answers = self.executor.collective_rpc("ekv_wake")
        failed = _failed(answers)
        if failed is not None:
            self.sleep_again()
            advice = "; free memory on that device and wake the engine up again" if failed["short"] else ""
            kind = PoolOutOfMemoryError if failed["short"] else DriverError
            raise kind(
                f"rank {failed['rank']} could not take its KV cache's memory again, so the engine stays "
                f"asleep: {failed['error']}{advice}"
            )

    def _cached_blocks(self) -> list[int]:
        blocks = self.core.scheduler.kv_cache_manager.block_pool.blocks
        return [
            block.block_id
            for block in blocks
            if not block.is_null and (block.ref_cnt > 0 or block.block_hash is not None)
        ]


def _of(executor: Any) -> EngineSleep | None:
    return getattr(executor, "ekv_sleep", None)


def _failed(answers: list[dict[str, Any]]) -> dict[str, Any] | None:
    return next((answer for answer in answers if answer["error"]), None)


@contextmanager
def _hashes_kept(manager: Any) -> Iterator[None]:
    def nothing_in_use() -> bool:
        """Return what vLLM's own reset would: blocks that a connector is still filling are no content."""
        pool = manager.block_pool
        return bool(pool.num_gpu_blocks - pool.get_num_free_blocks() == 1)  # the null block

    with replaced(manager, "reset_prefix_cache", nothing_in_use):
        yield
