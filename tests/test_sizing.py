"""The sizing cases that people met, as arithmetic, and the rules behind them for any numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator.errors import PoolValueError
from allocator.layout import BlockLayout
from allocator.sizing import (
    SizingError,
    blocks_for_tokens,
    blocks_within,
    explicit_budget_bytes,
    final_blocks,
    kv_budget_bytes,
    logits_bytes,
    longest_request_tokens,
    requested_bytes,
    warmup_blocks,
)
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
    request = requested_bytes(total, 0.98)
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


@pytest.mark.parametrize("context_bytes", [0, 512 * MIB])
def test_final_size_case_4_eight_ranks_hold_no_more_than_requested(context_bytes: int) -> None:
    """0.95 of 31.38 GiB on each of eight ranks, the device context of the process included."""
    total = int(31.38 * GIB)
    request = requested_bytes(total, 0.95)
    held = [context_bytes + 4 * GIB + rank * 37 * MIB for rank in range(8)]
    block_bytes = 3 * MIB
    per_rank = [
        blocks_within(
            budget(total - h, initial=total, requested=request, step_reserve_bytes=200 * MIB),
            lambda n: n * block_bytes,
            10**6,
        )
        for h in held
    ]
    blocks = final_blocks(per_rank, 10)
    assert all(h + blocks * block_bytes + 200 * MIB <= 0.95 * total for h in held)
    assert blocks == per_rank[7]


def test_kv_budget_case_5_reading_after_the_samplers_warm_up_counts() -> None:
    """What the sampler keeps and what its step needs for a moment are both gone from the budget."""
    after_capture, after_sampler = 60 * GIB, 60 * GIB - 300 * MIB
    difference = budget(after_capture) - budget(after_sampler, step_reserve_bytes=700 * MIB)
    assert difference == 1000 * MIB


def test_logits_case_6_widest_step_of_speculative_decoding() -> None:
    """16 sequences, 16 draft tokens, a vocabulary of 248,320, fp32: 258 MiB beside the cache."""
    wide = logits_bytes(16, 16, 248_320)
    assert wide == 16 * 17 * 248_320 * 4
    assert budget(60 * GIB) - budget(60 * GIB, step_reserve_bytes=wide) == wide


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


def test_explicit_budget_case_10_ignores_utilization() -> None:
    """Utilization 0.9 with 0.85 free would not start; an explicit 1 GiB does."""
    total = 80 * GIB
    free = int(0.85 * total)
    assert requested_bytes(total, 0.9) > free
    assert explicit_budget_bytes(GIB, free - 10 * GIB, 4 * MIB, 2 * GIB) == GIB


def test_explicit_budget_case_11_names_bytes_when_a_step_does_not_fit() -> None:
    """Free less 100 MiB, and a step that needs 1 GiB: an error now, not an out-of-memory under load."""
    free = 20 * GIB
    with pytest.raises(SizingError) as caught:
        explicit_budget_bytes(free - 100 * MIB, free, 0, GIB)
    for number in (free - 100 * MIB, GIB, free - 100 * MIB + GIB, free):
        assert str(number) in str(caught.value)


@pytest.mark.parametrize("explicit", [0, -1])
def test_explicit_budget_without_bytes_raises(explicit: int) -> None:
    with pytest.raises(SizingError, match=f"of {explicit} bytes"):
        explicit_budget_bytes(explicit, GIB, 0, 0)


@given(amounts, amounts, amounts, amounts)
def test_explicit_budget_any_numbers_are_kept_or_refused(
    explicit: int, free: int, committed: int, step: int
) -> None:
    try:
        assert explicit_budget_bytes(explicit, free, committed, step) == explicit
    except SizingError:
        assert explicit == 0 or explicit + step > free + committed
    else:
        assert explicit + step <= free + committed


def test_final_blocks_case_12_override_of_one_names_what_a_request_needs() -> None:
    required = blocks_for_tokens(4096, 16)
    with pytest.raises(SizingError, match="override of 1 blocks .* needs 257 blocks"):
        final_blocks([1000], required, override_blocks=1)


def test_longest_request_case_13_counts_the_null_block() -> None:
    """`max_model_len=-1` is fitted to the final size: of 100 blocks, 99 hold tokens."""
    assert longest_request_tokens(100, 16, 40_960) == 99 * 16
    assert longest_request_tokens(10_000, 16, 40_960) == 40_960
    with pytest.raises(SizingError, match="1 blocks"):
        longest_request_tokens(1, 16, 40_960)


@given(st.integers(2, 10_000), st.integers(1, 256), st.integers(1, 10**6))
def test_longest_request_any_size_fits_and_one_more_token_does_not(
    blocks: int, size: int, model: int
) -> None:
    tokens = longest_request_tokens(blocks, size, model)
    assert blocks_for_tokens(tokens, size) <= blocks
    assert tokens == model or blocks_for_tokens(tokens + 1, size) > blocks


@pytest.mark.parametrize(("capacity", "blocks"), [(1, 1), (2, 2), (3, 2), (1000, 2)])
def test_warmup_blocks_case_14_bootstrap_is_two_or_the_capacity(capacity: int, blocks: int) -> None:
    assert warmup_blocks(capacity) == blocks


def test_warmup_blocks_case_15_cover_every_dummy_request_of_a_capture() -> None:
    """Capture size 512 with a model length of 64: 512 requests of 4 blocks, and the null block."""
    per_request = blocks_for_tokens(64, 16, null_blocks=0)
    assert warmup_blocks(100_000, 1 + 512 * per_request) == 2049
    assert warmup_blocks(500, 1 + 512 * per_request) == 500


def test_warmup_blocks_without_capacity_raises() -> None:
    with pytest.raises(SizingError, match="needs 2 blocks, the capacity is 0"):
        warmup_blocks(0)


def test_final_blocks_case_16_checks_the_final_size_not_the_prefix() -> None:
    """1,024 sequences need 1,024 state blocks: 2 for warm-up are fine, 512 in the end are not."""
    assert warmup_blocks(2000) < 1024
    assert final_blocks([2000], 1024) == 2000
    with pytest.raises(SizingError, match="512 blocks.* 1024 blocks"):
        final_blocks([512], 1024)


def test_final_blocks_case_18_all_ranks_use_the_smallest() -> None:
    assert final_blocks([2111, 2055], 100) == 2055
    assert final_blocks([2055, 2111], 100) == 2055
    with pytest.raises(SizingError, match="rank 1 has memory for 2055 blocks"):
        final_blocks([2111, 2055], 2100)


@given(st.lists(st.integers(0, 10**6), min_size=1), st.integers(0, 10**6), st.none() | st.integers(0, 10**6))
def test_final_blocks_any_ranks_fit_everywhere_or_raise(
    ranks: list[int], required: int, override: int | None
) -> None:
    try:
        blocks = final_blocks(ranks, required, override_blocks=override)
    except SizingError as error:
        wanted = min(ranks) if override is None else override
        assert wanted < required or wanted > min(ranks)
        assert str(wanted) in str(error)
        assert str(required if wanted <= min(ranks) else min(ranks)) in str(error)
    else:
        assert required <= blocks <= min(ranks)
        assert blocks == (min(ranks) if override is None else override)


def test_final_blocks_capacity_below_memory_caps() -> None:
    assert final_blocks([2111, 2055], 100, capacity_blocks=1500) == 1500


def test_final_blocks_no_rank_raises() -> None:
    with pytest.raises(SizingError, match="0 ranks"):
        final_blocks([], 10)


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


@pytest.mark.parametrize("utilization", [0.0, -0.1, 1.1])
def test_requested_bytes_outside_range_raises(utilization: float) -> None:
    with pytest.raises(SizingError, match=str(utilization)):
        requested_bytes(GIB, utilization)


@given(st.integers(1, 1 << 40), st.floats(0.01, 1))
def test_requested_bytes_never_more_than_the_share(total: int, utilization: float) -> None:
    assert 0 <= requested_bytes(total, utilization) <= total * utilization
