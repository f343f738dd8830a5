"""A PyTorch allocator backend whose KV-cache tensors grow in place.

Importing this package makes no driver call; the first use of a device does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from allocator.errors import (
        DriverError,
        EkvError,
        PoolOutOfMemoryError,
        PoolValueError,
        UnsupportedError,
    )
    from allocator.extensible_tensor import ExtensibleTensor
    from allocator.layout import BlockLayout
    from allocator.pool import PoolController, extensible_kv_pool
    from allocator.probing import Probe, memory_info, probe, reserved_bytes
    from allocator.sharing import ImportedPool, export, import_
    from allocator.torch_routing import pluggable_allocator

_HOMES = {
    "BlockLayout": "layout",
    "DriverError": "errors",
    "EkvError": "errors",
    "ExtensibleTensor": "extensible_tensor",
    "PoolController": "pool",
    "PoolOutOfMemoryError": "errors",
    "PoolValueError": "errors",
    "Probe": "probing",
    "UnsupportedError": "errors",
    "ImportedPool": "sharing",
    "export": "sharing",
    "extensible_kv_pool": "pool",
    "import_": "sharing",
    "memory_info": "probing",
    "pluggable_allocator": "torch_routing",
    "probe": "probing",
    "reserved_bytes": "probing",
}

__all__ = [
    "BlockLayout",
    "DriverError",
    "EkvError",
    "ExtensibleTensor",
    "PoolController",
    "PoolOutOfMemoryError",
    "PoolValueError",
    "Probe",
    "UnsupportedError",
    "ImportedPool",
    "export",
    "extensible_kv_pool",
    "import_",
    "memory_info",
    "pluggable_allocator",
    "probe",
    "reserved_bytes",
]


def __getattr__(name: str) -> Any:
    """Import the module of a public name when the name is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"allocator.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
