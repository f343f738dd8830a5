"""A KV connector that checks what it is given, and remembers it: each byte committed, each block covered.

Loaded by vLLM through ``kv_connector_module_path``; what it saw in this process is in `SEEN`.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rig import readable_bytes
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

SEEN: list[dict[str, Any]] = []


@dataclass
class Blocks(KVConnectorMetadata):
    """The blocks of the requests of one step."""

    ids: list[int] = field(default_factory=list)


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """What a peer would be told."""

    num_blocks: int


class RecordingConnector(KVConnectorBase_V1, SupportsHMA):
    """Copies nothing, and reads every block that a request has."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.num_blocks = kv_cache_config.num_blocks
        self.views: dict[str, torch.Tensor] = {}
        told = [tensor.size for tensor in kv_cache_config.kv_cache_tensors]
        seen = {"sizes": told, "num_gpu_blocks": vllm_config.cache_config.num_gpu_blocks}
        self.saw("made", num_blocks=self.num_blocks, **seen)
        self.steps: list[list[int]] = []
        self.block_ids: dict[str, list[int]] = {}

    def saw(self, what: str, **more: Any) -> None:
        side = "scheduler" if self._role == KVConnectorRole.SCHEDULER else "worker"
        SEEN.append({"side": side, "what": what, **more})

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        for name, view in kv_caches.items():
            check(view, self.num_blocks)
            self.views[name] = view
        storages = {
            (v.untyped_storage().data_ptr(), v.untyped_storage().nbytes()) for v in kv_caches.values()
        }
        self.saw("registered", layers=sorted(kv_caches), storages=sorted(storages))

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        self.saw("copy operation", name=copy_operation.__name__)

    def get_handshake_metadata(self) -> Handshake:
        self.saw("handshake", registered=len(self.views))
        return Handshake(self.num_blocks)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        shown = 0
        for layer in forward_context.no_compile_layers.values():
            cache = getattr(layer, "kv_cache", None)
            if isinstance(cache, torch.Tensor) and cache.numel():
                check(cache, self.num_blocks)
                shown += 1
        self.saw("load", layers=shown)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        check(kv_layer, self.num_blocks)
        assert kv_layer.data_ptr() == self.views[layer_name].data_ptr()
        self.saw("saved layer", layer=layer_name)

    def wait_for_save(self) -> None:
        metadata = self._get_connector_metadata()
        for view in self.views.values():
            pieces = view.shape[0] // self.num_blocks
            for block in metadata.ids:
                assert 0 <= block < self.num_blocks
                assert view[block * pieces : (block + 1) * pieces].isfinite().all()
        self.saw("step", blocks=sorted(metadata.ids))

    # Scheduler side.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        ids = [i for group in blocks.get_block_ids() for i in group]
        assert all(0 <= i < self.num_blocks for i in ids)
        self.block_ids[request.request_id] = ids

    def build_connector_meta(self, scheduler_output: Any) -> Blocks:
        ids = {i for r in scheduler_output.num_scheduled_tokens for i in self.block_ids.get(r, ())}
        return Blocks(sorted(ids))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Any]) -> None:
        self.saw("peers", num_blocks=[m.num_blocks for m in metadata.values()])


class SleepingConnector(RecordingConnector):
    """Can give up what it registered, as the connectors of vLLM 0.33 can."""

    def unregister_kv_caches(self) -> None:
        self.saw("unregistered", readable=all(_is_readable(view) for view in self.views.values()))

    def restore_kv_caches(self) -> None:
        for view in self.views.values():
            check(view, self.num_blocks)
        self.saw("registered again")


class LoadingConnector(SleepingConnector):
    """Fills the blocks of requests that are named "remote..." while others run, until it is let finish."""

    loading: set[str] = set()
    may_finish = False

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if not request.request_id.startswith("remote") or request.request_id in self.asked:
            return 0, False
        self.asked.add(request.request_id)
        return request.num_prompt_tokens // 2 // 128 * 128, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            self.loading.add(request.request_id)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        if not (self.may_finish and self.loading):
            return None, None
        done = set(self.loading)
        self.loading.clear()
        return None, done

    @property
    def asked(self) -> set[str]:
        return vars(self).setdefault("_asked", set())


class PoolConnector(RecordingConnector):
    """May want the cache in memory of its own."""

    def get_mem_pool_context(self) -> None:
        return None


def check(view: torch.Tensor, num_blocks: int) -> None:
    """Assert that `view` has room for exactly `num_blocks`, and that its storage is committed memory only."""
    storage = view.untyped_storage()
    assert view.shape[0] % num_blocks == 0, (tuple(view.shape), num_blocks)
    last = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    end = view.data_ptr() + (last + 1) * view.element_size()
    assert storage.data_ptr() <= view.data_ptr() < end <= storage.data_ptr() + storage.nbytes()
    assert _is_readable(view)


def _is_readable(view: torch.Tensor) -> bool:
    storage = view.untyped_storage()
    if view.device.type != "cpu":
        return True
    begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    if readable_bytes(begin, 1) != 1 or readable_bytes(end - 1, 1) != 1:
        return False
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access = line.split()[:2]
        low, high = (int(address, 16) for address in addresses.split("-"))
        if low <= begin < high and access.startswith("rw"):
            begin = high
    return begin >= end
