"""A neighbour inside one worker process: vLLM imports this module there for ``worker_extension_cls``.

EKV_TEST_NEIGHBOUR is JSON, ``{"rank": r, "after": {stage: bytes, ...}}``: when a stage has ended on that
rank, another pool of its process holds so many bytes of the host driver's budget from then on. With
``prefix_bytes`` that rank has no more for its warm-up prefix.
"""

import json
import os
from typing import Any

from vllm_integration import stages

_JOB = json.loads(os.environ.get("EKV_TEST_NEIGHBOUR", "{}"))
_TAKEN: list[Any] = []


class Extension:
    """What vLLM puts among the worker's base classes."""

    def neighbour_bytes(self) -> int:
        """Return what the neighbour on this rank holds."""
        return sum(taken.num_bytes for taken in _TAKEN)

    def lengths(self: Any) -> list[int]:
        """Return `max_model_len` as the configuration of this worker and its runner have it."""
        return [self.model_config.max_model_len, self.model_runner.max_model_len]


def _listen(name: str, record: dict[str, Any] | None) -> None:
    import torch

    from allocator import ExtensibleTensor

    wanted = _JOB["after"].get(name) if record else None
    if wanted is None or torch.distributed.get_rank() != _JOB["rank"]:
        return
    while _TAKEN:
        _TAKEN.pop().free()
    if wanted:
        _TAKEN.append(ExtensibleTensor(wanted, "cpu"))
        _TAKEN[0].resize_(wanted)


if "prefix_bytes" in _JOB:
    from vllm_integration.worker_state import WorkerCache

    _limit = WorkerCache.prefix_limit_bytes

    def _limited(self: WorkerCache, worker: Any) -> int:
        return _JOB["prefix_bytes"] if self.rank == _JOB["rank"] else _limit(self, worker)

    WorkerCache.prefix_limit_bytes = _limited

if _JOB:
    _LISTENING = stages.listen(_listen)
    _LISTENING.__enter__()
