"""Small KV caches of every physical order, and a model that knows them byte by byte.

The model never uses the code under test: it lists the address of every element, which block owns it, and
counts granules one at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from allocator.layout import BlockLayout
from allocator.views import ViewSpec

GRANULARITIES = (64, 256, 4096)


@dataclass(frozen=True)
class Cache:
    """A reservation and the views over it."""

    order: str
    base_address: int
    reservation_bytes: int
    num_blocks: int
    num_outer: int  # combinations of the indices that lie outside the block dimension
    padded: bool
    views: tuple[ViewSpec, ...]

    def layout(self) -> BlockLayout:
        """Derive the layout under test."""
        return BlockLayout.from_views(self.base_address, self.reservation_bytes, self.views)

    def owned_bytes(self, num_blocks: int) -> np.ndarray:
        """Mark each byte of the reservation that belongs to an element of a block below `num_blocks`."""
        owned = np.zeros(self.reservation_bytes, dtype=bool)
        for view in self.views:
            for block, offsets in element_bytes(view, self.base_address):
                if block < num_blocks:
                    owned[offsets] = True
        return owned


def element_bytes(view: ViewSpec, base_address: int) -> list[tuple[int, np.ndarray]]:
    """List `(block, offsets of its bytes)` for each kernel block of `view`."""
    result = []
    for kernel_block in range(view.shape[view.block_dim]):
        offsets = np.zeros((1,), dtype=np.int64) + view.address - base_address
        for dim, (size, stride) in enumerate(zip(view.shape, view.strides_bytes, strict=True)):
            index = np.array([kernel_block]) if dim == view.block_dim % len(view.shape) else np.arange(size)
            if size > 1:
                offsets = (offsets[:, None] + index * stride).reshape(-1)
        offsets = (offsets[:, None] + np.arange(view.itemsize)).reshape(-1)
        result.append((kernel_block // view.kernel_blocks_per_block, offsets))
    return result


def touched_granules(owned: np.ndarray, granularity: int) -> int:
    """Count the granules that hold at least one marked byte."""
    padded = np.zeros(-(-len(owned) // granularity) * granularity, dtype=bool)
    padded[: len(owned)] = owned
    return int(padded.reshape(-1, granularity).any(axis=1).sum())


@st.composite
def caches(draw: st.DrawFn, min_blocks: int = 1, padding: bool = True) -> Cache:
    """Draw a cache of any order of layers L, blocks B, K/V split K, heads H, tokens N and channels C.

    Every dimension may have padding behind each index, views list their dimensions in any order and may have
    odd strides where a size is 1, blocks may consist of several kernel blocks, and an int8 view of whole
    pages may overlay the first layer.
    """
    order = "".join(draw(st.permutations("LBKHNC")))
    sizes = {name: draw(st.integers(1, 3)) for name in "LKHN"}
    sizes |= {"B": draw(st.integers(min_blocks, 6)), "C": draw(st.sampled_from([1, 4, 24]))}
    itemsize = draw(st.sampled_from([1, 2, 4]))
    ratio = draw(st.sampled_from([1, 1, 2, 4]))
    sizes["r"] = ratio  # kernel blocks lie next to each other inside a block
    strides: dict[str, int] = {}
    step, padded = itemsize, False
    for name in reversed(order.replace("B", "Br")):
        strides[name] = step
        pad = 0
        if padding and name != "r" and draw(st.booleans()):
            pad = draw(st.sampled_from([1, 8, 100])) * itemsize
        padded |= pad > 0
        step = step * sizes[name] + pad
    granularity = draw(st.sampled_from(GRANULARITIES))
    base_address = granularity * draw(st.integers(1, 1000))
    last = itemsize + sum((sizes[name] - 1) * stride for name, stride in strides.items())
    reservation_bytes = max(last, step if draw(st.booleans()) else last)

    logical = draw(st.permutations("BKHNC"))
    views = []
    for layer in range(sizes["L"]):
        shape, view_strides = [], []
        for name in logical:
            size = sizes["B"] * ratio if name == "B" else sizes[name]
            stride = strides["r"] if name == "B" else strides[name]
            odd = size == 1 and draw(st.booleans())
            shape.append(size)
            view_strides.append(draw(st.sampled_from([0, 1, 7, 10**15])) if odd else stride)
        address = base_address + layer * strides["L"]
        views.append(
            ViewSpec(tuple(shape), tuple(view_strides), itemsize, address, logical.index("B"), ratio)
        )
    inside = order[order.index("B") + 1 :]
    if draw(st.booleans()):  # pages of bytes over the first layer's first outer index
        page = itemsize * ratio if not inside else (ratio - 1) * strides["r"] + itemsize
        page += sum((sizes[name] - 1) * strides[name] for name in inside if name != "L")
        block_stride = strides["B"]
        views.append(ViewSpec((sizes["B"], 1, 1, page), (block_stride, 3, 5, 1), 1, base_address, 0, 1))
    outer = order[: order.index("B")]
    return Cache(
        order=order,
        base_address=base_address,
        reservation_bytes=reservation_bytes,
        num_blocks=sizes["B"],
        num_outer=int(np.prod([sizes[name] for name in outer], dtype=np.int64)),
        padded=padded,
        views=tuple(draw(st.permutations(views))),
    )
