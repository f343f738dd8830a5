"""Random sequences of operations on a reservation, against a plain-dict model, per driver and layout.

After every step: committed blocks hold what was written or zero, nothing outside of the chunks can be read,
base pointers have not moved, and the driver's books agree (invariants 1 to 6).
"""

from __future__ import annotations

import os

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
from stub_lab import SANITIZED, Stub, in_child

MAX_EXAMPLES = 5 if SANITIZED in os.environ else 25
STEPS = 18
fractions = st.floats(0, 1)
operations = st.sampled_from(["commit", "shrink", "release", "recommit", "defragment"])


def machine(driver: str, layout: str, max_chunk: float) -> type[RuleBasedStateMachine]:
    """Return a state machine over one driver, layout and chunk size (in granules; 0: no limit)."""
    from rig import Rig

    stub = None if driver == "host" else Stub(driver)

    class Machine(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.rig = Rig(driver, layout, max_chunk_granules=max_chunk)
            self.committed, self.released = 0, None
            assert self.rig.reserve() == 0

        def blocks(self, fraction: float, least: int = 0) -> int:
            return least + round(fraction * (self.rig.capacity - least))

        def plan(self, name: str, fraction: float):
            """Return what to call, and what to expect once it has worked."""
            target, was_released = self.blocks(fraction), self.released is not None

            def grown():
                self.rig.expect_zero(range(self.committed, target))
                self.committed = max(self.committed, target)

            def shrunk():
                if not was_released and target < self.committed:
                    self.committed = target
                    self.rig.forget(target)
                    self.rig.check_nothing_spare(target)

            def let_go():
                if not was_released:
                    self.released, self.committed = self.committed, 0
                    self.rig.forget(0)

            def back():
                if was_released:
                    self.committed, self.released = self.released, None
                    self.rig.expect_zero(range(self.committed))

            def defragmented():
                self.rig.expect_zero(range(self.committed))
                assert self.rig.info().num_chunks <= len(self.rig.segments)

            return {
                "commit": (lambda: self.rig.commit(target), grown),
                "shrink": (lambda: self.rig.shrink(target), shrunk),
                "release": (self.rig.release, let_go),
                "recommit": (self.rig.recommit, back),
                "defragment": (self.rig.defragment, defragmented),
            }[name]

        def is_refused(self, name: str) -> bool:
            return self.released is not None and name in ("commit", "defragment")

        @rule(name=operations, fraction=fractions)
        def works(self, name, fraction):
            if not self.is_refused(name):
                run, succeeded = self.plan(name, fraction)
                assert run() == 0
                succeeded()

        @rule(name=operations, fraction=fractions, n=st.integers(1, 60), code=st.sampled_from([1, 2, 999]))
        @precondition(lambda self: stub is not None)
        def works_or_changes_nothing_when_a_call_fails(self, name, fraction, n, code):
            if not self.is_refused(name):
                run, succeeded = self.plan(name, fraction)
                stub.fail_nth(None, n, code, 0)
                status = run()
                stub.fail_clear()
                if not status:
                    succeeded()

        @rule(fraction=fractions, width=st.integers(1, 4))
        @precondition(lambda self: self.committed)
        def write(self, fraction, width):
            first = round(fraction * (self.committed - 1))
            self.rig.write(range(first, min(first + width, self.committed)))

        @rule(fraction=fractions)
        @precondition(lambda self: self.released is not None)
        def commit_while_released_is_refused(self, fraction):
            assert self.rig.commit(self.blocks(fraction, 1)) == 1

        @rule(extra=st.integers(1, 1 << 40))
        def commit_past_the_capacity_is_refused(self, extra):
            assert self.rig.commit(self.rig.capacity + extra) == 1

        @rule()
        def free_and_reserve(self):
            self.teardown()
            self.__init__()

        @invariant()
        def holds(self):
            self.rig.check(self.committed, stub)

        def teardown(self):
            if self.rig.reservation is not None:
                assert self.rig.unreserve() == 0
                self.rig.content.clear()
            if stub is not None:
                assert not any(stub.live().values()), stub.live()

    return Machine


@pytest.mark.parametrize("driver", ["host", "cuda", "hip"])
@in_child(options=f"total_memory={1 << 30}")
def test_any_sequence_of_operations_agrees_with_the_model(driver):
    from rig import LAYOUTS

    chosen = settings(
        max_examples=MAX_EXAMPLES,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    for i, layout in enumerate(LAYOUTS):
        for max_chunk in (0, (1, 2, 5)[i % 3]):
            run_state_machine_as_test(machine(driver, layout, max_chunk), settings=chosen)


@pytest.mark.parametrize("driver", ["host", "cuda", "hip"])
@in_child(leaks=True)
def test_touching_the_first_block_past_the_chunks_kills_the_process(driver):
    import signal
    import subprocess
    import sys

    code = (
        "import ctypes, sys; from rig import Rig; r = Rig(sys.argv[1], 'layers'); "
        "assert r.reserve() == 0 and r.commit(2) == 0; "
        "ctypes.string_at(r.address(3, 1), 1); print('alive', flush=True); "
        "ctypes.string_at(r.address(3, 2), 1); print('not killed', flush=True)"
    )
    child = subprocess.run(
        [sys.executable, "-c", code, driver], capture_output=True, text=True, env=os.environ, check=False
    )
    assert child.stdout == "alive\n", (child.stdout, child.stderr)
    assert child.returncode == -signal.SIGSEGV
