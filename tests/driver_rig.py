"""What the driver tests share; imported in their child processes too."""

from __future__ import annotations

import ctypes

import pytest
from stub_lab import Stub

BOTH = pytest.mark.parametrize("driver", ["cuda", "hip"])
SYMBOLS = {
    "cuda": {"create": "cuMemCreate", "map": "cuMemMap", "access": "cuMemSetAccess", "vmm": 102},
    "hip": {"create": "hipMemCreate", "map": "hipMemMap", "access": "hipMemSetAccess", "vmm": 89},
}
MIB = 1 << 20


def rig(driver: str, layout: str = "layers", **arguments):
    from rig import Rig

    made = Rig(driver, layout, **arguments)
    assert made.reserve() == 0, error()
    return made


def reserve(driver: str, size_bytes: int, shareable: bool = False) -> int:
    """Reserve and, when that worked, give back; returns the status."""
    from rig import KINDS

    from allocator.shim import ffi, lib

    out = ffi.new("uint64_t *")
    status = lib.ekv_reserve(KINDS[driver], 0, size_bytes, 0, shareable, out)
    return status or lib.ekv_unreserve(out[0])


def error() -> str:
    from allocator.shim import last_error

    return last_error()[1]


def current_device(driver: str) -> int | None:
    """Return the calling thread's current device; None without a context."""
    library, out = Stub(driver).driver, ctypes.c_int(-1)
    if driver == "hip":
        assert library.hipGetDevice(ctypes.byref(out)) == 0
        return out.value
    context = ctypes.c_void_p()
    assert library.cuCtxGetCurrent(ctypes.byref(context)) == 0
    if not context:
        return None
    assert library.cuCtxGetDevice(ctypes.byref(out)) == 0
    return out.value


def capture_mode(driver: str) -> int:
    """Return the calling thread's stream capture mode."""
    mode = ctypes.c_int(0)
    name = {"cuda": "cuThreadExchangeStreamCaptureMode", "hip": "hipThreadExchangeStreamCaptureMode"}[driver]
    exchange = getattr(Stub(driver).driver, name)
    assert exchange(ctypes.byref(mode)) == 0
    found = mode.value
    assert exchange(ctypes.byref(mode)) == 0
    return found


def make_current(driver: str, device: int) -> None:
    """Play the application: make a device current on this thread."""
    library = Stub(driver).driver
    if driver == "hip":
        assert library.hipSetDevice(device) == 0
        return
    context = ctypes.c_void_p()
    assert library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    assert library.cuCtxSetCurrent(context) == 0
