"""KV connectors as the engine sees them: which can have an extensible cache, and of what kind of memory.

A connector that registers the cache's memory with a transport (NIXL) needs each region in one physical
allocation that can be shared; one that only copies blocks takes the cache as it is. The workers' side is in
`worker_connectors`.
"""

from __future__ import annotations

from typing import Any

from vllm_integration.log import logger

__all__ = [
    "connector_reason",
    "leaves",
    "registers_memory",
    "settle",
    "sleep_reason",
    "staging_reason",
    "takes_one_size",
    "uses_layers",
]

MULTI, SIMPLE_OFFLOAD = "MultiConnector", "SimpleCPUOffloadConnector"
# vLLM's own that copy blocks in this process, on demand. All others are taken to register memory.
COPYING = {"ExampleConnector", "OffloadingConnector", "SharedStorageConnector", SIMPLE_OFFLOAD}
# vLLM's own whose hooks for single layers do nothing: they work from what was registered.
WITHOUT_LAYERS = {
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
    "OffloadingConnector",
    SIMPLE_OFFLOAD,
}
NIXL = {"NixlConnector", "NixlPullConnector", "NixlPushConnector"}
OTHER_PROCESS = "opens the cache in another process by a CUDA IPC handle, which reserved memory has none of"
UNSUPPORTED = {
    "FlexKVConnectorV1": OTHER_PROCESS,
    "HiSparseConnector": "keeps part of the cache on the host",
    "LMCacheMPConnector": OTHER_PROCESS,
}


def leaves(transfer: Any) -> list[tuple[type, Any]]:
    """Return class and configuration of the connector in `transfer`, or of each one in a MultiConnector."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    found = KVConnectorFactory.get_connector_class(transfer)
    if not _is_vllms(found, {MULTI}):
        return [(found, transfer)]
    children = transfer.kv_connector_extra_config.get("connectors") or ()
    configs = [KVTransferConfig(**{"engine_id": transfer.engine_id, **child}) for child in children]
    return [leaf for config in configs for leaf in leaves(config)]


def connector_reason(vllm_config: Any) -> str | None:
    """Return why the configured KV connector cannot have an extensible cache, or None."""
    transfer = vllm_config.kv_transfer_config
    name = getattr(transfer, "kv_connector", None)
    if name is None:
        return None
    if vllm_config.parallel_config.decode_context_parallel_size > 1:
        return f"the KV connector {name} may change how context parallelism lays out tokens before warm-up"
    try:
        found = leaves(transfer)
    except Exception as error:  # a module of the user's; vLLM will say the same
        return f"the KV connector {name} cannot be loaded: {error}"
    for connector, child in found:
        reason = _class_reason(connector)
        if reason:
            return f"the KV connector {child.kv_connector} {reason}"
    return None


def registers_memory(vllm_config: Any) -> bool:
    """Return whether a configured connector may hand the cache's memory to a transport."""
    return any(not _is_vllms(connector, COPYING) for connector, _ in _configured(vllm_config))


def takes_one_size(vllm_config: Any) -> bool:
    """Return whether a configured connector cannot tell layers of several sizes apart by their storages.

    Source: vLLM 0.29.0, v1/simple_kv_offload/worker.py; 0.30.0 goes by each tensor's place.
    """
    from vllm.version import __version__ as version

    named = any(_is_vllms(connector, {SIMPLE_OFFLOAD}) for connector, _ in _configured(vllm_config))
    return named and version.startswith("0.29.")


def uses_layers(vllm_config: Any) -> bool:
    """Return whether a configured connector may reach into the cache of single layers."""
    return any(not _is_vllms(connector, WITHOUT_LAYERS) for connector, _ in _configured(vllm_config))


def sleep_reason(vllm_config: Any) -> str | None:
    """Return why the cache cannot sleep with the configured connectors, or None.

    Source: vLLM 0.33.0, kv_connector/v1/base.py: `unregister_kv_caches`, `restore_kv_caches` and
    `supports_sleep_mode`; kv_connector/v1/nixl/base_worker.py: with vLLM's sleep mode NIXL's agent is made
    without UCX's cache of registrations and without CUDA IPC, which both outlast what was given up.
    """
    for connector, transfer in _configured(vllm_config):
        if _is_vllms(connector, COPYING):
            continue
        hooks = (_overrides(connector, name) for name in ("unregister_kv_caches", "restore_kv_caches"))
        supports = getattr(connector, "supports_sleep_mode", lambda transfer: True)
        if not all(hooks) or not supports(transfer):
            return (
                f"the KV connector {transfer.kv_connector} has registered the cache's memory and has no way "
                "to give it up and to register it again (vLLM's NixlConnector over UCX has, from 0.33 on)"
            )
        if _is_kind_of(connector, NIXL) and not vllm_config.model_config.enable_sleep_mode:
            return (
                f"the KV connector {transfer.kv_connector} lets its transport hold on to memory that was "
                "given up, unless vLLM's sleep mode is on (--enable-sleep-mode)"
            )
    return None


def staging_reason(vllm_config: Any, handle_kind: str, has_rdma: bool) -> str | None:
    """Return why a configured connector would be far slower with an extensible cache than without, or None.

    NIXL's UCX maps the memory of another process of the same host, ordinary memory by a CUDA IPC handle and
    reserved memory by a fabric handle or not at all (libuct_cuda of nixl-cu13 1.5.1). Where it can do neither
    nor use a network adapter, it copies through the host: seen on an H200, 0.5 GB/s instead of 120 to 240.
    An engine that only decodes maps others' memory, and nobody maps its own: 180 GB/s. (With an adapter, its
    own would have to be registered there.)

    Parameters
    ----------
    vllm_config : VllmConfig
        Of the engine.
    handle_kind : str
        The best kind of shareable memory on this device, see `allocator.probe`.
    has_rdma : bool
        Whether this process has an RDMA adapter. Only memory made for GPUDirect RDMA is of use to it.
    """
    if handle_kind == "fabric" or (has_rdma and handle_kind == "fd+rdma"):
        return None
    # With the cumem allocator, which sleep mode switches on, vLLM's own cache has no CUDA IPC handles either.
    if vllm_config.device_config.device_type != "cuda" or vllm_config.model_config.enable_cumem_allocator:
        return None
    for connector, transfer in _configured(vllm_config):
        if not _is_over_ucx(connector, transfer) or _is_left_alone(connector, transfer, has_rdma):
            continue
        adapter = (
            "its RDMA adapter cannot reach those" if has_rdma else "no RDMA adapter is in /dev/infiniband"
        )
        return (
            f"the KV connector {transfer.kv_connector} would copy blocks between processes of this host "
            "through host memory: UCX maps reserved memory by fabric handles only, this machine gives "
            f'"{handle_kind}" ones, and {adapter} (host_staged_transfers accepts that)'
        )
    return None


def settle(sizing: Any, num_blocks: int) -> None:
    """Let every worker make its connector, which is handed `num_blocks` committed blocks.

    Raises
    ------
    RuntimeError
        A rank's connector could not be made; the rank and its error are named.
    """
    vllm_config, executor = sizing.vllm_config, sizing.core.model_executor
    if not _configured(vllm_config):
        return
    answers = sizing.rpc("ekv_connect", num_blocks)
    failed = next((answer for answer in answers if answer["error"]), None)
    if failed is not None:
        raise RuntimeError(f"rank {failed['rank']} could not set up its KV connector: {failed['error']}")
    kinds = sorted({answer["handle_kind"] for answer in answers} - {None})
    logger.info(
        "Extensible KV cache: the KV connector %s works on %d committed blocks%s.",
        vllm_config.kv_transfer_config.kv_connector,
        num_blocks,
        f", one allocation for each segment (shareable: {', '.join(kinds)})" if kinds else "",
    )
    if kinds not in ([], ["fabric"]) and vllm_config.device_config.device_type == "cuda":
        _tell_of_ucx(vllm_config, ", ".join(kinds), any(answer["has_rdma"] for answer in answers))
    # Since 0.33 the engine asks for this before warm-up, when there is no connector yet.
    cache_config = vllm_config.cache_config
    if getattr(cache_config, "simple_cpu_offload_num_blocks", None) is not None:
        cache_config.simple_cpu_offload_num_blocks = executor.get_simple_cpu_offload_num_blocks()


def _tell_of_ucx(vllm_config: Any, kinds: str, has_rdma: bool) -> None:
    # Source: libuct_cuda of nixl-cu13 1.5.1, which exports such memory by a fabric handle or not at all.
    over_ucx = [leaf for leaf in _configured(vllm_config) if _is_over_ucx(*leaf)]
    if any(not _is_left_alone(*leaf, has_rdma) for leaf in over_ucx):
        logger.warning(
            "Extensible KV cache: this machine gives no fabric handles (%s), so NIXL's UCX cannot map the "
            "cache into another process of the same host: blocks between such go over a network adapter or "
            "through host memory.",
            kinds,
        )
    elif over_ucx:  # vLLM goes by each request, whatever the role
        logger.info(
            "Extensible KV cache: kv_consumer is taken to decode only. This machine gives no fabric handles "
            "(%s), so blocks that another process of this host would read from it go through host memory.",
            kinds,
        )


def _configured(vllm_config: Any) -> list[tuple[type, Any]]:
    transfer = vllm_config.kv_transfer_config
    return leaves(transfer) if getattr(transfer, "kv_connector", None) else []


def _class_reason(connector: type) -> str | None:
    for base in connector.__mro__:
        if base.__name__ in UNSUPPORTED:
            return UNSUPPORTED[base.__name__]
    if _overrides(connector, "get_mem_pool_context"):
        return "brings a memory pool of its own"
    if not hasattr(connector, "register_kv_caches"):
        return "is not one of vLLM's V1 connectors"
    return None


def _overrides(connector: type, method: str) -> bool:
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1

    found = getattr(connector, method, None)
    return found is not None and found is not getattr(KVConnectorBase_V1, method, None)


def _is_vllms(connector: type, names: set[str]) -> bool:
    return connector.__name__ in names and connector.__module__.startswith("vllm.")


def _is_kind_of(connector: type, names: set[str]) -> bool:
    """Return whether it is one of vLLM's of these names, or a user's class on top of one."""
    return any(_is_vllms(base, names) for base in connector.__mro__)


def _is_over_ucx(connector: type, transfer: Any) -> bool:
    """Return whether it is NIXL and has UCX move blocks of device memory."""
    backends = transfer.get_from_extra_config("backends", ["UCX"])
    return _is_kind_of(connector, NIXL) and transfer.kv_buffer_device != "cpu" and "UCX" in backends


def _is_left_alone(connector: type, transfer: Any, has_rdma: bool) -> bool:
    """Return whether no other process, nor an adapter, has to reach the cache: NIXL's decoding side reads.

    Source: vLLM 0.29.0 to 0.33.0, kv_connector/v1/nixl/pull_scheduler.py: it fetches blocks itself, and has
    none fetched from it. With NixlPushConnector, others write. What UCX does on ROCm nobody has looked at.
    """
    from vllm.platforms import current_platform

    return (
        _is_vllms(connector, {"NixlConnector", "NixlPullConnector"})
        and transfer.kv_role == "kv_consumer"
        and not transfer.get_from_extra_config("bidirectional_kv_xfer", False)
        and not has_rdma
        and not current_platform.is_rocm()
    )
