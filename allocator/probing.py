"""What the driver of a device can do, found out by really doing it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from allocator.errors import EkvError
from allocator.shim import DRIVER_KINDS, HANDLE_KINDS, check, ffi, lib
from allocator.torch_routing import driver_of, resolve_device

__all__ = ["Probe", "memory_info", "probe", "reserved_bytes"]

_REASON_BYTES = 1024


@dataclass(frozen=True)
class Probe:
    """The answer of `probe`.

    Attributes
    ----------
    available : bool
        Virtual memory management works: a granule was reserved, backed, written and given back.
    reason : str
        Why it does not; empty otherwise.
    handle_kind : str
        The best kind of shareable handle that really allocated: "fabric", "fd+rdma", "fd" or "none".
    handle_reason : str
        Why the better kinds did not.
    granularity, recommended_granularity, shareable_granularity : int
        In bytes: the unit of mapping, the size the driver recommends, and the unit for `handle_kind`.
    gpu_direct_rdma : bool
        The device's attribute.
    """

    device: str
    driver: str
    available: bool
    reason: str = ""
    handle_kind: str = "none"
    handle_reason: str = ""
    granularity: int = 0
    recommended_granularity: int = 0
    shareable_granularity: int = 0
    gpu_direct_rdma: bool = False


def probe(device: torch.device | str | int | None = None) -> Probe:
    """Find out what the driver of `device` can do. Never raises for a device or driver that cannot."""
    torch_device: torch.device | str | int | None = device
    driver_name = "none"
    try:
        torch_device = resolve_device(device)
        driver, index = driver_of(torch_device)
        driver_name = DRIVER_KINDS[driver]
        info = ffi.new("ekv_probe_info *")
        reason = ffi.new("char[]", _REASON_BYTES)
        check(lib.ekv_probe(driver, index, info, reason, _REASON_BYTES))
    except EkvError as error:
        return Probe(str(torch_device), driver_name, available=False, reason=str(error))
    return Probe(
        device=str(torch_device),
        driver=driver_name,
        available=True,
        handle_kind=HANDLE_KINDS[info.handle_kind],
        handle_reason=ffi.string(reason).decode(errors="replace"),
        granularity=info.granularity,
        recommended_granularity=info.recommended_granularity,
        shareable_granularity=info.shareable_granularity,
        gpu_direct_rdma=bool(info.gpu_direct_rdma),
    )


def memory_info(device: torch.device | str | int | None = None) -> tuple[int, int]:
    """Return the driver's `(free_bytes, total_bytes)` of `device`.

    On the host driver the budget (`EKV_HOST_BUDGET`) and what is left of it, or the machine's memory.
    Raises `DriverError` when the driver cannot be used.
    """
    driver, index = driver_of(resolve_device(device))
    free, total = ffi.new("uint64_t *"), ffi.new("uint64_t *")
    check(lib.ekv_memory_info(driver, index, free, total))
    return free[0], total[0]


def reserved_bytes(device: torch.device | str | int | None = None) -> int:
    """Return the bytes of addresses that this process holds on `device`, backed or not.

    PyTorch's counters take them for memory, also those of dead tensors, which it keeps for the next one.
    """
    return int(lib.ekv_reserved_bytes(*driver_of(resolve_device(device))))
