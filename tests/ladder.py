"""What the fault ladders share: the climb, and two reservations of which one gets the other's memory."""

from __future__ import annotations

import os

from stub_lab import Stub

OPTIONS = f"total_memory={1 << 30}"
OUT_OF_MEMORY, UNKNOWN = 2, 999


def once(stub, n, code):
    stub.fail_nth(None, n, code, 0)


def persistently(stub, n, code):
    stub.fail_nth(stub.prefix, n, code, 1)


def with_a_failing_undo(stub, n, code):
    stub.fail_nth(None, n, code, 0)
    stub.fail_after_first(stub.prefix, 1, UNKNOWN, 1)


WAYS = (once, persistently, with_a_failing_undo)


def climb(stub, prepare, run, failed, succeeded, code=UNKNOWN, way=once) -> int:
    """Fail the n-th call of `run(prepare())`, n = 1, 2, ...; returns how many there are."""
    n = 0
    while True:
        n += 1
        subject = prepare()
        way(stub, n, code)
        status = run(subject)
        fired = stub.injected()
        stub.fail_clear()
        if status:
            assert fired, (n, error())
            failed(subject)
            assert run(subject) == 0, (n, error())
        succeeded(subject)
        assert not any(stub.live().values()), (n, stub.live(), stub.text())
        assert not stub.num_violations(), (n, stub.text())
        if not fired:
            return n


def error() -> str:
    from allocator.shim import last_error

    return last_error()[1]


def opened(driver: str):
    """Open the device, so that a ladder does not climb through that too."""
    from rig import Rig

    warm = Rig(driver, "layers")
    assert warm.reserve() == 0
    assert warm.unreserve() == 0
    return Stub(driver)


class Shared:
    """A reservation with five blocks in several chunks, and one that is to get them."""

    def __init__(self, driver: str) -> None:
        from rig import Rig

        self.rigs = [Rig(driver, "layers", max_chunk_granules=2), Rig(driver, "layers")]
        assert all(rig.reserve(shareable=True) == 0 for rig in self.rigs)
        self.exporter, self.importer = self.rigs
        assert self.exporter.commit(5) == 0
        self.exporter.write(range(5))
        self.files: list[int] = []

    def export(self) -> int:
        from allocator.shim import ffi, lib

        self.close()
        self.chunks = ffi.new("ekv_chunk_info[]", self.exporter.info().num_chunks)
        for i in range(len(self.chunks)):
            file = ffi.new("int *")
            status = lib.ekv_export_chunk(self.exporter.reservation.id, i, self.chunks + i, file)
            if status:
                return status
            self.files.append(file[0])
        return 0

    def import_(self) -> int:
        from allocator.shim import lib

        target = self.importer.reservation.id
        return lib.ekv_import_chunks(target, self.chunks, self.files, len(self.files), 5)

    def close(self) -> None:
        while self.files:
            os.close(self.files.pop())

    def free(self, *_) -> None:
        self.close()
        assert all(rig.unreserve() == 0 for rig in self.rigs)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
