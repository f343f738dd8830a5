"""Sleep in a worker: the pool gives its memory back after vLLM's own work, and takes it again before that.

Addresses stay, so captured graphs do. Where weights are in vLLM's sleep mode (``--enable-sleep-mode``) they
go its way; otherwise, and on a CPU, where vLLM has none, only the KV cache sleeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm_integration import sleep_failure, sleep_host, worker_connectors
from vllm_integration.log import format_bytes, logger
from vllm_integration.step_memory import StepMemory

__all__ = ["Nap", "SleepingWorker"]

TAG = "kv_cache"
READING = "Memory usage increased after sleeping."
CPU_WORKER = "vllm.v1.worker.cpu_worker"


class Nap:
    """One worker's pool over sleep and wake-up, with the content that is to survive it."""

    def __init__(self, pool: Any, rank: int, step_memory: StepMemory | None = None) -> None:
        self.pool, self.rank, self.step_memory = pool, rank, step_memory
        self.backup: Any = None
        self.held: list[Any] = []  # the widest step's memory, until vLLM is awake
        # "asleep"; "waking" until vLLM's own part of the wake-up is done; "woken" until all ranks' is.
        self.state = "awake"

    @property
    def is_awake(self) -> bool:
        """Return whether requests can run, as far as this rank goes."""
        return self.state in ("awake", "woken")

    def host_need(self, blocks: list[int]) -> tuple[str, int, int | None]:
        """Return this host, the bytes that `save` would take from it, and those that it has, if known."""
        from allocator import backup

        self.drop()  # as `save` does
        need, available = backup.host_need(self.pool, blocks)
        return sleep_host.host_name(), need + sleep_host.weights_need(), available

    def save(self, blocks: list[int]) -> int:
        """Keep the content of `blocks` in host memory; return its bytes. Not while the pool has none."""
        from allocator import backup

        if self.is_awake:
            self.drop()
            saved = backup.save(self.pool, blocks)
            saved.wait()
            self.backup = saved
        return self.backup.num_bytes if self.backup else 0

    def release(self) -> None:
        """Give the memory back; a second time changes nothing."""
        num_bytes = self.pool.physical_bytes
        undone = self.state in ("waking", "woken")
        self.state = "asleep"  # also when this fails halfway
        self.held = []
        if undone:
            self._empty_cache()
        self.pool.release_physical()
        if num_bytes:
            kept = f", {format_bytes(self.backup.num_bytes)} kept in host memory" if self.backup else ""
            logger.info(
                "Extensible KV cache: rank %d gave back %s%s.", self.rank, format_bytes(num_bytes), kept
            )

    def wake(self) -> None:
        """Back the same blocks again, with what was kept and else zeros; or raise and stay asleep.

        The widest step's memory must be there as well, and is held until `finish`.
        """
        if self.state != "asleep":
            return
        if self.step_memory is not None:
            self.step_memory.trim()
        self.pool.recommit(may_empty_cache=False)
        try:
            if self.backup:
                self.backup.restore(self.pool)
                self.backup.wait()
            self.hold()
        except BaseException:
            self.pool.release_physical()
            self._empty_cache()
            raise
        self.state = "waking"

    def hold(self) -> None:
        """Take what is missing of the widest step's memory while the pool has its own."""
        if self.step_memory is not None:
            self.held = self.step_memory.take()

    def _empty_cache(self) -> None:
        from allocator.torch_routing import empty_cache

        if self.step_memory is not None:
            empty_cache(self.step_memory.device)

    def finish(self) -> None:
        """Be awake, until other ranks fail to: PyTorch caches what was held, and what was kept stays."""
        self.held = []
        if self.state == "waking":
            self.state = "woken"
            blocks, size = self.pool.committed_blocks, format_bytes(self.pool.physical_bytes)
            seconds = self.pool.last_commit_seconds
            logger.info(
                "Extensible KV cache: rank %d backed %d blocks (%s) again in %.3f s.",
                self.rank,
                blocks,
                size,
                seconds,
            )

    def forget(self) -> None:
        """Be awake for good, where a wake-up is done: what was kept is not needed any more."""
        if self.state == "woken":
            self.state = "awake"
        self.drop()

    def drop(self) -> None:
        """Forget what was kept."""
        saved, self.backup = self.backup, None
        if saved is not None:
            saved.drop()


class SleepingWorker:
    """The part of `ExtensibleWorker` that sleeps; without a pool every call is vLLM's own."""

    _ekv: Any
    _ekv_nap: Nap | None = None

    # From here on, what vLLM calls.

    def sleep(self: Any, level: int = 1) -> None:
        """Sleep as vLLM does, then give the cache's memory back."""
        nap = self._ekv_current_nap()
        if nap is None:
            return super().sleep(level)
        if level != 1:
            nap.drop()  # the weights may be others afterwards
        try:
            with _whatever_others_took():
                _unless_unsupported(super().sleep)(level)
            worker_connectors.give_up_memory()
        except BaseException:
            if nap.is_awake:
                nap.drop()
            raise
        nap.release()

    def wake_up(self: Any, tags: list[str] | None = None) -> None:
        """Take the cache's memory, then wake up as vLLM does; whichever fails, the cache stays asleep."""
        nap = self._ekv_current_nap()
        if nap is None:
            return super().wake_up(tags)
        mine = tags is None or TAG in tags
        if mine:
            nap.wake()
        if nap.is_awake:
            nap.hold()  # vLLM empties PyTorch's cache now
        try:
            _unless_unsupported(super().wake_up)(tags)
            if mine:
                worker_connectors.take_memory_again()
        except BaseException:
            if mine and nap.state == "waking":
                nap.release()
            nap.held = []
            raise
        if mine or nap.is_awake:
            nap.finish()

    def discard(self: Any, tags: tuple[str, ...]) -> None:
        """Discard as vLLM does (0.31 and later), then give the cache's memory back; nothing is kept."""
        nap = self._ekv_current_nap()
        if nap is None or TAG not in tags:
            return super().discard(tags)
        discard = super().discard
        (_unless_unsupported(discard) if set(tags) == {TAG} else discard)(tags)
        nap.drop()
        worker_connectors.give_up_memory()
        nap.release()

    # From here on, what the engine calls.

    def ekv_wait_until_idle(self: Any) -> str | None:
        """Wait for the KV connector's copies to be on their way; return what is wrong, or None."""
        return worker_connectors.wait_until_idle()

    def ekv_host_need(self: Any, blocks: list[int]) -> dict[str, Any]:
        """Tell what `ekv_save` would take, before any rank takes it."""
        return self._ekv_answer(lambda nap: nap.host_need(blocks) if nap.is_awake else None)

    def ekv_save(self: Any, blocks: list[int]) -> dict[str, Any]:
        """Keep the content of `blocks` over the sleep that follows; the answer says whether it worked."""
        return self._ekv_answer(lambda nap: nap.save(blocks))

    def ekv_sleep(self: Any, level: int = 1) -> sleep_failure.Outcome:
        """Do what `sleep` does, and answer."""
        return sleep_failure.attempt(self.rank, lambda: self.sleep(level))

    def ekv_wake_up(self: Any, tags: list[str] | None = None) -> sleep_failure.Outcome:
        """Do what `wake_up` does, and answer."""
        return sleep_failure.attempt(self.rank, lambda: self.wake_up(tags))

    def ekv_discard(self: Any, tags: tuple[str, ...]) -> sleep_failure.Outcome:
        """Do what `discard` does, and answer."""
        return sleep_failure.attempt(self.rank, lambda: self.discard(tags))

    def ekv_forget(self: Any) -> dict[str, Any]:
        """Undo `ekv_save`; after a wake-up of all ranks what was kept is not needed any more."""
        return self._ekv_answer(lambda nap: nap.forget())

    def ekv_wake(self: Any) -> dict[str, Any]:
        """Take the cache's memory again; the answer says whether it worked."""
        return self._ekv_answer(lambda nap: nap.wake())

    def ekv_sleep_again(self: Any) -> dict[str, Any]:
        """Undo `ekv_wake`, and what `wake_up` did with the cache until `ekv_forget`."""

        def undo(nap: Nap) -> None:
            if nap.state == "woken":
                worker_connectors.give_up_memory()
            if nap.state in ("waking", "woken"):
                nap.release()

        return self._ekv_answer(undo)

    def _ekv_answer(self: Any, step: Callable[[Nap], Any]) -> dict[str, Any]:
        from allocator.errors import EkvError

        nap, error, value, short = self._ekv_current_nap(), None, None, False
        if nap is not None:
            try:
                value = step(nap)
            except (EkvError, MemoryError) as failure:
                error, short = str(failure), isinstance(failure, MemoryError)
            except Exception as failure:  # unread, it would be taken for the answer to the next call
                logger.exception("Extensible KV cache: rank %d failed.", self.rank)
                error = f"{type(failure).__name__}: {failure}"
        return {"rank": self.rank, "error": error, "value": value, "short": short}

    def _ekv_current_nap(self: Any) -> Nap | None:
        cache = self._ekv
        if cache is None or cache.pool is None:
            return None
        if self._ekv_nap is None or self._ekv_nap.pool is not cache.pool:
            self._ekv_nap = Nap(cache.pool, self.rank, cache.step_memory)
        return self._ekv_nap


@contextmanager
def _whatever_others_took() -> Iterator[None]:
    """Go on when vLLM's sleep is done and only finds less of the device's memory free than before.

    It reads that before the cache gives its memory back, and processes beside this one count.
    """
    try:
        yield
    except AssertionError as error:
        if str(error) != READING:
            raise
        logger.warning(
            "Extensible KV cache: less of the device's memory was free after vLLM's part of the sleep than "
            "before, so a process beside this one took some. The cache gives its own back now."
        )


def _unless_unsupported(method: Callable[..., None]) -> Callable[..., None]:
    """Return `method`, or nothing to call where it is the CPU worker's, which only says that it cannot."""
    if getattr(method, "__module__", None) == CPU_WORKER:
        return lambda *args: None
    return method
