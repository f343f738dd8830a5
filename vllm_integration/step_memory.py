"""What PyTorch's cache holds for the widest step, and how to take it again after it was emptied.

The cache's size leaves room for that memory, and a nap loses it: vLLM empties PyTorch's cache when it sleeps
and when it wakes up. Whoever takes it meanwhile would not be seen before a batch runs out of memory, and
without a neighbour the first requests would cut it up in their own order (see `least_cache`).

PyTorch serves a request from the smallest free block that fits, the lowest address first, and gives only
whole segments back. So whoever wants segments has to hold every other block that would do: what loading
weights left (208 MiB too much on an H200), and the holes in segments that tensors live in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

__all__ = ["StepMemory"]

Sizes = Counter[tuple[int, int]]  # of PyTorch's segments: stream, bytes
DEFAULT_POOL = (0, 0)
SMALL_BYTES = 2 << 20


class FreeBlock(NamedTuple):
    """Memory that PyTorch holds on `stream` and no tensor uses; `whole` if it can be given back."""

    address: int
    stream: int
    size: int
    whole: bool


class StepMemory:
    """What PyTorch's allocator kept on `device` after the widest step, and nothing used; none on a CPU."""

    def __init__(self, device: Any) -> None:
        self.device = device
        free, self.used = large_blocks(device)
        self.kept: Sizes = Counter((block.stream, block.size) for block in free if block.whole)

    def take(self) -> list[Any]:
        """Return tensors over that memory; while they live it stays, however often the cache is emptied.

        Dropped, they leave it to PyTorch's cache. What is in use by now is not taken a second time, and no
        other segment is cut up for it: all others that nothing uses go back to the device. Raises
        `PoolOutOfMemoryError`, and takes nothing then.
        """
        import torch

        from allocator.torch_routing import empty_cache

        held: list[Any] = []
        others: list[Any] = []
        missing = self._hold_cached(held, others)
        empty_cache(self.device)
        cached = len(held)
        try:
            for stream, size in missing.elements():
                held.append(empty(self.device, stream, size))
        except torch.OutOfMemoryError as error:
            from allocator.errors import PoolOutOfMemoryError

            del held[cached:]
            empty_cache(self.device)
            held.clear()  # the error's traceback would keep them
            others.clear()
            needed, gone = (sum(size for _, size in sizes.elements()) for sizes in (self.kept, missing))
            raise PoolOutOfMemoryError(
                f"the widest step needs {needed} bytes beside the KV cache, and {gone} of them have to be "
                f"taken again from {self.device}, which has less: {error}"
            ) from error
        return held

    def trim(self) -> None:
        """Give back what else PyTorch caches, such as what loading weights left."""
        from allocator.torch_routing import empty_cache

        held: list[Any] = []
        others: list[Any] = []
        self._hold_cached(held, others)
        empty_cache(self.device)

    def _hold_cached(self, held: list[Any], others: list[Any]) -> Sizes:
        """Put tensors over what PyTorch still caches of that memory into `held`; return what is missing.

        `others` are over the holes that would serve for what is missing.
        """
        import torch

        if not self.kept:
            return Counter()
        process_events(self.device)
        free, used = large_blocks(self.device)
        missing = self.kept - (used - self.used)
        if not missing:
            return missing
        least = min(size for _, size in missing)
        blocks = {block.address: block for block in free}
        spare: list[Any] = []  # until the end, so that each request gets another block
        for block in free:
            if block.size < least:
                continue
            try:
                tensor = empty(self.device, block.stream, block.size)
            except torch.OutOfMemoryError:  # PyTorch rounds it up to more than the block: it is taken anew
                continue
            found = blocks.get(tensor.data_ptr())
            if found is None:
                spare.append(tensor)
            elif not found.whole:
                others.append(tensor)
            elif missing[found.stream, found.size]:
                missing[found.stream, found.size] -= 1
                held.append(tensor)
            else:
                spare.append(tensor)
        return +missing


def large_blocks(device: Any) -> tuple[list[FreeBlock], Sizes]:
    """Return the free blocks of PyTorch's default pool, and the number of its segments that tensors live in.

    Small ones are left out: of 2 MiB, for tensors of up to 1 MiB. A block whose last use on another stream is
    not known to be over counts as free. Of expandable segments, which are one for everything, what is free is
    given back page by page.
    """
    free: list[FreeBlock] = []
    used: Sizes = Counter()
    if device.type != "cuda":
        return free, used
    import torch

    from allocator.torch_routing import current_allocator

    if current_allocator() != "native":
        return free, used
    for segment in torch.cuda.memory_snapshot():
        if segment["device"] != device.index or segment["segment_type"] != "large":
            continue
        if tuple(segment["segment_pool_id"]) != DEFAULT_POOL:
            continue
        stream, whole = segment["stream"], not segment["allocated_size"]
        if not whole and not segment["is_expandable"]:
            used[stream, segment["total_size"]] += 1
        for address, size in _free_runs(segment):
            if size > SMALL_BYTES:
                free.append(FreeBlock(address, stream, size, whole or segment["is_expandable"]))
    return free, used


def _free_runs(segment: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield address and bytes of what lies between a segment's tensors."""
    address = begin = segment["address"]
    for block in segment["blocks"]:
        if block["state"] == "active_allocated":
            if address > begin:
                yield begin, address - begin
            begin = address + block["size"]
        address += block["size"]
    if address > begin:
        yield begin, address - begin


def process_events(device: Any) -> None:
    """Have PyTorch take back blocks whose uses on other streams are over, as each of its requests does."""
    import torch

    torch.cuda.synchronize(device)
    with suppress(torch.OutOfMemoryError):
        torch.empty(1, dtype=torch.int8, device=device)


def empty(device: Any, stream: int, num_bytes: int) -> Any:
    """Return a tensor that is a segment's whole size, for the work of `stream`, an address."""
    import torch

    # PyTorch takes address 0, the default stream's, for "any stream".
    owner = torch.cuda.ExternalStream(stream, device=device) if stream else torch.cuda.default_stream(device)
    with torch.cuda.stream(owner):
        return torch.empty(num_bytes, dtype=torch.int8, device=device)
