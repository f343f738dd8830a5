"""How long it takes to make memory usable, each sample in a process of its own, as a server does it once.

A process that commits what it gave back before was seen to pay more (57 ms for 100 GiB on an H200) than an
engine that had never held that memory (30 ms for 121 GiB). So the first timing of a process is the sample,
and its second, after it gave all back and rested, is kept beside it, as "again".

The driver clears freed memory in the background and a new owner waits for it, so a timing starts at least 2 s
after the previous process ended. A device that rests also lowers its clocks, which costs whoever zeroes first
more than the difference that is looked for: a tenth of a second of work goes before each timing, as an engine
that commits has just warmed up. On the CPU (a dry run) there is nothing to wait for.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch

from allocator import PoolController, extensible_kv_pool
from allocator.pool import DEFAULT_MAX_CHUNK_BYTES

GIB, MIB = 1 << 30, 1 << 20
NUM_SEGMENTS, NUM_BLOCKS = 28, 1024
REST_SECONDS = {"cuda": 2.0, "cpu": 0.0}
WAKE_SECONDS = {"cuda": 0.1, "cpu": 0.0}
LIMIT_S = 60
Samples = dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class Kind:
    """One way to make memory usable.

    Attributes
    ----------
    name : str
        Of the chunk size, or "stock".
    max_chunk_bytes : int or None
        Of the pool; None is `torch.zeros` without a pool.
    rounds : int or None
        At most so many processes; None: as many as were asked for.
    again : bool
        Whether each process gives all back and does the same once more.
    shrink : bool
        Whether the first commit is followed by a shrink to half of the blocks.
    """

    name: str
    max_chunk_bytes: int | None
    rounds: int | None = 3
    again: bool = False
    shrink: bool = True


KINDS = (
    Kind("stock", None, rounds=None, again=True, shrink=False),
    Kind("default", DEFAULT_MAX_CHUNK_BYTES, rounds=None, again=True),
    Kind("segment", 0),
    Kind("1gib", GIB),
    Kind("64mib", 64 * MIB),
    Kind("granule", 2 * MIB, again=True, shrink=False),  # commits for seconds, and would shrink for as long
)


class SampleError(RuntimeError):
    """The process of a sample died, or gave no answer in time."""


def collect(num_bytes: int, rounds: int, device: str, kinds: tuple[Kind, ...] = KINDS) -> Samples:
    """Take all samples, the kinds in turn, in the opposite order every second round.

    Returns
    -------
    dict
        By kind, then by "first", "again" and "shrink": milliseconds, one of each process.

    Raises
    ------
    SampleError
        A process died or hung; names which.
    RuntimeError
        This process has started CUDA, which no fork of it could use.
    """
    samples: Samples = {kind.name: {} for kind in kinds}
    ended = time.monotonic()
    for number in range(rounds):
        for kind in kinds if number % 2 == 0 else kinds[::-1]:
            if kind.rounds is not None and number >= kind.rounds:
                continue
            rested = ended + REST_SECONDS[device]
            name = f"sample {number + 1} of {kind.name}"
            answer = in_child(name, lambda kind=kind, at=rested: measure(kind, num_bytes, device, at))
            ended = time.monotonic()
            print(f"{name}: {answer}", file=sys.stderr, flush=True)
            for what, milliseconds in answer.items():
                samples[kind.name].setdefault(what, []).append(milliseconds)
    return samples


def in_child(name: str, body: Callable[[], dict[str, float]], limit_s: float = LIMIT_S) -> dict[str, float]:
    """Return what `body` returns in a fork of this process, which has ended then."""
    if torch.cuda.is_initialized():
        raise RuntimeError(f"{name}: this process has started CUDA, and a fork of it cannot use it")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _answer(body, writer)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        status = _wait(child, limit_s)
        answer = pipe.read()
    if status is None:
        raise SampleError(f"{name}: its process did not end in {limit_s:g} s and was killed")
    if status or not answer:
        raise SampleError(f"{name}: its process ended with status {status}{'' if answer else ', no answer'}")
    return json.loads(answer)


def _answer(body: Callable[[], dict[str, float]], writer: int) -> None:
    """Be the child: answer, and end without what the parent has registered for its own end."""
    status = 1
    try:
        os.write(writer, (json.dumps(body()) + "\n").encode())
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _wait(child: int, limit_s: float) -> int | None:
    """Return the exit status of `child`, negative for a signal; None when it had to be killed."""
    deadline, ended, status = time.monotonic() + limit_s, 0, 0
    try:
        while not ended and time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0 if ended else 0.005)
    finally:
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if ended else None


def measure(kind: Kind, num_bytes: int, device: str, rested: float) -> dict[str, float]:
    """Take one sample in this process.

    Parameters
    ----------
    kind : Kind
        What to measure.
    num_bytes : int
        A multiple of 28 segments of 1024 blocks.
    device : {"cuda", "cpu"}
        Where.
    rested : float
        The value of `time.monotonic()` from which on the device has rested.

    Returns
    -------
    dict
        Milliseconds of "first", and as the kind says of "shrink" and "again".
    """
    work = torch.zeros(min(256 * MIB, num_bytes), dtype=torch.int8, device=device)
    if kind.max_chunk_bytes is not None:
        # `work` was stock's way once; the pool's way is gone once too, as by an engine's warm-up prefix.
        prefix = layered_pool(NUM_SEGMENTS * 2 * MIB, device, num_blocks=1)
        prefix.commit(1)
    times = {}
    for what in ("first", "again") if kind.again else ("first",):
        if kind.max_chunk_bytes is None:
            times[what] = _zeros(num_bytes, work, rested)
        else:
            shrink = kind.shrink and what == "first"
            times |= _commit(what, kind.max_chunk_bytes, num_bytes, work, rested, shrink)
        rested = time.monotonic() + REST_SECONDS[device]
    return times


def _zeros(num_bytes: int, work: torch.Tensor, rested: float) -> float:
    device = work.device.type
    _rest(work, rested)
    milliseconds, tensor = timed(lambda: torch.zeros(num_bytes, dtype=torch.int8, device=device), device)
    del tensor
    if device == "cuda":
        torch.cuda.empty_cache()
    return milliseconds


def _commit(
    what: str, max_chunk_bytes: int, num_bytes: int, work: torch.Tensor, rested: float, shrink: bool
) -> dict[str, float]:
    device = work.device.type
    pool = layered_pool(num_bytes, device, max_chunk_bytes=max_chunk_bytes)
    _rest(work, rested)
    times = {what: timed(lambda: pool.commit(NUM_BLOCKS), device)[0]}
    if shrink:
        times["shrink"] = timed(lambda: pool.shrink(NUM_BLOCKS // 2), device)[0]
    pool.free()
    return times


def _rest(work: torch.Tensor, rested: float) -> None:
    """Wait until the driver has cleared what was freed, then bring the clocks up again."""
    device = work.device.type
    synchronize(device)
    time.sleep(max(0.0, rested - time.monotonic()))
    end = time.perf_counter() + WAKE_SECONDS[device]
    while time.perf_counter() < end:
        work.add_(1)
        synchronize(device)


def layered_pool(
    num_bytes: int,
    device: str = "cuda",
    num_segments: int = NUM_SEGMENTS,
    num_blocks: int = NUM_BLOCKS,
    **options,
) -> PoolController:
    """A pool whose tensor stays alive with it: `num_segments` layers of `num_blocks` blocks."""
    with extensible_kv_pool(device, **options) as pool:
        flat = torch.zeros(num_bytes, dtype=torch.int8, device=device)
    view = flat.view(num_segments, num_blocks, -1)
    for layer in view:
        pool.bind(layer)
    pool.view = view  # type: ignore[attr-defined]
    return pool


def timed(body: Callable[[], object], device: str = "cuda") -> tuple[float, object]:
    """Milliseconds of `body` with all that it started on the device, and what it returned."""
    synchronize(device)
    start = time.perf_counter()
    result = body()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3, result


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
