"""The built C shim: `ffi`, `lib`, its path, and the one place where its status becomes an exception."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from allocator import errors
from allocator._ekv import ffi, lib

__all__ = ["DRIVER_KINDS", "HANDLE_KINDS", "check", "ffi", "ids_argument", "lib", "library_path"]

DRIVER_KINDS = {lib.EKV_HOST: "host", lib.EKV_CUDA: "cuda", lib.EKV_HIP: "hip"}
HANDLE_KINDS = {
    lib.EKV_HANDLE_NONE: "none",
    lib.EKV_HANDLE_FD: "fd",
    lib.EKV_HANDLE_FD_RDMA: "fd+rdma",
    lib.EKV_HANDLE_FABRIC: "fabric",
}
_TEXT_BYTES = 1024


def library_path() -> str:
    """Return the shared object's path, for `CUDAPluggableAllocator`: it is the one Python has loaded."""
    from allocator import _ekv

    assert _ekv.__file__ is not None
    return _ekv.__file__


def last_error() -> tuple[int, str]:
    """Return status and text of the calling thread's last call."""
    text = ffi.new("char[]", _TEXT_BYTES)
    return lib.ekv_last_error(text, _TEXT_BYTES), ffi.string(text).decode(errors="replace")


def check(status: int) -> None:
    """Raise what `status` of the call just made on this thread stands for; return when it is 0."""
    if status == lib.EKV_OK:
        return
    text = last_error()[1]
    if status == lib.EKV_OUT_OF_MEMORY:
        raise errors.PoolOutOfMemoryError(text)
    if status in (lib.EKV_INVALID, lib.EKV_FREED):
        raise errors.PoolValueError(text)
    if status == lib.EKV_UNSUPPORTED:
        raise errors.UnsupportedError(text)
    raise errors.DriverError(text)


def ids_argument(ids: Sequence[int]) -> tuple[Any, int]:
    """Return reservation ids as the two arguments that the C functions take."""
    return ffi.new("uint64_t[]", list(ids)), len(ids)
