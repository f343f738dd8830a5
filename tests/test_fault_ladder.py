"""Fail the n-th driver call of each operation, n = 1, 2, ... until a run injects nothing.

Once, persistently, and with the undo failing too. Afterwards invariants 2, 4, 5 and 6 hold, the next attempt
succeeds, and when everything is freed the driver has got everything back.
"""

from __future__ import annotations

import pytest
from ladder import OPTIONS, OUT_OF_MEMORY, UNKNOWN
from stub_lab import Stub, in_child

UNDO_CALLS = 6  # of the calls that undo, each of so many fails in its turn


class Operation:
    """What to do before, the operation, and how many blocks are committed before and after."""

    before, after = 0, 0
    frees = False

    def prepare(self, rig) -> None:
        assert rig.reserve() == 0
        if self.before:
            assert rig.commit(self.before) == 0
            rig.write(range(self.before))

    def run(self, rig) -> int:
        raise NotImplementedError

    def succeeded(self, rig) -> None:
        """Update what `rig` expects."""


class Commit(Operation):
    after = 5

    def run(self, rig):
        return rig.commit(self.after)

    def succeeded(self, rig):
        rig.expect_zero(range(self.before, self.after))


class Grow(Commit):
    before, after = 2, 6


class Shrink(Operation):
    before, after = 6, 2

    def run(self, rig):
        return rig.shrink(self.after)

    def succeeded(self, rig):
        rig.forget(self.after)


class Release(Shrink):
    after = 0

    def run(self, rig):
        return rig.release()


class Recommit(Operation):
    after = 4

    def prepare(self, rig):
        assert rig.reserve() == 0
        assert rig.commit(self.after) == 0
        rig.write(range(self.after))
        assert rig.release() == 0
        rig.forget(0)

    def run(self, rig):
        return rig.recommit()

    def succeeded(self, rig):
        rig.expect_zero(range(self.after))


class Defragment(Operation):
    before, after = 6, 6

    def prepare(self, rig):
        assert rig.reserve() == 0
        for blocks in (1, 3, 6):
            assert rig.commit(blocks) == 0
        rig.write(range(6))

    def run(self, rig):
        return rig.defragment()

    def succeeded(self, rig):
        rig.expect_zero(range(6))


class Free(Shrink):
    frees, after = True, 0

    def run(self, rig):
        return rig.unreserve()


OPERATIONS = {
    kind.__name__.lower(): kind for kind in (Commit, Grow, Shrink, Release, Recommit, Defragment, Free)
}


def rules_once(stub, n):
    stub.fail_nth(None, n, UNKNOWN, 0)


def rules_out_of_memory(stub, n):
    stub.fail_nth(None, n, OUT_OF_MEMORY, 0)


def rules_persistent(stub, n):
    stub.fail_nth(stub.prefix, n, UNKNOWN, 1)


def rules_failing_undo(stub, n):
    stub.fail_nth(None, n, UNKNOWN, 0)
    stub.fail_after_first(stub.prefix, 1, UNKNOWN, 1)


def rules_undo_fails_once(stub, n):
    """The first call fails, and one of the calls that undo it."""
    stub.fail_nth(stub.prefix, n // UNDO_CALLS + 1, UNKNOWN, 0)
    stub.fail_after_first(stub.prefix, n % UNDO_CALLS + 1, UNKNOWN, 0)


MODES = {
    "once": rules_once,
    "out-of-memory": rules_out_of_memory,
    "persistent": rules_persistent,
    "failing-undo": rules_failing_undo,
    "undo-fails-once": rules_undo_fails_once,
}
UNDONE = ("once", "out-of-memory")  # the undo works, so all is as it was before


def after_failure(rig, operation, mode, before, stub) -> None:
    """Check what a failed attempt left."""
    if operation.frees:
        return  # half freed, and can be freed again
    info = rig.info()
    if mode in UNDONE:
        assert info.physical_bytes == before.physical_bytes
        assert info.num_chunks == before.num_chunks
        rig.check(operation.before, stub)
    else:  # what could not be put back is given up; what is left is a prefix with its content
        assert info.committed_blocks <= operation.before
        rig.forget(info.committed_blocks)
        check_with_orphans(rig, info.committed_blocks, stub)


def check_with_orphans(rig, committed, stub) -> None:
    """As `rig.check`, where an unmapped handle may still be waiting to be taken back."""
    info = rig.info()
    rig.check(committed)
    assert info.physical_bytes == stub.used_bytes(0)
    assert info.num_chunks == stub.live_mappings()
    assert not stub.num_violations(), stub.text()


def climb(driver: str, layout: str, name: str, mode: str, max_chunk: float) -> int:
    """Climb one ladder; returns the number of its steps."""
    from rig import Rig

    from allocator.shim import last_error

    stub, operation, n = Stub(driver), OPERATIONS[name](), 0
    misses = 0
    while misses < (UNDO_CALLS if mode == "undo-fails-once" else 1):
        n += 1
        assert n < 4000
        rig = Rig(driver, layout, max_chunk_granules=max_chunk)
        operation.prepare(rig)
        before, fired = rig.info(), stub.injected()
        MODES[mode](stub, n)
        status = operation.run(rig)
        text = last_error()[1]
        fired = stub.injected() - fired
        stub.fail_clear()
        misses = 0 if fired else misses + 1
        if status:
            assert fired, text
            assert f"{driver}: " in text and "device 0" in text, text  # invariant 8
            after_failure(rig, operation, mode, before, stub)
            before_retry = rig.info().committed_blocks if rig.reservation else 0
            if operation.before and before_retry < operation.before and not operation.frees:
                assert rig.commit(operation.before) == 0, last_error()  # what was lost can be had again
                rig.expect_zero(range(before_retry, operation.before))
                rig.write(range(operation.before))
            assert operation.run(rig) == 0, (n, text, last_error())
        if operation.frees:
            assert rig.reservation is None
        else:
            operation.succeeded(rig)
            check_with_orphans(rig, operation.after, stub)
            assert rig.commit(rig.capacity) in (0, 1)
            assert rig.unreserve() == 0, last_error()
        assert not any(stub.live().values()), (n, stub.live(), text)
        assert not stub.num_violations(), (n, stub.text())
        assert stub.thread_pushes() == 0
    return n


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("driver", ["cuda", "hip"])
@in_child(options=OPTIONS)
def test_ladder_any_call_fails_state_is_kept_and_retry_succeeds(driver, name):
    for mode in MODES:
        for layout, max_chunk in (("block-major", 2), ("kv-split", 0), ("layers", 0)):
            print(driver, name, mode, layout, climb(driver, layout, name, mode, max_chunk), flush=True)


@pytest.mark.parametrize("driver", ["cuda", "hip"])
@in_child(options=OPTIONS)
def test_ladder_opening_a_device_fails_then_opens(driver):
    from rig import Rig

    from allocator.shim import last_error

    stub, n = Stub(driver), 0
    while True:
        n += 1
        rig, fired = Rig(driver, "block-major"), stub.injected()
        stub.fail_nth(None, n, UNKNOWN, 0)
        status = rig.reserve()
        fired = stub.injected() - fired
        stub.fail_clear()
        if not status:
            assert rig.unreserve() == 0
        if not fired:
            assert not status, last_error()
            break
        if driver == "cuda":
            assert stub.context_references(0) <= 1, (n, last_error())
        assert stub.live_streams() <= 1, (n, last_error())
    assert n > 3
    assert not any(stub.live().values())
