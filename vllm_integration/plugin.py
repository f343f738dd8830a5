"""Loading the plugin: which patches go in when, and what a configuration with the switch on needs."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

from vllm_integration import hooks, patches, sleep_host
from vllm_integration.config import switch
from vllm_integration.fallback import warn
from vllm_integration.log import logger
from vllm_integration.worker_names import extensible_name

__all__ = ["activate", "apply_allocation_patches", "incompatibility", "register", "unregister"]

PATCHER = patches.Patcher()
GROUPS = {
    "flag": hooks.FLAG,
    "engine": hooks.ENGINE,
    "client": hooks.CLIENT,
    "allocation": hooks.ALLOCATION,
}


def register() -> None:
    """Add the flag; where the engine core is already loaded, let it look at the switch. Idempotent.

    A vLLM that this does not fit keeps working as it is: the reason is logged when the flag is used, or, when
    even the flag cannot be added, at once.
    """
    try:
        # Nobody parses arguments in a process that was spawned for a worker or the engine core, ...
        if "vllm.engine.arg_utils" in sys.modules:
            flags = [patch.target for patch in hooks.FLAG if patch.target.parameters is not None]
            found = patches.problems(flags)
            if found:
                raise patches.PatchError("; ".join(found))
            PATCHER.apply("flag", hooks.FLAG)
        # ... and nobody calls create_engine_config in the latter.
        if "vllm.v1.engine.core" in sys.modules and incompatibility() is None:
            PATCHER.apply("engine", hooks.ENGINE)
    except patches.PatchError as error:
        logger.warning("The extensible KV cache is not available: %s", error)


def unregister() -> None:
    """Put back everything that was replaced in this process; for tests."""
    for group in reversed(list(GROUPS)):
        PATCHER.remove(group)


@lru_cache(maxsize=1)
def incompatibility() -> str | None:
    """Return why the installed vLLM does not fit, or None. Reads sources, applies nothing."""
    from vllm.version import __version__ as version

    wrong = patches.check_version(version)
    if wrong is None:
        found = patches.problems(hooks.ALL_TARGETS, release=version)
        patches.forget_sources()
        wrong = f"vLLM {version} does not match: {'; '.join(found)}" if found else None
    return wrong


def activate(vllm_config: Any, *, quiet: bool = False) -> None:
    """Make `vllm_config`, which has the switch on, use our worker; or switch it off with a warning."""
    reason = incompatibility() or _choose_worker(vllm_config.parallel_config)
    if reason is None:
        try:
            PATCHER.apply("engine", hooks.ENGINE)
            PATCHER.apply("client", hooks.CLIENT)
            sleep_host.note_engines(vllm_config.parallel_config)
            return
        except patches.PatchError as error:
            reason = str(error)
    switch(vllm_config, False)
    if not quiet:
        warn(reason)


def apply_allocation_patches() -> None:
    """Let this worker process bind what the model runners allocate. Idempotent."""
    reason = incompatibility()
    if reason is not None:
        raise patches.PatchError(reason)
    PATCHER.apply("allocation", hooks.ALLOCATION)


def _choose_worker(parallel_config: Any) -> str | None:
    worker_cls = parallel_config.worker_cls
    if not isinstance(worker_cls, str) or worker_cls == "auto":
        return f"the worker class is {worker_cls!r}, which cannot be extended"
    parallel_config.worker_cls = extensible_name(worker_cls)
    return None
