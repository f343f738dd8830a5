"""What becomes of an engine when its sleep fails on one rank and works on others.

Every rank answers, whether it worked or not: vLLM's executor of several processes stops reading answers at
the first error, and would take what the ranks after that one have said for answers to the next call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm_integration.log import logger
from vllm_integration.measure import replaced

__all__ = ["Outcome", "answered", "attempt", "counted_as_asleep", "loses_weights"]

ANSWERING = {"sleep": "ekv_sleep", "wake_up": "ekv_wake_up", "discard": "ekv_discard"}
TAGS = frozenset({"weights", "kv_cache"})


class Outcome:
    """Whether a step worked on a rank; the error itself stays in the process that raised it."""

    def __init__(self, rank: int, text: str | None = None, error: Exception | None = None) -> None:
        self.rank, self.text, self.error = rank, text, error

    def __reduce__(self) -> tuple[Any, ...]:
        return Outcome, (self.rank, self.text)


def attempt(rank: int, step: Callable[[], Any]) -> Outcome:
    """Take `step` in a worker, and tell how that went instead of raising."""
    try:
        step()
    except Exception as error:
        logger.exception("Extensible KV cache: rank %d failed.", rank)
        return Outcome(rank, f"{type(error).__name__}: {error}", error)
    return Outcome(rank)


@contextmanager
def answered(executor: Any) -> Iterator[None]:
    """Have `executor`, inside the block, ask the workers for what `ANSWERING` names so that they answer.

    When all have answered, the first error is raised: itself where it was raised in this process, as a
    RuntimeError where it was not.
    """
    rpc = executor.collective_rpc

    def collective_rpc(method: Any, *args: Any, **kwargs: Any) -> Any:
        if method not in ANSWERING:
            return rpc(method, *args, **kwargs)
        answers = rpc(ANSWERING[method], *args, **kwargs)
        for answer in answers:
            if not isinstance(answer, Outcome):
                raise RuntimeError(f"a worker answered {answer!r} when told to {method}")
            if answer.text is not None:
                raise answer.error or RuntimeError(f"rank {answer.rank}: {answer.text}")
        return answers

    with replaced(executor, "collective_rpc", collective_rpc):
        yield


@contextmanager
def counted_as_asleep(executor: Any) -> Iterator[None]:
    """Have vLLM take all of the engine for asleep; when the block ends well, for what it took it before.

    An engine that is asleep runs nothing, and can be told to wake up.
    """
    before = set(executor.sleeping_tags)
    _count(executor, set(TAGS))
    yield
    _count(executor, before)


def loses_weights(vllm_config: Any, level: int) -> bool:
    """Return whether a sleep of `level` leaves weights that must be loaded again, wherever it worked."""
    model_config = getattr(vllm_config, "model_config", None)
    pooled = (getattr(model_config, name, False) for name in ("enable_sleep_mode", "enable_cumem_allocator"))
    return level > 1 and any(pooled)


def _count(executor: Any, tags: set[str]) -> None:
    executor.sleeping_tags = tags
    if "is_sleeping" in vars(executor):  # until 0.30; a property of the tags since
        executor.is_sleeping = bool(tags)
