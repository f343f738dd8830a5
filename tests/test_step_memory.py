"""The widest step's memory over a nap: real pool and `SleepingWorker`, and a device that is a few numbers.

vLLM's cumem empties PyTorch's cache when it sleeps and when it wakes up, also where no weights are in it, and
keeps it when it discards (0.33.0, device_allocator/cumem.py).
"""

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pools import MIB
from test_measured_size import MARGIN, STEP, Device, Started, start  # noqa: F401

from allocator import torch_routing
from allocator.errors import PoolOutOfMemoryError
from vllm_integration import step_memory
from vllm_integration.step_memory import StepMemory
from vllm_integration.worker_sleep import SleepingWorker

BLOCKS = 20
CUDA = torch.device("cuda", 0)


class Held:
    """A tensor: PyTorch takes it from what it keeps, or from the device, and keeps it afterwards."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        if num_bytes > device.kept and num_bytes > device.free_bytes(None) + device.kept:
            num_bytes = 0
        self.device, self.num_bytes = device, num_bytes
        device.kept = max(0, device.kept - num_bytes)
        device.in_use += num_bytes
        if not num_bytes:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def __del__(self) -> None:
        self.device.in_use -= self.num_bytes
        self.device.kept += self.num_bytes


class Stock:
    """As much of vLLM's GPU worker as empties PyTorch's cache."""

    fails = False

    def sleep(self, level: int = 1) -> None:
        self.modelled.settle(None)

    def discard(self, tags: tuple[str, ...]) -> None:
        pass

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.modelled.settle(None)
        if self.fails:
            raise RuntimeError("no")


class Worker(SleepingWorker, Stock):
    rank = 0


@pytest.fixture
def awake(start: Callable[..., Started], monkeypatch: pytest.MonkeyPatch) -> Worker:  # noqa: F811
    """Hand out a worker whose neighbours hold the rest of the device, as where the utilization is 1."""
    started = start()
    device = started.device
    kept = lambda _: (Counter({(0, device.kept): 1} if device.kept else {}), Counter())  # noqa: E731
    monkeypatch.setattr(step_memory, "large_segments", kept)
    monkeypatch.setattr(step_memory, "empty", lambda _, stream, num_bytes: Held(device, num_bytes))
    started.blocks()
    assert started.cache.commit(started.worker, BLOCKS)["error"] is None
    device.outside += device.free_bytes(None) - MARGIN
    worker = Worker()
    worker._ekv, worker.modelled, worker.started = started.cache, device, started
    assert device.kept == STEP and device.free_bytes(None) == MARGIN
    return worker


@pytest.mark.parametrize("level", [1, 2])
def test_wake_up_gives_pytorch_what_it_kept_for_the_widest_step(awake: Worker, level: int) -> None:
    for _ in range(2):
        awake.sleep(level)
        assert awake.modelled.kept == 0
        awake.wake_up()
        assert awake.modelled.kept == STEP
        assert awake.modelled.free_bytes(None) == MARGIN


def test_wake_up_of_a_worker_that_did_not_sleep_leaves_the_widest_step_its_memory(awake: Worker) -> None:
    """As where its own sleep failed, and the engine wakes all."""
    awake.wake_up()
    assert awake.modelled.kept == STEP


@pytest.mark.parametrize("order", [["weights", "kv_cache"], ["kv_cache", "weights"]])
def test_wake_up_in_parts_leaves_the_widest_step_its_memory(awake: Worker, order: list[str]) -> None:
    awake.sleep(1)
    for tag in order:
        awake.wake_up([tag])
    assert awake.modelled.kept == STEP


def test_wake_up_without_room_for_the_widest_step_fails_and_works_later(awake: Worker) -> None:
    """A neighbour holds less than the nap gave back: the cache would fit, and the first batch would not."""
    awake.sleep(1)
    awake.modelled.outside += MARGIN + MIB
    for _ in range(2):
        with pytest.raises(
            PoolOutOfMemoryError,
            match=f"the widest step needs {STEP} bytes beside the KV cache; {STEP} of them are missing",
        ):
            awake.wake_up()
        assert awake._ekv.pool.physical_bytes == 0
        assert awake.modelled.kept == 0
    answer = awake.ekv_wake()
    assert f"needs {STEP} bytes" in answer["error"]
    awake.modelled.outside -= MARGIN + MIB
    awake.wake_up()
    assert awake.modelled.kept == STEP and awake._ekv.pool.committed_blocks == BLOCKS


def test_wake_up_that_vllm_cannot_finish_holds_nothing(awake: Worker) -> None:
    in_use = awake.modelled.in_use
    awake.sleep(1)
    awake.fails = True
    with pytest.raises(RuntimeError, match="no"):
        awake.wake_up()
    assert awake.modelled.in_use == in_use
    assert awake._ekv.pool.physical_bytes == 0
    assert awake._ekv_nap.held == []


def test_wake_up_after_discard_does_not_grow_into_the_widest_step(
    awake: Worker, monkeypatch: pytest.MonkeyPatch, host_budget: Callable[[int], None]
) -> None:
    monkeypatch.setattr(torch_routing, "empty_cache", awake.modelled.settle)
    held = awake._ekv.pool.physical_bytes
    awake.discard(("kv_cache",))
    host_budget(held - 1)  # a neighbour took a little of what was given back
    with pytest.raises(PoolOutOfMemoryError, match="recommit of 20 blocks"):
        awake.wake_up(["kv_cache"])
    assert awake.modelled.kept == STEP


def segments(monkeypatch: pytest.MonkeyPatch, *found: tuple[int, int, bool]) -> None:
    """Have PyTorch's allocator tell of segments: stream, bytes, and whether a tensor lives in it."""
    told = [
        {
            "device": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "stream": stream,
            "total_size": size,
            "active_size": size // 2 if active else 0,
            "is_expandable": False,
            "blocks": [],
        }
        for stream, size, active in found
    ]
    others = [{"device": 1}, {"segment_type": "small"}, {"segment_pool_id": (0, 7)}]
    told += [told[0] | {"total_size": 99, "active_size": 0} | other for other in others] if told else []
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: told, raising=False)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")


def test_only_what_is_missing_of_the_default_pool_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of other sizes may have come meanwhile, and a tensor of the engine's into one of the blocks."""
    taken: list[tuple[int, int]] = []
    monkeypatch.setattr(step_memory, "empty", lambda _, stream, size: taken.append((stream, size)))
    segments(monkeypatch, (0, 900, True), (0, 300, False), (0, 300, False), (5, 300, False), (0, 200, False))
    memory = StepMemory(CUDA)
    memory.take()
    assert sorted(taken) == [(0, 200), (0, 300), (0, 300), (5, 300)]
    taken.clear()
    segments(monkeypatch, (0, 800, True), (0, 300, True))
    memory.take()
    assert sorted(taken) == [(0, 200), (0, 300), (5, 300)]


def test_memory_of_which_a_part_is_there_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    left: list[int] = []

    class Tensor:
        pass

    def one_only(device: Any, stream: int, size: int) -> Tensor:
        if alive:
            raise torch.OutOfMemoryError("CUDA out of memory")
        tensor = Tensor()
        alive.add(tensor)
        return tensor

    monkeypatch.setattr(step_memory, "empty", one_only)
    monkeypatch.setattr(torch_routing, "empty_cache", lambda device: left.append(len(alive)))
    segments(monkeypatch, (0, 300, False), (0, 200, False))
    memory = StepMemory(CUDA)
    segments(monkeypatch)
    with pytest.raises(PoolOutOfMemoryError, match="needs 500 bytes.*500 of them.*CUDA out of memory"):
        memory.take()
    assert left == [0, 0]  # nothing was held any more when PyTorch's cache was emptied


class CachingAllocator:
    """PyTorch's, for one stream: the smallest block that fits is cut, and what is left of it stays cached.

    A segment goes back when nothing lives in it. `segments` are lists of blocks, each its size and its owner.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.segments: list[list[tuple[int, Any]]] = []
        monkeypatch.setattr(step_memory, "empty", lambda _, stream, size: self.empty(size))
        monkeypatch.setattr(torch_routing, "empty_cache", lambda _: self.empty_cache())
        monkeypatch.setattr(step_memory, "large_segments", lambda _: self.large_segments())

    def empty(self, size: int) -> Any:
        tensor = type("Tensor", (), {})()
        free = [(b[0], s, i) for s, bs in enumerate(self.blocks()) for i, b in enumerate(bs) if not b[1]]
        fits = [found for found in free if found[0] >= size]
        if not fits:
            self.segments.append([(size, weakref.ref(tensor))])
            return tensor
        found, segment, place = min(fits)
        rest = [(found - size, lambda: None)] if found > size else []
        self.segments[segment][place : place + 1] = [(size, weakref.ref(tensor)), *rest]
        return tensor

    def blocks(self) -> list[list[tuple[int, bool]]]:
        for segment in self.segments:  # free neighbours are one block
            for place in range(len(segment) - 1, 0, -1):
                if segment[place][1]() is None and segment[place - 1][1]() is None:
                    segment[place - 1 : place + 1] = [
                        (segment[place - 1][0] + segment[place][0], lambda: None)
                    ]
        return [[(size, owner() is not None) for size, owner in segment] for segment in self.segments]

    def empty_cache(self) -> None:
        self.segments = [
            s for s, bs in zip(self.segments, self.blocks(), strict=True) if any(b[1] for b in bs)
        ]

    def large_segments(self) -> tuple[Counter[tuple[int, int]], Counter[tuple[int, int]]]:
        kept: Counter[tuple[int, int]] = Counter()
        used: Counter[tuple[int, int]] = Counter()
        for blocks in self.blocks():
            (used if any(b[1] for b in blocks) else kept)[0, sum(b[0] for b in blocks)] += 1
        return kept, used

    @property
    def reserved(self) -> int:
        return sum(size for segment in self.segments for size, _ in segment)


@pytest.mark.parametrize("cached", [True, False], ids=["discarded", "emptied"])
def test_what_loading_weights_left_is_given_back_and_not_cut_up(
    monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    """`reload_weights` between waking the weights and waking the cache; on the H200 208 MiB stayed."""
    cache = CachingAllocator(monkeypatch)
    weights = cache.empty(1100)
    step = [cache.empty(size) for size in (300, 90)]
    del step
    memory = StepMemory(CUDA)
    if not cached:
        cache.empty_cache()
    left = cache.empty(400)
    del left
    memory.trim()
    assert cache.reserved == 1100 + 390 * cached  # the pool is backed now, and may need the rest
    left = cache.empty(400)
    del left
    held = memory.take()
    assert cache.reserved == 1100 + 390
    cache.empty_cache()  # vLLM's part of the wake-up
    del held
    step = [cache.empty(size) for size in (300, 90)]
    assert cache.reserved == 1100 + 390
    del weights, step


def test_wake_up_gives_back_what_loading_weights_left(awake: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    device, pool = awake.modelled, awake._ekv.pool
    monkeypatch.setattr(torch_routing, "empty_cache", device.settle)
    recommit, kept = pool.recommit, []

    def recommit_and_note(**options: bool) -> None:
        kept.append(device.kept)
        recommit(**options)

    monkeypatch.setattr(pool, "recommit", recommit_and_note)
    awake.sleep(2)
    awake.wake_up(["weights"])
    device.kept = 3 * STEP  # of tensors that are gone
    awake.wake_up(["kv_cache"])
    assert kept == [0]
    assert device.kept == STEP
    assert device.free_bytes(None) == MARGIN


def test_of_expandable_segments_the_free_blocks_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch has one such segment for all, weights included, and empties what is free in it."""
    taken: list[tuple[int, int]] = []
    monkeypatch.setattr(step_memory, "empty", lambda _, stream, size: taken.append((stream, size)))
    segments(monkeypatch, (0, 900 * MIB, True))
    (found,) = [s for s in torch.cuda.memory_snapshot() if s["device"] == 0 and s["active_size"]]
    found["is_expandable"] = True
    sizes = {"active_allocated": 500, "inactive": 300, "active_pending_free": 98}
    found["blocks"] = [{"state": state, "size": size * MIB} for state, size in sizes.items()]
    found["blocks"] += [{"state": "inactive", "size": 2 * MIB}]
    memory = StepMemory(CUDA)
    found["blocks"] = found["blocks"][:1]  # the cache was emptied
    memory.take()
    assert taken == [(0, 300 * MIB)]


def test_other_allocators_and_the_cpu_have_no_such_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    segments(monkeypatch, (0, 300, False))
    assert StepMemory(CUDA).kept and not StepMemory(torch.device("cpu")).kept
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "pluggable")
    assert not StepMemory(CUDA).kept
    assert StepMemory(CUDA).take() == []
