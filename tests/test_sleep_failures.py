"""A sleep that fails on one rank: all are awake again with what they had, or all count as asleep."""

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from pools import assert_filled
from test_sleep_ranks import WHAT_TO_DO, Core, StockWorker, Worker, committed, make_core

from allocator import DriverError
from vllm_integration import worker_connectors
from vllm_integration.sleep_failure import Outcome, attempt

OWN = "vLLM's own part failed"
BOTH = {"weights", "kv_cache"}


@pytest.fixture
def core() -> Core:
    return make_core("cpu")


@pytest.fixture
def break_down(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that makes a call of vLLM's worker fail on a rank; what that returns mends it."""

    def break_one(call: str, rank: int, then: Callable[[], Any] = lambda: None) -> Callable[[], None]:
        stock = getattr(StockWorker, call)

        def failing(self: Worker, *args: Any) -> None:
            stock(self, *args)
            if self.rank == rank:
                then()
                raise ValueError(OWN)

        monkeypatch.setattr(StockWorker, call, failing)
        return lambda: monkeypatch.setattr(StockWorker, call, stock)

    return break_one


def check_awake(core: Core, kept: bool = True) -> None:
    assert core.model_executor.sleeping_tags == set()
    assert committed(core) == [48, 48]
    assert core.num_resets == (0 if kept else 1)
    for worker in core.model_executor.workers:
        assert worker._ekv_nap.state == "awake"
        assert worker._ekv_nap.backup is None
        if kept:
            assert_filled(worker.view, 1, 12)


def nap(core: Core) -> None:
    core.sleep(1)
    assert committed(core) == [0, 0]
    core.model_executor.wake_up()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("backup", ["cpu", None])
def test_all_ranks_are_awake_again_with_what_they_had(
    break_down: Callable[..., Any], rank: int, backup: str | None
) -> None:
    core = make_core(backup)
    mend = break_down("sleep", rank)
    with pytest.raises(ValueError, match=f"^{OWN}$"):
        core.sleep(1)
    check_awake(core, kept=backup is not None)
    assert "collective_rpc" not in vars(core.model_executor)
    # The rank that worked had given everything back, weights included: it was woken as vLLM does it.
    assert [call for call, _ in core.model_executor.workers[1 - rank].calls] == ["sleep 1", "wake None"]
    mend()
    nap(core)
    check_awake(core, kept=backup is not None)


def test_peers_are_told_what_connectors_registered_again(core: Core, break_down: Callable[..., Any]) -> None:
    """Since 0.33 the scheduler's side hands it out, and vLLM refreshes that in a wake-up of its own only."""
    told: list[list[int]] = []
    core._set_kv_connector_handshake_metadata = lambda: told.append(committed(core))
    break_down("sleep", 1)
    with pytest.raises(ValueError, match=f"^{OWN}$"):
        core.sleep(1)
    assert told == [[48, 48]]


def test_connector_that_does_not_let_go_leaves_all_awake(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter([None, 1])
    monkeypatch.setattr(worker_connectors, "give_up_memory", lambda: 1 / 0 if next(calls) else None)
    with pytest.raises(ZeroDivisionError):
        core.sleep(1)
    check_awake(core)


def test_memory_that_was_given_back_halfway_is_taken_again(
    core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = core.model_executor.workers[1].pool
    release = pool.release_physical

    def failing() -> None:
        release()
        raise RuntimeError("the driver failed")

    monkeypatch.setattr(pool, "release_physical", failing)
    with pytest.raises(RuntimeError, match="^the driver failed$"):
        core.sleep(1)
    check_awake(core)


def test_release_that_gave_nothing_back_keeps_everything(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = core.model_executor.workers[0].pool
    with monkeypatch.context() as patch:
        patch.setattr(pool, "release_physical", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            core.sleep(1)
    check_awake(core)
    nap(core)


def test_ranks_that_cannot_be_woken_either_count_as_asleep(
    core: Core, break_down: Callable[..., Any], host_budget: Any
) -> None:
    """Rank 0 sleeps, and when rank 1 fails there is no memory any more to take rank 0's from."""
    mend = break_down("sleep", 1, lambda: host_budget(0))
    core.model_executor.is_sleeping = False  # until 0.30 it is no property
    told = f"^{OWN}. The ranks could .*rank 0 could not take its KV cache's .*{WHAT_TO_DO}$"
    with pytest.raises(RuntimeError, match=told):
        core.sleep(1)
    assert core.model_executor.sleeping_tags == BOTH
    assert core.model_executor.is_sleeping
    assert committed(core) == [0, 48]
    mend()
    host_budget(None)
    core.model_executor.wake_up()
    check_awake(core)
    nap(core)


def test_rank_whose_weights_cannot_be_woken_keeps_all_counted_as_asleep(
    core: Core, break_down: Callable[..., Any]
) -> None:
    break_down("sleep", 1)
    mend = break_down("wake_up", 0)
    with pytest.raises(RuntimeError, match=f"^{OWN}. The ranks could not be woken again .*: {OWN}$"):
        core.sleep(1)
    assert core.model_executor.sleeping_tags == BOTH
    assert committed(core) == [0, 48]
    mend()
    core.model_executor.wake_up()
    check_awake(core)


@pytest.mark.parametrize("pooled", [True, False])
def test_level_that_drops_weights_is_not_undone(
    core: Core, break_down: Callable[..., Any], pooled: bool
) -> None:
    """Without vLLM's memory pool the weights are where they were."""
    core.vllm_config.model_config = SimpleNamespace(enable_sleep_mode=pooled)
    break_down("sleep", 0)
    with pytest.raises(RuntimeError if pooled else ValueError, match=OWN) as found:
        core.sleep(2)
    assert core.model_executor.sleeping_tags == (BOTH if pooled else set())
    assert ("as after any sleep of level 2" in str(found.value)) == pooled
    if pooled:
        core.model_executor.wake_up(["weights"])
        core.model_executor.wake_up(["kv_cache"])
        core.num_resets += 1  # as vLLM's pause has done
    check_awake(core, kept=False)


def test_cache_that_slept_before_stays_asleep_with_its_content(
    core: Core, break_down: Callable[..., Any]
) -> None:
    core.sleep(1)
    core.model_executor.wake_up(["weights"])
    break_down("sleep", 1)
    with pytest.raises(ValueError, match=f"^{OWN}$"):
        core.sleep(1)
    assert core.model_executor.sleeping_tags == {"kv_cache"}
    assert core.model_executor.workers[0].calls[-1] == ("wake ['weights']", 0)
    core.model_executor.wake_up(["kv_cache"])
    check_awake(core)


def test_error_stays_in_its_process() -> None:
    outcome = attempt(3, lambda: 1 / 0)
    assert isinstance(outcome.error, ZeroDivisionError)
    sent = pickle.loads(pickle.dumps(outcome))
    assert (sent.rank, sent.text, sent.error) == (3, "ZeroDivisionError: division by zero", None)
    assert attempt(3, lambda: None).text is None


@pytest.mark.parametrize("answer", [Outcome(1, "OSError: gone"), None])
def test_other_process_and_wrong_answer_are_errors(core: Core, answer: Any) -> None:
    """None is what vLLM's own calls answer, as from an executor whose answers are out of step."""
    core.model_executor.workers[1].ekv_sleep = lambda level: answer
    with pytest.raises(RuntimeError, match="^rank 1: OSError: gone$" if answer else "a worker answered None"):
        core.sleep(1)
    check_awake(core)


def test_failed_discard_is_told_once_all_have_answered(core: Core) -> None:
    """vLLM counts the tags as gone, so that the next wake-up is for all."""
    refusing, other = core.model_executor.workers
    refusing.fails = True
    with pytest.raises(RuntimeError, match=OWN):
        core.model_executor.discard(("kv_cache",))
    assert [call for call, _ in other.calls] == ["discard ('kv_cache',)"]
    assert committed(core) == [48, 0]
    refusing.fails = False
    core.model_executor.wake_up()
    assert committed(core) == [48, 48]
    assert core.model_executor.sleeping_tags == set()


def test_wake_up_that_fails_for_another_reason_leaves_all_asleep(
    core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    core.sleep(1)

    def lost(pool: Any) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    nap_of_one = core.model_executor.workers[1]._ekv_nap
    monkeypatch.setattr(nap_of_one.backup, "restore", lost)
    with pytest.raises(DriverError, match="rank 1 could not .*: RuntimeError: CUDA error: unspecified"):
        core.model_executor.wake_up()
    assert committed(core) == [0, 0]
    assert core.model_executor.sleeping_tags == BOTH
    monkeypatch.undo()
    core.model_executor.wake_up()
    check_awake(core)


def test_wrapper_that_was_on_the_executor_before_stays(core: Core) -> None:
    executor, seen = core.model_executor, []
    rpc = executor.collective_rpc
    tracer = lambda method, args=(): seen.append(method) or rpc(method, args)  # noqa: E731
    executor.collective_rpc = tracer
    nap(core)
    assert executor.collective_rpc is tracer
    assert {"ekv_sleep", "ekv_wake_up"} <= set(seen)
