"""The cases of sizing on a GPU worker: real pool and plugin, and a device whose memory is a few numbers.

Only the prefix is really backed, by the host driver; what the pool holds is taken from the device.
"""

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from allocator import extensible_kv_pool, torch_routing
from allocator.sizing import SizingError
from vllm_integration import final_size, measure, own_context, worker_state
from vllm_integration.config import Options

pytestmark = pytest.mark.vllm

MIB, GIB = 1 << 20, 1 << 30
BLOCK = 8 * MIB
TOTAL, CONTEXT, WEIGHTS, STEP = 80 * GIB, 504 * MIB, 8 * GIB, 1000 * MIB
MARGIN = 144 * MIB
STOCK = 4 * GIB  # what a profile that guessed high would leave for the cache


class Device:
    """A GPU: what PyTorch holds in use, what it only keeps, and what others hold."""

    def __init__(self) -> None:
        self.total, self.in_use, self.kept, self.outside, self.pool = TOTAL, 0, 0, CONTEXT, None
        self.step_bytes, self.step_works = STEP, True
        self.before = 0  # of this process, when the worker begins
        self.of_others, self.drift, self.nvml_tells = 0, 0, False

    def free_bytes(self, device: Any) -> int:
        pool = self.pool.physical_bytes if self.pool else 0
        return self.total - self.in_use - self.kept - self.outside - pool

    def own_bytes(self, device: Any) -> int:
        return self.in_use + self.kept + self.drift

    def process_bytes(self, worker: Any) -> int | None:
        own = self.in_use + self.kept + self.outside - self.of_others + self.pool.physical_bytes
        own -= self.before
        return own if self.nvml_tells else None

    def settle(self, device: Any) -> None:
        self.kept = 0

    def capture(self, transient: int, stays: int) -> None:
        """Take more for a moment than stays; PyTorch keeps the rest."""
        self.in_use += stays
        self.kept += transient - stays

    def run_widest_step(self, worker: Any, num_blocks: int) -> bool:
        """Take from what PyTorch keeps, and from the driver what is missing; PyTorch keeps all of it."""
        self.kept = max(self.kept, self.step_bytes)
        return self.step_works


class Started:
    """A GPU worker's cache after its profile, before warm-up, of which 2 blocks are backed."""

    def __init__(self, device: Device, share: float, explicit: int | None, library: int) -> None:
        free = device.free_bytes(None)
        self.device, self.explicit = device, explicit
        self.worker = types.SimpleNamespace(
            device=types.SimpleNamespace(type="cuda", index=0),
            rank=0,
            vllm_config=types.SimpleNamespace(kv_transfer_config=None),
            cache_config=types.SimpleNamespace(kv_cache_memory_bytes=explicit, num_gpu_blocks_override=None),
            requested_memory=int(device.total * share),
            init_snapshot=types.SimpleNamespace(free_memory=free),
            _ekv_before=own_context.Before(by_pytorch={0: device.own_bytes(None)}),
            _ekv_context_bytes=CONTEXT,
        )
        self.cache = worker_state.WorkerCache(Options(margin_bytes=MARGIN), self.worker)
        device.in_use += WEIGHTS
        device.outside += library
        self.cache.stock_bytes = explicit or STOCK
        self.cache.note_profile(self.worker)
        upper = self.cache.propose(self.worker)["upper_bytes"]
        self.capacity = upper // BLOCK
        with extensible_kv_pool("cpu") as pool:
            self.flat = torch.zeros(self.capacity * BLOCK, dtype=torch.int8)
        pool.bind(self.flat.view(self.capacity, BLOCK))
        self.cache.adopt(pool, self.capacity, self.capacity * BLOCK)
        self.cache.commit_prefix(2)
        device.pool = pool

    def blocks(self) -> int:
        return self.cache.measure(self.worker)["blocks"]

    def settle(self) -> None:
        """As the engine does for a size that was asked for, as far as the check."""
        sizing = types.SimpleNamespace(
            rpc=lambda method, *args: [getattr(self, method)(*args)],
            proposals=[{"explicit": self.explicit is not None}],
            vllm_config=types.SimpleNamespace(cache_config=self.worker.cache_config),
        )
        final_size.settle(sizing, types.SimpleNamespace(num_blocks=self.capacity))

    def ekv_measure(self) -> dict[str, Any]:
        return self.cache.measure(self.worker)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Started]:
    device = Device()
    for name in ("free_bytes", "own_bytes", "settle"):
        monkeypatch.setattr(measure, name, getattr(device, name))
    monkeypatch.setattr(measure, "model_bytes", lambda worker: WEIGHTS)
    monkeypatch.setattr(own_context, "process_bytes", device.process_bytes)
    monkeypatch.setattr(worker_state, "run_widest_step", device.run_widest_step)
    reservable, cpu = worker_state.reservable_bytes, torch.device("cpu")
    monkeypatch.setattr(
        worker_state, "reservable_bytes", lambda device, wanted, least: reservable(cpu, wanted, least)
    )

    def started(
        share: float = 0.9,
        explicit: int | None = None,
        outside: int = CONTEXT,
        library: int = 0,
        held_before: int = 0,
        total: int = TOTAL,
    ) -> Started:
        device.total, device.outside, device.kept, device.pool = total, outside, 0, None
        device.in_use = device.before = held_before
        return Started(device, share, explicit, library)

    return started


def expected(share: float = 0.9, *, graphs: int = 0, step: int = STEP) -> int:
    return (int(TOTAL * share) - CONTEXT - WEIGHTS - graphs - step - MARGIN) // BLOCK


def test_where_the_widest_step_fails_the_profiles_peak_stands_for_it(start: Callable[..., Started]) -> None:
    started = start()
    started.device.step_works = False
    started.cache.peak_activation_bytes = 700 * MIB
    assert started.blocks() == expected(step=700 * MIB)
    assert started.device.kept == 0
    started.device.outside += started.device.free_bytes(None) - 4 * GIB
    fits = started.cache.rollback(started.worker)["blocks"]
    assert fits == (4 * GIB - MARGIN - 700 * MIB) // BLOCK + 2


@pytest.mark.parametrize(("device", "explicit"), [("cuda", False), ("cpu", True)])
def test_size_of_0_is_one_where_vllms_worker_takes_it_for_one(
    start: Callable[..., Started], device: str, explicit: bool
) -> None:
    started = start()
    started.worker.device.type = device
    started.worker.cache_config.kv_cache_memory_bytes = 0
    started.cache.note_profile(started.worker)
    assert started.cache.explicit is explicit


@pytest.mark.parametrize("share", [0.3, 0.9, 0.98])
def test_what_the_widest_step_takes_again_is_no_memory_for_the_cache(
    start: Callable[..., Started], share: float
) -> None:
    """PyTorch's cache is emptied before the step, not after it; what the profile guessed caps nothing."""
    assert start(share).blocks() == expected(share) > STOCK // BLOCK


@pytest.mark.parametrize("step", [0, 24 * MIB, 4 * GIB])
def test_logits_case_6_whatever_the_widest_step_takes_is_left_out(
    start: Callable[..., Started], step: int
) -> None:
    started = start()
    started.device.step_bytes = step
    assert started.blocks() == expected(step=step)


def test_case_1_graphs_that_take_more_than_is_left_make_the_cache_smaller(
    start: Callable[..., Started],
) -> None:
    """Of what 0.98 leaves to others, 120 MiB are free; graphs take 136 MiB, which nobody estimated."""
    started = start(0.98, outside=CONTEXT + TOTAL - int(TOTAL * 0.98) - 120 * MIB)
    started.device.capture(136 * MIB, 136 * MIB)
    assert 0 < started.blocks() == expected(0.98, graphs=136 * MIB)
    assert started.device.free_bytes(None) >= (started.blocks() - 2) * BLOCK + MARGIN


def test_case_2_captures_in_one_pool_cost_what_they_took_together(start: Callable[..., Started]) -> None:
    """The first of 50 takes 96 MiB, and each other one 1 MiB more, with as much again for a moment."""
    started = start()
    started.device.capture(192 * MIB, 96 * MIB)
    for _ in range(49):
        started.device.capture(2 * MIB, MIB)
    assert started.blocks() == expected(graphs=(96 + 49) * MIB)


def test_case_3_transient_of_capture_that_pytorch_keeps_does_not_count(start: Callable[..., Started]) -> None:
    started = start()
    started.device.step_bytes = 0
    started.device.capture(GIB, 24 * MIB)
    assert started.blocks() == expected(graphs=24 * MIB, step=0)


def test_case_4_eight_ranks_hold_no_more_than_was_requested(start: Callable[..., Started]) -> None:
    """0.95 of 31.38 GiB each, the context included; libraries take 37 MiB more on each next rank."""
    total = int(31.38 * GIB)
    libraries = [rank * 37 * MIB for rank in range(8)]
    found = [start(0.95, library=library, total=total).blocks() for library in libraries]
    assert found == sorted(found, reverse=True) and found[0] > found[7]
    held = [CONTEXT + WEIGHTS + library + STEP + min(found) * BLOCK for library in libraries]
    assert max(held) + MARGIN <= 0.95 * total < max(held) + MARGIN + BLOCK


def test_case_5_what_the_sampler_keeps_after_capture_counts(start: Callable[..., Started]) -> None:
    started = start()
    started.device.capture(136 * MIB, 136 * MIB)
    started.device.capture(700 * MIB, 304 * MIB)  # the sampler's own warm-up
    assert started.blocks() == expected(graphs=440 * MIB)


@pytest.mark.parametrize("freed", [7 * GIB, 20 * GIB])
@pytest.mark.parametrize("nvml_tells", [False, True])
def test_case_8_neighbour_that_frees_meanwhile_gives_nothing_away(
    start: Callable[..., Started], freed: int, nvml_tells: bool
) -> None:
    started = start(0.5, outside=CONTEXT + 20 * GIB, library=304 * MIB)
    started.device.of_others, started.device.nvml_tells = 20 * GIB - freed, nvml_tells
    started.device.capture(136 * MIB, 136 * MIB)
    started.device.outside -= freed
    assert started.blocks() == expected(0.5, graphs=(304 + 136) * MIB)


@pytest.mark.parametrize("nvml_tells", [False, True])
def test_case_8_neighbour_that_comes_and_goes_is_not_taken_for_a_library(
    start: Callable[..., Started], nvml_tells: bool
) -> None:
    """What was taken by the time of the profile may be anybody's: without NVML 2 GiB of it count."""
    started = start(library=30 * GIB)
    started.device.outside -= 30 * GIB
    started.device.nvml_tells = nvml_tells
    kept_free = 0 if nvml_tells else own_context.MOST_BYTES - CONTEXT
    assert started.blocks() == expected(graphs=kept_free)


def test_neighbour_that_takes_meanwhile_leaves_what_is_free_and_never_less_than_nothing(
    start: Callable[..., Started],
) -> None:
    started = start()
    started.device.outside += 30 * GIB
    assert started.blocks() == expected() - 30 * GIB // BLOCK
    started.device.outside += started.device.free_bytes(None) - 4 * MIB
    assert started.blocks() == 0


@pytest.mark.parametrize(("explicit", "kept_free"), [(None, MARGIN), (8 * GIB, 0)])
def test_commit_that_comes_up_short_leaves_the_margin(
    start: Callable[..., Started], explicit: int | None, kept_free: int
) -> None:
    """Between the reading and the commit a neighbour took all but 4 GiB, some of which is needed later."""
    started = start(explicit=explicit)
    started.blocks()
    started.device.outside += started.device.free_bytes(None) - 4 * GIB
    fits = started.cache.rollback(started.worker)["blocks"]
    assert fits == (4 * GIB - kept_free) // BLOCK + 2
    started.device.outside += 4 * GIB - 4 * MIB
    assert started.cache.rollback(started.worker)["blocks"] == (0 if kept_free else 2)


def test_case_9_memory_that_pytorch_does_not_count_is_seen(start: Callable[..., Started]) -> None:
    started = start()
    started.device.outside += GIB  # of a library, or mapped behind its back
    assert started.blocks() == expected(graphs=GIB)


def test_case_9_memory_that_pytorch_counts_and_has_not_is_left_to_the_driver(
    start: Callable[..., Started],
) -> None:
    """Where NVML does not tell, PyTorch's counters are the only account: the cache is smaller, not larger."""
    started = start()
    started.device.nvml_tells = True
    started.device.drift = GIB
    assert started.blocks() == expected()
    started.device.nvml_tells = False
    assert expected(graphs=GIB) == started.blocks() < expected()


@pytest.mark.parametrize("has_sinks", [False, True])
def test_final_size_below_the_prefix_holds_no_more_than_it_needs(
    start: Callable[..., Started], has_sinks: bool
) -> None:
    """Both blocks of the prefix are in one chunk, which goes back whole; what sinks need stays."""
    started = start()
    pool, cache = started.device.pool, started.cache
    cache.has_sinks = has_sinks
    started.flat[:BLOCK] = 7
    assert cache.commit(started.worker, 1)["error"] is None
    assert pool.committed_blocks == 1
    assert pool.physical_bytes == (2 * BLOCK if has_sinks else BLOCK)
    assert set(started.flat[:BLOCK].tolist()) == ({7} if has_sinks else {0})


@pytest.mark.parametrize("nvml_tells", [False, True])
def test_what_the_process_held_before_is_not_this_engines(
    start: Callable[..., Started], nvml_tells: bool
) -> None:
    """A second engine in one process, or one beside a model of the user's own."""
    started = start(0.5, held_before=30 * GIB)
    started.device.nvml_tells = nvml_tells
    assert started.blocks() == expected(0.5)


@pytest.mark.parametrize("registered", [False, True])
def test_commit_that_comes_up_short_leaves_the_widest_step_its_memory(
    start: Callable[..., Started],
    monkeypatch: pytest.MonkeyPatch,
    host_budget: Callable[[int], None],
    registered: bool,
) -> None:
    """What PyTorch keeps of the step is needed again with the first batch, and no room for the cache."""
    started = start()
    device, cache = started.device, started.cache
    cache.registered = registered
    monkeypatch.setattr(torch_routing, "empty_cache", device.settle)
    blocks = started.blocks()
    device.outside += 20 * GIB  # a neighbour, between the reading and the commit
    host_budget(BLOCK)
    answer = cache.commit(started.worker, blocks)
    fits = cache.rollback(started.worker)["blocks"]
    assert f"commit of {blocks} blocks" in answer["error"]
    assert device.kept == STEP
    left = TOTAL - CONTEXT - WEIGHTS - STEP - 20 * GIB - MARGIN
    assert fits == min(left // BLOCK, started.capacity) < blocks


def test_case_10_explicit_size_starts_with_less_free_than_the_share(start: Callable[..., Started]) -> None:
    """0.9 are asked for, and 0.85 are free."""
    started = start(0.9, explicit=GIB, outside=int(0.15 * TOTAL))
    assert started.capacity == GIB // BLOCK
    measured = started.ekv_measure()
    assert measured["blocks_free"] == started.capacity


def test_case_11_explicit_size_without_room_for_the_widest_step_names_the_bytes(
    start: Callable[..., Started],
) -> None:
    """All that is free less 100 MiB, and a step that needs 1,000 MiB."""
    explicit = (TOTAL - CONTEXT - WEIGHTS - 100 * MIB) // BLOCK * BLOCK
    started = start(explicit=explicit)
    with pytest.raises(SizingError) as caught:
        started.settle()
    left = TOTAL - CONTEXT - WEIGHTS - STEP
    text = str(caught.value)
    assert f"{explicit} bytes" in text
    assert f"{left} bytes left for it after warm-up and its widest step, which takes {STEP} bytes" in text
    assert f"at most {left // BLOCK} blocks fit" in text


class Stock:
    """As much of vLLM's GPU worker as the check of its share is in."""

    def __init__(self, explicit: int | None) -> None:
        self.cache_config = types.SimpleNamespace(kv_cache_memory_bytes=explicit, gpu_memory_utilization=0.9)
        self.device = types.SimpleNamespace(type="none")

    def init_device(self) -> None:
        import vllm.v1.worker.gpu_worker as module

        snapshot = types.SimpleNamespace(
            total_memory=100 * GIB, free_memory=85 * GIB, device_=torch.device("cpu")
        )
        self.requested_memory = module.request_memory(snapshot, self.cache_config)


def test_case_10_vllms_gpu_worker_starts_with_less_free_than_the_share() -> None:
    """vLLM's own check, which its GPU worker makes whatever the size; and only an explicit one is let in."""
    import vllm.v1.worker.gpu_worker as module

    from vllm_integration.worker import ExtensibleWorker

    class Worker(ExtensibleWorker, Stock):
        pass

    check = module.request_memory
    worker = Worker(GIB)
    worker.init_device()
    assert worker.requested_memory == 90 * GIB
    for refused in (Worker(None), Stock(GIB)):
        with pytest.raises(ValueError, match="less than desired GPU memory utilization"):
            refused.init_device()
    assert module.request_memory is check
