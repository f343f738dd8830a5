"""Sleep and wake-up of several ranks with real pools, around worker classes that stand in for vLLM's."""

import gc
import os
from types import SimpleNamespace
from typing import Any

import pytest
from pools import MIB, assert_filled, fill, make_pool
from sleep_extension import Budget

from allocator import DriverError, PoolOutOfMemoryError
from vllm_integration import worker_connectors
from vllm_integration.sleep import (
    EngineSleep,
    attach,
    wrap_core_sleep,
    wrap_discard,
    wrap_finish_pause,
    wrap_release,
    wrap_resume_scheduler,
    wrap_sleep,
    wrap_wake_up,
)
from vllm_integration.worker_sleep import SleepingWorker

NUM_BLOCKS, BLOCK_BYTES = 64, MIB // 8
WHAT_TO_DO = "; free memory on that device and wake the engine up again"


class StockWorker:
    """The calls that vLLM's worker has, noting what the pool held then."""

    fails = False

    def sleep(self, level: int = 1) -> None:
        self._note(f"sleep {level}")

    def wake_up(self, tags: list[str] | None = None) -> None:
        self._note(f"wake {tags}")

    def discard(self, tags: tuple[str, ...]) -> None:
        self._note(f"discard {tags}")

    def _note(self, what: str) -> None:
        self.calls.append((what, self.pool.committed_blocks))  # type: ignore[attr-defined]
        if self.fails:
            raise RuntimeError("vLLM's own part failed")


class Worker(SleepingWorker, StockWorker):
    """One rank with a pool of 64 blocks of 128 KiB, 48 of them committed and filled."""

    def __init__(self, rank: int) -> None:
        self.rank, self.calls = rank, []
        self.pool, self.view = make_pool("cpu", 1, NUM_BLOCKS, BLOCK_BYTES)
        self.pool.commit(48)
        fill(self.view, 0, 48)
        self._ekv = SimpleNamespace(pool=self.pool, step_memory=None)


class Executor:
    """vLLM's executor of 0.31 and later, without processes."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers, self.sleeping_tags = workers, set()

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return [getattr(worker, method)(*args) for worker in self.workers]

    def _sleep(self, level: int = 1) -> None:
        if "weights" not in self.sleeping_tags:
            self.collective_rpc("sleep", (level,))
            self.sleeping_tags |= {"weights", "kv_cache"}

    def _wake_up(self, tags: list[str] | None = None) -> None:
        if self.sleeping_tags.issuperset(tags or ()):
            self.collective_rpc("wake_up", (tags,))
            self.sleeping_tags -= set(tags or self.sleeping_tags)

    def _discard(self, tags: tuple[str, ...]) -> None:
        try:
            self.collective_rpc("discard", (tags,))
        finally:
            self.sleeping_tags |= set(tags)

    sleep = wrap_sleep(_sleep)
    wake_up = wrap_wake_up(_wake_up)
    discard = wrap_discard(_discard)


class Core:
    """As much of an engine core as sleep asks."""

    def __init__(self, workers: list[Worker], cached: list[int]) -> None:
        self.model_executor = Executor(workers)
        self.vllm_config = SimpleNamespace(kv_transfer_config=None)
        blocks = [
            SimpleNamespace(block_id=b, ref_cnt=b % 2, block_hash=None if b % 2 else b, is_null=b == 0)
            for b in cached
        ]
        blocks.append(SimpleNamespace(block_id=47, ref_cnt=0, block_hash=None, is_null=False))
        pool = SimpleNamespace(blocks=blocks, num_gpu_blocks=48, get_num_free_blocks=lambda: self.free_blocks)
        manager = SimpleNamespace(block_pool=pool, reset_prefix_cache=lambda: True)
        self.scheduler = SimpleNamespace(kv_cache_manager=manager)
        self.free_blocks = 47  # all but the null block
        self.paused: list[Any] = []
        self.is_paused = False
        self.num_resets = 0

    def pause_scheduler(self, mode: str, clear_cache: Any) -> None:
        self.paused.append((mode, bool(clear_cache), clear_cache is True))
        self.is_paused = True
        if clear_cache:
            self._finish_pause(clear_cache)

    def is_scheduler_paused(self) -> bool:
        return self.is_paused

    def _resume(self) -> None:
        self.is_paused = False

    def _finish(self, clear_cache: Any) -> None:
        """As vLLM's scheduler, which asks the manager once all requests have given up their blocks."""
        if not self.scheduler.kv_cache_manager.reset_prefix_cache():
            raise RuntimeError("Failed to reset KV cache")

    def _reset_caches(self) -> None:
        self.num_resets += 1

    def _release(self) -> None:
        self._reset_caches()
        self.model_executor.discard(("kv_cache",))

    def _sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.pause_scheduler(mode=mode, clear_cache=level >= 1)
        if level:
            self.model_executor.sleep(level)

    sleep = wrap_core_sleep(_sleep)
    resume_scheduler = wrap_resume_scheduler(_resume)
    release_kv_cache_memory = wrap_release(_release)
    _finish_pause = wrap_finish_pause(_finish)


@pytest.fixture
def core() -> Core:
    return make_core("cpu")


def make_core(backup: str | None) -> Core:
    core = Core([Worker(0), Worker(1)], list(range(12)))
    attach(core, SimpleNamespace(sleep_backup=backup))
    assert isinstance(core.model_executor.ekv_sleep, EngineSleep)
    return core


def committed(core: Core) -> list[int]:
    return [worker.pool.committed_blocks for worker in core.model_executor.workers]


def test_release_comes_after_vllms_sleep_and_memory_before_its_wake_up(core: Core) -> None:
    core.sleep(1)
    assert committed(core) == [0, 0]
    core.model_executor.wake_up(["weights"])
    assert committed(core) == [0, 0]
    core.model_executor.wake_up(["kv_cache"])
    for worker in core.model_executor.workers:
        assert worker.calls == [("sleep 1", 48), ("wake ['weights']", 0), ("wake ['kv_cache']", 48)]


def test_blocks_in_use_survive_and_only_those(core: Core) -> None:
    core.sleep(1, "keep")
    assert core.paused == [("keep", True, False)]
    assert "pause_scheduler" not in vars(core)
    core.model_executor.wake_up()
    for worker in core.model_executor.workers:
        assert_filled(worker.view, 1, 12)
        assert not worker.view[:, 0].any()
        assert not worker.view[:, 12:48].any()
        assert worker._ekv_nap.backup is None
    assert core.num_resets == 0


def test_content_that_a_connector_is_still_filling_is_not_kept(core: Core) -> None:
    """vLLM refuses to sleep then; with the content kept the blocks would have been saved half filled."""
    manager = core.scheduler.kv_cache_manager
    manager.reset_prefix_cache = own = lambda: pytest.fail("the hashes would go")
    core.free_blocks -= 3
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        core.sleep(1, "keep")
    assert committed(core) == [48, 48] and not core.model_executor.sleeping_tags
    core.free_blocks += 3
    core.sleep(1, "keep")
    assert committed(core) == [0, 0]
    assert manager.reset_prefix_cache is own


def test_scheduler_is_not_resumed_over_a_cache_without_memory(core: Core) -> None:
    core.sleep(1)
    with pytest.raises(RuntimeError, match=r"its KV cache has no memory: wake it up \(/wake_up\)"):
        core.resume_scheduler()
    assert core.is_paused
    core.model_executor.wake_up(["kv_cache"])
    core.resume_scheduler()
    assert not core.is_paused


def test_engine_that_was_woken_while_it_waited_stays_awake(core: Core) -> None:
    """With mode "wait" vLLM puts the executor to sleep when the last request ends, whatever came since."""
    core.sleep(0)
    core.resume_scheduler()
    with pytest.raises(RuntimeError, match="woken up before it slept"):
        core.model_executor.sleep(1)
    assert committed(core) == [48, 48] and not core.model_executor.sleeping_tags
    assert not core.model_executor.workers[0].calls


def test_release_that_is_refused_resets_nothing(core: Core) -> None:
    core.model_executor.ekv_sleep.refusal = "the KV connector NixlConnector has"
    with pytest.raises(RuntimeError, match="the engine cannot sleep: the KV connector"):
        core.release_kv_cache_memory()
    assert core.num_resets == 0 and not core.model_executor.sleeping_tags
    core.model_executor.ekv_sleep.refusal = None
    core.release_kv_cache_memory()
    assert core.num_resets == 1 and committed(core) == [0, 0]


def test_somebody_elses_wrapper_of_a_pause_stays(core: Core) -> None:
    pause, seen = core.pause_scheduler, []

    def theirs(**options: Any) -> None:
        seen.append(options["mode"])
        pause(**options)

    core.pause_scheduler = theirs
    core.sleep(1)
    assert core.pause_scheduler is theirs and seen == ["abort"]


@pytest.mark.parametrize(("backup", "level"), [("cpu", 2), (None, 1)])
def test_content_is_gone_where_it_must_be(backup: str | None, level: int) -> None:
    core = make_core(backup)
    core.sleep(level)
    assert core.paused == [("abort", True, True)]
    core.model_executor.wake_up()
    assert committed(core) == [48, 48]
    assert not any(worker.view[:, :48].any() for worker in core.model_executor.workers)


def test_one_rank_out_of_memory_leaves_all_asleep_and_the_next_wake_up_works(
    core: Core, host_budget: Any
) -> None:  # cases 19 and 31
    core.sleep(1)
    host_budget(8 * MIB)  # enough for one of the ranks
    told = f"^rank 1 could not take its KV cache's memory again, .* asleep: .*{WHAT_TO_DO}$"
    for tags in (None, ["kv_cache"], None):
        with pytest.raises(PoolOutOfMemoryError, match=told):
            core.model_executor.wake_up(tags)
        assert committed(core) == [0, 0]
        assert core.model_executor.sleeping_tags == {"weights", "kv_cache"}
    host_budget(None)
    core.model_executor.wake_up()
    assert committed(core) == [48, 48]
    for worker in core.model_executor.workers:
        assert_filled(worker.view, 1, 12)


def test_wake_up_that_fails_otherwise_does_not_ask_for_memory(
    core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**options: Any) -> None:
        raise DriverError("cuda: cuMemMap failed")

    core.sleep(1)
    with monkeypatch.context() as patch:
        patch.setattr(core.model_executor.workers[1].pool, "recommit", fail)
        with pytest.raises(DriverError, match="asleep: cuda: cuMemMap failed$"):
            core.model_executor.wake_up()
    assert committed(core) == [0, 0]
    core.model_executor.wake_up()
    assert committed(core) == [48, 48]


@pytest.mark.parametrize("tags", [None, ["kv_cache"], ["weights", "kv_cache"]])
@pytest.mark.parametrize("rank", [0, 1])
def test_vllms_own_wake_up_that_fails_on_one_rank_leaves_every_cache_asleep(
    core: Core, rank: int, tags: list[str] | None
) -> None:
    """With its content: the rank that had woken up did not know that it may forget it."""
    core.sleep(1)
    broken = core.model_executor.workers[rank]
    for _ in range(2):
        broken.fails = True
        with pytest.raises(RuntimeError, match="vLLM's own part failed"):
            core.model_executor.wake_up(tags)
        assert committed(core) == [0, 0]
        assert core.model_executor.sleeping_tags == {"weights", "kv_cache"}
        broken.fails = False
        core.model_executor.wake_up(["weights"])
        assert committed(core) == [0, 0]
        core.model_executor.sleeping_tags.add("weights")
    core.model_executor.wake_up(tags)
    assert committed(core) == [48, 48]
    for worker in core.model_executor.workers:
        assert_filled(worker.view, 1, 12)
        assert worker._ekv_nap.state == "awake" and worker._ekv_nap.backup is None


def test_weights_that_do_not_wake_leave_a_cache_that_is_awake_alone(core: Core) -> None:
    core.sleep(1)
    core.model_executor.wake_up(["kv_cache"])
    core.model_executor.workers[1].fails = True
    with pytest.raises(RuntimeError, match="vLLM's own part failed"):
        core.model_executor.wake_up(["weights"])
    assert committed(core) == [48, 48]
    for worker in core.model_executor.workers:
        assert_filled(worker.view, 1, 12)


def test_rank_that_cannot_be_put_back_to_sleep_is_told_of(
    core: Core, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    core.sleep(1)
    core.model_executor.workers[1].fails = True
    monkeypatch.setattr(worker_connectors, "give_up_memory", lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="vLLM's own part failed"):
        core.model_executor.wake_up()
    assert "rank 0 was awake when another rank failed to wake up, and could not be put to sl" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_one_rank_that_cannot_keep_its_content_makes_all_lose_it(
    core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    from allocator import backup

    available = iter([1 << 40, 1000])
    monkeypatch.setattr(backup, "_available_host_bytes", lambda: next(available))
    core.sleep(1)
    assert core.num_resets == 1
    core.model_executor.wake_up()
    assert not any(worker.view[:, :48].any() for worker in core.model_executor.workers)


def test_sleep_twice_keeps_the_content_of_the_first(core: Core) -> None:
    core.sleep(1)
    core.sleep(1)
    core.model_executor.wake_up(["weights"])
    core.sleep(1)  # since 0.31 the workers are called again
    core.model_executor.wake_up()
    for worker in core.model_executor.workers:
        assert_filled(worker.view, 1, 12)


def test_discard_gives_memory_back_and_keeps_nothing(core: Core) -> None:
    executor = core.model_executor
    executor.collective_rpc("discard", (("kv_cache",),))
    executor.sleeping_tags = {"kv_cache"}
    assert committed(core) == [0, 0]
    executor.wake_up(["kv_cache"])
    assert committed(core) == [48, 48]
    assert not any(worker.view[:, :48].any() for worker in executor.workers)


def test_rank_without_a_cache_does_as_vllm_does(core: Core) -> None:
    executor = core.model_executor
    executor.workers[1]._ekv = None
    core.sleep(1)
    executor.wake_up()
    assert [call for call, _ in executor.workers[1].calls] == ["sleep 1", "wake None"]
    assert committed(core) == [48, 48]


def test_hundred_naps_leave_nothing_behind(core: Core) -> None:
    worker = core.model_executor.workers[0]
    worker.pool.shrink(8)
    gc.collect()  # pools of tests before
    others_bytes = Budget().memfd_bytes() - worker.pool.physical_bytes  # the other rank's
    held = set()
    for _ in range(100):
        worker.ekv_save([1, 2])
        worker.sleep(1)
        asleep = Budget().memfd_bytes()
        worker.wake_up()
        files = len(os.listdir("/proc/self/fd"))
        held.add((asleep, Budget().memfd_bytes(), worker.pool.physical_bytes, files))
    assert len(held) == 1
    assert held.pop()[0] == others_bytes
    assert_filled(worker.view, 1, 3)


class Registered:
    """A connector that notes how many blocks of each rank are there when it is called."""

    def __init__(self, core: Core) -> None:
        self.core, self.calls = core, []

    def unregister_kv_caches(self) -> None:
        self.calls.append(("unregister", committed(self.core)))

    def restore_kv_caches(self) -> None:
        self.calls.append(("restore", committed(self.core)))


def test_connector_gives_memory_up_while_it_is_there_and_takes_it_when_it_is_back(
    core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = Registered(core)
    monkeypatch.setattr(worker_connectors, "current", lambda: connector)
    core.sleep(1)
    assert [call for call, _ in connector.calls] == ["unregister"] * 2
    assert [blocks[rank] for rank, (_, blocks) in enumerate(connector.calls)] == [48, 48]
    connector.calls.clear()
    core.model_executor.wake_up(["weights"])
    assert connector.calls == []
    core.model_executor.wake_up(["kv_cache"])
    assert connector.calls == [("restore", [48, 48])] * 2
    connector.calls.clear()
    core.model_executor.discard(("kv_cache",))
    assert [call for call, _ in connector.calls] == ["unregister"] * 2


def test_connector_that_cannot_register_again_leaves_the_cache_asleep(
    core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = Registered(core)
    monkeypatch.setattr(worker_connectors, "current", lambda: connector)
    core.sleep(1)
    monkeypatch.setattr(connector, "restore_kv_caches", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        core.model_executor.wake_up()
    assert committed(core) == [0, 0]


class SimpleCPUOffloadConnector:
    """Its worker's part, of which a thread has still to start copies up to `last`, and has started `done`."""

    def __init__(self, last: int, done: list[int]) -> None:
        self.worker_handler = self
        self._pending_load_event_indices: set[int] = set()
        self._pending_store_event_indices = {last - 1, last}
        self.done = done

    def _poll_stream_events(self, is_store: bool) -> int:
        return self.done.pop(0) if len(self.done) > 1 else self.done[0]


def test_sleep_waits_for_copies_that_a_thread_has_still_to_start(
    core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = SimpleCPUOffloadConnector(7, [4, 5, 6, 7])
    monkeypatch.setattr(worker_connectors, "current", lambda: connector)
    core.sleep(1)
    assert connector.done == [7]
    assert committed(core) == [0, 0]


@pytest.mark.parametrize("call", ["sleep", "discard"])
def test_copies_that_do_not_end_refuse_a_sleep_before_anything_is_given_back(
    core: Core, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    connector = SimpleCPUOffloadConnector(7, [6])
    monkeypatch.setattr(worker_connectors, "current", lambda: connector)
    monkeypatch.setattr(worker_connectors, "IDLE_TIMEOUT_S", 0.02)
    with pytest.raises(RuntimeError, match="SimpleCPUOffloadConnector is still copying"):
        core.sleep(1) if call == "sleep" else core.model_executor.discard(("kv_cache",))
    assert committed(core) == [48, 48]
    assert core.model_executor.sleeping_tags == set()
    assert all(worker.calls == [] for worker in core.model_executor.workers)


def test_connector_that_cannot_sleep_refuses_before_a_request_is_aborted(core: Core) -> None:
    core.model_executor.ekv_sleep.refusal = "the KV connector X has registered the cache's memory"
    with pytest.raises(RuntimeError, match="the engine cannot sleep: the KV connector X has registered"):
        core.sleep(1)
    with pytest.raises(RuntimeError, match="the engine cannot sleep"):
        core.model_executor.discard(("kv_cache",))
    assert core.paused == []
    assert committed(core) == [48, 48]
