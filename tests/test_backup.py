"""The content of blocks over a release and recommit: saved, restored, refused, and short of memory."""

import random
from collections import Counter

import pytest
import torch
from pools import MIB, ON_EVERY_DEVICE, assert_filled, fill, make_pool

from allocator import PoolOutOfMemoryError, PoolValueError, backup, extensible_kv_pool
from allocator.committed_rows import committed_rows
from allocator.shim import lib
from allocator.torch_routing import RoutingMode


def nap(pool, blocks, **options):
    """Save, give the memory back, take it again, restore."""
    saved = backup.save(pool, blocks, **options)
    saved.wait()
    pool.release_physical()
    assert pool.physical_bytes == 0
    pool.recommit()
    saved.restore(pool)
    saved.wait()
    return saved


@ON_EVERY_DEVICE
@pytest.mark.parametrize("piece_bytes", [1, 200_000, 32 << 20])
def test_nap_keeps_saved_blocks_and_zeroes_the_others(device, piece_bytes):
    pool, view = make_pool(device)
    pool.commit(50)
    fill(view, 0, 50)
    kept = random.Random(piece_bytes).sample(range(50), 31)
    saved = nap(pool, kept, piece_bytes=piece_bytes)
    assert saved.blocks == tuple(sorted(kept))
    assert saved.num_bytes == 31 * 4 * 96 * 1024
    for block in range(50):
        if block in kept:
            assert_filled(view, block, block + 1)
        else:
            assert not view[:, block].any()


@ON_EVERY_DEVICE
@pytest.mark.parametrize("layout", ["kv-split", "packed", "short-last-block", "odd-bytes"])
def test_nap_keeps_every_byte_in_every_layout(device, layout):
    with extensible_kv_pool(device, min_bytes=1) as pool:
        raw = torch.zeros(6 * MIB, dtype=torch.uint8, device=device)
    if layout == "kv-split":
        views = [(raw[: 2 * 30 * 70_000].view(2, 30, 70_000), 1)]
    elif layout == "packed":
        rows = raw[: 30 * 120_000].view(30, 120_000)
        views = [(rows[:, :50_000], 0), (rows[:, 50_000:117_000], 0)]
    elif layout == "short-last-block":  # padding behind the last block is not there
        views = [(raw.as_strided((30, 4096), (213_000, 1), raw.numel() - 29 * 213_000 - 5000), 0)]
    else:
        views = [(raw.as_strided((30, 999), (999, 1), 7), 0)]
    for view, dim in views:
        pool.bind(view, dim)
    pool.commit(30)
    generator = torch.Generator().manual_seed(1)
    contents = []
    for view, _ in views:
        content = torch.randint(0, 256, view.shape, generator=generator, dtype=torch.uint8)
        view.copy_(content.to(device))
        contents.append(content)
    nap(pool, range(30), piece_bytes=300_000)
    for (view, _), content in zip(views, contents, strict=True):
        assert torch.equal(view.cpu(), content)


@ON_EVERY_DEVICE
def test_restore_twice_and_after_growing(device):
    pool, view = make_pool(device)
    pool.commit(20)
    fill(view, 0, 20)
    saved = nap(pool, [3, 4, 19])
    view[:, :20].zero_()
    pool.commit(64)
    saved.restore(pool)
    saved.wait()
    assert_filled(view, 3, 5)
    assert_filled(view, 19, 20)
    assert not view[:, 5:19].any()


@ON_EVERY_DEVICE
def test_no_blocks_is_an_empty_backup(device):
    pool, view = make_pool(device)
    pool.commit(5)
    fill(view, 0, 5)
    assert nap(pool, []).num_bytes == 0
    assert not view[:, :5].any()


@ON_EVERY_DEVICE
def test_save_or_restore_of_blocks_that_are_not_committed_is_refused(device):
    pool, view = make_pool(device)
    pool.commit(10)
    fill(view, 0, 10)
    for blocks in ([10], [-1], [0, 63]):
        with pytest.raises(PoolValueError, match="of 10 that are committed"):
            backup.save(pool, blocks)
    saved = backup.save(pool, [9])
    saved.wait()
    pool.release_physical()
    with pytest.raises(PoolValueError, match="block 9 is saved, and only 0 are committed"):
        saved.restore(pool)
    pool.recommit()
    other, _view = make_pool(device)
    other.commit(10)
    with pytest.raises(PoolValueError, match="other segments"):
        saved.restore(other)
    saved.restore(pool)
    saved.drop()
    assert_filled(view, 9, 10)
    with pytest.raises(PoolValueError, match="dropped"):
        saved.restore(pool)


def test_host_memory_that_is_not_there_is_out_of_memory(monkeypatch):
    pool, view = make_pool("cpu")
    pool.commit(10)
    fill(view, 0, 10)
    monkeypatch.setattr(backup, "_available_host_bytes", lambda: 1000)
    with pytest.raises(PoolOutOfMemoryError, match="1000 bytes of host memory are available"):
        backup.save(pool, range(10))
    assert_filled(view, 0, 10)


def test_host_need_tells_what_save_takes_and_changes_nothing(monkeypatch):
    pool, view = make_pool("cpu")
    pool.commit(10)
    fill(view, 0, 10)
    monkeypatch.setattr(backup, "_available_host_bytes", lambda: 1 << 40)
    assert backup.host_need(pool, [1, 2, 2, 9]) == (3 * 4 * 96 * 1024, 1 << 40)
    assert_filled(view, 0, 10)
    with pytest.raises(PoolValueError, match="of 10 that are committed"):
        backup.host_need(pool, [10])


def test_pinned_memory_counts_as_pytorch_takes_it(monkeypatch):
    """In powers of two, of which it has those that an earlier backup left; others' are of other sizes."""
    stats = {"allocated_bytes.current": 90 * MIB, "active_bytes.current": 2 * MIB}
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: stats)
    monkeypatch.setattr(backup, "_left", Counter())
    assert backup._new_bytes([8 * MIB, 5 * MIB], pinned=True) == 16 * MIB
    assert backup._new_bytes([8 * MIB, 5 * MIB], pinned=False) == 13 * MIB
    backup._left.update({8 * MIB: 3, MIB: 1})
    assert backup._new_bytes([8 * MIB, 5 * MIB], pinned=True) == 0
    assert backup._new_bytes([8 * MIB, 20 * MIB, MIB], pinned=True) == 32 * MIB
    assert backup._new_bytes([8 * MIB] * 4, pinned=True) == 8 * MIB
    assert backup.pinned_need([70 * MIB, 3 * MIB]) == 132 * MIB - (88 - 25) * MIB
    assert backup.pinned_need([MIB]) == 0
    stats["allocated_bytes.current"] = 10 * MIB  # others took what a backup had left
    assert backup._new_bytes([8 * MIB, 5 * MIB], pinned=True) == 8 * MIB
    assert backup.pinned_need([MIB]) == MIB


def test_what_a_backup_leaves_pinned_is_taken_again_by_the_next(monkeypatch):
    pinned, empty = [], torch.empty

    def unpinned(*size, pin_memory=False, **options):
        pinned.append(pin_memory)
        return empty(*size, **options)

    monkeypatch.setattr(backup, "_left", Counter())
    monkeypatch.setattr(backup, "_cached_pinned_bytes", lambda: sum(backup._left.elements()))
    monkeypatch.setattr(torch, "empty", unpinned)
    pool, _ = make_pool("cpu", num_layers=1, num_blocks=8, block_bytes=MIB)
    pool.commit(8)
    saved = backup.save(pool, range(8))
    saved._device = torch.device("cuda")
    saved.drop()
    saved.drop()
    assert backup._left == {8 * MIB: 1}
    assert backup._new_bytes([8 * MIB], pinned=True) == 0
    slabs = backup._host_memory([8 * MIB, MIB], pinned=True)
    assert len(slabs) == 2 and pinned[-2:] == [True, True]
    assert +backup._left == Counter()


def test_room_in_a_container_counts_where_it_is_less(monkeypatch):
    machine = backup._available_host_bytes()
    monkeypatch.setattr(backup, "container_free_bytes", lambda: 5 * MIB)
    assert backup._available_host_bytes() == 5 * MIB
    monkeypatch.setattr(backup, "container_free_bytes", lambda: 1 << 60)
    assert backup._available_host_bytes() == pytest.approx(machine, rel=0.5)


def test_recommit_out_of_memory_keeps_the_backup_for_the_next_try():
    pool, view = make_pool("cpu", num_layers=1, num_blocks=64, block_bytes=MIB)
    pool.commit(48)
    fill(view, 0, 48)
    saved = backup.save(pool, range(0, 48, 3))
    saved.wait()
    pool.release_physical()
    lib.ekv_host_configure(0, 8 * MIB)
    try:
        with pytest.raises(PoolOutOfMemoryError):
            pool.recommit()
        assert pool.physical_bytes == 0
    finally:
        lib.ekv_host_configure(0, 0)
    pool.recommit()
    saved.restore(pool)
    for block in range(0, 48, 3):
        assert_filled(view, block, block + 1)


@ON_EVERY_DEVICE
def test_committed_rows_have_storages_of_committed_bytes_only(device):
    pool, _view = make_pool(device)
    pool.commit(13)
    rows = committed_rows(pool)
    assert [(r.whole.shape[0], r.stride_bytes) for r in rows] == [(13, 96 * 1024)] * 4
    assert all(r.whole.untyped_storage().nbytes() == 13 * 96 * 1024 for r in rows)
    assert [(r.whole.data_ptr(), r.whole.nbytes) for r in rows] == pool.committed_regions()


@pytest.mark.gpu
def test_captured_graph_reads_what_came_back():
    """The graph was captured before the nap; its addresses are backed by other memory after it."""
    pool, view = make_pool("cuda")
    pool.commit(40)
    fill(view, 0, 40)
    total = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total.copy_(view[:, :40].sum(dtype=torch.int64))
    graph.replay()
    before = int(total)
    free = torch.cuda.mem_get_info()[0]
    saved = backup.save(pool, range(40))
    saved.wait()
    held = pool.physical_bytes
    pool.release_physical()
    assert torch.cuda.mem_get_info()[0] >= free + held
    pool.recommit()
    graph.replay()
    assert int(total) == 0
    saved.restore(pool)
    graph.replay()
    assert int(total) == before != 0


@pytest.mark.parametrize("around", ["default-device", "own-pool", "other-pool"])
def test_nap_where_factories_go_elsewhere(around):
    pool, view = make_pool("cpu")
    pool.commit(40)
    fill(view, 0, 40)
    contexts = {
        "default-device": lambda: torch.device("meta"),
        "own-pool": lambda: RoutingMode(pool.reserve, pool.device),
        "other-pool": lambda: extensible_kv_pool("cpu"),
    }
    with contexts[around]():
        nap(pool, range(40))
    assert_filled(view, 0, 40)


def test_blocks_that_are_no_integers_are_refused():
    pool, _ = make_pool("cpu")
    pool.commit(2)
    with pytest.raises(TypeError):
        backup.save(pool, [0.5])
