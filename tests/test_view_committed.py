"""Views for code that goes by storages: every byte that they reach is committed."""

import pytest
import torch
from pools import MIB, ON_EVERY_DEVICE, assert_filled, fill, make_pool
from rig import readable_bytes

from allocator import PoolValueError, extensible_kv_pool


def assert_bounded(pool, narrowed):
    """The storage lies inside the committed regions, the view inside the storage."""
    storage = narrowed.untyped_storage()
    begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    assert any(a <= begin and end <= a + size for a, size in pool.committed_regions())
    assert begin <= narrowed.data_ptr()
    last = sum((n - 1) * s for n, s in zip(narrowed.shape, narrowed.stride(), strict=True))
    assert narrowed.data_ptr() + (last + 1) * narrowed.itemsize <= end
    if pool.device.type == "cpu":
        assert readable_bytes(begin, storage.nbytes()) == storage.nbytes()


@ON_EVERY_DEVICE
@pytest.mark.parametrize("num_blocks", [1, 2, 33, 64])
def test_layers_one_segment_each(device, num_blocks):
    pool, view = make_pool(device)
    pool.commit(num_blocks)
    fill(view, 0, num_blocks)
    for layer in view:
        narrowed = pool.view_committed(layer)
        assert narrowed.shape == (num_blocks, layer.shape[1])
        assert narrowed.data_ptr() == layer.data_ptr()
        assert narrowed.untyped_storage().nbytes() == num_blocks * 96 * 1024
        assert torch.equal(narrowed, layer[:num_blocks])
        assert_bounded(pool, narrowed)
        narrowed[num_blocks - 1].zero_()
        assert not layer[num_blocks - 1].any()


@ON_EVERY_DEVICE
def test_packed_layers_share_one_storage_of_whole_rows(device):
    with extensible_kv_pool(device) as pool:
        raw = torch.zeros(6 * MIB, dtype=torch.int8, device=device)
    rows = raw[: 30 * 192_000].view(30, 192_000)
    layers = [rows[:, i * 64_000 : (i + 1) * 64_000].view(torch.int16) for i in range(3)]
    for layer in layers:
        pool.bind(layer)
    pool.commit(17)
    narrowed = [pool.view_committed(layer) for layer in layers]
    assert {n.untyped_storage().data_ptr() for n in narrowed} == {raw.data_ptr()}
    assert {n.untyped_storage().nbytes() for n in narrowed} == {17 * 192_000}
    for number, (layer, n) in enumerate(zip(layers, narrowed, strict=True)):
        n.fill_(number + 1)
        assert_bounded(pool, n)
        assert int(layer[16].sum(dtype=torch.int64)) == 32_000 * (number + 1)


@ON_EVERY_DEVICE
def test_kernel_blocks_and_other_block_dimensions(device):
    with extensible_kv_pool(device) as pool:
        raw = torch.zeros(6 * MIB, dtype=torch.int8, device=device)
    blocks = raw.view(24, 4, -1)
    pool.bind(blocks)
    pool.commit(5)
    small = pool.view_committed(raw.view(96, -1))  # four kernel blocks a block
    assert small.shape[0] == 20
    swapped = pool.view_committed(blocks.transpose(0, 1), 1)
    assert swapped.shape[:2] == (4, 5)
    assert swapped.stride() == blocks.transpose(0, 1).stride()
    for narrowed in (small, swapped):
        assert_bounded(pool, narrowed)


@ON_EVERY_DEVICE
def test_short_last_block_ends_where_the_reservation_does(device):
    with extensible_kv_pool(device) as pool:
        raw = torch.zeros(6 * MIB, dtype=torch.uint8, device=device)
    view = raw.as_strided((30, 4096), (213_000, 1), raw.numel() - 29 * 213_000 - 5000)
    pool.bind(view)
    for num_blocks in (29, 30):
        pool.commit(num_blocks)
        assert_bounded(pool, pool.view_committed(view))


@ON_EVERY_DEVICE
def test_what_cannot_be_bounded_is_refused(device):
    pool, view = make_pool(device)
    with pytest.raises(PoolValueError, match="with 0 blocks"):
        pool.view_committed(view[0])
    pool.commit(9)
    with pytest.raises(PoolValueError, match="not in one segment's 9 committed blocks"):
        pool.view_committed(view, 1)  # all layers at once: there is unbacked memory between them
    with pytest.raises(PoolValueError, match="63 pieces do not divide into 64 blocks"):
        pool.view_committed(view[0, :63])
    with pytest.raises(PoolValueError, match="block dimension 2"):
        pool.view_committed(view[0], 2)
    with pytest.raises(PoolValueError, match="not in one segment"):
        pool.view_committed(torch.zeros(64, 5, device=device))
    pool.release_physical()
    with pytest.raises(PoolValueError, match="with 0 blocks"):
        pool.view_committed(view[0])
    pool.recommit()
    fill(view, 0, 9)
    assert_filled(view, 0, 9)
    assert_bounded(pool, pool.view_committed(view[3]))
