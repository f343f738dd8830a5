"""What PyTorch's cache holds for the widest step, and how to take it again after it was emptied.

The cache's size leaves room for that memory, and a nap loses it: vLLM empties PyTorch's cache when it sleeps
and when it wakes up. Whoever takes it meanwhile would not be seen before a batch runs out of memory, and
without a neighbour the first requests would cut it up in their own order (see `least_cache`).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

__all__ = ["StepMemory"]

Sizes = Counter[tuple[int, int]]  # of PyTorch's segments: stream, bytes
DEFAULT_POOL = (0, 0)
SMALL_BYTES = 2 << 20


class StepMemory:
    """What PyTorch's allocator kept on `device` after the widest step, and nothing used; none on a CPU."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.kept, self.used = large_segments(device)

    def take(self) -> list[Any]:
        """Return tensors over that memory; while they live it stays, however often the cache is emptied.

        Dropped, they leave it to PyTorch's cache. What is in use by now is not taken a second time, and no
        other segment is cut up for it: all others that nothing uses go back to the device. Raises
        `PoolOutOfMemoryError`, and takes nothing then.
        """
        import torch

        from allocator.torch_routing import empty_cache

        held, missing = self._hold_cached()
        empty_cache(self.device)
        taken: list[Any] = []
        try:
            for stream, size in missing.elements():
                taken.append(empty(self.device, stream, size))
        except torch.OutOfMemoryError as error:
            from allocator.errors import PoolOutOfMemoryError

            taken.clear()
            empty_cache(self.device)
            needed = sum(size for _, size in self.kept.elements())
            num_bytes = sum(size for _, size in missing.elements())
            raise PoolOutOfMemoryError(
                f"the widest step needs {needed} bytes beside the KV cache; {num_bytes} of them are "
                f"missing and not free on {self.device}: {error}"
            ) from error
        return held + taken

    def trim(self) -> None:
        """Give back what else PyTorch caches, such as what loading weights left."""
        from allocator.torch_routing import empty_cache

        held, _ = self._hold_cached()
        empty_cache(self.device)
        del held

    def _hold_cached(self) -> tuple[list[Any], Sizes]:
        """Return tensors over what PyTorch still caches of that memory, and what is missing besides."""
        kept, used = large_segments(self.device)
        wanted = self.kept - (used - self.used)
        cached = wanted & kept
        return [empty(self.device, stream, size) for stream, size in cached.elements()], wanted - cached


def large_segments(device: Any) -> tuple[Sizes, Sizes]:
    """Count the segments of PyTorch's default pool: those that no tensor lives in, and the others.

    Small ones, of 2 MiB for tensors of up to 1 MiB, are left out; of expandable ones the free blocks count.
    """
    kept: Sizes = Counter()
    used: Sizes = Counter()
    if device.type != "cuda":
        return kept, used
    import torch

    from allocator.torch_routing import current_allocator

    if current_allocator() != "native":
        return kept, used
    for segment in torch.cuda.memory_snapshot():
        if segment["device"] != device.index or segment["segment_type"] != "large":
            continue
        if tuple(segment["segment_pool_id"]) != DEFAULT_POOL:
            continue
        if segment["is_expandable"]:  # one for everything, and emptied block by block
            blocks = (b["size"] for b in segment["blocks"] if b["state"] == "inactive")
            kept.update((segment["stream"], size) for size in blocks if size > SMALL_BYTES)
        else:
            sizes = used if segment["active_size"] else kept
            sizes[segment["stream"], segment["total_size"]] += 1
    return kept, used


def empty(device: Any, stream: int, num_bytes: int) -> Any:
    """Return a tensor that is a segment's whole size, for the work of `stream`, an address."""
    import torch

    # PyTorch takes address 0, the default stream's, for "any stream".
    owner = torch.cuda.ExternalStream(stream, device=device) if stream else torch.cuda.default_stream(device)
    with torch.cuda.stream(owner):
        return torch.empty(num_bytes, dtype=torch.int8, device=device)
