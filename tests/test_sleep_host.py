"""Several ranks and engines of one host that keep content over a sleep: they share the host's memory."""

import pickle
import sys
from types import SimpleNamespace

import pytest
from pools import assert_filled, fill
from test_sleep_ranks import BLOCK_BYTES, Core, make_core

from allocator import backup
from vllm_integration import sleep_host


@pytest.fixture
def core() -> Core:
    return make_core("cpu")


def test_host_must_have_room_for_the_content_of_all_of_its_ranks(
    core: Core, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of two ranks would find room for its own 11 blocks."""
    both = 2 * 11 * BLOCK_BYTES
    monkeypatch.setattr(backup, "_available_host_bytes", lambda: both - 1)
    core.sleep(1)
    assert f"host: {both} bytes to keep by 2 workers " in caplog.text
    assert f"{both - 1} bytes of host memory are available: give the host" in caplog.text
    assert core.num_resets == 1
    core.model_executor.wake_up()
    assert not any(worker.view[:, :48].any() for worker in core.model_executor.workers)
    monkeypatch.setattr(backup, "_available_host_bytes", lambda: both)
    for worker in core.model_executor.workers:
        fill(worker.view, 0, 48)
    core.sleep(1)
    core.model_executor.wake_up()
    for worker in core.model_executor.workers:
        assert_filled(worker.view, 1, 12)


def test_no_rank_takes_host_memory_before_all_were_asked(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first rank takes is gone from what the host has when the second one saves."""

    def left() -> int:
        naps = [worker._ekv_nap for worker in core.model_executor.workers]
        return 2 * 11 * BLOCK_BYTES - sum(nap.backup.num_bytes for nap in naps if nap and nap.backup)

    monkeypatch.setattr(backup, "_available_host_bytes", left)
    core.sleep(1)
    assert core.num_resets == 0
    core.model_executor.wake_up()
    for worker in core.model_executor.workers:
        assert_filled(worker.view, 1, 12)


def test_ranks_of_two_hosts_each_have_their_own_memory(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["one", "other"])
    monkeypatch.setattr(sleep_host, "host_name", lambda: next(names))
    monkeypatch.setattr(backup, "_available_host_bytes", lambda: 11 * BLOCK_BYTES)
    core.sleep(1)
    assert core.num_resets == 0


@pytest.mark.vllm
@pytest.mark.parametrize("dense", [True, False])
def test_engines_of_data_parallelism_share_their_host(
    core: Core, monkeypatch: pytest.MonkeyPatch, dense: bool
) -> None:
    """A dense model's engine is told by vLLM that it is the only one."""
    from vllm.config import ParallelConfig

    from vllm_integration import plugin

    worker = "vllm.v1.worker.cpu_worker.CPUWorker"
    config = ParallelConfig(data_parallel_size=8, data_parallel_size_local=4, worker_cls=worker)
    plugin.activate(SimpleNamespace(parallel_config=config))
    config = pickle.loads(pickle.dumps(config))  # on the way to the engine core
    if dense:
        config.reconfigure_for_independent_dp_rank()
    assert config.data_parallel_size_local == (1 if dense else 4)
    core.vllm_config.parallel_config = config
    available = iter([4 * 2 * 11 * BLOCK_BYTES - 1] * 2 + [4 * 2 * 11 * BLOCK_BYTES] * 4)
    monkeypatch.setattr(backup, "_available_host_bytes", lambda: next(available))
    core.sleep(1)
    assert core.num_resets == 1
    core.model_executor.wake_up()
    core.sleep(1)
    assert core.num_resets == 1


def test_weights_that_go_to_the_host_beside_the_content_count(
    core: Core, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's sleep of level 1 copies them into pinned memory after the content was kept."""

    def allocation(tag: str, size: int, asleep: bool = False) -> SimpleNamespace:
        return SimpleNamespace(tag=tag, handle=(0, size, 0, 0), is_asleep=asleep)

    sizes = [allocation("weights", 3 << 20), allocation("kv_cache", 1 << 30), allocation("weights", 9, True)]
    allocator = SimpleNamespace(pointer_to_data=dict(enumerate(sizes)))
    cumem = SimpleNamespace(CuMemAllocator=SimpleNamespace(instance=allocator))
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", cumem)
    monkeypatch.setattr(backup, "_cached_pinned_bytes", lambda: 1 << 20)
    assert sleep_host.weights_need() == 3 << 20
    both = 2 * (11 * BLOCK_BYTES + (3 << 20))
    monkeypatch.setattr(backup, "_available_host_bytes", lambda: both - 1)
    core.sleep(1)
    assert f"host: {both} bytes to keep by 2 workers (cached blocks, and weights" in caplog.text
    cumem.CuMemAllocator.instance = None
    assert sleep_host.weights_need() == 0
