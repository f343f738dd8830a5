"""The stages of a start, written down by the worker as it goes through them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["STAGES", "Stages", "listen"]

STAGES = ("reserve", "prefix", "warm-up", "measure", "commit")
Listener = Callable[[str, dict[str, Any] | None], None]
_LISTENERS: list[Listener] = []


class Stages:
    """What one worker did: `records`, in order, each plain data.

    A record holds `stage`, `committed_blocks`, `physical_bytes`, `reserved_bytes` (of the pool when the stage
    ended) and `seconds` (wall time of the stage).
    """

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    @contextmanager
    def stage(self, name: str, pool_of: Callable[[], Any]) -> Iterator[None]:
        """Time the block and record it, unless it raises; `pool_of` returns the pool as it is at the end."""
        _tell(name, None)
        start = time.perf_counter()
        yield
        pool = pool_of()
        record = {
            "stage": name,
            "committed_blocks": pool.committed_blocks,
            "physical_bytes": pool.physical_bytes,
            "reserved_bytes": pool.reserved_bytes,
            "seconds": time.perf_counter() - start,
        }
        self.records.append(record)
        _tell(name, record)


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Call `listener(name, None)` when a stage begins in this process, and `listener(name, record)` after it.

    Listeners run in the worker's thread and hold it up; they hear of workers in this process only.
    """
    _LISTENERS.append(listener)
    try:
        yield
    finally:
        _LISTENERS.remove(listener)


def _tell(name: str, record: dict[str, Any] | None) -> None:
    for listener in list(_LISTENERS):
        listener(name, record)
