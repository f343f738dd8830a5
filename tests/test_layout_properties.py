"""Layouts against a model that knows every byte (design invariants 1, 2, 3 and 7)."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layouts import GRANULARITIES, Cache, caches, element_bytes, touched_granules

granularities = st.sampled_from(GRANULARITIES)
examples = settings(max_examples=200, deadline=None)


def committed_bytes(cache: Cache, num_blocks: int) -> np.ndarray:
    marked = np.zeros(cache.reservation_bytes, dtype=bool)
    for offset, size in cache.layout().spans(num_blocks):
        assert offset >= 0 and offset + size <= cache.reservation_bytes
        marked[offset : offset + size] = True
    return marked


@examples
@given(caches(), st.data())
def test_spans_any_layout_cover_every_byte_of_committed_blocks(cache: Cache, data: st.DataObject) -> None:
    """Invariant 2, one half: a block below `n` is readable in all its bytes."""
    num_blocks = data.draw(st.integers(0, cache.num_blocks))
    assert (committed_bytes(cache, num_blocks) >= cache.owned_bytes(num_blocks)).all()


@examples
@given(caches(min_blocks=2), st.data())
def test_spans_any_layout_hold_no_byte_of_later_blocks(cache: Cache, data: st.DataObject) -> None:
    """Invariant 2, other half, before rounding to granules: a prefix, and not one byte of block `n`."""
    num_blocks = data.draw(st.integers(0, cache.num_blocks))
    beyond = cache.owned_bytes(cache.num_blocks) & ~cache.owned_bytes(num_blocks)
    assert not (committed_bytes(cache, num_blocks) & beyond).any()


@examples
@given(caches(padding=False), granularities, st.data())
def test_extent_bytes_dense_layout_equals_granules_of_its_elements(
    cache: Cache, granularity: int, data: st.DataObject
) -> None:
    """Invariant 7 against the elements alone, where no padding leaves a choice."""
    num_blocks = data.draw(st.integers(0, cache.num_blocks))
    expected = touched_granules(cache.owned_bytes(num_blocks), granularity) * granularity
    assert cache.layout().extent_bytes(num_blocks, granularity) == expected


@examples
@given(caches(), granularities, st.data())
def test_extent_bytes_padded_layout_equals_granules_of_its_spans(
    cache: Cache, granularity: int, data: st.DataObject
) -> None:
    """Invariants 1 and 7: each granule counts once, also where segments meet inside it."""
    num_blocks = data.draw(st.integers(0, cache.num_blocks))
    layout = cache.layout()
    expected = touched_granules(committed_bytes(cache, num_blocks), granularity) * granularity
    assert layout.extent_bytes(num_blocks, granularity) == expected
    ranges = layout.granule_ranges(num_blocks, granularity)
    assert sum(size for _, size in ranges) == expected
    assert all(offset % granularity == 0 and size % granularity == 0 and size > 0 for offset, size in ranges)
    assert all(a + size < b for (a, size), (b, _) in zip(ranges, ranges[1:], strict=False))


@examples
@given(caches(), granularities)
def test_extent_bytes_more_blocks_never_less(cache: Cache, granularity: int) -> None:
    """Invariant 7: monotone from 0 on, so a budget is turned into blocks by search."""
    layout = cache.layout()
    extents = [layout.extent_bytes(n, granularity) for n in range(cache.num_blocks + 1)]
    assert extents[0] == 0 and extents == sorted(extents)


@examples
@given(caches(min_blocks=2))
def test_from_views_any_order_makes_one_segment_per_outer_index(cache: Cache) -> None:
    """The layout table: what lies outside the block dimension multiplies, what lies inside does not."""
    layout = cache.layout()
    assert (len(layout.segments), layout.capacity_blocks) == (cache.num_outer, cache.num_blocks)
    assert list(layout.segments) == sorted(layout.segments)


@examples
@given(caches(min_blocks=2))
def test_segments_any_layout_place_each_element_by_its_block(cache: Cache) -> None:
    """Block `b` of a segment lies at `offset + b * block_stride`, at the same place for every `b`."""
    layout = cache.layout()
    offsets = np.array([segment.offset for segment in layout.segments])
    strides = np.array([segment.block_stride for segment in layout.segments])
    for view in cache.views:
        for block, addresses in element_bytes(view, cache.base_address):
            owner = np.searchsorted(offsets, addresses, side="right") - 1
            assert (owner >= 0).all()
            assert ((addresses - offsets[owner]) // strides[owner] == block).all()


@examples
@given(caches(), st.data())
def test_spans_of_two_steps_meet_without_gap_or_overlap(cache: Cache, data: st.DataObject) -> None:
    """Invariants 3 and 5: what a later commit zeroes starts exactly where the earlier one ended."""
    first = data.draw(st.integers(0, cache.num_blocks))
    second = data.draw(st.integers(first, cache.num_blocks))
    layout = cache.layout()
    steps = zip(layout.spans(first), layout.spans(second, first), layout.spans(second), strict=True)
    for (offset, size), (next_offset, next_size), (_, whole) in steps:
        assert next_offset == offset + size and size + next_size == whole
