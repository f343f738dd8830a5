"""KV connectors without an engine: every layout and runner, vLLM's own connectors, reasons, handles."""

import logging
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pools import make_pool

from allocator import PoolValueError
from vllm_integration import worker_connectors
from vllm_integration.narrowing import Narrowing, check_one_handle_each

BLOCKS = 7
# What makes each layout, and how many layers share a storage when it is narrowed.
LAYOUTS = {"LBHNC": 1, "LBNHC": 1, "BLHNC": 4, "BLNHC": 4, "BHLNC": 4}


def test_span_of_several_allocations_is_refused() -> None:
    """Case 33."""
    pool, view = make_pool("cpu", max_chunk_bytes=2 << 20)
    pool.commit(50)
    with pytest.raises(PoolValueError, match=r"4915200 bytes at offset 0 .* lie in 3 physical allocations"):
        check_one_handle_each(pool)
    pool.commit(50, defragment=True)
    check_one_handle_each(pool)
    assert len(pool.snapshot()["chunks"]) == pool.num_segments == len(view)


@pytest.mark.parametrize("num_blocks", [1, 40, 63])
def test_segments_that_share_a_granule_are_in_one_allocation_each(num_blocks: int) -> None:
    """63 blocks of 96 KiB end within a granule, in which the next layer begins."""
    pool, view = make_pool("cpu", num_blocks=63, max_chunk_bytes=0)
    pool.commit(num_blocks)
    check_one_handle_each(pool)
    assert len(pool.snapshot()["chunks"]) == (1 if num_blocks == 63 else 4)
    assert pool.physical_bytes == pool.bytes_for(num_blocks)
    view[:, :num_blocks] = 3
    pool.release_physical()
    pool.recommit()
    check_one_handle_each(pool)
    assert not view[:, :num_blocks].any()


def test_growth_beyond_a_piece_is_refused_until_defragmented() -> None:
    """Case 33, with a segment that grew by a second chunk."""
    pool, _ = make_pool("cpu", num_blocks=63, max_chunk_bytes=0)
    pool.commit(2)
    pool.commit(63)
    with pytest.raises(PoolValueError, match="physical allocations"):
        check_one_handle_each(pool)
    pool.commit(63, defragment=True)
    check_one_handle_each(pool)


def test_what_is_not_of_the_pool_stays_as_it_is() -> None:
    pool, view = make_pool("cpu")
    pool.commit(3)
    narrow, other = Narrowing(pool), torch.zeros(64, 4)
    assert narrow(other) is other
    assert narrow(None) is None
    first, (second, same) = narrow([view[0], view[0]])[0], narrow((view[1], view[1]))
    assert first.shape[0] == 3
    assert second is same
    assert Narrowing(None)(other) is other


@pytest.fixture
def vllm_config(tiny_model_path: Path) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(tiny_model_path), max_model_len=512, dtype="float32", enforce_eager=True, block_size=32
    ).create_engine_config()


def specs(kind: str) -> dict[str, Any]:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec
    from vllm.v1.worker.gpu_worker import Worker  # noqa: F401  (registers the cache specs)

    sizes = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    full = FullAttentionSpec(**sizes)
    if kind == "latent":
        full = MLAAttentionSpec(**sizes | {"num_kv_heads": 1})
    other = full
    if kind == "two groups":
        other = SlidingWindowSpec(**sizes, sliding_window=64)
    elif kind == "two sizes":
        other = FullAttentionSpec(**sizes | {"head_size": 128})
    return {f"model.layers.{i}.self_attn.attn": (full, other)[i % 2] for i in range(4)}


class Cache:
    """A cache as vLLM allocates it in a pool, of which `BLOCKS` blocks are committed, and its worker."""

    def __init__(self, vllm_config: Any, kind: str, layout: str, transfer: dict[str, Any], v2: bool) -> None:
        from vllm.config import KVTransferConfig
        from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
        from vllm.v1.kv_cache_layout import KVCacheLayout
        from vllm.v1.worker.utils import allocate_kv_cache

        from allocator import extensible_kv_pool
        from vllm_integration.allocation import bind_views
        from vllm_integration.worker_connectors import Deferred

        vllm_config.cache_config.kv_cache_layout = layout
        vllm_config.kv_transfer_config = KVTransferConfig(**{"kv_role": "kv_both", **transfer})
        (self.config,) = get_kv_cache_configs(vllm_config, [specs(kind)], [16 << 20])
        self.size = self.config.kv_cache_tensors[0].size
        with extensible_kv_pool("cpu", min_bytes=self.size, max_chunk_bytes=0) as self.pool:
            caches = allocate_kv_cache(self.config, torch.device("cpu"), KVCacheLayout[layout], None)
        bind_views(self.pool, caches, self.config.num_blocks)
        self.pool.commit(BLOCKS)
        check_one_handle_each(self.pool)
        self.told = Deferred(self.config)
        self.told.register_kv_caches(caches)
        self.told.set_host_xfer_buffer_ops(print)
        vllm_config.cache_config.num_gpu_blocks = self.config.num_blocks  # as a worker has it until then
        runner = types.SimpleNamespace(**{"kv_connector": "none yet"} if v2 else {})
        self.worker = types.SimpleNamespace(
            vllm_config=vllm_config, cache_config=vllm_config.cache_config, model_runner=runner
        )

    def connect(self) -> Any:
        worker_connectors.connect(self.worker, self.told, self.pool, BLOCKS)
        return worker_connectors.current()

    def assert_committed(self, tensor: torch.Tensor) -> None:
        begin = tensor.data_ptr()
        extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        end = begin + extent * tensor.element_size()
        assert any(a <= begin and end <= a + size for a, size in self.pool.committed_regions())


@pytest.fixture
def make_cache(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Cache]]:
    from vllm.distributed.kv_transfer import kv_transfer_state

    monkeypatch.setattr(kv_transfer_state, "_sync_engine_id_across_tp", lambda config: None)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", None)

    def make(kind: str, layout: str, transfer: dict[str, Any], v2: bool = False) -> Cache:
        return Cache(vllm_config, kind, layout, transfer, v2)

    return make


RECORDING = {"kv_connector": "RecordingConnector", "kv_connector_module_path": "recording_connector"}
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 64 << 20},
}
EVERY_LAYOUT = [
    (kind, layout)
    for kind in ("full", "two groups", "two sizes", "latent")
    for layout in LAYOUTS
    if (kind, layout) != ("two sizes", "BHLNC")  # vLLM refuses it
]


@pytest.mark.vllm
@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize(("kind", "layout"), EVERY_LAYOUT)
def test_connector_is_given_committed_memory_in_every_layout(
    make_cache: Callable[..., Cache], kind: str, layout: str, v2: bool
) -> None:
    cache = make_cache(kind, layout, RECORDING, v2)
    connector = cache.connect()
    assert connector.num_blocks == BLOCKS
    assert sorted(connector.views) == sorted(cache.told.caches)
    for name, view in connector.views.items():
        whole = cache.told.caches[name]
        assert view.data_ptr() == whole.data_ptr()
        assert view.stride() == whole.stride()
        assert view.shape[0] * cache.config.num_blocks == whole.shape[0] * BLOCKS
        cache.assert_committed(view)
        view.fill_(1.0)
        assert whole[: view.shape[0]].eq(1.0).all()
    storages = {view.untyped_storage().data_ptr() for view in connector.views.values()}
    sizes = sum(
        {
            v.untyped_storage().data_ptr(): v.untyped_storage().nbytes() for v in connector.views.values()
        }.values()
    )
    assert sizes == BLOCKS * cache.size // cache.config.num_blocks
    assert len(storages) == cache.pool.num_segments
    assert cache.worker.cache_config.num_gpu_blocks == cache.config.num_blocks
    if v2:
        assert cache.worker.model_runner.kv_connector.kv_connector is connector


@pytest.mark.vllm
@pytest.mark.parametrize(("kind", "layout"), EVERY_LAYOUT)
def test_plan_for_connectors_says_where_the_views_are(
    make_cache: Callable[..., Cache], kind: str, layout: str
) -> None:
    from vllm_integration.worker_connectors import final_config

    cache = make_cache(kind, layout, RECORDING)
    config, narrow = final_config(cache.config, BLOCKS), Narrowing(cache.pool)
    assert config.num_blocks == BLOCKS
    assert config.kv_cache_groups == cache.config.kv_cache_groups
    names = [name for tensor in config.kv_cache_tensors for name in tensor.layers]
    assert sorted(names) == sorted(cache.told.caches)
    for tensor in config.kv_cache_tensors:
        assert tensor.size == BLOCKS * cache.size // cache.config.num_blocks
        for number, name in enumerate(tensor.layers):
            view = narrow(cache.told.caches[name])
            place = view.data_ptr() - view.untyped_storage().data_ptr()
            assert place == tensor.offset + number * tensor.layer_stride
            assert BLOCKS * tensor.block_stride == view.untyped_storage().nbytes()


@pytest.mark.vllm
@pytest.mark.parametrize(("kind", "layout"), EVERY_LAYOUT)
def test_offloading_connector_moves_committed_blocks_only(
    make_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch, kind: str, layout: str
) -> None:
    """Up to the copies themselves, which need a GPU."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker

    regions: list[Any] = []
    monkeypatch.setattr(
        OffloadingConnectorWorker, "_init_worker", lambda self, caches: regions.append(caches)
    )
    cache = make_cache(kind, layout, OFFLOADING)
    cache.connect()
    (caches,) = regions
    for one in caches.tensors:
        assert one.tensor.shape[0] == BLOCKS
        cache.assert_committed(one.tensor)
    assert sum(one.tensor.nbytes for one in caches.tensors) == BLOCKS * cache.size // cache.config.num_blocks


@pytest.mark.vllm
@pytest.mark.parametrize(("kind", "layout"), EVERY_LAYOUT)
def test_simple_offload_moves_committed_blocks_only(
    make_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch, kind: str, layout: str
) -> None:
    """Up to its streams, which need a GPU; alone and beside another connector."""
    from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker

    class Stream:
        priority_range = staticmethod(lambda: (0, -1))

        def __init__(self, priority: int) -> None:
            pass

    regions: list[dict[str, torch.Tensor]] = []
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(
        SimpleCPUOffloadWorker, "_init_cpu_mode", lambda self, caches, *_: regions.append(caches)
    )
    simple = {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both"}
    multi = {"kv_connector": "MultiConnector"}
    multi["kv_connector_extra_config"] = {"connectors": [simple, RECORDING | {"kv_role": "kv_both"}]}
    cache = make_cache(kind, layout, multi)
    cache.connect()
    (caches,) = regions
    # 0.29 takes the size for that of one storage.
    handler = worker_connectors.current()._connectors[0].worker_handler
    sizes = {t.size // t.block_stride for t in handler.kv_cache_config.kv_cache_tensors}
    assert sizes == {BLOCKS}
    for region in caches.values():
        assert region.shape[0] == BLOCKS
        cache.assert_committed(region)
    assert sum(region.nbytes for region in caches.values()) == BLOCKS * cache.size // cache.config.num_blocks


def _transfer(name: str, **more: Any) -> Any:
    from vllm.config import KVTransferConfig

    return KVTransferConfig(kv_connector=name, **{"kv_role": "kv_both", **more})


def _multi(*children: dict[str, Any]) -> Any:
    connectors = [{"kv_role": "kv_both", **child} for child in children]
    return _transfer("MultiConnector", kv_connector_extra_config={"connectors": connectors})


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("name", "registers", "sleeps"),
    [
        ("NixlConnector", True, False),
        ("NixlPushConnector", True, False),
        ("OffloadingConnector", False, True),
        ("SimpleCPUOffloadConnector", False, True),
        ("ExampleConnector", False, True),
        ("MooncakeConnector", True, False),
    ],
)
def test_vllms_connectors_are_known(vllm_config: Any, name: str, registers: bool, sleeps: bool) -> None:
    """On 0.32, where no connector of vLLM's can give up what it registered."""
    from vllm_integration import connectors

    vllm_config.kv_transfer_config = _transfer(name)
    assert connectors.connector_reason(vllm_config) is None
    assert connectors.registers_memory(vllm_config) is registers
    assert (connectors.sleep_reason(vllm_config) is None) is sleeps
    vllm_config.kv_transfer_config = _multi(OFFLOADING, {"kv_connector": name})
    assert connectors.connector_reason(vllm_config) is None
    assert connectors.registers_memory(vllm_config) is registers
    assert (connectors.sleep_reason(vllm_config) is None) is sleeps


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("transfer", "device", "kinds", "told", "has_rdma"),
    [
        (lambda: _nixl(), "cuda", ["fd", "fd"], "WARNING", False),
        (lambda: _nixl(kv_role="kv_producer"), "cuda", ["fd"], "WARNING", False),
        (lambda: _nixl(kv_role="kv_consumer"), "cuda", ["fd"], "INFO", False),
        (lambda: _nixl(kv_role="kv_consumer"), "cuda", ["fd"], "WARNING", True),
        (lambda: _nixl("NixlPushConnector", kv_role="kv_consumer"), "cuda", ["fd"], "WARNING", False),
        (lambda: _multi(DECODING, {**DECODING, "kv_role": "kv_producer"}), "cuda", ["fd"], "WARNING", False),
        (lambda: _nixl(kv_connector_extra_config={"backends": ["LIBFABRIC"]}), "cuda", ["fd"], None, False),
        (lambda: _nixl(kv_buffer_device="cpu"), "cuda", ["fd"], None, False),
        (lambda: _nixl(), "cuda", ["fabric", None], None, False),
        (lambda: _nixl(), "cpu", ["fd"], None, False),
        (lambda: _transfer("MooncakeConnector"), "cuda", ["fd"], None, False),
        (lambda: _transfer("OffloadingConnector"), "cuda", [None], None, False),
    ],
)
def test_transport_that_cannot_map_the_cache_is_warned_of(
    vllm_config: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    transfer: Callable[[], Any],
    device: str,
    kinds: list,
    told: str | None,
    has_rdma: bool,
) -> None:
    """A rank without layers answers None."""
    from vllm_integration import connectors

    vllm_config.kv_transfer_config = transfer()
    vllm_config.device_config.device_type = device
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    answers = [{"error": None, "handle_kind": kind, "has_rdma": has_rdma} for kind in kinds]
    core = types.SimpleNamespace(model_executor=None)
    sizing = types.SimpleNamespace(vllm_config=vllm_config, core=core, rpc=lambda method, num_blocks: answers)
    with caplog.at_level("INFO", "vllm.extensible_kv"):
        connectors.settle(sizing, BLOCKS)
    # Some handlers see a line twice, and vLLM's own modules log as well.
    lines = {(r.levelname, r.getMessage()) for r in caplog.records if r.name == "vllm.extensible_kv"}
    shareable = f", one allocation for each segment (shareable: {kinds[0]})" if kinds[0] else ""
    name = vllm_config.kv_transfer_config.kv_connector
    line = f"Extensible KV cache: the KV connector {name} works on {BLOCKS} committed blocks{shareable}."
    assert ("INFO", line) in lines
    lines.remove(("INFO", line))
    assert {level for level, _ in lines} == ({told} if told else set())
    assert all("no fabric handles (fd)" in text for _, text in lines)
    assert all(("kv_consumer is taken to decode only" in text) is (told == "INFO") for _, text in lines)


BOTH_WAYS = {"bidirectional_kv_xfer": True}
DECODING = {"kv_connector": "NixlConnector", "kv_buffer_device": "cuda", "kv_role": "kv_consumer"}


def _nixl(name: str = "NixlConnector", **more: Any) -> Any:
    return _transfer(name, **{"kv_buffer_device": "cuda", **more})  # which the CPU has otherwise


@pytest.mark.vllm
def test_user_class_on_nixl_is_not_taken_to_only_read(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from vllm_integration import connectors

    transfer = vllm_config.kv_transfer_config = _nixl(kv_role="kv_consumer")
    vllm_config.device_config.device_type = "cuda"
    assert connectors.staging_reason(vllm_config, "fd", False) is None
    mine = type("Mine", (KVConnectorFactory.get_connector_class(transfer),), {})
    monkeypatch.setattr(connectors, "leaves", lambda transfer: [(mine, transfer)])
    assert "through host memory" in str(connectors.staging_reason(vllm_config, "fd", False))


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, True),
        (
            {
                "transfer": lambda: _multi(
                    OFFLOADING, {"kv_connector": "NixlConnector", "kv_buffer_device": "cuda"}
                )
            },
            True,
        ),
        ({"handle_kind": "none"}, True),
        ({"handle_kind": "fabric"}, False),
        ({"has_rdma": True}, False),
        ({"has_rdma": True, "handle_kind": "fd"}, True),  # no GPUDirect RDMA
        ({"has_rdma": True, "handle_kind": "none"}, True),
        ({"device": "cpu"}, False),
        ({"cumem": True}, False),  # as vLLM's own cache then
        ({"transfer": lambda: _nixl(kv_role="kv_producer")}, True),
        ({"transfer": lambda: _nixl(kv_role="kv_consumer")}, False),  # it reads, and nobody maps its memory
        ({"transfer": lambda: _nixl(kv_role="kv_consumer"), "rocm": True}, True),
        # It would have its own memory registered with the adapter.
        ({"transfer": lambda: _nixl(kv_role="kv_consumer"), "has_rdma": True}, False),
        ({"transfer": lambda: _nixl(kv_role="kv_consumer"), "has_rdma": True, "handle_kind": "fd"}, True),
        ({"transfer": lambda: _nixl(kv_role="kv_consumer", kv_connector_extra_config=BOTH_WAYS)}, True),
        ({"transfer": lambda: _nixl(name="NixlPushConnector", kv_role="kv_consumer")}, True),  # others write
        ({"transfer": lambda: _multi(OFFLOADING, DECODING)}, False),
        ({"transfer": lambda: _multi(DECODING, {**DECODING, "kv_role": "kv_producer"})}, True),
        ({"transfer": lambda: _nixl(kv_buffer_device="cpu")}, False),
        ({"transfer": lambda: _nixl(kv_connector_extra_config={"backends": ["GDS"]})}, False),
        ({"transfer": lambda: _transfer("MooncakeConnector", kv_buffer_device="cuda")}, False),
        ({"transfer": lambda: _transfer("OffloadingConnector", kv_buffer_device="cuda")}, False),
        ({"transfer": lambda: None}, False),
    ],
)
def test_transfers_through_the_host_are_a_reason(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch, change: dict, named: bool
) -> None:
    """UCX would copy what it maps without the flag."""
    from vllm.platforms import current_platform

    from vllm_integration import connectors

    monkeypatch.setattr(type(current_platform), "is_rocm", lambda self: change.get("rocm", False))

    given = {"transfer": _nixl, "handle_kind": "fd+rdma", "has_rdma": False, "device": "cuda"} | change
    vllm_config.kv_transfer_config = given["transfer"]()
    vllm_config.device_config.device_type = given["device"]
    vllm_config.model_config.enable_cumem_allocator = given.get("cumem", False)
    reason = connectors.staging_reason(vllm_config, given["handle_kind"], given["has_rdma"])
    if not named:
        assert reason is None
        return
    assert reason is not None
    assert re.search(r"the KV connector Nixl(Push)?Connector would copy blocks between processes", reason)
    adapter = (
        "its RDMA adapter cannot reach those"
        if given["has_rdma"]
        else "no RDMA adapter is in /dev/infiniband"
    )
    assert f'gives "{given["handle_kind"]}" ones, and {adapter}' in reason


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("devices", "accepted", "named"),
    [
        (None, False, True),
        ([], False, True),
        (["rdma_cm"], False, True),  # the module is loaded, and there is no adapter
        (["rdma_cm", "uverbs0"], False, False),
        ([], True, False),
    ],
)
def test_worker_looks_for_what_transfers_could_use(
    vllm_config: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    devices: list[str] | None,
    accepted: bool,
    named: bool,
) -> None:
    from vllm_integration import worker_checks
    from vllm_integration.config import Options

    folder = tmp_path / "infiniband"
    for device in devices or []:
        (folder / device).mkdir(parents=True)
    if devices == []:
        folder.mkdir()
    vllm_config.kv_transfer_config = _nixl()
    vllm_config.device_config.device_type = "cuda"
    found = types.SimpleNamespace(available=True, handle_kind="fd+rdma")
    monkeypatch.setattr("allocator.probe", lambda device: found)
    monkeypatch.setattr(worker_checks, "_backend_reason", lambda config: None)
    monkeypatch.setattr(worker_checks, "_allocator_reason", lambda device: None)
    monkeypatch.setattr(worker_checks, "RDMA_DEVICES", folder)
    worker = types.SimpleNamespace(device=types.SimpleNamespace(type="cuda"), vllm_config=vllm_config)
    reason = worker_checks.worker_reason(worker, Options(host_staged_transfers=accepted))
    assert ("through host memory" in (reason or "")) is named


@pytest.mark.vllm
def test_nixl_sleeps_with_vllms_sleep_mode_only(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it UCX keeps registrations, and another process its mappings, of memory that was given back."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from vllm_integration import connectors

    vllm_config.kv_transfer_config = _transfer("NixlConnector")
    nixl = KVConnectorFactory.get_connector_class(vllm_config.kv_transfer_config)
    for name in ("unregister_kv_caches", "restore_kv_caches"):  # as vLLM 0.33 has them
        monkeypatch.setattr(nixl, name, lambda self: None, raising=False)
    assert "--enable-sleep-mode" in str(connectors.sleep_reason(vllm_config))
    monkeypatch.setattr(connectors, "leaves", lambda transfer: [(type("Mine", (nixl,), {}), transfer)])
    assert "--enable-sleep-mode" in str(connectors.sleep_reason(vllm_config))
    vllm_config.device_config.device_type = "cuda"
    vllm_config.kv_transfer_config = _nixl()
    assert "through host memory" in str(connectors.staging_reason(vllm_config, "fd", False))
    monkeypatch.undo()
    for name in ("unregister_kv_caches", "restore_kv_caches"):
        monkeypatch.setattr(nixl, name, lambda self: None, raising=False)
    vllm_config.model_config.enable_sleep_mode = True  # what the CPU's platform refuses on the way in
    assert connectors.sleep_reason(vllm_config) is None


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("transfer", "reason"),
    [
        (lambda: _transfer("FlexKVConnectorV1"), "FlexKVConnectorV1 opens the cache in another process"),
        (lambda: _multi(OFFLOADING, {"kv_connector": "FlexKVConnectorV1"}), "FlexKVConnectorV1 opens"),
        (lambda: _transfer("HiSparseConnector"), "HiSparseConnector keeps part"),
        (lambda: _transfer("NoSuchConnector"), "the KV connector NoSuchConnector cannot be loaded"),
        (
            lambda: _transfer("PoolConnector", kv_connector_module_path="recording_connector"),
            "PoolConnector brings a memory pool of its own",
        ),
    ],
)
def test_connector_that_cannot_have_it_is_named(vllm_config: Any, transfer: Any, reason: str) -> None:
    from vllm_integration.fallback import engine_reason

    vllm_config.kv_transfer_config = transfer()
    assert reason in (engine_reason(vllm_config) or "")


def layout_reason(vllm_config: Any, kind: str, layout: str, transfer: Any) -> str | None:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    from vllm_integration import connectors, worker_checks

    vllm_config.cache_config.kv_cache_layout, vllm_config.kv_transfer_config = layout, transfer
    (planned,) = get_kv_cache_configs(vllm_config, [specs(kind)], [16 << 20])
    worker = types.SimpleNamespace(vllm_config=vllm_config, cache_config=vllm_config.cache_config)
    worker._ekv = types.SimpleNamespace(registered=connectors.registers_memory(vllm_config))
    return worker_checks.layout_reason(worker, planned)


@pytest.mark.vllm
def test_layer_in_several_pieces_is_named(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    nixl = _transfer("NixlConnector")
    assert layout_reason(vllm_config, "full", "LBHNC", nixl) is None
    assert layout_reason(vllm_config, "full", "BLHNC", nixl) is None
    named = layout_reason(vllm_config, "full", "LHBNC", nixl)
    assert (
        named
        == "the KV connector NixlConnector is given each layer in one piece, and LHBNC has it in several"
    )
    assert layout_reason(vllm_config, "full", "LHBNC", None) is None
    # On ROCm there is no plan of views to look at, and the layout's name has to do.
    monkeypatch.setattr(type(current_platform), "is_rocm", lambda self: True)
    assert layout_reason(vllm_config, "full", "LHBNC", nixl) == named
    assert layout_reason(vllm_config, "full", "LBHNC", nixl) is None
    assert layout_reason(vllm_config, "full", "LHBNC", None) is None


@pytest.mark.vllm
@pytest.mark.parametrize(("version", "named"), [("0.29.1", True), ("0.30.0", False)])
def test_layers_of_several_sizes_are_too_much_for_simple_offload_of_old(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch, version: str, named: bool
) -> None:
    monkeypatch.setattr("vllm.version.__version__", version)
    simple = _transfer("SimpleCPUOffloadConnector")
    assert layout_reason(vllm_config, "full", "LBHNC", simple) is None
    reason = layout_reason(vllm_config, "two sizes", "LBHNC", simple)
    assert (reason is not None and "takes all layers to be of one size" in reason) is named
    assert layout_reason(vllm_config, "two sizes", "LBHNC", _transfer("NixlConnector")) is None


def test_commit_in_one_piece_that_fails_leaves_the_prefix_and_works_with_less(
    host_budget: Callable[[int], None],
) -> None:
    """The prefix is given back first, so that what just fits does; a failure, or a roll-back, restores it."""
    from vllm_integration.stages import Stages
    from vllm_integration.worker_state import WorkerCache

    cache = WorkerCache.__new__(WorkerCache)
    cache.registered, cache.rank, cache.prefix_blocks, cache.stages = True, 3, 16, Stages()
    cache.explicit, cache.unseen_bytes = True, 0
    cache.pool, view = make_pool("cpu", num_blocks=63, **cache.memory_settings())
    cache.pool.commit(16)
    host_budget(cache.pool.bytes_for(40) - cache.pool.bytes_for(16))
    failed = cache.commit(None, 60)
    assert failed["rank"] == 3
    assert "host: " in failed["error"]
    assert cache.pool.committed_blocks == 16
    assert not view[:, :16].any()
    assert cache.commit(None, 40)["error"] is None
    check_one_handle_each(cache.pool)
    cache.rollback(types.SimpleNamespace(device=torch.device("cpu")))
    assert cache.pool.committed_blocks == 16
    assert cache.pool.physical_bytes == cache.pool.bytes_for(16)


@pytest.mark.vllm
@pytest.mark.parametrize("v2", [False, True])
def test_stand_in_is_told_what_a_connector_would_be_and_is_gone_afterwards(
    make_cache: Callable[..., Cache], v2: bool
) -> None:
    """With the calls that either runner makes while it allocates; the size then is the reservation's."""
    import recording_connector
    from vllm.distributed.kv_transfer import kv_transfer_state as state
    from vllm.v1.worker.gpu.kv_connector import NO_OP_KV_CONNECTOR, get_kv_connector

    cache = make_cache("full", "LBHNC", RECORDING, v2)
    with worker_connectors.deferred(cache.worker, cache.config) as told:
        state.ensure_kv_transfer_initialized(cache.worker.vllm_config, cache.config)
        assert state.get_kv_transfer_group() is told
        assert told.get_mem_pool_context() is None
        if v2:
            cache.worker.model_runner.kv_connector = get_kv_connector(
                cache.worker.vllm_config, cache.told.caches
            )
        else:
            told.register_kv_caches(cache.told.caches)
            told.set_host_xfer_buffer_ops(print)
        cache.config.kv_cache_groups.append("of the runner alone")
    assert not state.has_kv_transfer_group()
    assert told.caches is cache.told.caches
    assert callable(told.copy_operation)
    assert len(told.config.kv_cache_groups) == 1
    if v2:
        assert cache.worker.model_runner.kv_connector is NO_OP_KV_CONNECTOR
    cache.config.kv_cache_groups.pop()
    cache.told = told
    assert cache.connect().num_blocks == BLOCKS
    (made,) = [seen for seen in recording_connector.SEEN[-4:] if seen["what"] == "made"]
    assert made["num_gpu_blocks"] == BLOCKS
    assert cache.worker.cache_config.num_gpu_blocks == cache.config.num_blocks > BLOCKS


@pytest.mark.vllm
def test_without_a_connector_there_is_no_stand_in(vllm_config: Any) -> None:
    from vllm.distributed.kv_transfer import has_kv_transfer_group

    worker = types.SimpleNamespace(vllm_config=vllm_config)
    with worker_connectors.deferred(worker, None) as told:
        assert told is None
        assert not has_kv_transfer_group()
