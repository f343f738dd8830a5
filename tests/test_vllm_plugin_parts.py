"""The plugin's parts without an engine: reasons to stand aside, the prefix, the final size of ranks."""

import gc
import math
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pools import MIB

from allocator.sizing import SizingError
from vllm_integration.config import Options

pytestmark = pytest.mark.vllm


@pytest.fixture
def vllm_config(tiny_model_path: Path) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(
        model=str(tiny_model_path), max_model_len=512, dtype="float32", enforce_eager=True
    ).create_engine_config()
    config.cache_config.kv_cache_layout = "LBHNC"
    return config


def _elastic(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ELASTIC_EP_SCALE_UP_LAUNCH", "1")


def _external(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config.parallel_config.distributed_executor_backend = "external_launcher"


def _scales(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config.cache_config.cache_dtype = "fp8_per_token_head"


def _hisparse(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config.attention_config = types.SimpleNamespace(hisparse_config={})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_elastic, "elastic scale-up"),
        (_external, "external launcher"),
        (_scales, "fp8_per_token_head"),
        (_hisparse, "HiSparse"),
    ],
)
def test_reason_of_configuration_is_named(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch, change: Callable[..., None], named: str
) -> None:
    from vllm_integration.fallback import engine_reason

    assert engine_reason(vllm_config) is None
    change(vllm_config, monkeypatch)
    assert named in (engine_reason(vllm_config) or "")


def test_flex_attention_is_named(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer.kv_connector import utils
    from vllm.v1.attention.backends.flex_attention import FlexAttentionBackend

    from vllm_integration import worker_checks

    monkeypatch.setattr(utils, "get_current_attn_backends", lambda config: [FlexAttentionBackend])
    worker = types.SimpleNamespace(device=types.SimpleNamespace(type="cpu"), vllm_config=vllm_config)
    monkeypatch.setattr("allocator.probe", lambda device: types.SimpleNamespace(available=True))
    assert "FLEX_ATTENTION" in (worker_checks.worker_reason(worker, Options()) or "")


def test_other_devices_are_named(vllm_config: Any) -> None:
    from vllm_integration.worker_checks import worker_reason

    worker = types.SimpleNamespace(device=types.SimpleNamespace(type="xpu"), vllm_config=vllm_config)
    assert "type xpu" in (worker_reason(worker, Options()) or "")


def test_worker_class_that_is_not_vllms_says_so() -> None:
    from vllm.v1.worker.worker_base import WorkerBase

    from vllm_integration.worker import UnsupportedWorker, extend

    class Other(WorkerBase):
        pass

    extended = extend(Other)
    assert issubclass(extended, UnsupportedWorker)
    assert "Other is not a vllm.v1.worker.gpu_worker.Worker" in extended.ekv_begin(
        extended.__new__(extended), {}
    )


def spec(block_size: int = 16, **more: Any) -> Any:
    return types.SimpleNamespace(block_size=block_size, **more)


def prefix(specs: list[Any], capacity: int = 10**6, most_blocks: int = 10**6, **scheduler: int) -> int:
    from vllm_integration.prefix import warmup_blocks

    worker = types.SimpleNamespace(
        scheduler_config=types.SimpleNamespace(
            **{"max_num_batched_tokens": 1024, "max_num_seqs": 8, **scheduler}
        ),
        vllm_config=types.SimpleNamespace(speculative_config=None),
    )
    config = types.SimpleNamespace(kv_cache_groups=[types.SimpleNamespace(kv_cache_spec=s) for s in specs])
    return warmup_blocks(worker, config, capacity, 1000, most_blocks * 1000)


def test_prefix_holds_one_full_prefill_and_every_request() -> None:
    assert prefix([spec()]) >= 1 + 1024 // 16
    assert prefix([spec()], max_num_seqs=256) >= 1 + 256
    assert prefix([spec(), spec()], max_num_seqs=256) >= 1 + 2 * 256


def test_prefix_stays_within_its_share_and_the_capacity() -> None:
    assert prefix([spec()], most_blocks=10) == 10
    assert prefix([spec()], most_blocks=0) == 2
    assert prefix([spec()], capacity=7) == 7


def test_prefix_holds_sink_blocks_in_full() -> None:
    assert prefix([spec(sink_len=1600)], most_blocks=2) == 1 + 100


class Ranks:
    """Stands in for `TwoPhaseSizing` with several ranks: vLLM's own planner, real pools, one process."""

    def __init__(self, vllm_config: Any, measured_blocks: list[int], budget_bytes: int) -> None:
        import torch
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.kv_cache_interface import FullAttentionSpec
        from vllm.v1.worker.gpu_worker import Worker  # noqa: F401  (registers the cache specs)

        from allocator import extensible_kv_pool
        from allocator.shim import check, lib

        check(lib.ekv_host_configure(4096, budget_bytes))
        self.vllm_config, self.core = vllm_config, types.SimpleNamespace()
        spec = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=64, dtype=torch.float32)
        self.specs = [{"model.layers.0.attn": spec} for _ in measured_blocks]
        self._configs = kv_cache_utils.get_kv_cache_configs
        self.block_bytes = spec.page_size_bytes
        self.proposals = [{"explicit": False, "upper_bytes": 1 << 40} for _ in measured_blocks]
        capacity = 4096
        self.pools = []
        for _ in measured_blocks:
            with extensible_kv_pool("cpu") as pool:
                flat = torch.zeros(capacity * self.block_bytes, dtype=torch.int8)
            pool.bind(flat.view(capacity, -1))
            pool.commit(2)
            self.pools.append((pool, flat))
        self.config = kv_cache_utils.generate_scheduler_kv_cache_config(
            self.plan_again([capacity * self.block_bytes] * len(measured_blocks))
        )
        self.measured_blocks = measured_blocks
        self.calls: list[str] = []
        self.told: list[int] = []  # the length, of each rank in turn

    def plan_again(self, available: list[int]) -> list[Any]:
        return self._configs(self.vllm_config, self.specs, available)

    def rpc(self, method: str, *args: Any) -> list[Any]:
        self.calls.append(method)
        return [getattr(self, method)(rank, *args) for rank in range(len(self.pools))]

    def ekv_measure(self, rank: int) -> dict[str, Any]:
        return {
            "rank": rank,
            "blocks": self.measured_blocks[rank],
            "blocks_free": self.measured_blocks[rank],
            "bytes_per_block": self.block_bytes,
            "requested_bytes": 100 * MIB,
            "used_bytes": 10 * MIB,
            "margin_bytes": 0,
        }

    def ekv_commit(self, rank: int, blocks: int) -> dict[str, Any]:
        from allocator.errors import EkvError

        try:
            self.pools[rank][0].commit(blocks)
        except EkvError as error:
            return {"rank": rank, "error": str(error), "seconds": 0.0}
        return {"rank": rank, "error": None, "seconds": 0.0}

    def ekv_rollback(self, rank: int) -> dict[str, Any]:
        from allocator import memory_info

        pool = self.pools[rank][0]
        pool.shrink(2)
        return {"rank": rank, "blocks": pool.max_blocks_within(memory_info("cpu")[0] + pool.physical_bytes)}

    def update_max_model_len(self, rank: int, max_model_len: int) -> None:
        self.told.append(max_model_len)

    def committed(self) -> list[int]:
        return [pool.committed_blocks for pool, _ in self.pools]


@pytest.fixture
def ranks(vllm_config: Any) -> Iterator[Callable[..., Ranks]]:
    from allocator import probe
    from allocator.shim import check, lib

    granularity = probe("cpu").granularity
    gc.collect()
    made: list[Ranks] = []

    def make(measured_blocks: list[int], budget_bytes: int = 1 << 40) -> Ranks:
        made.append(Ranks(vllm_config, measured_blocks, budget_bytes))
        return made[-1]

    yield make
    while made:
        one = made.pop()
        for pool in [pool for pool, _ in one.pools]:
            pool.free()
        one.pools.clear()
    gc.collect()  # the caches' addresses go with their tensors
    check(lib.ekv_host_configure(granularity, 0))


def test_all_ranks_use_what_the_smallest_measured(ranks: Callable[..., Ranks]) -> None:
    """Case 18."""
    from vllm_integration.final_size import settle

    some = ranks([2111, 2055])
    sizes = settle(some, some.config)
    assert sizes.blocks == some.config.num_blocks == 2055
    assert some.committed() == [2055, 2055]
    assert some.vllm_config.cache_config.num_gpu_blocks == 2055
    assert {tensor.size for tensor in some.config.kv_cache_tensors} == {2055 * some.block_bytes}
    # One request of 512 tokens takes 4 blocks.
    assert some.vllm_config.cache_config.kv_cache_size_tokens == pytest.approx(2055 / 4 * 512, abs=512)


def test_rank_that_fails_takes_every_rank_back(ranks: Callable[..., Ranks]) -> None:
    """Case 19: both ranks share one budget, so the second never has room for what the first took."""
    from vllm_integration.final_size import settle

    some = ranks([100, 100], budget_bytes=6 * 131072)
    with pytest.raises(SizingError) as caught:
        settle(some, some.config)
    assert "rank 0 could not back" in str(caught.value) or "rank 1 could not back" in str(caught.value)
    assert "host: " in str(caught.value)
    assert "one request of max_model_len 512 needs 5" in str(caught.value)
    assert some.committed() == [2, 2]


@pytest.mark.parametrize(("blocks", "length"), [(40, 39 * 128), (2, 128)])
def test_commit_that_comes_up_short_fits_the_automatic_length_again(
    ranks: Callable[..., Ranks], vllm_config: Any, blocks: int, length: int
) -> None:
    """Cases 13 and 29: a length that was fitted to 60 blocks asks for all of them."""
    from vllm_integration.final_size import settle

    model_config = vllm_config.model_config
    # As they are in an engine that was started with -1, with a model of 8,192 tokens.
    model_config.original_max_model_len, model_config.max_model_len = -1, 8192
    some = ranks([60], budget_bytes=blocks * 131072)
    assert settle(some, some.config).blocks == some.config.num_blocks == blocks
    assert some.committed() == [blocks]
    assert model_config.max_model_len == length
    assert some.told == [59 * 128, length]


def test_commit_that_stays_short_names_rank_call_and_code_whatever_the_length(
    ranks: Callable[..., Ranks], vllm_config: Any
) -> None:
    """Both ranks share one budget, so that what would fit on one of them never fits on both."""
    from vllm_integration.final_size import settle

    vllm_config.model_config.original_max_model_len = -1
    some = ranks([60, 60], budget_bytes=80 * 131072)
    with pytest.raises(SizingError, match=r"rank 1 could not back 57 blocks .*: host: .*\(12\)") as caught:
        settle(some, some.config)
    assert "and any request needs 2" in str(caught.value)
    assert some.committed() == [2, 2]


def test_no_rank_with_room_for_a_request_names_both_numbers(ranks: Callable[..., Ranks]) -> None:
    from vllm_integration.final_size import settle

    some = ranks([4, 50])
    with pytest.raises(SizingError, match="needs 5 blocks of the extensible KV cache, 4 fit: of 100.0 MiB"):
        settle(some, some.config)
    assert "ekv_commit" not in some.calls
    assert some.committed() == [2, 2]


def test_required_blocks_count_the_null_block(ranks: Callable[..., Ranks]) -> None:
    from vllm_integration.final_size import required_blocks

    some = ranks([100])
    assert required_blocks(some.vllm_config, some.config) == 1 + math.ceil(512 / 128)


def test_model_without_cache_is_planned_as_vllm_does(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attention-free model: the same call, the same answer, one warning, ordinary workers."""
    from vllm_integration import engine
    from vllm_integration.config import Options

    warnings: list[str] = []
    monkeypatch.setattr(engine.fallback, "warn", warnings.append)
    calls: list[str] = []

    def rpc(method: str, args: tuple[Any, ...]) -> list[Any]:
        calls.append(method)
        return [0, 0]

    core = types.SimpleNamespace(model_executor=types.SimpleNamespace(collective_rpc=rpc))
    planned: list[Any] = []

    def original(*args: Any, **kwargs: Any) -> str:
        planned.append((args, kwargs))
        return "vLLM's plan"

    sizing = engine.TwoPhaseSizing(core, vllm_config, Options())
    assert sizing.plan(original, (vllm_config, [{}, {}], [7, 7]), {}) == "vLLM's plan"
    assert planned == [((vllm_config, [{}, {}], [7, 7]), {})]
    assert calls == ["ekv_abandon"]
    assert warnings == ["the model has no KV cache"]


def test_warm_up_believes_that_the_cache_ends_with_the_prefix() -> None:
    """Case 15: what vLLM's warm-up picks blocks from; behind them nothing is backed."""
    from vllm_integration.stages import Stages
    from vllm_integration.worker import ExtensibleWorker

    plan, seen = types.SimpleNamespace(num_blocks=64), []

    class Stock:
        def compile_or_warm_up_model(self) -> None:
            seen.append(plan.num_blocks)

    class Extended(ExtensibleWorker, Stock):
        model_runner = types.SimpleNamespace(kv_cache_config=plan)

    stages, pool = Stages(), types.SimpleNamespace(committed_blocks=5)
    pool.physical_bytes = pool.reserved_bytes = 0
    worker = Extended()
    worker._ekv = types.SimpleNamespace(pool=pool, stage=lambda name: stages.stage(name, lambda: pool))
    worker.compile_or_warm_up_model()
    worker._ekv = None
    worker.compile_or_warm_up_model()
    assert seen == [5, 64]
