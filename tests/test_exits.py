"""A process ends with status 0 whatever order the pool, its tensors, threads and the interpreter go away in.

Invariant 11 and cases 22 to 24, on the host driver; tests/test_gpu_pool.py has captured graphs, too.
"""

from __future__ import annotations

import pytest
from stub_lab import run_child

PROCESSES = 50
keep: list = []


def make():
    import torch

    from allocator import extensible_kv_pool

    with extensible_kv_pool("cpu", min_bytes=0) as pool:
        cache = torch.zeros(3, 16, 2048)
    for layer in cache:
        pool.bind(layer)
    pool.commit(9)
    cache[:, :9] = 1
    return pool, cache


def end_with_everything_alive():
    keep.extend(make())


def end_after_the_pool_was_freed():
    pool, cache = make()
    keep.append(cache)
    pool.free()


def end_with_the_tensor_dropped_first():
    pool, cache = make()
    del cache
    keep.append(pool)


def end_with_the_pool_dropped_first():
    pool, cache = make()
    del pool
    assert cache[:, :9].sum() == 3 * 9 * 2048
    keep.append(cache)


def end_with_a_cycle():
    class Holder:
        def __del__(self):
            self.pool.shrink(1)

    holder = Holder()
    holder.pool, holder.cache = make()
    holder.me = holder


def end_with_a_thread_at_work():
    """Not in a torch call: a daemon thread that dies in one takes the process along, with or without us."""
    import ctypes
    import threading

    pool, cache = make()
    started = threading.Event()

    def work():
        while True:
            pool.commit(16)
            pool.shrink(2)
            ctypes.string_at(cache.data_ptr(), 1)
            started.set()

    threading.Thread(target=work, daemon=True).start()
    assert started.wait(30)


def end_with_an_exception_in_the_block():
    import torch

    from allocator import extensible_kv_pool

    with pytest.raises(ZeroDivisionError), extensible_kv_pool("cpu", min_bytes=0):
        keep.append(torch.zeros(1 << 20))
        raise ZeroDivisionError


def end_after_churn():  # case 22
    import gc

    pool, cache = make()
    called = 0

    def count():
        nonlocal called
        called += 1

    for _ in range(500_000):
        (lambda: count())()
    gc.collect()
    pool.free()
    assert called == 500_000
    del cache


ENDS = [
    end_with_everything_alive,
    end_after_the_pool_was_freed,
    end_with_the_tensor_dropped_first,
    end_with_the_pool_dropped_first,
    end_with_a_cycle,
    end_with_a_thread_at_work,
    end_with_an_exception_in_the_block,
]


OFTEN = (  # cases 23 and 24
    end_with_everything_alive,
    end_with_the_tensor_dropped_first,
    end_with_the_pool_dropped_first,
)


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_exit_status_is_0(end):
    for _ in range(PROCESSES if end in OFTEN else 8):
        assert run_child(end, {}, preload=("torch", "allocator")) == ""


def test_churn_of_callables_loses_none():
    assert run_child(end_after_churn, {}, preload=("torch", "allocator")) == ""
