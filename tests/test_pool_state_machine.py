"""Random sequences of pool operations, per layout, against a dict of what each block of each view must hold.

On the host driver; the same machine runs on a GPU with the other `gpu` tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from stub_lab import in_child

MAX_EXAMPLES, STEPS = 10, 14
WORDS = 1280  # a block of one view: 5,120 bytes, a third of the tests' host granule
fractions = st.floats(0, 1)


def block_major(new):
    return [(new(11, WORDS), 0, 1)]


def kv_split(new):
    return [(new(2, 11, WORDS), 1, 1)]


def layers_outermost(new):
    buffer = new(3, 11, WORDS)
    return [(layer, 0, 1) for layer in buffer]


def heads_outermost(new):
    buffer = new(2, 3, 11, WORDS)
    return [(layer, 1, 1) for layer in buffer]


def packed_rows(new):
    buffer = new(11, 3 * WORDS)
    return [(buffer[:, layer * WORDS : (layer + 1) * WORDS], 0, 1) for layer in range(3)]


def two_views_alias(new):
    buffer = new(12, WORDS)
    return [(buffer, 0, 1), (buffer.view(12, 2, WORDS // 2), 0, 1)]


def kernel_blocks_in_a_block(new):
    return [(new(44, WORDS // 4), 0, 4)]


def one_tensor_a_layer(new):
    return [(new(11, WORDS), 0, 1) for _ in range(3)]


def page_of_k_then_v(new):
    return [(new(11, 2, WORDS), 0, 1)]


LAYOUTS: dict[str, Callable] = {
    f.__name__: f
    for f in (
        block_major,
        kv_split,
        layers_outermost,
        heads_outermost,
        packed_rows,
        two_views_alias,
        kernel_blocks_in_a_block,
        one_tensor_a_layer,
        page_of_k_then_v,
    )
}


def machine(layout: Callable, device: str, max_chunk_bytes: int) -> type[RuleBasedStateMachine]:
    import torch

    from allocator import PoolValueError, extensible_kv_pool

    class Machine(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            with extensible_kv_pool(device, min_bytes=0, max_chunk_bytes=max_chunk_bytes) as self.pool:
                self.views = layout(lambda *shape: torch.zeros(*shape, dtype=torch.int32, device=device))
            for view, block_dim, kernel_blocks in self.views:
                self.pool.bind(view, block_dim, kernel_blocks_per_block=kernel_blocks)
            self.bases = [view.data_ptr() for view, *_ in self.views]
            self.committed, self.released, self.model, self.next = 0, None, {}, 1

        def block(self, index: int, number: int):
            view, dim, kernel_blocks = self.views[index]
            return view.narrow(dim, number * kernel_blocks, kernel_blocks)

        def expect_zero(self, blocks):
            self.model |= dict.fromkeys(blocks, 0)

        def target(self, fraction: float) -> int:
            return round(fraction * self.pool.capacity_blocks)

        @rule(fraction=fractions, defragment=st.booleans())
        @precondition(lambda self: self.released is None)
        def commit(self, fraction, defragment):
            target = self.target(fraction)
            self.pool.commit(target, defragment=defragment)
            self.expect_zero(range(0 if defragment else self.committed, max(target, self.committed)))
            self.committed = max(self.committed, target)

        @rule(fraction=fractions)
        @precondition(lambda self: self.committed)
        def write(self, fraction):
            number = round(fraction * (self.committed - 1))
            for index in range(len(self.views)):
                self.block(index, number).fill_(self.next)
            self.model[number] = self.next
            self.next += 1

        @rule(fraction=fractions)
        @precondition(lambda self: self.released is None)
        def shrink(self, fraction):
            self.pool.shrink(self.target(fraction))
            self.committed = min(self.committed, self.target(fraction))

        @rule()
        def release(self):
            self.pool.release_physical()
            if self.released is None:
                self.released, self.committed = self.committed, 0
            assert self.pool.physical_bytes == 0

        @rule()
        def recommit(self):
            self.pool.recommit()
            if self.released is not None:
                self.committed, self.released = self.released, None
                self.expect_zero(range(self.committed))

        @rule(extra=st.integers(1, 1 << 60))
        def wrong_arguments_change_nothing(self, extra):
            for call in (self.pool.commit, self.pool.shrink):
                with pytest.raises(PoolValueError):
                    call(-extra)
            with pytest.raises(PoolValueError):
                self.pool.commit(self.pool.capacity_blocks + extra)
            if self.committed or self.released:
                with pytest.raises(PoolValueError):
                    self.pool.bind(*self.views[0][:2], kernel_blocks_per_block=self.views[0][2])

        @invariant()
        def holds(self):
            assert self.pool.committed_blocks == self.committed
            assert [view.data_ptr() for view, *_ in self.views] == self.bases
            for index in range(len(self.views)):
                for number in range(self.committed):
                    block = self.block(index, number)
                    assert (block == self.model[number]).all(), (index, number)
            held = sum(size for _, size in self.pool.committed_regions())
            assert held <= self.pool.physical_bytes or not self.committed
            assert self.pool.physical_bytes >= self.pool.bytes_for(self.committed)

        def teardown(self):
            self.pool.free()
            assert self.pool.physical_bytes == 0

    return Machine


def run(layout: str, device: str, granule: int) -> None:
    chosen = settings(
        max_examples=MAX_EXAMPLES,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    for max_chunk_bytes in (0, granule):
        run_state_machine_as_test(machine(LAYOUTS[layout], device, max_chunk_bytes), settings=chosen)


@in_child()
def test_host_pool_agrees_with_the_model_in_every_layout():
    for layout in LAYOUTS:
        run(layout, "cpu", int(os.environ["EKV_HOST_GRANULARITY"]))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cuda_pool_agrees_with_the_model(layout):
    run(layout, "cuda", 2 << 20)
