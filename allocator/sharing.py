"""`export` and `import_`: one pool's physical memory, mapped by two processes of one machine.

The memory travels as file descriptors over a Unix socket. Each side has its own addresses and gives back its
own share: the memory itself goes when the last side has given it back, also when a side crashes.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import struct
from typing import Any

import torch

from allocator.errors import DriverError, PoolValueError
from allocator.pool import PoolController
from allocator.reservation import Reservation
from allocator.shim import DRIVER_KINDS, check, ffi, ids_argument, lib
from allocator.torch_routing import driver_of, reserve_tensor, resolve_device

__all__ = ["ImportedPool", "export", "import_"]

_HEADER = struct.Struct("!4sI")
_MAGIC = b"EKV1"
_FILES_PER_MESSAGE = 64  # the kernel takes at most 253


def export(pool: PoolController, connection: socket.socket) -> None:
    """Send the committed blocks of `pool` to the process at the other end, which calls `import_`.

    Parameters
    ----------
    pool : PoolController
        Made with `shareable=True`; on the CPU any pool. It may go on growing: the other side keeps the blocks
        that were committed now. What it shrinks or releases stays allocated while the other side maps it.
    connection : socket.socket
        A connected Unix stream socket.

    Raises
    ------
    PoolValueError
        No block is committed, or the memory is not shareable. Nothing was sent.
    DriverError
        The driver cannot export a handle; the connection must be closed.
    """
    with pool._lock:
        members = [(m.reservation, m.layout) for m in pool._live()]
        if not pool.committed_blocks:
            raise PoolValueError("export of a pool with 0 committed blocks")
        description = {
            "driver": DRIVER_KINDS[pool._driver],
            "device": _identity(pool.device),
            "num_blocks": pool.committed_blocks,
            "reservations": [
                {
                    "size_bytes": reservation.size_bytes,
                    "granularity": reservation.granularity,
                    "capacity_blocks": layout.capacity_blocks,
                    "segments": [
                        (s.offset, s.block_stride, size)
                        for s, size in zip(layout.segments, layout.sizes_bytes, strict=True)
                    ],
                    "chunks": reservation.chunks(),
                }
                for reservation, layout in members
                if layout is not None
            ],
        }
        if any(r.snapshot()["handle_kind"] == "none" for r, _ in members) and pool.device.type != "cpu":
            raise PoolValueError(
                "export of a pool whose memory is not shareable: make it with shareable=True"
            )
        files = _export_files([reservation for reservation, _ in members])
    try:
        text = json.dumps(description).encode()
        connection.sendall(_HEADER.pack(_MAGIC, len(text)) + text)
        for first in range(0, len(files), _FILES_PER_MESSAGE):
            socket.send_fds(connection, [b"F"], files[first : first + _FILES_PER_MESSAGE])
    finally:
        _close(files)


def import_(connection: socket.socket, device: torch.device | str | int | None = None) -> ImportedPool:
    """Map what the process at the other end exports, readable and writable.

    Parameters
    ----------
    connection : socket.socket
        The other end of the socket given to `export`.
    device : torch.device, str, int or None
        This process's name for the same device; default as for `extensible_kv_pool`.

    Raises
    ------
    PoolValueError
        The other end speaks of another device or driver, or closed the connection.
    DriverError, PoolOutOfMemoryError
        The driver failed. Everything received was given back.
    """
    magic, size = _HEADER.unpack(_receive(connection, _HEADER.size))
    if magic != _MAGIC:
        raise PoolValueError(f"not an export of this version: it begins with {magic!r}, expected {_MAGIC!r}")
    text = _receive(connection, size)
    torch_device = resolve_device(device)
    here = (DRIVER_KINDS[driver_of(torch_device)[0]], _identity(torch_device))
    try:
        description = json.loads(text)
        there = (description["driver"], description["device"])
        pool = ImportedPool(torch_device, description["num_blocks"])
        num_files = sum(len(item["chunks"]) for item in description["reservations"])
    except (ValueError, KeyError, TypeError) as error:
        raise PoolValueError(f"the {size} bytes {text[:40]!r} describe no export: {error!r}") from None
    if here != there:
        raise PoolValueError(f"the export is of {' '.join(there)}, and {torch_device} is {' '.join(here)}")
    files = _receive_files(connection, num_files)
    try:
        first = 0
        for item in description["reservations"]:
            last = first + len(item["chunks"])
            pool._map(item, files[first:last])
            first = last
    except BaseException:
        pool.free()
        raise
    finally:
        _close(files)
    return pool


class ImportedPool:
    """Blocks of another process's pool. Made by `import_`; it neither grows nor shrinks.

    Attributes
    ----------
    device : torch.device
    committed_blocks : int
        How many blocks there are; they may be read and written, and both sides see the same bytes.
    tensors : list of torch.Tensor
        One for each tensor of the exported pool, uint8 of shape `[size_bytes]`, laid out as there; bytes that
        are not committed must not be touched. The memory lives as long as they do.
    """

    def __init__(self, device: torch.device, committed_blocks: int) -> None:
        self.device = device
        self.committed_blocks = committed_blocks
        self.tensors: list[torch.Tensor] = []
        self._reservations: list[Reservation] = []

    @property
    def physical_bytes(self) -> int:
        """Bytes mapped by this side."""
        return sum(r.info().physical_bytes for r in self._reservations)

    def free(self) -> None:
        """Give back this side's share. The addresses follow when the last tensor over them dies."""
        if self._reservations:
            check(lib.ekv_release_physical(*ids_argument([r.id for r in self._reservations])))
        self._reservations, self.tensors, self.committed_blocks = [], [], 0

    def _map(self, item: dict[str, Any], files: list[int]) -> None:
        tensor, reservation = reserve_tensor(
            (item["size_bytes"],), (1,), torch.uint8, self.device, max_chunk_bytes=0, shareable=True
        )
        if reservation.granularity != item["granularity"]:
            raise PoolValueError(
                f"the export has a granularity of {item['granularity']} bytes, "
                f"here it is {reservation.granularity}"
            )
        reservation.set_segments(map(tuple, item["segments"]), item["capacity_blocks"])
        chunks = ffi.new("ekv_chunk_info[]", [tuple(chunk) for chunk in item["chunks"]])
        check(lib.ekv_import_chunks(reservation.id, chunks, files, len(files), self.committed_blocks))
        self.tensors.append(tensor)
        self._reservations.append(reservation)


def _identity(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "this machine"


def _export_files(reservations: list[Reservation]) -> list[int]:
    """Return one descriptor for each chunk, in order; the caller closes them."""
    counts = [len(reservation.chunks()) for reservation in reservations]
    _allow_files(sum(counts))
    files: list[int] = []
    try:
        for reservation, count in zip(reservations, counts, strict=True):
            for index in range(count):
                chunk, file = ffi.new("ekv_chunk_info *"), ffi.new("int *")
                check(lib.ekv_export_chunk(reservation.id, index, chunk, file))
                files.append(file[0])
    except BaseException:
        _close(files)
        raise
    return files


def _allow_files(count: int) -> None:
    """Raise the soft limit of open files when `count` more may not fit; the hard limit stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(os.listdir("/proc/self/fd")) + count + 64
    if soft < wanted and soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)


def _receive(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise PoolValueError(
                f"the exporting process closed the connection after {len(parts)} of {size} bytes"
            )
        parts += part
    return bytes(parts)


def _receive_files(connection: socket.socket, count: int) -> list[int]:
    """Return exactly `count` descriptors, or close what came and raise."""
    _allow_files(2 * count)  # the driver keeps descriptors of its own on the host
    files: list[int] = []
    try:
        while len(files) < count:
            most = min(_FILES_PER_MESSAGE, count - len(files))
            data, received, flags, _address = socket.recv_fds(connection, 1, most)
            files += received
            if flags & socket.MSG_CTRUNC:
                limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                raise DriverError(
                    f"{count} handles do not fit: {len(files)} were received, and this process may have "
                    f"{limit} files open (ulimit -n), or the other end sent more than it said"
                )
            if not data or not received:
                raise PoolValueError(
                    f"the exporting process closed the connection after {len(files)} of {count} handles"
                )
    except BaseException:
        _close(files)
        raise
    return files
