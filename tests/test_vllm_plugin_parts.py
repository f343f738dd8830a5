"""The plugin's parts without an engine: reasons to stand aside, the prefix, models without a cache."""

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_integration.config import Options

pytestmark = pytest.mark.vllm


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


@pytest.mark.parametrize(
    ("backend", "uncached", "fraction", "named"),
    [
        ("native", "", 1.0, None),
        ("cudaMallocAsync", "", 1.0, "cudaMallocAsync has no memory pools"),
        ("native", "1", 1.0, "without its cache (PYTORCH_NO_CUDA_MEMORY_CACHING)"),
        ("native", "", 0.8, "may take 0.8 of cuda:0"),
    ],
)
def test_allocators_of_pytorch_that_have_no_room_for_addresses_are_named(
    vllm_config: Any,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    uncached: str,
    fraction: float,
    named: str | None,
) -> None:
    from vllm_integration import worker_checks

    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: fraction, raising=False)
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", uncached)
    monkeypatch.setattr(worker_checks, "_backend_reason", lambda config: None)
    found = types.SimpleNamespace(available=True, handle_kind="fd")
    monkeypatch.setattr("allocator.probe", lambda device: found)
    worker = types.SimpleNamespace(device=torch.device("cuda", 0), vllm_config=vllm_config)
    reason = worker_checks.worker_reason(worker, Options())
    assert reason is None if named is None else named in (reason or "")


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


def prefix(
    specs: list[Any], capacity: int = 10**6, most_blocks: int = 10**6, state: Any = None, **scheduler: int
) -> int:
    from vllm_integration.prefix import warmup_blocks

    worker = types.SimpleNamespace(
        scheduler_config=types.SimpleNamespace(
            **{"max_num_batched_tokens": 1024, "max_num_seqs": 8, **scheduler}
        ),
        vllm_config=types.SimpleNamespace(speculative_config=None),
        model_runner=types.SimpleNamespace(model_state=state),
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


def test_prefix_holds_the_whole_encoder_output_of_every_request() -> None:
    cross = type("CrossAttentionSpec", (), {"block_size": 16})()
    state = types.SimpleNamespace(max_encoder_len=1500)
    assert prefix([spec(), cross], max_num_seqs=256, state=state) >= 1 + 256 * (1 + 94)
    assert prefix([spec()], state=state) == prefix([spec()])


def test_prefix_holds_sink_blocks_in_full() -> None:
    assert prefix([spec(sink_len=1600)], most_blocks=2) == 1 + 100


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
