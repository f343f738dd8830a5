"""The records of what KV connectors need of vLLM; `hooks` checks these with its own."""

from __future__ import annotations

from vllm_integration.patches import Target

__all__ = ["CONNECTORS_RELIED_ON"]

TRANSFER, V1 = "vllm.distributed.kv_transfer", "vllm.distributed.kv_transfer.kv_connector.v1"
STATE, RUNNER_PART = f"{TRANSFER}.kv_transfer_state", "vllm.v1.worker.gpu.kv_connector"
WORKER, BASE = "vllm.v1.worker.gpu_worker", f"{V1}.base"
OFFLOAD_WORKER = "vllm.v1.simple_kv_offload.worker"
SINCE_ALIGNED = SINCE_RESTORE = ("0.33",)

CONNECTORS_RELIED_ON = (
    Target(STATE, "_KV_CONNECTOR_AGENT", None, "a stand-in is here while the cache is allocated"),
    Target(
        STATE,
        "ensure_kv_transfer_initialized",
        ("vllm_config", "kv_cache_config"),
        "leaves alone what is there already; called again with the final size",
    ),
    Target(WORKER, "ensure_kv_transfer_initialized", None, "called by initialize_from_config"),
    Target(
        f"{TRANSFER}.kv_connector.factory",
        "KVConnectorFactory.get_connector_class",
        ("kv_transfer_config",),
        "which classes are configured",
    ),
    Target(RUNNER_PART, "NO_OP_KV_CONNECTOR", None, "the V2 runner's while it warms up"),
    Target(RUNNER_PART, "get_kv_connector", ("vllm_config", "kv_caches_dict"), "the V2 runner's afterwards"),
    Target(
        "vllm.v1.worker.gpu.model_runner", "get_kv_connector", None, "registers with the stand-in at first"
    ),
    Target(BASE, "KVConnectorBase_V1.register_kv_caches", ("kv_caches",), "is given narrowed views"),
    Target(BASE, "KVConnectorBase_V1.set_host_xfer_buffer_ops", ("copy_operation",), "called after it"),
    Target(BASE, "KVConnectorBase_V1.start_load_kv", ("forward_context",), "is shown narrowed layers"),
    Target(
        BASE,
        "KVConnectorBase_V1.save_kv_layer",
        ("layer_name", "kv_layer", "attn_metadata"),
        "is given a narrowed view",
    ),
    Target(BASE, "KVConnectorBase_V1.unregister_kv_caches", (), "called before a sleep", SINCE_RESTORE),
    Target(BASE, "KVConnectorBase_V1.restore_kv_caches", (), "called after a wake-up", SINCE_RESTORE),
    Target("vllm.forward_context", "ForwardContext.no_compile_layers", None, "the layers that are shown"),
    Target(f"{V1}.multi_connector", "MultiConnector", None, "has the others in `_connectors`"),
    Target(
        f"{V1}.simple_cpu_offload_connector",
        "SimpleCPUOffloadConnector",
        None,
        "has the worker's part in `worker_handler`",
    ),
    Target(
        OFFLOAD_WORKER,
        "SimpleCPUOffloadWorker._poll_stream_events",
        ("is_store",),
        "asked until all that was sent to its thread is done",
    ),
    Target(
        WORKER,
        "Worker.get_simple_cpu_offload_num_cpu_blocks",
        (),
        "overridden: asked for before there is a connector",
        SINCE_ALIGNED,
    ),
    Target(
        "vllm.v1.executor.abstract",
        "Executor.get_simple_cpu_offload_num_blocks",
        (),
        "asked again afterwards",
        SINCE_ALIGNED,
    ),
)
