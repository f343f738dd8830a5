"""Exceptions of the package: one base, and the built-in a caller would expect beside it.

`PoolOutOfMemoryError` is made on first use, because its base `torch.OutOfMemoryError` needs torch and
importing this module must stay cheap and free of side effects. Importing it by name, catching it and pickling
it work as for any class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = [
    "DriverError",
    "EkvError",
    "PoolOutOfMemoryError",
    "PoolValueError",
    "UnsupportedError",
]


class EkvError(Exception):
    """Base of every error that this package raises on purpose."""


class PoolValueError(EkvError, ValueError):
    """An argument, a size or the state of the object does not allow the call; nothing was changed."""


class DriverError(EkvError, RuntimeError):
    """A driver call failed, not for lack of memory, or the process forked after the driver was used."""


class UnsupportedError(DriverError):
    """Virtual memory management is missing, or unusable, on this device or driver."""


if TYPE_CHECKING:

    class PoolOutOfMemoryError(EkvError, MemoryError):
        """The device has too little memory left for the call; the pool is as it was before."""


def __getattr__(name: str) -> type:
    """Build `PoolOutOfMemoryError` when it is first asked for, and keep it."""
    if name != "PoolOutOfMemoryError":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    bases: tuple[type, ...] = (EkvError, MemoryError)
    try:
        import torch
    except ImportError:
        pass
    else:
        bases = (EkvError, torch.OutOfMemoryError, MemoryError)
    doc = "The device has too little memory left for the call; the pool is as it was before."
    # setdefault: when two threads get here at once, both must end up with the same class.
    return globals().setdefault(name, type(name, bases, {"__module__": __name__, "__doc__": doc}))
