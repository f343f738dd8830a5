"""The stub drivers refuse what the real ones refuse, and more; their layouts are those of the headers."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
from c_build import CSRC, TESTS, WARNINGS, compile_c
from stub_lab import GRANULE, Stub, in_child

CUDA_HEADERS = sorted(Path("/usr/local").glob("cuda*/include/cuda.h"))
INVALID, OUT_OF_MEMORY, BAD_CONTEXT, ILLEGAL = 1, 2, 201, 700


@pytest.mark.skipif(not CUDA_HEADERS, reason="no cuda.h on this machine")
def test_cuda_declarations_agree_with_the_published_header():
    include = f"-I{CUDA_HEADERS[-1].parent}"
    sources = [TESTS / "c" / "cuda_abi.c"]
    headers = [TESTS / "stubs" / "cuda_types.h"]
    program = compile_c("cuda_abi", sources, (*WARNINGS, "-std=c11", include), headers)
    subprocess.run([str(program)], check=True)
    shim = TESTS / "c" / "cuda_abi_shim.c"
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", include]
    subprocess.run(["cc", *flags, f"-I{CSRC}", str(shim)], check=True)


class Raw:
    """The CUDA stub's own calls, as a program without the shim would make them."""

    def __init__(self):
        self.stub = Stub("cuda")
        self.library = self.stub.driver
        assert self.library.cuInit(0) == 0
        context = ctypes.c_void_p()
        assert self.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        assert self.library.cuCtxPushCurrent_v2(context) == 0
        self.properties = (ctypes.c_int * 8)(1, 0, 1, 0, 0, 0, 0, 0)
        self.access = (ctypes.c_int * 3)(1, 0, 3)

    def call(self, name, *arguments):
        converted = [ctypes.c_uint64(a) if isinstance(a, int) else a for a in arguments]
        return getattr(self.library, name)(*converted)

    def reserve(self, granules):
        out = ctypes.c_uint64()
        assert self.call("cuMemAddressReserve", ctypes.byref(out), granules * GRANULE, 0, 0, 0) == 0
        return out.value

    def create(self, granules):
        out = ctypes.c_uint64()
        assert self.call("cuMemCreate", ctypes.byref(out), granules * GRANULE, self.properties, 0) == 0
        return out.value

    def mapped(self, granules, pieces=1):
        base = self.reserve(granules * pieces)
        for i in range(pieces):
            handle = self.create(granules)
            size = granules * GRANULE
            assert self.call("cuMemMap", base + i * size, size, 0, handle, 0) == 0
            assert self.call("cuMemRelease", handle) == 0
        return base

    def refused(self, code, name, *arguments):
        """Call, and expect that code and one more violation."""
        before = self.stub.num_violations()
        assert self.call(name, *arguments) == code, self.stub.text()
        assert self.stub.num_violations() == before + 1, self.stub.text()


@in_child(leaks=True, violations=True)
def test_misuse_of_addresses_and_handles_is_refused():
    raw, g = Raw(), GRANULE
    base, handle = raw.reserve(8), raw.create(2)
    out = ctypes.byref(ctypes.c_uint64())
    raw.refused(INVALID, "cuMemAddressReserve", out, g // 2, 0, 0, 0)
    raw.refused(INVALID, "cuMemAddressReserve", out, g, 3, 0, 0)
    raw.refused(INVALID, "cuMemAddressReserve", out, g, 0, 0, 1)
    raw.refused(INVALID, "cuMemCreate", out, g + 4096, raw.properties, 0)
    raw.refused(INVALID, "cuMemMap", base + 4096, 2 * g, 0, handle, 0)
    raw.refused(INVALID, "cuMemMap", base, g, 0, handle, 0)  # not the whole handle
    raw.refused(INVALID, "cuMemMap", base, g, g, handle, 0)  # at an offset
    raw.refused(INVALID, "cuMemMap", base + 7 * g, 2 * g, 0, handle, 0)  # past the end
    raw.refused(INVALID, "cuMemMap", base, 2 * g, 0, 12345, 0)
    assert raw.call("cuMemMap", base, 2 * g, 0, handle, 0) == 0
    raw.refused(INVALID, "cuMemMap", base + g, 2 * g, 0, handle, 0)  # over a mapping
    raw.refused(INVALID, "cuMemUnmap", base, g)  # part of a mapping
    raw.refused(INVALID, "cuMemUnmap", base, 3 * g)  # more than it
    raw.refused(INVALID, "cuMemUnmap", base + 4 * g, g)
    raw.refused(INVALID, "cuMemSetAccess", base, g, raw.access, 1)
    raw.refused(INVALID, "cuMemSetAccess", base + 2 * g, g, raw.access, 1)
    raw.refused(INVALID, "cuMemAddressFree", base, 8 * g)  # still mapped
    assert raw.call("cuMemRelease", handle) == 0
    raw.refused(INVALID, "cuMemRelease", handle)  # the mapping keeps the memory, not the handle
    raw.refused(INVALID, "cuMemMap", base + 4 * g, 2 * g, 0, handle, 0)
    assert raw.stub.live_handles() == 1
    assert raw.call("cuMemUnmap", base, 2 * g) == 0
    assert raw.stub.live_handles() == 0
    assert raw.stub.used_bytes(0) == 0
    raw.refused(INVALID, "cuMemAddressFree", base, 4 * g)
    raw.refused(INVALID, "cuMemAddressFree", base + g, 7 * g)
    assert raw.call("cuMemAddressFree", base, 8 * g) == 0
    raw.refused(INVALID, "cuMemAddressFree", base, 8 * g)


@in_child(leaks=True, violations=True)
def test_memory_without_access_is_fatal_to_the_context():
    raw = Raw()
    base = raw.mapped(1, pieces=2)
    raw.refused(ILLEGAL, "cuMemsetD8_v2", base, 0, GRANULE)
    assert raw.call("cuCtxSynchronize") == ILLEGAL  # sticky
    raw.stub.reset()
    assert raw.call("cuMemSetAccess", base, 2 * GRANULE, raw.access, 1) == 0  # once over two mappings
    assert raw.call("cuMemsetD8_v2", base, 7, 2 * GRANULE) == 0
    assert ctypes.string_at(base, 1) == b"\xa5"  # not yet: nobody has waited
    raw.call("cuMemUnmap", base, GRANULE)
    assert "enqueued work still uses" in raw.stub.text()


@in_child(leaks=True, violations=True)
def test_work_is_done_when_its_stream_is_waited_for():
    raw = Raw()
    base = raw.mapped(1)
    assert raw.call("cuMemSetAccess", base, GRANULE, raw.access, 1) == 0
    streams = []
    for _ in range(2):
        out = ctypes.c_uint64()
        assert raw.call("cuStreamCreate", ctypes.byref(out), 1) == 0
        streams.append(out.value)
    assert raw.call("cuMemsetD8Async", base, 1, 16, streams[0]) == 0
    assert raw.call("cuStreamSynchronize", streams[1]) == 0
    assert ctypes.string_at(base, 1) == b"\xa5"
    assert raw.call("cuStreamSynchronize", 0) == 0  # the default stream does not wait for these
    assert ctypes.string_at(base, 1) == b"\xa5"
    assert raw.call("cuStreamSynchronize", streams[0]) == 0
    assert ctypes.string_at(base, 1) == b"\x01"
    assert raw.call("cuStreamDestroy_v2", streams[0]) == 0
    raw.refused(400, "cuMemsetD8Async", base, 1, 16, streams[0])


@in_child(leaks=True, violations=True)
def test_calls_need_a_context_and_its_stack_balances():
    raw = Raw()
    popped = ctypes.c_void_p()
    assert raw.library.cuCtxPopCurrent_v2(ctypes.byref(popped)) == 0
    raw.refused(BAD_CONTEXT, "cuMemAddressFree", 4096, 4096)
    raw.refused(BAD_CONTEXT, "cuCtxPopCurrent_v2", ctypes.byref(popped))
    assert raw.library.cuDevicePrimaryCtxRelease_v2(0) == 0
    raw.refused(BAD_CONTEXT, "cuDevicePrimaryCtxRelease_v2", 0)
    raw.refused(BAD_CONTEXT, "cuCtxPushCurrent_v2", popped)


@in_child(leaks=True, violations=True)
def test_capture_refuses_unsafe_calls_unless_relaxed():
    raw = Raw()
    out = ctypes.byref(ctypes.c_uint64())
    raw.stub.begin_capture()
    raw.refused(900, "cuMemAlloc_v2", out, 4096)
    assert raw.stub.end_capture() == 1
    raw.stub.begin_capture()
    mode = ctypes.c_int(2)
    assert raw.library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == 0
    assert mode.value == 0
    assert raw.call("cuMemAlloc_v2", out, 4096) == 0
    assert raw.stub.end_capture() == 0
    raw.stub.begin_capture()
    raw.refused(900, "cuCtxSynchronize")
    assert raw.stub.end_capture() == 1


@in_child(leaks=True, violations=True)
def test_handle_export_and_import_share_memory():
    raw = Raw()
    raw.properties[1] = 1  # POSIX file descriptor
    base, handle, file = raw.reserve(2), raw.create(1), ctypes.c_int()
    assert raw.call("cuMemExportToShareableHandle", ctypes.byref(file), handle, 1, 0) == 0
    other = ctypes.c_uint64()
    assert raw.call("cuMemImportFromShareableHandle", ctypes.byref(other), file.value, 1) == 0
    for i, each in enumerate((handle, other.value)):
        assert raw.call("cuMemMap", base + i * GRANULE, GRANULE, 0, each, 0) == 0
    assert raw.call("cuMemSetAccess", base, 2 * GRANULE, raw.access, 1) == 0
    ctypes.memset(base, 42, 1)
    assert ctypes.string_at(base + GRANULE, 1) == b"*"
    assert raw.stub.used_bytes(0) == GRANULE
    assert not raw.stub.num_violations(), raw.stub.text()
