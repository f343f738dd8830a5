"""Views over a reservation: what they say about blocks, and the checks on one view by itself.

The only inputs are shape, strides, element size and address; the size of the storage behind a view is never
used, because it spans the whole reservation. Nothing here needs torch or a device. Units are bytes.

The block dimension of a view counts kernel blocks, `kernel_blocks_per_block` of them make one (manager)
block. Dimensions with a stride of at least the kernel block stride are outer: each combination of their
indices is a place where block 0 starts. All other dimensions lie inside the block.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from allocator.errors import PoolValueError

__all__ = ["BlockRun", "ParsedView", "ViewSpec", "parse_view"]

# A wrong block dimension makes every block of the cache an outer index. This says so before it takes minutes.
MAX_SEGMENTS = 1 << 17


@dataclass(frozen=True)
class ViewSpec:
    """What is known of one view over the reservation.

    Parameters
    ----------
    shape, strides_bytes : tuple of int
        One entry per dimension. Strides of dimensions of size 1 mean nothing and may have any value.
    itemsize : int
        Bytes of one element.
    address : int
        Address of the element at index (0, ..., 0).
    block_dim : int
        The dimension that counts kernel blocks; negative counts from the end.
    kernel_blocks_per_block : int
        How many neighbours along `block_dim` make one block.
    """

    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    itemsize: int
    address: int
    block_dim: int = 0
    kernel_blocks_per_block: int = 1

    @classmethod
    def from_tensor(cls, tensor: Any, block_dim: int = 0, kernel_blocks_per_block: int = 1) -> ViewSpec:
        """Read `tensor.shape`, `.stride()`, `.element_size()` and `.data_ptr()`, nothing else."""
        itemsize = int(tensor.element_size())
        return cls(
            shape=tuple(int(size) for size in tensor.shape),
            strides_bytes=tuple(int(stride) * itemsize for stride in tensor.stride()),
            itemsize=itemsize,
            address=int(tensor.data_ptr()),
            block_dim=block_dim,
            kernel_blocks_per_block=kernel_blocks_per_block,
        )


class BlockRun(NamedTuple):
    """One outer index of one view: the first block at `offset`, of which `inner_bytes` are used."""

    offset: int
    block_stride: int
    inner_bytes: int


class ParsedView(NamedTuple):
    """A checked view: its blocks, and the outer dimensions as `(size, stride in bytes)`."""

    offset: int
    block_stride: int
    inner_bytes: int
    capacity_blocks: int
    outer_dims: list[tuple[int, int]]

    def runs(self) -> Iterable[BlockRun]:
        """Yield one run for each combination of outer indices."""
        steps = [range(0, size * stride, stride) for size, stride in self.outer_dims]
        for shifts in itertools.product(*steps):
            yield BlockRun(self.offset + sum(shifts), self.block_stride, self.inner_bytes)


def parse_view(view: ViewSpec, base_address: int, reservation_bytes: int, index: int) -> ParsedView:
    """Split the dimensions of `view` into the block's, the outer and the inner ones, and check them."""
    name = f"view {index} of shape {view.shape}, strides {view.strides_bytes} bytes"
    ndim, ratio = len(view.shape), view.kernel_blocks_per_block
    if ndim != len(view.strides_bytes):
        raise PoolValueError(f"{name}: {ndim} sizes but {len(view.strides_bytes)} strides")
    if not -ndim <= view.block_dim < ndim:
        raise PoolValueError(f"{name}: block dimension {view.block_dim} is outside the {ndim} dimensions")
    if view.itemsize <= 0 or min(view.shape) <= 0:
        raise PoolValueError(f"{name}: elements of {view.itemsize} bytes, or a size, hold no bytes")
    block_dim = view.block_dim % ndim
    num_kernel_blocks, kernel_stride = view.shape[block_dim], view.strides_bytes[block_dim]
    if ratio <= 0 or num_kernel_blocks % ratio:
        raise PoolValueError(
            f"{name}: {num_kernel_blocks} kernel blocks do not divide into blocks of {ratio}"
        )

    offset = view.address - base_address
    others: list[tuple[int, int]] = []
    for dim, (size, stride) in enumerate(zip(view.shape, view.strides_bytes, strict=True)):
        if dim == block_dim or size == 1:
            continue
        if stride < 0:  # the same bytes, walked from the other end
            offset, stride = offset + (size - 1) * stride, -stride
        others.append((size, stride))

    if num_kernel_blocks == 1:
        kernel_stride = _stride_of_only_block(kernel_stride, others, view.itemsize)
    if kernel_stride <= 0:
        raise PoolValueError(f"{name}: the block stride is {kernel_stride} bytes, it must be positive")
    inner = [dim for dim in others if dim[1] < kernel_stride]
    outer = [dim for dim in others if dim[1] >= kernel_stride]
    inner_bytes = _extent(inner, view.itemsize)
    if inner_bytes > kernel_stride:
        raise PoolValueError(f"{name}: a block of {inner_bytes} bytes exceeds its stride of {kernel_stride}")
    reach = num_kernel_blocks * kernel_stride
    for size, stride in sorted(outer, key=lambda dim: dim[1]):
        if stride < reach:
            raise PoolValueError(
                f"{name}: outer stride {stride} is less than the {reach} bytes that lie before its next index"
            )
        reach = size * stride
    used = _extent([*others, (num_kernel_blocks, kernel_stride)], view.itemsize)
    if offset < 0 or offset + used > reservation_bytes:
        raise PoolValueError(
            f"{name}: bytes {offset}..{offset + used} of the reservation, which has {reservation_bytes} bytes"
        )
    if prod(size for size, _ in outer) > MAX_SEGMENTS:
        raise PoolValueError(
            f"{name}: block dimension {view.block_dim} makes {prod(size for size, _ in outer)} segments, "
            f"more than {MAX_SEGMENTS}"
        )
    block_inner = (ratio - 1) * kernel_stride + inner_bytes
    return ParsedView(offset, ratio * kernel_stride, block_inner, num_kernel_blocks // ratio, outer)


def _stride_of_only_block(stride: int, others: list[tuple[int, int]], itemsize: int) -> int:
    """Return a stride for a block dimension of size 1, whose own stride need not mean anything.

    It is kept where some dimension lies inside a block of that stride and all that do fit, so that (2, 1,
    ...) has its two segments. Otherwise the whole view is the block.
    """
    inner = [dim for dim in others if dim[1] < stride]
    if stride > 0 and (inner or not others) and _extent(inner, itemsize) <= stride:
        return stride
    return max(_extent(others, itemsize), 1 + max((dim[1] for dim in others), default=0))


def _extent(dims: list[tuple[int, int]], itemsize: int) -> int:
    return itemsize + sum((size - 1) * stride for size, stride in dims)
