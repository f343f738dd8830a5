"""Tensors over the committed part of a pool, whose storages end where the committed memory ends."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from allocator.errors import PoolValueError
from allocator.pool import PoolController

__all__ = ["Rows", "committed_rows", "tensor_over", "view_committed"]

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@dataclass(frozen=True)
class Rows:
    """The committed blocks of one segment.

    Attributes
    ----------
    whole : torch.Tensor
        Shape `[blocks, words]`, contiguous, a whole block stride each, of the widest integers that fit.
    cut : torch.Tensor or None
        uint8 of shape `[1, bytes]`: the last block, where the reservation ends before its stride does.
    """

    whole: torch.Tensor
    cut: torch.Tensor | None
    stride_bytes: int
    address: int

    @property
    def num_whole(self) -> int:
        """How many blocks `whole` has; the number of the block in `cut`."""
        return self.whole.shape[0]

    @property
    def cut_bytes(self) -> int:
        """Bytes of `cut`, 0 without one."""
        return 0 if self.cut is None else self.cut.numel()

    @property
    def place(self) -> tuple[int, int]:
        """What tells one segment from another: address and stride."""
        return (self.address, self.stride_bytes)


def committed_rows(pool: PoolController) -> list[Rows]:
    """Return the committed blocks of every segment of `pool`.

    They own nothing: a tensor of the pool must live while they are used, and no block be given back.
    """
    snapshot = pool.snapshot()
    num_blocks = snapshot["committed_blocks"]
    found = []
    for segment in snapshot["segments"]:
        address = snapshot["reservations"][segment["reservation"]]["base"] + segment["offset"]
        stride, limit = segment["block_stride"], segment["size_bytes"]
        num_whole = min(num_blocks, limit // stride)
        word = next(w for w in _WORDS if stride % w.itemsize == 0 and address % w.itemsize == 0)
        whole = tensor_over(address, num_whole * stride, pool.device, word).view(
            num_whole, stride // word.itemsize
        )
        cut = None
        if num_blocks > num_whole:
            size = limit - num_whole * stride
            cut = tensor_over(address + num_whole * stride, size, pool.device, torch.uint8).view(1, -1)
        found.append(Rows(whole, cut, stride, address))
    return found


def view_committed(pool: PoolController, view: torch.Tensor, block_dim: int = 0) -> torch.Tensor:
    """See `PoolController.view_committed`."""
    num_blocks, capacity = pool.committed_blocks, pool.capacity_blocks
    if view.device != pool.device or not num_blocks:
        raise PoolValueError(f"a view on {view.device}, of a pool on {pool.device} with {num_blocks} blocks")
    if not -view.dim() <= block_dim < view.dim():
        raise PoolValueError(f"block dimension {block_dim} of a view with {view.dim()} dimensions")
    block_dim %= view.dim()
    pieces, rest = divmod(view.shape[block_dim], capacity)
    if rest or not pieces:
        raise PoolValueError(f"{view.shape[block_dim]} pieces do not divide into {capacity} blocks")
    shape = list(view.shape)
    shape[block_dim] = num_blocks * pieces
    first = view.data_ptr()
    last = first + view.itemsize * (1 + sum((n - 1) * s for n, s in zip(shape, view.stride(), strict=True)))
    for rows in committed_rows(pool):
        size = rows.whole.nbytes + rows.cut_bytes
        if not rows.address <= first < rows.address + size:
            continue
        if last > rows.address + size or (first - rows.address) % view.itemsize:
            break
        storage = tensor_over(rows.address, size, pool.device, torch.uint8).untyped_storage()
        narrowed = torch.empty(0, dtype=view.dtype, device=view.device)
        return narrowed.set_(storage, (first - rows.address) // view.itemsize, shape, view.stride())
    raise PoolValueError(
        f"a view of the bytes 0x{first:x} to 0x{last:x} is not in one segment's {num_blocks} committed blocks"
    )


def tensor_over(address: int, num_bytes: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return a flat tensor over memory that it does not own; its storage is exactly these bytes."""
    # Source: PyTorch 2.11 to 2.14, torch/csrc/Module.cpp; there is no public way to bound a storage.
    storage = torch._C._construct_storage_from_data_pointer(address, device, num_bytes)
    tensor = torch.empty(0, dtype=dtype, device=device)
    return tensor.set_(storage, 0, (num_bytes // dtype.itemsize,), (1,))
