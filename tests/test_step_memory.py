"""The widest step's memory over a nap: real pool and `SleepingWorker`, and a device that is a few numbers.

vLLM's cumem empties PyTorch's cache when it sleeps and when it wakes up, also where no weights are in it, and
keeps it when it discards (0.33.0, device_allocator/cumem.py).
"""

import re
import types
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pools import MIB
from test_measured_size import MARGIN, STEP, Device, Started, start  # noqa: F401

from allocator import torch_routing
from allocator.errors import DriverError, PoolOutOfMemoryError
from vllm_integration import step_memory
from vllm_integration.step_memory import FreeBlock, StepMemory
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

    def data_ptr(self) -> int:
        return 0


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
    kept = lambda _: ([FreeBlock(0, 0, device.kept, True)] if device.kept else [], Counter())  # noqa: E731
    monkeypatch.setattr(step_memory, "large_blocks", kept)
    monkeypatch.setattr(step_memory, "process_events", lambda _: None)
    monkeypatch.setattr(torch_routing, "empty_cache", device.settle)
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
            match=f"the widest step needs {STEP} bytes beside the KV cache",
        ):
            awake.wake_up()
        assert awake._ekv.pool.physical_bytes == 0
        assert awake.modelled.kept == 0
    answer = awake.ekv_wake()
    assert f"needs {STEP} bytes" in answer["error"]
    awake.modelled.outside -= MARGIN + MIB
    awake.wake_up()
    assert awake.modelled.kept == STEP and awake._ekv.pool.committed_blocks == BLOCKS


@pytest.mark.parametrize("discarded", [False, True])
def test_wake_up_that_vllm_cannot_finish_holds_nothing(awake: Worker, discarded: bool) -> None:
    device = awake.modelled
    in_use, free = device.in_use, device.free_bytes(None)
    pool_bytes = awake._ekv.pool.physical_bytes
    awake.discard(("kv_cache",)) if discarded else awake.sleep(1)
    awake.fails = True
    with pytest.raises(RuntimeError, match="no"):
        awake.wake_up()
    assert (device.in_use, device.kept) == (in_use, 0)
    assert device.free_bytes(None) == free + pool_bytes + STEP
    assert awake._ekv.pool.physical_bytes == 0
    assert awake._ekv_nap.held == []


def test_wake_up_that_cannot_restore_the_content_holds_nothing(awake: Worker) -> None:
    def restore(pool: Any) -> None:
        raise DriverError("no")

    awake.discard(("kv_cache",))
    asleep = awake.modelled.free_bytes(None)
    awake._ekv_nap.backup = types.SimpleNamespace(restore=restore)
    with pytest.raises(DriverError, match="no"):
        awake.wake_up()
    assert awake._ekv.pool.physical_bytes == 0
    assert awake.modelled.free_bytes(None) == asleep + STEP


def test_wake_up_that_another_rank_cannot_follow_holds_nothing(awake: Worker) -> None:
    awake.sleep(1)
    asleep = awake.modelled.free_bytes(None)
    assert awake.ekv_wake()["error"] is None
    assert awake.ekv_sleep_again()["error"] is None
    assert awake.modelled.free_bytes(None) == asleep


def test_wake_up_after_discard_does_not_grow_into_the_widest_step(
    awake: Worker, host_budget: Callable[[int], None]
) -> None:
    held = awake._ekv.pool.physical_bytes
    awake.discard(("kv_cache",))
    host_budget(held - 1)  # a neighbour took a little of what was given back
    with pytest.raises(PoolOutOfMemoryError, match="recommit of 20 blocks"):
        awake.wake_up(["kv_cache"])
    assert awake.modelled.kept == STEP


def test_wake_up_gives_back_what_loading_weights_left(awake: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    device, pool = awake.modelled, awake._ekv.pool
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


class Block:
    """A part of a segment, free when its tensor is gone and no other stream may still be using it."""

    def __init__(self, size: int, tensor: Any = None, pending: bool = False) -> None:
        self.size, self.owner, self.pending = size, tensor and weakref.ref(tensor), pending

    @property
    def state(self) -> str:
        if self.owner and self.owner():
            return "active_allocated"
        return "active_pending_free" if self.pending else "inactive"


class Tensor:
    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class CachingAllocator:
    """PyTorch's: the smallest free block that fits is cut, the lowest address first; the rest stays cached.

    A segment goes back when nothing lives in it. `segments` are pairs of a stream and blocks, by address.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.segments: dict[int, tuple[int, list[Block]]] = {}
        self.next_address, self.room, self.round_up = 1 << 40, 1 << 60, lambda size: size
        self.expandable = False
        monkeypatch.setattr(step_memory, "empty", lambda _, stream, size: self.empty(size, stream))
        monkeypatch.setattr(step_memory, "process_events", lambda _: self.process_events())
        monkeypatch.setattr(torch_routing, "empty_cache", lambda _: self.empty_cache())
        monkeypatch.setattr(torch.cuda, "memory_snapshot", self.snapshot, raising=False)
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")

    def empty(self, size: int, stream: int = 0, pending: bool = False) -> Tensor:
        size = self.round_up(size)
        self._join()
        fits = []
        for begin, (owner, blocks) in self.segments.items():
            for place, block in enumerate(blocks):
                if owner == stream and block.state == "inactive" and block.size >= size:
                    address = begin + sum(b.size for b in blocks[:place])
                    fits.append((block.size, address, begin, place))
        if not fits:
            return self._from_device(size, stream, pending)
        found, address, begin, place = min(fits)
        tensor = Tensor(address)
        rest = [Block(found - size)] if found > size else []
        self.segments[begin][1][place : place + 1] = [Block(size, tensor, pending), *rest]
        return tensor

    def _from_device(self, size: int, stream: int, pending: bool) -> Tensor:
        if self.reserved + size > self.room:
            self.empty_cache()
        if self.reserved + size > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        tensor = Tensor(self.next_address)
        self.next_address += 1 << 30
        self.segments[tensor.address] = (stream, [Block(size, tensor, pending)])
        return tensor

    def _join(self) -> None:
        for _, blocks in self.segments.values():
            for place in range(len(blocks) - 1, 0, -1):
                if blocks[place].state == blocks[place - 1].state == "inactive":
                    blocks[place - 1 : place + 1] = [Block(blocks[place - 1].size + blocks[place].size)]

    def process_events(self) -> None:
        for _, blocks in self.segments.values():
            for block in blocks:
                block.pending = block.pending and block.state == "active_allocated"

    def empty_cache(self) -> None:
        self.process_events()
        self.segments = {
            begin: (stream, blocks)
            for begin, (stream, blocks) in self.segments.items()
            if any(block.state != "inactive" for block in blocks)
        }

    def snapshot(self) -> list[dict[str, Any]]:
        self._join()
        return [
            {
                "device": 0,
                "segment_type": "large",
                "segment_pool_id": (0, 0),
                "stream": stream,
                "address": begin,
                "total_size": sum(block.size for block in blocks),
                "allocated_size": sum(b.size for b in blocks if b.state == "active_allocated"),
                "is_expandable": self.expandable,
                "blocks": [{"state": block.state, "size": block.size} for block in blocks],
            }
            for begin, (stream, blocks) in self.segments.items()
        ]

    @property
    def reserved(self) -> int:
        return sum(block.size for _, blocks in self.segments.values() for block in blocks)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> CachingAllocator:
    monkeypatch.setattr(step_memory, "SMALL_BYTES", 2)
    return CachingAllocator(monkeypatch)


@pytest.mark.parametrize("cached", [True, False], ids=["discarded", "emptied"])
def test_what_loading_weights_left_is_given_back_and_not_cut_up(
    cache: CachingAllocator, cached: bool
) -> None:
    """`reload_weights` between waking the weights and waking the cache; on the H200 208 MiB stayed."""
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


def test_holes_beside_what_stays_are_left_to_the_step(cache: CachingAllocator) -> None:
    """A workspace that was made while large blocks were cached: the hole beside it was part of the step's."""
    large = cache.empty(1000)
    del large
    workspace = cache.empty(100)
    step = [cache.empty(size) for size in (850, 300)]
    del step
    memory = StepMemory(CUDA)
    assert memory.kept == {(0, 300): 1} and cache.reserved == 1300
    for _ in range(2):
        cache.empty_cache()
        memory.trim()
        held = memory.take()
        cache.empty_cache()
        del held
        assert cache.reserved == 1300
    step = [cache.empty(size) for size in (300, 850)]
    assert cache.reserved == 1300
    del workspace, step


def test_segment_is_held_and_not_a_hole_of_its_size(cache: CachingAllocator) -> None:
    stays, goes = cache.empty(600), cache.empty(300)
    del stays
    stays = [cache.empty(300), cache.empty(300)]
    del stays[1], goes  # the hole has the lower address
    memory = StepMemory(CUDA)
    assert memory.kept == {(0, 300): 1}
    held = memory.take()
    cache.empty_cache()
    assert cache.reserved == 900
    memory.trim()
    assert cache.reserved == 900
    del held


def test_what_another_stream_may_still_use_is_the_steps_too(cache: CachingAllocator) -> None:
    pending = cache.empty(900, pending=True)
    del pending
    side = cache.empty(64, stream=7)
    del side
    memory = StepMemory(CUDA)
    assert memory.kept == {(0, 900): 1, (7, 64): 1}
    held = memory.take()
    cache.empty_cache()
    assert cache.reserved == 964
    del held
    again = cache.empty(900, pending=True)
    del again
    memory.trim()
    assert cache.reserved == 964


def test_only_what_is_missing_is_taken(cache: CachingAllocator) -> None:
    """Weights of other sizes may have come meanwhile, and a tensor of the engine's into one of the blocks."""
    weights = cache.empty(900)
    step = [cache.empty(size) for size in (310, 300, 300)]
    del step
    memory = StepMemory(CUDA)
    taken = cache.empty(310)
    cache.empty_cache()
    weights = cache.empty(800)
    held = memory.take()
    assert sorted(size for _, size in cache_sizes(cache)) == [300, 300, 310, 800]
    del held, taken, weights


def cache_sizes(cache: CachingAllocator) -> list[tuple[int, int]]:
    return [(stream, sum(block.size for block in blocks)) for stream, blocks in cache.segments.values()]


def test_memory_of_which_a_part_is_there_is_not_taken(cache: CachingAllocator) -> None:
    step = [cache.empty(size) for size in (300, 200, 100)]
    del step
    memory = StepMemory(CUDA)
    cache.empty_cache()
    cached = cache.empty(300)
    del cached
    cache.room = 550
    with pytest.raises(PoolOutOfMemoryError) as caught:
        memory.take()
    assert re.search("needs 600 bytes .* 300 of them .* CUDA out of memory", str(caught.value))
    assert cache_sizes(cache) == [(0, 300)]  # as it was, and free: the error keeps nothing
    cache.empty_cache()
    assert cache.reserved == 0
    cache.room = 600
    held = memory.take()
    assert cache.reserved == 600
    del held


def test_requests_that_are_rounded_up_leave_nothing_of_others(cache: CachingAllocator) -> None:
    """As `roundup_power2_divisions:2` does."""
    step = cache.empty(20)
    del step
    memory = StepMemory(CUDA)
    cache.round_up = lambda size: 24 if size == 20 else size
    left = cache.empty(308)
    del left
    memory.trim()
    assert cache.reserved == 0
    cache.round_up = lambda size: size
    both = [cache.empty(308), cache.empty(20)]
    del both
    cache.round_up = lambda size: 24 if size == 20 else size
    cache.room = 328
    held = memory.take()
    assert cache.reserved == 24
    del held


def test_of_expandable_segments_the_free_blocks_are_taken(cache: CachingAllocator) -> None:
    """PyTorch has one such segment for all, weights included, and empties what is free in it."""
    cache.expandable = True
    whole = cache.empty(998)
    del whole
    blocks = [cache.empty(size) for size in (500, 300, 100)]
    pending = cache.empty(98, pending=True)
    del blocks[1], pending
    memory = StepMemory(CUDA)
    assert memory.kept == {(0, 300): 1, (0, 98): 1}
    memory = StepMemory(CUDA)
    begin = next(iter(cache.segments))
    cache.segments[begin][1][1].owner = weakref.ref(blocks[0])  # given back: nothing to be had there
    cache.segments[begin][1][3].owner = weakref.ref(blocks[0])
    held = memory.take()
    assert sorted(cache_sizes(cache)) == [(0, 98), (0, 300), (0, 998)]
    del held


def test_small_segments_private_pools_and_other_devices_are_left_out(
    cache: CachingAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = cache.empty(300)
    del step
    (found,) = cache.snapshot()
    others = [{"device": 1}, {"segment_type": "small"}, {"segment_pool_id": (0, 7)}]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [found | other for other in others])
    assert not StepMemory(CUDA).kept
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [found])
    assert StepMemory(CUDA).kept == {(0, 300): 1}


def test_other_allocators_and_the_cpu_have_no_such_memory(
    cache: CachingAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = cache.empty(300)
    del step
    assert StepMemory(CUDA).kept and not StepMemory(torch.device("cpu")).kept
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "pluggable")
    memory = StepMemory(CUDA)
    monkeypatch.setattr(step_memory, "process_events", None)
    assert not memory.kept and memory.take() == []
