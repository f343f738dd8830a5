"""What only a GPU can show: CUDA graphs over growing pools, MemPools, contexts, exits."""

import pytest
import torch
from pools import MIB, assert_filled, fill, make_pool, run_python

from allocator import DriverError, PoolValueError, extensible_kv_pool, memory_info, probe

pytestmark = pytest.mark.gpu


def test_graph_captured_with_one_block_replays_over_blocks_committed_later():
    pool, view = make_pool("cuda", num_layers=4, num_blocks=64)
    pool.commit(1)
    index = torch.zeros(1, dtype=torch.int64, device="cuda")
    total = torch.zeros(4, dtype=torch.int64, device="cuda")

    def step():
        torch.sum(view.index_select(1, index).long(), dim=(1, 2), out=total)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    pool.commit(64)
    fill(view, 0, 64)
    for block in (0, 1, 33, 63):
        index.fill_(block)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(total, view[:, block].long().sum(dim=1)), block
    pool.release_physical()
    pool.recommit()
    fill(view, 0, 64)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(total, view[:, 63].long().sum(dim=1))


def test_commit_takes_and_release_gives_device_memory():
    pool, _view = make_pool("cuda", num_layers=8, num_blocks=1024, block_bytes=256 * 1024)  # 2 GiB
    before = memory_info("cuda")[0]
    pool.commit(1024)
    assert before - memory_info("cuda")[0] == pytest.approx(pool.physical_bytes, abs=4 * MIB)
    pool.shrink(0)
    assert memory_info("cuda")[0] == pytest.approx(before, abs=4 * MIB)


def test_commit_while_kernels_run_on_the_committed_prefix():
    pool, view = make_pool("cuda", num_layers=4, num_blocks=512, block_bytes=MIB)
    pool.commit(32)
    fill(view, 0, 32)
    expected = view[:, :32].clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(200):
            view[:, :32] += 1
            view[:, :32] -= 1
    pool.commit(512)
    stream.synchronize()
    assert torch.equal(view[:, :32], expected)
    assert not view[:, 32:].any()


def test_commit_short_of_memory_empties_pytorchs_cache_and_succeeds():  # case 32
    torch.cuda.empty_cache()
    pool, view = make_pool("cuda", num_layers=1, num_blocks=512, block_bytes=MIB)
    cached = torch.empty(1000 * MIB, dtype=torch.int8, device="cuda")
    del cached  # free, but held by PyTorch
    filler = torch.empty(memory_info("cuda")[0] - 200 * MIB, dtype=torch.int8, device="cuda")
    reserved = torch.cuda.memory_reserved()
    try:
        with pytest.raises(torch.OutOfMemoryError, match="commit of 512 blocks"):
            pool.commit(512, may_empty_cache=False)
        assert torch.cuda.memory_reserved() == reserved and pool.committed_blocks == 0
        pool.commit(512)
        assert torch.cuda.memory_reserved() <= reserved - 1000 * MIB
        assert not view.any()  # takes a segment of its own
    finally:
        del filler  # else a failure's traceback keeps it, and every later test fails


def test_memory_of_the_widest_step_is_taken_again_and_serves_the_same_requests():
    """As a nap does: the cache is emptied, held while it is emptied again, and left to PyTorch."""
    from vllm_integration.step_memory import StepMemory

    torch.cuda.empty_cache()
    device = torch.device("cuda", torch.cuda.current_device())
    side = torch.cuda.Stream()
    sizes = [300 * MIB, 90 * MIB, 5 * MIB]

    def step():
        tensors = [torch.empty(size, dtype=torch.int8, device=device) for size in sizes]
        with torch.cuda.stream(side):
            tensors.append(torch.empty(64 * MIB, dtype=torch.int8, device=device))
        torch.cuda.synchronize()
        del tensors

    weights = torch.empty(40 * MIB, dtype=torch.int8, device=device)
    empty = torch.cuda.memory_reserved()
    step()
    kept = torch.cuda.memory_reserved()
    memory = StepMemory(device)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == empty
    held = memory.take()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == kept
    del held
    again = memory.take()  # from PyTorch's cache
    assert torch.cuda.memory_reserved() == kept
    del again
    step()
    assert torch.cuda.memory_reserved() == kept
    torch.cuda.empty_cache()
    left = torch.empty(410 * MIB, dtype=torch.int8, device=device)  # as loading weights leaves it
    del left
    memory.trim()
    assert torch.cuda.memory_reserved() == empty
    left = torch.empty(410 * MIB, dtype=torch.int8, device=device)
    del left
    held = memory.take()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == kept
    del held
    step()
    assert torch.cuda.memory_reserved() == kept
    torch.cuda.empty_cache()
    filler = torch.empty(memory_info("cuda")[0] - 380 * MIB, dtype=torch.int8, device=device)
    full = torch.cuda.memory_reserved()
    with pytest.raises(torch.OutOfMemoryError, match="the widest step needs"):
        memory.take()
    assert torch.cuda.memory_reserved() == full  # a part of it was there, and went back
    del filler, weights
    torch.cuda.empty_cache()


def test_memory_of_the_widest_step_is_not_taken_from_holes():
    """A workspace made while large blocks were cached: the hole beside it was part of the step's."""
    from vllm_integration.step_memory import StepMemory

    torch.cuda.empty_cache()
    device = torch.device("cuda", torch.cuda.current_device())
    bytes_of = lambda mib: torch.empty(mib * MIB, dtype=torch.int8, device=device)  # noqa: E731
    large = bytes_of(1000)
    del large
    workspace = bytes_of(100)
    step = [bytes_of(850), bytes_of(300)]
    del step
    kept = torch.cuda.memory_reserved()
    memory = StepMemory(device)
    torch.cuda.empty_cache()
    memory.trim()
    held = memory.take()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == kept
    del held
    step = [bytes_of(300), bytes_of(850)]
    assert torch.cuda.memory_reserved() == kept
    del step, workspace
    torch.cuda.empty_cache()


def test_memory_of_the_widest_step_has_what_another_stream_used_last():
    from vllm_integration.step_memory import StepMemory

    torch.cuda.empty_cache()
    device = torch.device("cuda", torch.cuda.current_device())
    tensor, side = torch.zeros(64 * MIB, dtype=torch.int8, device=device), torch.cuda.Stream()
    with torch.cuda.stream(side):
        tensor += 1
    tensor.record_stream(side)
    kept = torch.cuda.memory_reserved()
    del tensor
    torch.cuda.synchronize()
    memory = StepMemory(device)
    assert memory.kept[0, 64 * MIB] == 1
    held = memory.take()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == kept
    del held
    torch.cuda.empty_cache()


def test_recommit_fails_while_the_device_is_full_and_works_after():  # case 31
    torch.cuda.empty_cache()
    pool, view = make_pool("cuda", num_layers=4, num_blocks=1024, block_bytes=MIB)  # 4 GiB
    pool.commit(1024)
    pool.release_physical()
    filler = torch.empty(memory_info("cuda")[0] - 1024 * MIB, dtype=torch.int8, device="cuda")
    with pytest.raises(
        torch.OutOfMemoryError, match=r"cuda: cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY \(2\)"
    ):
        pool.recommit()
    assert pool.physical_bytes == 0
    del filler
    torch.cuda.empty_cache()
    pool.recommit()
    assert pool.committed_blocks == 1024
    assert not view.any()


def test_a_mempool_around_ours_does_not_take_the_allocation():  # case 26
    outer = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(outer), extensible_kv_pool("cuda") as pool:
        try:
            cache = torch.zeros(64, MIB, dtype=torch.int8, device="cuda")
        except DriverError as error:
            assert "did not reach the pool's allocator" in str(error)
            pytest.fail(str(error))
    pool.bind(cache)
    pool.commit(64)
    cache.fill_(1)
    assert int(cache.sum(dtype=torch.int64)) == 64 * MIB


def test_dropping_a_tensor_inside_a_mempool_or_a_capture_is_safe():
    """PyTorch 2.11 ends the process when a MemPool is destroyed at such a moment."""
    code = """
import torch
from allocator import extensible_kv_pool, memory_info
def make():
    with extensible_kv_pool("cuda") as pool:
        cache = torch.zeros(64, 1 << 20, dtype=torch.int8, device="cuda")
    pool.bind(cache); pool.commit(64); cache.fill_(3)
    return pool, cache
x = torch.zeros(4, device="cuda")
pool, cache = make()
with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
    del cache
pool, cache = make()
free = []
for _ in range(4):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1
        del cache
    graph.replay()
    pool, cache = make()      # the memory of the one before is given back by now
    torch.cuda.synchronize()
    free.append(memory_info("cuda")[0] / 2**20)
# The first round may pay for what a process's first graph takes.
assert min(free) > free[0] - 32, free
"""
    process = run_python(code)
    assert process.returncode == 0, process.stdout + process.stderr


def test_addresses_of_a_dead_tensor_are_used_again_zeroed():
    pool, view = make_pool("cuda")
    pool.commit(64)
    fill(view, 0, 64)
    address = view.data_ptr()
    del view
    free = memory_info("cuda")[0]
    new_pool, view = make_pool("cuda")
    assert view.data_ptr() == address
    assert (new_pool.committed_blocks, new_pool.physical_bytes, memory_info("cuda")[0]) == (0, 0, free)
    new_pool.commit(64)
    assert not view.any()
    with pytest.raises(PoolValueError, match="freed"):
        pool.commit(1)


def test_small_and_odd_sizes_are_not_packed_into_one_torch_segment():
    with extensible_kv_pool("cuda") as pool:
        caches = [
            torch.zeros(3, size, dtype=torch.int8, device="cuda") for size in (MIB, 4 * MIB, 7 * MIB + 12)
        ]
    for cache in caches:
        pool.bind(cache)
    pool.commit(3)
    for number, cache in enumerate(caches):
        cache.fill_(number + 1)
    assert [int(c.sum(dtype=torch.int64)) // c.numel() for c in caches] == [1, 2, 3]


def test_shareable_pool_works():
    pool, view = make_pool("cuda", shareable=True)
    pool.commit(64)
    fill(view, 0, 64)
    assert_filled(view, 0, 64)
    [reservation] = pool.snapshot()["reservations"]
    assert reservation["handle_kind"] == probe("cuda").handle_kind != "none"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_pool_on_device_0_while_device_1_is_current():  # case 20
    with extensible_kv_pool("cuda:0") as pool:
        torch.cuda.set_device(1)
        cache = torch.zeros(4, MIB, dtype=torch.int8, device="cuda:0")
        pool.bind(cache)
        pool.commit(4)
        assert torch.cuda.current_device() == 1
        assert torch.zeros(1, device="cuda").device.index == 1
    torch.cuda.set_device(0)
    cache.fill_(1)
    assert int(cache.sum()) == 4 * MIB


GRAPH_AND_EXIT = """
import torch
from allocator import extensible_kv_pool
with extensible_kv_pool("cuda") as pool:
    cache = torch.zeros(8, 1 << 20, dtype=torch.int8, device="cuda")
pool.bind(cache); pool.commit(2)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    cache[:2] += 1
pool.commit(8); graph.replay()
{end}
"""
ENDS = {
    "nothing": "",
    "tensor first": "del cache; del pool",
    "pool first": "del pool; del cache",
    "graph last": "del cache; del pool; import gc; gc.collect(); torch.cuda.synchronize()",
    "cycle": "class C: pass\nc = C(); c.c = c; c.all = (pool, cache, graph); del pool, cache, graph",
}


@pytest.mark.parametrize("end", ENDS)
def test_exit_status_is_0_in_any_order(end):  # 11; case 23
    process = run_python(GRAPH_AND_EXIT.format(end=ENDS[end]))
    assert (process.returncode, process.stderr) == (0, "")


# Forks of a process that has everything imported and no CUDA yet; a child ends as any process does.
FIFTY = """
import os, sys, torch, allocator.torch_routing
left, bad, number = 50, [], 0
while left or number:
    if left and number < 10:
        left, number, child = left - 1, number + 1, os.fork()
        if child == 0:
            break
    else:
        status = os.waitstatus_to_exitcode(os.wait()[1])
        number -= 1
        if status:
            bad.append(status)
else:
    print("statuses", bad)
    sys.exit(bool(bad))
""" + GRAPH_AND_EXIT.format(end="")


@pytest.mark.timeout(150)
def test_fifty_processes_end_with_status_0_without_any_cleanup():  # case 23
    process = run_python(FIFTY, timeout=140)
    assert (process.returncode, process.stdout) == (0, "statuses []\n"), process.stderr[-2000:]


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_work_and_stay_set(variable):  # case 27
    code = GRAPH_AND_EXIT.format(end="") + (
        "import os\n"
        f"assert os.environ['{variable}'] == 'expandable_segments:True'\n"
        "x = torch.zeros(1 << 26, device='cuda')\n"
        "assert any(s['is_expandable'] for s in torch.cuda.memory_snapshot())\n"
    )
    process = run_python(code, **{variable: "expandable_segments:True"})
    assert process.returncode == 0, process.stderr


def test_change_current_allocator_mode_grows_tagged_tensors_and_passes_the_rest_through():
    code = """
import torch
from allocator import extensible_kv_pool, pluggable_allocator
torch.cuda.memory.change_current_allocator(pluggable_allocator())
x = torch.ones(1 << 20, device="cuda")
with extensible_kv_pool("cuda") as pool:
    cache = torch.zeros(8, 1 << 20, dtype=torch.int8, device="cuda")
    y = torch.ones(1 << 20, device="cuda")
pool.bind(cache); pool.commit(1)
assert pool.physical_bytes == 2 << 20
index = torch.zeros(1, dtype=torch.int64, device="cuda")
out = torch.zeros(1, 1 << 20, dtype=torch.int8, device="cuda")
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    torch.index_select(cache, 0, index, out=out)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    torch.index_select(cache, 0, index, out=out)
temporary = torch.cuda.CUDAGraph()
with torch.cuda.graph(temporary):
    out.copy_(cache.index_select(0, index))   # frees a tensor while capturing
noise = [torch.full((1 << 20,), 9, dtype=torch.int8, device="cuda") for _ in range(8)]
pool.commit(8)
cache[5] = 7; index.fill_(5)
for each in (graph, temporary):
    out.zero_(); each.replay(); torch.cuda.synchronize()
    assert int(out.sum(dtype=torch.int64)) == 7 << 20
assert all(bool((each == 9).all()) for each in noise)
assert float((x + y).sum()) == 2 << 20
del cache
from allocator.shim import lib
torch.cuda.synchronize()
assert lib.ekv_num_reservations() == 0, lib.ekv_num_reservations()
print("ok")
"""
    process = run_python(code, PYTHONFAULTHANDLER=1)
    assert (process.returncode, process.stdout) == (0, "ok\n"), process.stderr
