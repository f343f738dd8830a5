"""What is read on a CPU after warm-up, and what reading must leave as it was found."""

import gc
import mmap
import random
import types
import weakref
from pathlib import Path

import numpy
import pytest
import torch
from pools import MIB, make_pool

from allocator.shim import lib
from vllm_integration import measure

CPU = torch.device("cpu")


def test_replaced_method_of_a_class_leaves_nothing_on_the_instance() -> None:
    class Plan:
        def size(self) -> int:
            return 3

    plan = Plan()
    with measure.replaced(plan, "size", lambda: 5):
        assert plan.size() == 5
    assert plan.size() == 3 and not vars(plan)


def test_replaced_value_comes_back_after_an_error() -> None:
    plan = types.SimpleNamespace(num_blocks=64)
    with pytest.raises(KeyError), measure.replaced(plan, "num_blocks", 5):
        assert plan.num_blocks == 5
        raise KeyError
    assert plan.num_blocks == 64


def test_graph_estimation_is_back_after_an_error() -> None:
    class Runner:
        def profile_cudagraph_memory(self) -> int:
            return 7

    runner = Runner()
    with pytest.raises(KeyError), measure.without_graph_estimation(runner):
        assert runner.profile_cudagraph_memory() == 0
        raise KeyError
    assert runner.profile_cudagraph_memory() == 7


def _draw() -> list[float]:
    return [random.random(), float(numpy.random.rand()), float(torch.rand(1))]


def test_random_states_are_left_as_they_were_found_after_an_error_too() -> None:
    random.seed(3)
    numpy.random.seed(3)
    torch.manual_seed(3)
    expected = _draw()
    random.seed(3)
    numpy.random.seed(3)
    torch.manual_seed(3)
    with pytest.raises(KeyError), measure.quiet_random(CPU):
        _draw()
        raise KeyError
    assert _draw() == expected


def test_free_bytes_are_the_drivers() -> None:
    pool, _view = make_pool("cpu")
    pool.commit(64)
    lib.ekv_host_configure(0, 1 << 40)
    try:
        before = measure.free_bytes(CPU)
        pool.shrink(0)
        assert before < measure.free_bytes(CPU) <= 1 << 40
    finally:
        lib.ekv_host_configure(0, 0)


def test_own_bytes_are_private_memory_and_files_and_not_the_pools(tmp_path: Path) -> None:
    size, slack = 512 * MIB, 8 * MIB
    gc.collect()
    start = measure.own_bytes(CPU)
    pool, view = make_pool("cpu", num_blocks=256)  # 96 MiB
    pool.commit(256)
    view.fill_(1)
    with_pool = measure.own_bytes(CPU)
    assert abs(with_pool - start) < slack
    private = numpy.ones(size, dtype=numpy.uint8)
    with_private = measure.own_bytes(CPU)
    assert abs(with_private - with_pool - size) < slack
    size = 64 * MIB
    (tmp_path / "weights").write_bytes(private[:size].tobytes())
    before = measure.own_bytes(CPU)
    with open(tmp_path / "weights", "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) == size // mmap.PAGESIZE
        assert abs(measure.own_bytes(CPU) - before - size) < slack


def test_model_bytes_count_each_storage_of_the_device_once() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(100, 8)
            self.head = torch.nn.Linear(8, 100, bias=False)
            self.head.weight = torch.nn.Parameter(self.embedding.weight[:50].detach())  # of the same storage
            self.register_buffer("table", torch.zeros(30, dtype=torch.int64))
            self.elsewhere = torch.nn.Parameter(torch.zeros(1000, device="meta"))

    model = Model()
    runner = types.SimpleNamespace(get_model=lambda: model)
    worker = types.SimpleNamespace(device=CPU, model_runner=runner)
    assert measure.model_bytes(worker) == 100 * 8 * 4 + 30 * 8


def test_model_bytes_of_weights_without_a_storage_are_those_that_they_wrap() -> None:
    """As torchao's quantized weights are; what tells of no memory at all is left out."""
    from torch.testing._internal.two_tensor import TwoTensor

    class Nothing(torch.Tensor):
        def __new__(cls) -> torch.Tensor:
            return torch.Tensor._make_wrapper_subclass(cls, (7, 8))

        __torch_dispatch__ = classmethod(lambda *args: None)

    model = torch.nn.Module()
    part = torch.zeros(5, 8)
    model.weight = torch.nn.Parameter(TwoTensor(part, torch.ones(5, 8)), requires_grad=False)
    model.tied = torch.nn.Parameter(TwoTensor(part, TwoTensor(part, part)), requires_grad=False)
    model.register_buffer("nothing", Nothing())
    runner = types.SimpleNamespace(get_model=lambda: model)
    assert measure.model_bytes(types.SimpleNamespace(device=CPU, model_runner=runner)) == 2 * 5 * 8 * 4


def test_settling_gives_back_what_only_a_cycle_holds() -> None:
    class Node:
        pass

    gc.disable()
    try:
        node = Node()
        node.itself = node  # type: ignore[attr-defined]
        died = weakref.ref(node)
        del node
        assert died() is not None
        measure.settle(CPU)
        assert died() is None
    finally:
        gc.enable()


@pytest.mark.vllm
@pytest.mark.parametrize("several", [False, True], ids=["0.29 to 0.31", "0.32 and 0.33"])
def test_what_cumem_gave_back_behind_pytorch_is_not_held(
    monkeypatch: pytest.MonkeyPatch, several: bool
) -> None:
    """vLLM's own class, with pools that are made up."""
    from vllm.device_allocator.cumem import CuMemAllocator

    class Pool:
        def __init__(self, *addresses: int) -> None:
            self.addresses = addresses

        def snapshot(self) -> list[dict[str, int]]:
            return [{"address": address, "total_size": address * MIB} for address in self.addresses]

    pairs = {"weights": (Pool(20, 40, 80), None), "kv_cache": (Pool(4), None)}
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1000 * MIB)
    monkeypatch.setattr("allocator.reserved_bytes", lambda device: 300 * MIB)
    device = types.SimpleNamespace(type="cuda")
    assert measure.own_bytes(device) == 700 * MIB
    cumem = object.__new__(CuMemAllocator)
    cumem.allocator_and_pools = {tag: [pair] if several else pair for tag, pair in pairs.items()}
    cumem.pointer_to_data = {20: None, 80: None, 4: None}
    monkeypatch.setattr(CuMemAllocator, "instance", cumem)
    assert measure.own_bytes(device) == 660 * MIB
