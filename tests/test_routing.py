"""Which tensor factories become growable inside `extensible_kv_pool()`, and which do not."""

import threading
import weakref

import numpy
import pytest
import torch
from pools import MIB, ON_EVERY_DEVICE, run_python

from allocator import DriverError, PoolValueError, extensible_kv_pool, torch_routing
from allocator.torch_routing import _adopt, current_allocator, driver_of, resolve_device

FACTORIES = {
    "empty": lambda device, like: torch.empty(4, MIB, dtype=torch.int8, device=device),
    "empty with a size tuple": lambda device, like: torch.empty((4, MIB), dtype=torch.int8, device=device),
    "zeros": lambda device, like: torch.zeros(4, MIB, dtype=torch.int8, device=device),
    "zeros with a size": lambda device, like: torch.zeros(size=(4, MIB), dtype=torch.int8, device=device),
    "full with 0": lambda device, like: torch.full((4, MIB), 0, dtype=torch.int8, device=device),
    "empty_strided": lambda device, like: torch.empty_strided(
        (4, MIB), (MIB, 1), dtype=torch.int8, device=device
    ),
    "empty_like": lambda device, like: torch.empty_like(like),
    "zeros_like": lambda device, like: torch.zeros_like(like),
    "new_empty": lambda device, like: like.new_empty(4, MIB),
    "new_zeros": lambda device, like: like.new_zeros((4, MIB)),
    "new_zeros of another device's tensor": lambda device, like: torch.ones(
        1, dtype=torch.int8, device="cpu"
    ).new_zeros((4, MIB), device=device),
}


@ON_EVERY_DEVICE
@pytest.mark.parametrize("name", FACTORIES)
def test_routing_tensor_factory_becomes_growable(device, name):
    like = torch.ones(4, MIB, dtype=torch.int8, device=device)
    with extensible_kv_pool(device) as pool:
        cache = FACTORIES[name](device, like)
    assert (cache.shape, cache.dtype, cache.device) == (like.shape, like.dtype, like.device)
    assert cache.is_contiguous()
    assert pool.reserved_bytes >= 4 * MIB and pool.physical_bytes == 0
    pool.bind(cache)
    pool.commit(3)
    assert not cache[:3].any()
    cache[:3] = 2
    assert int(cache[:3].sum()) == 6 * MIB


@ON_EVERY_DEVICE
def test_routing_everything_else_stays_with_pytorch(device):
    like = torch.ones(2 * MIB, dtype=torch.int8, device=device)
    with extensible_kv_pool(device, predicate=lambda meta: meta.dtype != torch.float64) as pool:
        others = [
            torch.ones(2 * MIB, device=device),
            torch.full((2 * MIB,), 1, device=device),
            torch.full((2 * MIB,), fill_value=3.0, device=device),
            torch.full((2 * MIB,), -0.0, device=device),
            torch.randn(2 * MIB, device=device),
            torch.arange(2 * MIB, device=device),
            like.clone(),
            like + 1,
            torch.zeros(MIB - 1, dtype=torch.int8, device=device),  # under min_bytes
            torch.zeros(2 * MIB, dtype=torch.float64, device=device),  # outside the predicate
            torch.zeros(0, MIB, device=device),
            torch.zeros(2 * MIB, device="meta"),
        ]
        out = torch.ones(2 * MIB, device=device)
        torch.zeros(2 * MIB, out=out)
    assert pool.reserved_bytes == 0
    assert not out.any()
    assert all(
        float(t.sum(dtype=torch.float64)) == float(t.numel() * k)
        for t, k in zip(others[:3], (1, 1, 3), strict=True)
    )
    assert others[3].signbit().all()
    with pytest.raises(RuntimeError), extensible_kv_pool(device):
        torch.empty_strided((4, MIB), (-1, 1), device=device)
    with pytest.raises(PoolValueError, match="before bind"):
        pool.commit(1)


@ON_EVERY_DEVICE
def test_routing_takes_exactly_min_bytes_of_the_widest_type_and_not_one_less(device):
    with extensible_kv_pool(device, min_bytes=MIB) as pool:
        enough = torch.zeros(MIB // 16, dtype=torch.complex128, device=device)
        assert pool.reserved_bytes >= MIB
        reserved = pool.reserved_bytes
        torch.zeros(MIB - 1, dtype=torch.int8, device=device).fill_(1)
        assert pool.reserved_bytes == reserved
    pool.bind(enough.view(16, -1))
    pool.commit(16)
    assert not enough.any()


@ON_EVERY_DEVICE
def test_routing_leaves_empty_tensors_with_pytorch(device):
    with extensible_kv_pool(device, min_bytes=0) as pool:
        assert torch.zeros(0, 8, device=device).shape == (0, 8)
        assert pool.reserved_bytes == 0
        one = torch.zeros(1, dtype=torch.int8, device=device)
        assert pool.reserved_bytes > 0
    pool.bind(one)
    pool.commit(1)
    assert one.item() == 0


@ON_EVERY_DEVICE
def test_routing_default_device_counts_for_factories_without_a_source_only(device):
    source = torch.zeros(2, device=device)
    torch.set_default_device("meta")
    try:
        with extensible_kv_pool(device) as pool:
            assert torch.zeros(MIB).is_meta and torch.empty(MIB).is_meta
            assert pool.reserved_bytes == 0
            made = source.new_zeros(MIB)
            assert made.device == source.device
            assert pool.reserved_bytes >= 4 * MIB
    finally:
        torch.set_default_device(None)


@ON_EVERY_DEVICE
def test_routing_counts_bytes_and_not_elements_and_with_the_gaps_between_them(device):
    source = torch.zeros(MIB // 8, dtype=torch.float64, device=device)
    with extensible_kv_pool(device) as pool:
        like = torch.zeros_like(source)
        assert pool.reserved_bytes >= like.nbytes == MIB
    with extensible_kv_pool(device) as pool:
        rows = torch.empty_strided((4, MIB), (3 * MIB, 1), dtype=torch.int8, device=device)
        assert pool.reserved_bytes >= 10 * MIB
    pool.bind(rows)
    pool.commit(4)
    assert not rows.any()


def test_routing_leaves_pinned_and_sparse_tensors_with_pytorch():
    with extensible_kv_pool("cpu") as pool:
        sparse = torch.zeros(1024, 1024, layout=torch.sparse_coo)
        assert sparse.is_sparse and sparse.to_dense().sum() == 0
        try:
            pinned = torch.zeros(MIB, dtype=torch.int8, pin_memory=True)
        except RuntimeError:  # PyTorch's own answer where it sees no GPU
            assert not torch.cuda.is_available()
        else:
            assert pinned.is_pinned()
        assert pool.reserved_bytes == 0


@ON_EVERY_DEVICE
def test_routing_strides_offsets_and_grad_are_as_asked(device):
    with extensible_kv_pool(device) as pool:
        cache = torch.empty_strided((64, 4, 4000), (4000, 64 * 4000, 1), dtype=torch.float16, device=device)
        weights = torch.zeros(MIB, device=device, requires_grad=True)
    assert cache.stride() == (4000, 256_000, 1)
    assert weights.requires_grad and weights.is_leaf
    pool.bind(cache)
    pool.bind(weights.detach().view(64, -1))
    pool.commit(64)
    assert pool.num_segments == 5
    cache.fill_(1)
    assert float(cache.float().sum()) == 64 * 4 * 4000


@ON_EVERY_DEVICE
def test_routing_default_device_is_respected(device):
    with extensible_kv_pool(device) as pool:
        before = pool.reserved_bytes
        torch.zeros(MIB, device="meta")
        with torch.device(device):
            cache = torch.zeros(4, MIB, dtype=torch.int8)
    assert cache.device.type == device
    assert pool.reserved_bytes > before


@ON_EVERY_DEVICE
def test_routing_another_thread_does_not_enter_the_pool(device):  # case 25
    made = []
    with extensible_kv_pool(device) as pool:
        thread = threading.Thread(
            target=lambda: made.append(torch.zeros(4 * MIB, dtype=torch.int8, device=device))
        )
        thread.start()
        thread.join()
        assert pool.reserved_bytes == 0
    made[0].fill_(1)
    assert int(made[0].sum()) == 4 * MIB


@ON_EVERY_DEVICE
def test_routing_pools_nest_and_the_inner_one_takes(device):
    with extensible_kv_pool(device) as outer:
        with extensible_kv_pool(device) as inner:
            torch.zeros(4 * MIB, dtype=torch.int8, device=device)
        kept = torch.zeros(2 * MIB, dtype=torch.int8, device=device)
    assert kept.numel() == 2 * MIB
    assert outer.reserved_bytes >= 2 * MIB  # PyTorch rounds up, and uses freed addresses again
    assert inner._members


@ON_EVERY_DEVICE
def test_routing_error_in_the_block_leaves_no_trace(device):
    class Boom(Exception):
        pass

    with pytest.raises(Boom), extensible_kv_pool(device):
        raise Boom
    cache = torch.zeros(4 * MIB, dtype=torch.int8, device=device)
    cache.fill_(1)


@ON_EVERY_DEVICE
def test_routing_200_dropped_randn_inside_the_context(device):  # case 21
    with extensible_kv_pool(device) as pool:
        for _ in range(200 if device == "cuda" else 5):
            torch.randn(2048, 7168, device=device)
        if device == "cuda":
            torch.cuda.synchronize()
    assert pool.reserved_bytes == 0


def test_routing_new_tensor_after_commit_is_refused():
    with extensible_kv_pool("cpu") as pool:
        cache = torch.zeros(4, MIB, dtype=torch.int8)
        pool.bind(cache)
        pool.commit(1)
        with pytest.raises(PoolValueError, match="a new tensor after 1 blocks were committed"):
            torch.zeros(4, MIB, dtype=torch.int8)
    assert not cache[:1].any()


@ON_EVERY_DEVICE
def test_routing_scratch_tensor_that_dies_leaves_the_pool_usable(device):
    with extensible_kv_pool(device) as pool:
        scratch = torch.zeros(4, MIB, dtype=torch.int8, device=device)
        del scratch
        cache = torch.zeros(4, MIB, dtype=torch.int8, device=device)
        torch.zeros(8, MIB, dtype=torch.int8, device=device)  # dropped at once
    pool.bind(cache)
    pool.commit(2)
    assert not cache[:2].any()
    pool.shrink(1)
    assert len(pool.snapshot()["reservations"]) == 1


@ON_EVERY_DEVICE
def test_routing_deterministic_filling_does_not_touch_growable_tensors(device):
    torch.use_deterministic_algorithms(True)
    try:
        with extensible_kv_pool(device) as pool:
            cache = torch.empty(4, MIB, dtype=torch.int8, device=device)
        assert torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)
    pool.bind(cache)
    pool.commit(4)
    assert not cache.any()


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros_like(torch.ones(2 * MIB).to_sparse()),
        lambda: torch.zeros_like(torch.ones(1024, 2048).to_sparse_csr()),
        lambda: torch.zeros_like(torch.ones(2 * MIB).as_subclass(Subclass)),
        lambda: torch.func.vmap(torch.zeros_like)(torch.ones(4, MIB)),
        lambda: torch.func.grad(lambda x: (torch.zeros_like(x) + x).sum())(torch.ones(2 * MIB)),
    ],
    ids=["sparse", "csr", "subclass", "vmap", "grad"],
)
def test_routing_unusual_tensors_stay_with_pytorch(make):
    with extensible_kv_pool("cpu") as pool:
        inside = make()
    outside = make()
    assert pool.reserved_bytes == 0
    assert type(inside) is type(outside) and inside.layout == outside.layout
    assert torch.equal(inside.to_dense(), outside.to_dense())


def test_routing_fake_tensors_stay_fake():
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with extensible_kv_pool("cpu") as pool, FakeTensorMode():
        fake = torch.zeros(2 * MIB)
    assert isinstance(fake, FakeTensor)
    assert pool.reserved_bytes == 0


def test_routing_compiled_code_makes_growable_tensors_too():
    compiled = torch.compile(lambda like: torch.zeros(4, MIB, dtype=like.dtype), backend="eager")
    with extensible_kv_pool("cpu") as pool:
        cache = compiled(torch.ones(1, dtype=torch.int8))
    pool.bind(cache)
    pool.commit(4)
    assert not cache.any()


def test_storage_weakref_survives_its_wrapper():
    """The GPU route learns of a storage's death from a weak reference to its wrapper: not before."""
    died = []
    tensor = torch.zeros(8)
    weakref.finalize(tensor.untyped_storage(), died.append, 1)
    view = tensor[2:]
    del tensor
    assert not died and view.untyped_storage().nbytes() == 32
    del view
    assert died == [1]


def test_allocation_that_another_allocator_took_is_named():  # case 26, without a GPU
    with pytest.raises(DriverError, match=f"cpu: the allocation of {4 * MIB} bytes did not reach the pool's"):
        _adopt(torch.zeros(MIB), 0)


def test_unserved_devices_and_arguments_are_refused():
    with pytest.raises(DriverError, match="meta"):
        driver_of(torch.device("meta"))
    with pytest.raises(ValueError, match="min_bytes=-1"), extensible_kv_pool("cpu", min_bytes=-1):
        pass
    assert resolve_device("cpu") == torch.device("cpu")


def test_routing_takes_the_cpu_by_any_name_and_sizes_of_any_kind():
    with extensible_kv_pool("cpu", min_bytes=MIB) as pool:
        caches = [
            torch.zeros(MIB, dtype=torch.int8, device="cpu:0"),
            torch.zeros(numpy.int64(MIB), dtype=torch.int8),
            torch.ones(1, dtype=torch.int8).new_zeros(MIB),
        ]
    assert len(pool.snapshot()["reservations"]) == len(caches)


def test_current_allocator_is_foreign_where_nobody_asked_for_the_pools(monkeypatch):
    """What a GPU's PyTorch would say; that of the CPU says nothing."""
    if not torch.backends.cuda.is_built():
        assert current_allocator() == "none"
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "pluggable")
    monkeypatch.setattr(torch_routing, "_allocator", None)
    assert current_allocator() == "foreign"
    monkeypatch.setattr(torch_routing, "_allocator", object())
    assert current_allocator() == "pluggable"


def test_import_touches_no_driver():  # 10
    code = """
import os, sys
os.environ["EKV_CUDA_LIBRARY"] = "/nonexistent/libcuda.so.1"
import allocator, allocator.pool, allocator.torch_routing, allocator.probing, torch
from allocator.shim import lib
assert lib.ekv_num_reservations() == 0
assert not torch.cuda.is_initialized()
print(len(open("/proc/self/maps").read().split("extensible-kv")))
"""
    process = run_python(code)
    assert process.returncode == 0, process.stderr
    assert process.stdout == "1\n"
