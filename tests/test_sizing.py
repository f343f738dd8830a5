"""The sizing cases that people met, as arithmetic, and the rules behind them for any numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator.errors import PoolValueError
from allocator.layout import BlockLayout
from allocator.sizing import SizingError, blocks_within, kv_budget_bytes
from allocator.views import ViewSpec

MIB, GIB = 1 << 20, 1 << 30
amounts = st.integers(0, 1 << 40)


def budget(free_now: int, *, initial: int = 80 * GIB, requested: int = 72 * GIB, **other: int) -> int:
    values = {"committed_pool_bytes": 0, "step_reserve_bytes": 0, "margin_bytes": 0} | other
    return kv_budget_bytes(requested, initial, free_now, **values)


@given(amounts, amounts, amounts, amounts, amounts, amounts, amounts)
def test_kv_budget_any_numbers_keep_within_request_and_device(
    requested: int, initial: int, free_now: int, committed: int, step: int, margin: int, known: int
) -> None:
    """What is held in the end is within the request and within the device, or there is an error."""
    held = max(initial - free_now - committed, known, 0)
    try:
        result = kv_budget_bytes(
            requested, initial, free_now, committed, step, margin, known_held_bytes=known
        )
    except SizingError as error:
        assert held + step + margin > requested or step + margin > free_now + committed
        assert str(step + margin) in str(error)
        return
    assert result >= 0
    assert held + result + step + margin <= requested
    assert result + step + margin <= free_now + committed


def test_kv_budget_case_1_shrinks_by_what_the_graphs_took() -> None:
    """Utilization 0.98, 120 MiB left at the end of capture, graphs need 136 MiB: it starts, smaller."""
    total = 24 * GIB
    request = int(0.98 * total)
    weights = 8 * GIB
    before = budget(total - weights, initial=total, requested=request, step_reserve_bytes=300 * MIB)
    after = budget(
        total - weights - 136 * MIB, initial=total, requested=request, step_reserve_bytes=300 * MIB
    )
    assert before - after == 136 * MIB
    assert after > 0


@given(st.integers(1, 50), st.lists(st.integers(0, 4 * MIB), min_size=49, max_size=49))
def test_kv_budget_case_2_charges_measured_difference_of_shared_graph_pool(
    first: int, more: list[int]
) -> None:
    """50 captures in one pool: the first takes `first` MiB, the others what they really add."""
    free = 60 * GIB - first * MIB - sum(more)
    assert budget(60 * GIB) - budget(free) == first * MIB + sum(more)


def test_kv_budget_case_3_counts_only_what_stays_after_a_transient() -> None:
    """1 GiB came and went during capture, 24 MiB stay, and only they show in the last reading."""
    assert budget(60 * GIB) - budget(60 * GIB - 24 * MIB) == 24 * MIB


def test_kv_budget_case_5_reading_after_the_samplers_warm_up_counts() -> None:
    """What the sampler keeps and what its step needs for a moment are both gone from the budget."""
    after_capture, after_sampler = 60 * GIB, 60 * GIB - 300 * MIB
    difference = budget(after_capture) - budget(after_sampler, step_reserve_bytes=700 * MIB)
    assert difference == 1000 * MIB


@pytest.mark.parametrize("hidden", [1024, 4096, 8192])
def test_kv_budget_case_7_keeps_the_encoder_cache_out(hidden: int) -> None:
    encoder_cache = 16_384 * hidden * 2
    assert budget(60 * GIB) - budget(60 * GIB, step_reserve_bytes=encoder_cache) == encoder_cache


def test_kv_budget_case_8_neighbour_that_frees_gives_no_memory_away() -> None:
    """7 GiB appear between the readings: no abort, and everything stays within what was requested."""
    weights = 5 * GIB
    result = budget(
        40 * GIB - weights + 7 * GIB,
        initial=40 * GIB,
        requested=36 * GIB,
        step_reserve_bytes=GIB,
        known_held_bytes=weights,
    )
    assert result == 36 * GIB - weights - GIB


def test_kv_budget_case_8_without_known_weights_stays_within_request() -> None:
    assert budget(47 * GIB, initial=40 * GIB, requested=36 * GIB) == 36 * GIB


def test_kv_budget_counts_the_warm_up_prefix_as_cache_not_as_use() -> None:
    """100 were free, 60 are, 30 of the missing 40 are the pool's: 10 are in use, 90 are for the cache."""
    assert kv_budget_bytes(100, 100, 60, 30, 0, 0) == 90
    assert kv_budget_bytes(80, 100, 60, 30, 0, 0) == 70
    assert kv_budget_bytes(80, 100, 60, 30, 5, 7) == 58


def test_kv_budget_case_9_follows_the_driver_not_a_counter() -> None:
    """1 GiB was unmapped behind PyTorch's back: the driver sees it, so the cache gets it."""
    assert budget(61 * GIB) - budget(60 * GIB) == GIB


@given(st.integers(0, 3000), st.integers(0, 10**5), st.integers(1, 64), st.sampled_from([64, 512, 4096]))
def test_blocks_within_real_layout_is_largest_that_fits(
    capacity: int, budget_bytes: int, block_bytes: int, granularity: int
) -> None:
    """Invariant 7: searched over the exact bytes of a K/V-split layout, granules included."""
    capacity += 1
    view = ViewSpec((2, capacity, block_bytes), (capacity * block_bytes, block_bytes, 1), 1, 0, 1)
    layout = BlockLayout.from_views(0, 2 * capacity * block_bytes, [view])
    blocks = blocks_within(budget_bytes, lambda n: layout.extent_bytes(n, granularity), capacity)
    assert layout.extent_bytes(blocks, granularity) <= budget_bytes
    assert blocks == capacity or layout.extent_bytes(blocks + 1, granularity) > budget_bytes


def test_blocks_within_million_blocks_asks_twenty_times() -> None:
    calls: list[int] = []
    assert blocks_within(123_456, lambda n: calls.append(n) or n, 10**6) == 123_456
    assert len(calls) <= 20


def test_blocks_within_negative_budget_raises_naming_both() -> None:
    with pytest.raises(PoolValueError, match="-5 bytes, for 10 blocks"):
        blocks_within(-5, lambda n: n, 10)


def test_kv_budget_nothing_left_raises_naming_both_numbers() -> None:
    """Never negative blocks: 72 GiB requested, 79 GiB already held."""
    with pytest.raises(SizingError) as caught:
        budget(1 * GIB)
    assert str(72 * GIB) in str(caught.value) and str(79 * GIB) in str(caught.value)
