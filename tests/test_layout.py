"""Every layout of the design's table, read from real torch views, and what is refused."""

from __future__ import annotations

import time

import pytest
import torch

from allocator.errors import PoolValueError
from allocator.layout import BlockLayout, Segment
from allocator.views import ViewSpec

MIB = 1 << 20


def layout_of(buffer: torch.Tensor, *views: torch.Tensor, block_dim: int = 0, ratio: int = 1) -> BlockLayout:
    specs = [ViewSpec.from_tensor(view, block_dim, ratio) for view in views]
    return BlockLayout.from_views(buffer.data_ptr(), buffer.nbytes, specs)


def layer_views(order: str, **sizes: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One buffer in physical `order`, and for each layer its logical [B, H, N, C] view."""
    buffer = torch.empty([sizes[name] for name in order], dtype=torch.float16)
    logical = buffer.permute([order.index(name) for name in "LBHNC"])
    return buffer, list(logical)


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("order", "num_segments", "block_bytes"),
    [
        ("LBHNC", 4, 3 * 16 * 8 * 2),
        ("LBNHC", 4, 3 * 16 * 8 * 2),
        ("LHBNC", 4 * 3, 16 * 8 * 2),
        ("BLHNC", 1, 4 * 3 * 16 * 8 * 2),
        ("BLNHC", 1, 4 * 3 * 16 * 8 * 2),
        ("BHLNC", 1, 4 * 3 * 16 * 8 * 2),
    ],
)
def test_from_views_standard_layout_makes_its_segments(
    order: str, num_segments: int, block_bytes: int, num_blocks: int
) -> None:
    """Invariant 2: the committed part is a prefix of each of these."""
    buffer, views = layer_views(order, L=4, B=num_blocks, H=3, N=16, C=8)
    layout = layout_of(buffer, *views)
    stride = num_blocks * block_bytes
    assert layout.segments == tuple(Segment(i * stride, block_bytes) for i in range(num_segments))
    assert layout.capacity_blocks == num_blocks
    assert layout.extent_bytes(num_blocks, 1) == buffer.nbytes


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_from_views_case_14_tells_split_from_blocks_by_strides(num_blocks: int) -> None:
    """Case 14: sizes that could be K/V or blocks do not matter, the block dimension and strides do."""
    split = torch.empty(2, num_blocks, 16, 4, 8)
    assert len(layout_of(split, split, block_dim=1).segments) == 2
    major = torch.empty(num_blocks, 2, 16, 4, 8)
    assert layout_of(major, major).segments == (Segment(0, 2 * 16 * 4 * 8 * 4),)
    interleaved = major.transpose(0, 1)  # logically (2, B, ...), physically block-major
    assert layout_of(major, interleaved, block_dim=1).segments == (Segment(0, 2 * 16 * 4 * 8 * 4),)
    for layout in (layout_of(split, split, block_dim=1), layout_of(major, major)):
        assert layout.capacity_blocks == num_blocks


def test_from_views_split_narrowed_to_one_block_keeps_two_segments() -> None:
    """Case 14 with a prefix of a larger cache: the stride of the single block still means something."""
    split = torch.empty(2, 10, 16, 8)
    layout = layout_of(split, split[:, :1], block_dim=1)
    assert layout.segments == (Segment(0, 512), Segment(5120, 512))
    assert layout.extent_bytes(1, 512) == 1024


@pytest.mark.parametrize("stride", [0, 1, 3, 64, 10**12])
def test_from_views_single_block_of_odd_stride_is_the_whole_view(stride: int) -> None:
    """A dimension of size 1 may have any stride; the bytes of block 0 are known all the same."""
    buffer = torch.empty(512)
    view = buffer.as_strided((1, 4, 16, 8), (stride, 128, 8, 1))
    layout = layout_of(buffer, view)
    assert layout.capacity_blocks == len(layout.segments) == 1
    assert layout.spans(1)[0][0] == 0 and sum(size for _, size in layout.spans(1)) == buffer.nbytes
    assert tuple(segment.block_stride for segment in layout.segments) == layout.sizes_bytes


def test_from_views_mla_makes_one_segment() -> None:
    latent = torch.empty(9, 64, 576, dtype=torch.bfloat16)
    assert layout_of(latent, latent).segments == (Segment(0, 64 * 576 * 2),)


def test_from_views_mamba_pages_make_one_segment() -> None:
    """State pages are logical int8 [B, 1, 1, C], padded to the page of the attention layers."""
    pages = torch.empty(6, 4096, dtype=torch.int8)
    view = pages[:, None, None, :4000]
    assert layout_of(pages, view).segments == (Segment(0, 4096),)
    assert layout_of(pages, view).extent_bytes(6, 4096) == 6 * 4096


def test_from_views_hybrid_groups_over_same_bytes_share_one_segment() -> None:
    """Invariant 1: overlaid groups of other dtype, shape and kernel block size are the same blocks."""
    pages = torch.empty(5, 4096, dtype=torch.int8)
    attention = pages.view(torch.float16).view(5 * 4, 2, 16, 16)  # four kernel blocks in a manager block
    mamba = pages[:, None, None, :3000]
    specs = [ViewSpec.from_tensor(attention, 0, 4), ViewSpec.from_tensor(mamba, 0, 1)]
    layout = BlockLayout.from_views(pages.data_ptr(), pages.nbytes, specs)
    assert (layout.segments, layout.capacity_blocks) == ((Segment(0, 4096),), 5)


def test_from_views_kernel_blocks_of_split_cache_count_manager_blocks() -> None:
    cache = torch.empty(2, 12, 16, 8, dtype=torch.int8)
    layout = layout_of(cache, cache, block_dim=1, ratio=3)
    assert (layout.segments, layout.capacity_blocks) == ((Segment(0, 384), Segment(1536, 384)), 4)


def test_from_views_padding_between_blocks_belongs_to_the_block() -> None:
    buffer = torch.empty(4, 100, dtype=torch.int8)
    layout = layout_of(buffer, buffer[:, :60])
    assert layout.segments == (Segment(0, 100),)
    assert layout.spans(2) == [(0, 200)]


def test_from_views_upper_layers_of_packed_rows_stay_inside_the_reservation() -> None:
    """The stride of the last row reaches past the buffer when the first layer of the row is not bound."""
    buffer = torch.empty(4, 3, 64, dtype=torch.int8)
    layout = layout_of(buffer, buffer[:, 1], buffer[:, 2])
    assert layout.segments == (Segment(64, 192),)
    assert layout.spans(4) == [(64, buffer.nbytes - 64)]
    assert layout.extent_bytes(4, 64) == buffer.nbytes - 64


def test_from_views_padding_behind_the_last_block_may_belong_to_another_view() -> None:
    """3 blocks of 60 bytes every 100 end at 260; another view begins there, within the stride."""
    layout = BlockLayout.from_views(0, 1024, [spec((3, 60), (100, 1)), spec((3, 50), (50, 1), 260)])
    assert layout.segments == (Segment(0, 100), Segment(260, 50))
    assert layout.sizes_bytes == (260, 150)
    assert layout.spans(3) == [(0, 260), (260, 150)]


def test_from_views_overlapping_views_of_a_single_block_are_one_block_of_the_longer_stride() -> None:
    layout = BlockLayout.from_views(0, 1024, [spec((1, 50), (100, 1)), spec((1, 40), (40, 1), 20)])
    assert (layout.segments, layout.sizes_bytes) == ((Segment(0, 100),), (100,))


def test_from_views_twice_the_same_view_changes_nothing() -> None:
    buffer = torch.empty(2, 8, 32)
    once, twice = (layout_of(buffer, *[buffer] * count, block_dim=1) for count in (1, 2))
    assert once == twice


def test_from_views_separate_buffers_of_other_strides_stay_separate() -> None:
    buffer = torch.empty(4 * 100 + 4 * 30, dtype=torch.int8)
    layout = layout_of(buffer, buffer[:400].view(4, 100), buffer[400:].view(4, 30))
    assert layout.segments == (Segment(0, 100), Segment(400, 30))


def test_from_views_storage_larger_than_view_is_ignored() -> None:
    """The storage spans the reservation; only the view says how many blocks there are."""
    buffer = torch.empty(1000, 64, dtype=torch.int8)
    layout = layout_of(buffer, buffer[:3])
    assert (layout.capacity_blocks, layout.spans(3)) == (3, [(0, 192)])


def test_extent_bytes_neighbours_in_one_granule_count_it_once() -> None:
    """Invariant 1: 28 layers of 300 KiB start in 4 granules of 2 MiB and fill 5 of them."""
    buffer, views = layer_views("LBHNC", L=28, B=100, H=2, N=16, C=48)
    layout = layout_of(buffer, *views)
    assert layout.extent_bytes(1, 2 * MIB) == 4 * 2 * MIB
    assert layout.extent_bytes(100, 2 * MIB) == 5 * 2 * MIB


def test_layout_of_million_blocks_and_51200_outer_indices_takes_no_time() -> None:
    """640 segments in each of 80 layers: never one step per block."""
    num_blocks, heads = 1_000_000, 640
    size = heads * num_blocks * 32
    views = [
        ViewSpec((num_blocks, heads, 16, 2), (32, num_blocks * 32, 2, 1), 1, layer * size)
        for layer in range(80)
    ]
    start = time.perf_counter()
    layout = BlockLayout.from_views(0, 80 * size, views)
    assert layout.extent_bytes(num_blocks, 2 * MIB) == 80 * size
    assert len(layout.segments) == 80 * heads
    assert time.perf_counter() - start < 5


def spec(
    shape: tuple[int, ...], strides: tuple[int, ...], address: int = 0, dim: int = 0, ratio: int = 1
) -> ViewSpec:
    return ViewSpec(shape, strides, 1, address, dim, ratio)


@pytest.mark.parametrize(
    ("views", "numbers"),
    [
        pytest.param(
            [spec((4, 8), (8, 1), dim=2)], ["dimension 2", "2 dimensions"], id="block_dim_too_large"
        ),
        pytest.param(
            [spec((4, 8), (8, 1), dim=-3)], ["dimension -3", "2 dimensions"], id="block_dim_too_small"
        ),
        pytest.param([spec((), ())], ["dimension 0", "0 dimensions"], id="scalar"),
        pytest.param([spec((4, 8), (8,))], ["2 sizes", "1 strides"], id="rank"),
        pytest.param([spec((4, 8), (0, 1))], ["block stride is 0"], id="zero_stride"),
        pytest.param([spec((4, 8), (-8, 1), 24)], ["block stride is -8"], id="negative_stride"),
        pytest.param([spec((4, 0), (8, 1))], ["(4, 0)"], id="empty"),
        pytest.param([spec((4, 8), (7, 1))], ["8 bytes", "stride of 7"], id="block_larger_than_stride"),
        pytest.param([spec((2, 4, 8), (24, 8, 1), dim=1)], ["24", "32"], id="outer_overlaps"),
        pytest.param([spec((2, 4, 8), (8, 8, 1), dim=1)], ["8 is less", "32"], id="outer_equals_block"),
        pytest.param([spec((2, 2, 4, 8), (32, 32, 8, 1), dim=2)], ["32", "64"], id="outer_twice"),
        pytest.param([spec((4, 8), (8, 1), -8)], ["-8..24", "1024 bytes"], id="before_reservation"),
        pytest.param([spec((4, 8), (8, 1), 1000)], ["1000..1032", "1024 bytes"], id="behind_reservation"),
        pytest.param([spec((4, 8), (8, 1), 993)], ["993..1025", "1024 bytes"], id="one_byte_behind"),
        pytest.param(
            [spec((7, 8), (8, 1), ratio=2)], ["7 kernel blocks", "of 2"], id="ratio_does_not_divide"
        ),
        pytest.param([spec((7, 8), (8, 1), ratio=0)], ["7 kernel blocks", "of 0"], id="ratio_zero"),
        pytest.param([], ["at least one view", "0"], id="no_view"),
        pytest.param(
            [spec((4, 8), (8, 1)), spec((5, 8), (8, 1), 100)],
            ["room for 5", "view 0 for 4"],
            id="block_counts_differ",
        ),
        pytest.param(
            [spec((4, 8), (8, 1)), spec((4, 8), (8, 1), 4)],
            ["offset 0", "offset 4", "4 blocks"],
            id="shifted",
        ),
        pytest.param(
            [spec((4, 8), (8, 1)), spec((4, 8), (16, 1))], ["every 8", "every 16"], id="strides_differ"
        ),
        pytest.param(
            [spec((4, 8), (8, 1), ratio=2), spec((2, 8), (30, 1), 24)],
            ["16 bytes every 16 from offset 0", "8 bytes every 30 from offset 24"],
            id="inside_last_kernel_block",
        ),
        pytest.param(
            [spec((2, 100), (100, 1)), spec((2, 10), (100, 1), 10), spec((2, 10), (200, 1), 130)],
            ["100 bytes every 100 from offset 0", "10 bytes every 200 from offset 130"],
            id="inside_a_block_that_holds_a_smaller_view",
        ),
    ],
)
def test_from_views_impossible_views_raise_naming_the_numbers(
    views: list[ViewSpec], numbers: list[str]
) -> None:
    """Invariant 8: an expected failure is an error that says what was wrong."""
    with pytest.raises(PoolValueError) as caught:
        BlockLayout.from_views(0, 1024, views)
    assert isinstance(caught.value, ValueError)
    for number in numbers:
        assert number in str(caught.value)


@pytest.mark.parametrize("num_blocks", [-1, 5])
def test_extent_bytes_outside_capacity_raises_naming_both(num_blocks: int) -> None:
    layout = BlockLayout.from_views(0, 64, [spec((4, 8), (8, 1))])
    for call in (lambda: layout.extent_bytes(num_blocks, 8), lambda: layout.spans(num_blocks)):
        with pytest.raises(PoolValueError, match=f"^{num_blocks} blocks .* 4$"):
            call()


def test_spans_first_block_past_last_raises() -> None:
    layout = BlockLayout.from_views(0, 64, [spec((4, 8), (8, 1))])
    with pytest.raises(PoolValueError, match="3, outside 0..2"):
        layout.spans(2, first_block=3)


def test_extent_bytes_granularity_zero_raises() -> None:
    layout = BlockLayout.from_views(0, 64, [spec((4, 8), (8, 1))])
    with pytest.raises(PoolValueError, match="0 bytes"):
        layout.extent_bytes(2, 0)


def test_from_views_negative_outer_stride_walks_the_same_bytes() -> None:
    """NumPy and DLPack may hand these out; torch does not."""
    forward = spec((2, 4, 8), (32, 8, 1), 0, 1)
    backward = spec((2, 4, 8), (-32, 8, 1), 32, 1)
    assert BlockLayout.from_views(0, 64, [forward]) == BlockLayout.from_views(0, 64, [backward])


def test_from_views_expanded_dimension_adds_nothing() -> None:
    """Stride 0 repeats the same bytes, which is no segment of its own."""
    buffer = torch.empty(4, 8, dtype=torch.int8)
    layout = layout_of(buffer, buffer[None].expand(3, 4, 8), block_dim=1)
    assert layout.segments == (Segment(0, 8),)


def test_from_views_wrong_block_dim_says_how_many_segments_it_makes() -> None:
    """Otherwise every block of the cache becomes a segment, and binding takes minutes."""
    with pytest.raises(PoolValueError, match="dimension 1 makes 200000 segments, more than 131072"):
        BlockLayout.from_views(0, 10**6, [spec((200_000, 2), (2, 1), dim=1)])
