"""`ExtensibleTensor`: a byte buffer that grows in place."""

from __future__ import annotations

import torch

from allocator.errors import PoolValueError
from allocator.shim import check, ids_argument, lib
from allocator.torch_routing import call_with_room, driver_of, reserve_tensor, resolve_device

__all__ = ["ExtensibleTensor"]


class ExtensibleTensor:
    """A reservation of `max_num_bytes` in equal segments, each with a prefix that grows.

    Parameters
    ----------
    max_num_bytes : int
        Bytes of addresses, divided by `num_segments` without a rest.
    device : torch.device, str, int or None
        As for `extensible_kv_pool`.
    num_segments : int
        How many equal parts grow side by side, each from its own start.
    shareable : bool
        As for `extensible_kv_pool`.

    Raises
    ------
    PoolValueError
        (a `ValueError`) Sizes that are not positive, or segments that do not divide.

    Notes
    -----
    Grow-only; only `release_physical` and `free` give memory back. Addresses never change. New bytes are
    undefined unless a call says that it zeroes them. The buffer lives until it and all its tensors are gone.
    """

    def __init__(
        self,
        max_num_bytes: int,
        device: torch.device | str | int | None = None,
        num_segments: int = 1,
        shareable: bool = False,
    ) -> None:
        if not 0 < max_num_bytes < 1 << 63 or num_segments <= 0 or max_num_bytes % num_segments:
            raise PoolValueError(f"{max_num_bytes} bytes cannot be divided into {num_segments} segments")
        self.device = resolve_device(device)
        driver_of(self.device)  # before anything else asks PyTorch about a device that no driver serves
        self.num_segments = num_segments
        self.segment_capacity_bytes = max_num_bytes // num_segments
        tensor, self._reservation = reserve_tensor(
            (max_num_bytes,), (1,), torch.uint8, self.device, max_chunk_bytes=0, shareable=shareable
        )
        self._tensor: torch.Tensor | None = tensor
        size = self.segment_capacity_bytes
        self._reservation.set_segments(((i * size, 1, size) for i in range(num_segments)), size)

    @property
    def base_ptr(self) -> int:
        """Address of the first byte."""
        return self._reservation.base

    @property
    def capacity_bytes(self) -> int:
        """Bytes of addresses: a multiple of the driver's granularity, at least `max_num_bytes`."""
        return self._reservation.size_bytes

    @property
    def bytes_per_segment(self) -> int:
        """Committed bytes of each segment."""
        self._check_alive()
        return self._reservation.info().committed_blocks

    @property
    def num_bytes(self) -> int:
        """Committed bytes of all segments together."""
        return self.bytes_per_segment * self.num_segments

    @property
    def physical_bytes(self) -> int:
        """What the driver was asked for and has not been given back."""
        self._check_alive()
        return self._reservation.info().physical_bytes

    @property
    def tensor(self) -> torch.Tensor:
        """The committed bytes, uint8 of shape `[num_bytes]`; `PoolValueError` with several segments."""
        self._check_single("tensor")
        return self.full_view()[: self.num_bytes]

    def full_view(self) -> torch.Tensor:
        """Return all addresses, uint8 of shape `[max_num_bytes]`; do not touch what is not committed."""
        self._check_alive()
        assert self._tensor is not None
        return self._tensor

    def resize_(self, num_bytes: int, zero_new: bool = False) -> torch.Tensor:
        """Grow to `num_bytes` and return `tensor`. Raises `PoolValueError` for a smaller size."""
        self._check_single("resize_")
        self.resize_per_segment_(num_bytes, zero_new)
        return self.tensor

    def append(self, num_bytes: int, zero_new: bool = False) -> torch.Tensor:
        """Grow by `num_bytes` and return the new bytes, uint8 of shape `[num_bytes]`."""
        self._check_single("append")
        if num_bytes < 0:
            raise PoolValueError(f"append of {num_bytes} bytes")
        return self.resize_(self.num_bytes + num_bytes, zero_new)[-num_bytes or self.num_bytes :]

    def resize_per_segment_(self, num_bytes: int, zero_new: bool = False) -> None:
        """Grow every segment to `num_bytes`, all or nothing.

        Raises
        ------
        PoolValueError
            Fewer bytes than committed, or more than `segment_capacity_bytes`.
        PoolOutOfMemoryError
            The device has not enough memory; nothing changed.
        """
        current = self.bytes_per_segment
        if not current <= num_bytes <= self.segment_capacity_bytes:
            raise PoolValueError(
                f"{num_bytes} bytes per segment, outside {current} (committed) to "
                f"{self.segment_capacity_bytes} (capacity)"
            )
        if self._reservation.info().released_blocks:
            raise PoolValueError(
                f"{num_bytes} bytes per segment while the memory is released: recommit first"
            )
        flags = lib.EKV_COMMIT_ZERO if zero_new else 0
        ids, count = ids_argument([self._reservation.id])
        call_with_room(
            lambda: lib.ekv_commit(ids, count, num_bytes, flags),
            self.device,
            lambda: f"growth of {self.num_segments} segments from {current} to {num_bytes} bytes each",
        )

    def release_physical(self) -> None:
        """Give back all memory and keep the addresses; contents are lost. Sizes are 0 until `recommit`."""
        self._check_alive()
        check(lib.ekv_release_physical(*ids_argument([self._reservation.id])))

    def recommit(self) -> None:
        """Back the bytes again that were committed at `release_physical`, zeroed."""
        self._check_alive()
        ids, count = ids_argument([self._reservation.id])
        call_with_room(lambda: lib.ekv_recommit(ids, count), self.device, lambda: "recommit")

    def free(self) -> None:
        """Give back all memory for good. The addresses follow when the last tensor over them dies."""
        if self._tensor is not None:
            check(lib.ekv_release_physical(*ids_argument([self._reservation.id])))
            self._tensor = None

    def _check_alive(self) -> None:
        if self._tensor is None:
            raise PoolValueError("the ExtensibleTensor was freed")

    def _check_single(self, member: str) -> None:
        self._check_alive()
        if self.num_segments != 1:
            raise PoolValueError(f"{member} needs one segment, this buffer has {self.num_segments}")
