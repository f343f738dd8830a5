"""The records of what sleep wraps and relies on; `hooks` has the others, and checks these with its own."""

from __future__ import annotations

from vllm_integration import sleep
from vllm_integration.patches import Patch, Target

__all__ = ["SLEEP", "SLEEP_RELIED_ON"]

TESTED = "0.29 to 0.33"
CORE, EXECUTOR = "vllm.v1.engine.core", "vllm.v1.executor.abstract"
SCHEDULER, BLOCKS = "vllm.v1.core.sched.scheduler", "vllm.v1.core.block_pool"
MANAGER, BLOCK_UTILS = "vllm.v1.core.kv_cache_manager", "vllm.v1.core.kv_cache_utils"
SINCE_DISCARD = ("0.31", "0.32", "0.33")
OWN_CONTENT = "a sleep of vLLM's own keeps the content of cached blocks"
OWN_AGREEMENT = "vLLM wakes all ranks or none"

SLEEP = (
    Patch(
        Target(CORE, "EngineCore.sleep", ("level", "mode"), "cached blocks keep their hashes over a nap"),
        sleep.wrap_core_sleep,
        TESTED,
        OWN_CONTENT,
    ),
    Patch(
        Target(CORE, "EngineCore._finish_pause", ("clear_cache",), "where the hashes would be reset"),
        sleep.wrap_finish_pause,
        TESTED,
        OWN_CONTENT,
    ),
    Patch(
        Target(CORE, "EngineCore.resume_scheduler", (), "refused while the cache has no memory"),
        sleep.wrap_resume_scheduler,
        TESTED,
        "vLLM does not resume an engine that sleeps",
    ),
    Patch(
        Target(
            CORE,
            "EngineCore.release_kv_cache_memory",
            (),
            "refused before it resets caches",
            SINCE_DISCARD,
        ),
        sleep.wrap_release,
        TESTED,
        "vLLM asks its connectors before it resets them",
    ),
    Patch(
        Target(EXECUTOR, "Executor.sleep", ("level",), "the workers keep the content of cached blocks"),
        sleep.wrap_sleep,
        TESTED,
        OWN_CONTENT,
    ),
    Patch(
        Target(
            EXECUTOR,
            "Executor.discard",
            ("tags",),
            "refused where a KV connector registered the memory",
            SINCE_DISCARD,
        ),
        sleep.wrap_discard,
        TESTED,
        "vLLM asks its connectors before it discards",
    ),
    Patch(
        Target(EXECUTOR, "Executor.wake_up", ("tags",), "all ranks take their memory again, or none"),
        sleep.wrap_wake_up,
        TESTED,
        OWN_AGREEMENT,
    ),
)

SLEEP_RELIED_ON = (
    *(
        Target(f"vllm.v1.worker.{module}", f"{name}.{method}", parameters, "overridden", releases)
        for module, name in (("gpu_worker", "Worker"), ("cpu_worker", "CPUWorker"))
        for method, parameters, releases in (
            ("sleep", ("level",), None),
            ("wake_up", ("tags",), None),
            ("discard", ("tags",), SINCE_DISCARD),
        )
    ),
    *(
        Target(CORE, f"{name}.pause_scheduler", ("mode", "clear_cache"), "called by sleep on the same thread")
        for name in ("EngineCore", "EngineCoreProc")
    ),
    Target(CORE, "EngineCore.is_scheduler_paused", (), "whether a sleep that waited is still wanted"),
    Target(EXECUTOR, "Executor.collective_rpc", ("method",), "called by sleep and wake_up on the instance"),
    Target(CORE, "EngineCore._reset_caches", (), "what becomes of the content when it cannot be kept"),
    Target(SCHEDULER, "Scheduler.reset_prefix_cache", (), "preempts, then asks the manager"),
    Target(MANAGER, "KVCacheManager.reset_prefix_cache", (), "left out while hashes are kept"),
    Target(BLOCKS, "BlockPool", None, "has every block in `blocks`, `num_gpu_blocks` of them"),
    Target(BLOCKS, "BlockPool.get_num_free_blocks", (), "all but the null block, where nothing is in use"),
    Target(BLOCK_UTILS, "KVCacheBlock", None, "has block_id, ref_cnt, is_null and block_hash"),
)
