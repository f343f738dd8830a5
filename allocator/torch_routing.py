"""How tensor factories become growable: the only module that knows PyTorch's allocator machinery.

`RoutingMode` sees the factories that run inside `extensible_kv_pool()` on its thread and hands those that the
pool takes to `reserve_tensor`. On a GPU that is `torch.empty_strided` in a `MemPool` over the pluggable
allocator; on the CPU, where PyTorch has no pluggable allocator, it is a tensor over the reservation.
"""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from allocator import errors
from allocator.errors import DriverError, PoolValueError, UnsupportedError
from allocator.reservation import Reservation
from allocator.shim import check, ffi, last_error, lib, library_path

__all__ = [
    "RoutingMode",
    "call_with_room",
    "current_allocator",
    "driver_of",
    "empty_cache",
    "pluggable_allocator",
    "refuse_while_capturing",
    "reserve_tensor",
    "resolve_device",
]

_lock = threading.RLock()
_allocator: torch.cuda.memory.CUDAPluggableAllocator | None = None
_mempools: dict[tuple[torch.device, bool], Any] = {}


def resolve_device(device: torch.device | str | int | None) -> torch.device:
    """Return `device` with its index; None is the current CUDA device, or the CPU where there is none.

    Raises
    ------
    UnsupportedError
        A GPU is asked for where PyTorch sees none.
    PoolValueError
        PyTorch knows no such device.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(device, str):
        try:
            device = torch.device(device)
        except RuntimeError:
            message = f"there is no device {device!r}: a pool is on 'cpu', 'cuda' or 'cuda:1'"
            raise PoolValueError(message) from None
    if (isinstance(device, int) or torch.device(device).type == "cuda") and not torch.cuda.is_available():
        raise UnsupportedError(
            f"device {device!s} was asked for, and PyTorch {torch.__version__} sees no GPU here: use 'cpu', "
            "or install a PyTorch that fits the driver (nvidia-smi shows it)"
        )
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device


def driver_of(device: torch.device) -> tuple[int, int]:
    """Return the shim's driver and device number for a torch device."""
    if device.type == "cpu":
        return lib.EKV_HOST, 0
    if device.type == "cuda":
        return lib.EKV_HIP if torch.version.hip else lib.EKV_CUDA, device.index
    raise DriverError(f"no driver serves device '{device}': only cuda (CUDA or ROCm) and cpu")


def pluggable_allocator() -> torch.cuda.memory.CUDAPluggableAllocator:
    """Return the process's `CUDAPluggableAllocator` over `ekv_malloc` and `ekv_free`.

    For `torch.cuda.memory.change_current_allocator`, before any CUDA allocation of the process. Then every
    allocation reaches the shim: those that a pool takes become growable, the rest comes from the shim's
    cache. PyTorch refuses `memory_stats()` and `MemPool` in that mode, and memory that a captured graph
    touches stays with the process when the graph is destroyed.
    """
    global _allocator
    with _lock:
        if _allocator is None:
            if torch.version.hip:
                check(lib.ekv_torch_driver(lib.EKV_HIP))
            _allocator = torch.cuda.memory.CUDAPluggableAllocator(library_path(), "ekv_malloc", "ekv_free")
            _set_hook(_allocator, "set_record_stream_fn", "ekv_record_stream")
            _set_hook(_allocator, "set_reset_fn", "ekv_empty_cache")
        return _allocator


def _set_hook(allocator: torch.cuda.memory.CUDAPluggableAllocator, setter: str, function: str) -> None:
    """Hand PyTorch one of the shim's functions, by address; a PyTorch without the hook does without it."""
    hooks: Any = allocator.allocator()
    if hasattr(hooks, setter):
        getattr(hooks, setter)(int(ffi.cast("uintptr_t", ffi.addressof(lib, function))))


def current_allocator() -> str:
    """Return PyTorch's GPU allocator: "native", "cudaMallocAsync", "pluggable", "foreign" or "none".

    "foreign" is a pluggable allocator where nobody has asked for `pluggable_allocator`, "none" a PyTorch that
    was built without GPUs.
    """
    try:
        backend = str(torch.cuda.get_allocator_backend())
    except AttributeError:
        return "none"
    return "foreign" if backend == "pluggable" and _allocator is None else backend


def empty_cache(device: torch.device) -> None:
    """Give what PyTorch caches on `device` back to it."""
    if device.type == "cuda" and torch.cuda.is_initialized():
        _collect()
        if _has_caching_allocator():
            with torch.cuda.device(device):
                torch.cuda.empty_cache()
        else:
            lib.ekv_empty_cache()


def call_with_room(
    call: Callable[[], int], device: torch.device, what: Callable[[], str], may_empty_cache: bool = True
) -> None:
    """Check the shim call `call`; when it is short of memory, empty PyTorch's cache and try once more.

    The last error says `what()` was asked for and how much is free. `may_empty_cache=False`: only one try.
    """
    if may_empty_cache:
        try:
            return check(call())
        except errors.PoolOutOfMemoryError:
            empty_cache(device)
    try:
        check(call())
    except errors.PoolOutOfMemoryError as error:
        error.args = (f"{what()} on {device}{_room(device)}: {error}",)
        raise


def _room(device: torch.device) -> str:
    free, total = ffi.new("uint64_t *"), ffi.new("uint64_t *")
    if lib.ekv_memory_info(*driver_of(device), free, total):
        return ""
    return f", with {free[0]} of {total[0]} bytes free"


def refuse_while_capturing(operation: str, device: torch.device) -> None:
    """Raise for an operation that waits for the device, which would spoil this stream's capture."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise PoolValueError(f"{operation} waits for {device}: it cannot run while a stream is captured")


def reserve_tensor(
    size: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    max_chunk_bytes: int,
    shareable: bool,
) -> tuple[torch.Tensor, Reservation]:
    """Make a tensor over a new reservation: addresses only, reading or writing it faults until a commit.

    When the last tensor over its storage dies the memory goes back, and on the host the addresses too; on a
    GPU PyTorch keeps them cached for the next growable tensor.

    Raises
    ------
    DriverError
        Another allocator took the allocation (a MemPool around ours), or the driver failed.
    """
    num_bytes = (sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1) * dtype.itemsize
    if device.type == "cpu":
        return _reserve_on_host(num_bytes, size, stride, dtype, max_chunk_bytes, shareable)
    return _reserve_on_gpu(size, stride, dtype, device, max_chunk_bytes, shareable)


def _reserve_on_host(
    num_bytes: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    max_chunk_bytes: int,
    shareable: bool,
) -> tuple[torch.Tensor, Reservation]:
    reservation = Reservation.reserve(lib.EKV_HOST, 0, num_bytes, max_chunk_bytes, shareable)
    drop, reservation_id = lib.ekv_drop, reservation.id
    owner = ffi.gc(ffi.cast("char *", reservation.base), lambda _: drop(reservation_id))
    raw = torch.frombuffer(ffi.buffer(owner, num_bytes), dtype=torch.uint8)
    return raw.view(dtype).as_strided(size, stride), reservation


def _reserve_on_gpu(
    size: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    max_chunk_bytes: int,
    shareable: bool,
) -> tuple[torch.Tensor, Reservation]:
    _collect()
    mempool = _mempool(device, shareable) if _has_caching_allocator() else None
    check(lib.ekv_route_begin(device.index, max_chunk_bytes, shareable))
    with torch._C.DisableTorchFunction(), _without_filling():
        try:
            with torch.cuda.use_mem_pool(mempool, device=device) if mempool else nullcontext():
                tensor = torch.empty_strided(size, stride, dtype=dtype, device=device)
        except torch.OutOfMemoryError:
            check(last_error()[0])
            raise
        finally:
            reservation_id = lib.ekv_route_end()
    if not reservation_id:
        check(last_error()[0])  # a current allocator that fails gives a tensor at address 0, and no error
        reservation_id = _adopt(tensor, max_chunk_bytes)
    finalizer = weakref.finalize(tensor.untyped_storage(), _on_storage_death, reservation_id)
    finalizer.atexit = False
    return tensor, Reservation(reservation_id)


@contextmanager
def _without_filling() -> Iterator[None]:
    """Keep `torch.use_deterministic_algorithms` from filling new tensors: these have no memory yet."""
    settings: Any = torch.utils.deterministic  # a module whose one attribute is a property
    before = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = before


def _mempool(device: torch.device, shareable: bool) -> Any:
    """Return the MemPool of growable tensors, one for each device and kind; it lives as long as the process.

    `no_split` keeps one allocation per torch segment. It is never destroyed: PyTorch 2.11 ends the process
    when a MemPool dies while any thread captures a graph or is inside another MemPool.
    """
    with _lock:
        if (device, shareable) not in _mempools:
            pool = torch.cuda.MemPool(pluggable_allocator().allocator(), no_split=True)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
            _mempools[device, shareable] = pool
        return _mempools[device, shareable]


def _adopt(tensor: torch.Tensor, max_chunk_bytes: int) -> int:
    """Return the reservation behind a torch block that PyTorch had cached since its last tensor died."""
    out = ffi.new("uint64_t *")
    if lib.ekv_adopt(tensor.untyped_storage().data_ptr(), max_chunk_bytes, out):
        raise DriverError(
            f"{tensor.device}: the allocation of {tensor.untyped_storage().nbytes()} bytes did not reach the "
            "pool's allocator: another MemPool, or another pluggable allocator, is active around it"
        )
    return out[0]


def _on_storage_death(reservation_id: int) -> None:
    """Give the memory back at once; PyTorch keeps the addresses for the next growable tensor."""
    lib.ekv_retire(reservation_id, torch.cuda.is_current_stream_capturing())


def _collect() -> None:
    """Give back what died while a graph was being captured; waits for the device if there is any."""
    if not torch.cuda.is_current_stream_capturing():
        lib.ekv_collect()


def _has_caching_allocator() -> bool:
    return torch.cuda.get_allocator_backend() != "pluggable"


class RoutingMode(TorchFunctionMode):
    """Offers tensor factories of this thread to a pool.

    Parameters
    ----------
    take : callable
        Called with a meta tensor (shape, strides and dtype of the result) of a factory call for the pool's
        device; returns the tensor, or None when the call goes where it always went.
    device : torch.device
        The pool's device, with its index.
    min_bytes : int
        Calls that are surely smaller are not even looked at.
    """

    def __init__(
        self,
        take: Callable[[torch.Tensor], torch.Tensor | None],
        device: torch.device,
        min_bytes: int = 0,
    ) -> None:
        super().__init__()
        self._take = take
        self._device = device
        self._min_bytes = min_bytes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Route `func` when it is a factory; `zeros` becomes `empty`, since commit zeroes new blocks."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        like = _FACTORIES.get(func)
        if like is None or not self._is_candidate(func, like, args, kwargs):
            return func(*args, **kwargs)
        options = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory", "requires_grad")}
        tensor = self._take(func(*args, device="meta", **options))
        if tensor is None:
            return func(*args, **kwargs)
        return tensor.requires_grad_() if kwargs.get("requires_grad") else tensor

    def _is_candidate(self, func: Any, like: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if _most_bytes(func, like, args) < self._min_bytes:
            return False
        if kwargs.get("out") is not None or kwargs.get("pin_memory"):
            return False
        if kwargs.get("layout") not in (None, torch.strided) or _is_transformed():
            return False
        if func is torch.full and not _is_zero(args[1] if len(args) > 1 else kwargs.get("fill_value")):
            return False
        if func is torch.empty_strided and min([*_strides(args, kwargs), 0]) < 0:
            return False  # PyTorch refuses them, except on the meta device
        source = (args[0] if args else kwargs.get("input")) if like else None
        if like and not _is_plain(source):
            return False
        device = kwargs.get("device")
        if device is None:
            device = source.device if isinstance(source, torch.Tensor) else torch.get_default_device()
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return device.type == self._device.type and (device.type == "cpu" or device == self._device)


def _strides(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[1] if len(args) > 1 else kwargs.get("stride", ())


def _is_zero(value: Any) -> bool:
    """Whether a number is zero in all its bits: -0.0 is not."""
    return bool(value == 0) and not str(value).startswith("-")


def _is_plain(source: Any) -> bool:
    """Whether a tensor like `source` is one stretch of strided memory; subclasses say for themselves."""
    return (
        type(source) in (torch.Tensor, torch.nn.Parameter)
        and source.layout == torch.strided
        and not source.is_quantized
        and not source.is_nested
    )


def _is_transformed() -> bool:
    """Whether factories make no plain tensors here: under vmap, grad, a fake or other dispatch mode."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch.utils._python_dispatch._get_current_dispatch_mode() is not None
    )


def _most_bytes(func: Any, like: bool, args: tuple[Any, ...]) -> float:
    """Return a bound on the result's bytes that costs next to nothing, or infinity."""
    if func in _LIKE:
        return args[0].numel() * _MOST_ITEM_BYTES if args else math.inf
    size = args[1:] if like else args
    if func is torch.empty_strided or not size:
        return math.inf
    if not isinstance(size[0], int):
        size = size[0]
    elif func is torch.full:
        return math.inf
    try:
        return math.prod(size) * _MOST_ITEM_BYTES
    except TypeError:
        return math.inf


_MOST_ITEM_BYTES = 16  # complex128
_LIKE = {torch.empty_like, torch.zeros_like}
# The factories that are routed, and whether their first argument is a tensor whose device they take.
_FACTORIES: dict[Any, bool] = {
    torch.empty: False,
    torch.zeros: False,
    torch.full: False,
    torch.empty_strided: False,
    torch.empty_like: True,
    torch.zeros_like: True,
    torch.Tensor.new_empty: True,
    torch.Tensor.new_zeros: True,
}
