"""The final size of ranks without an engine: vLLM's own planner over real pools in one process."""

import gc
import math
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pools import MIB

from allocator.sizing import SizingError

pytestmark = pytest.mark.vllm


class Ranks:
    """Stands in for `TwoPhaseSizing` with several ranks: vLLM's own planner, real pools, one process."""

    def __init__(
        self,
        vllm_config: Any,
        measured_blocks: list[int],
        budget_bytes: int,
        capacity: int,
        states: bool,
        full_graphs: bool,
    ) -> None:
        import torch
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
        from vllm.v1.worker.gpu_worker import Worker  # noqa: F401  (registers the cache specs)

        from allocator import extensible_kv_pool
        from allocator.shim import check, lib

        check(lib.ekv_host_configure(4096, budget_bytes))
        self.vllm_config, self.core = vllm_config, types.SimpleNamespace()
        spec = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=64, dtype=torch.float32)
        if states:  # pages of the same size
            spec = MambaSpec(block_size=512, shapes=((spec.page_size_bytes // 4,),), dtypes=(torch.float32,))
        self.captures = [full_graphs] * len(measured_blocks)
        self.specs = [{"model.layers.0.attn": spec} for _ in measured_blocks]
        self._configs = kv_cache_utils.get_kv_cache_configs
        self.block_bytes = spec.page_size_bytes
        self.proposals = [{"explicit": False, "upper_bytes": 1 << 40} for _ in measured_blocks]
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
        self.measured_blocks, self.free_blocks = measured_blocks, measured_blocks
        self.calls: list[str] = []
        self.told: list[int] = []  # the length, of each rank in turn

    def plan_again(self, available: list[int]) -> list[Any]:
        return self._configs(self.vllm_config, self.specs, available)

    def rpc(self, method: str, *args: Any) -> list[Any]:
        self.calls.append(method)
        return [getattr(self, method)(rank, *args) for rank in range(len(self.pools))]

    def ekv_measure(self, rank: int) -> dict[str, Any]:
        capacity = self.pools[rank][0].capacity_blocks
        return {
            "rank": rank,
            "blocks": self.measured_blocks[rank],
            "blocks_free": self.free_blocks[rank],
            "capacity_bytes": capacity * self.block_bytes,
            "free_bytes": (self.free_blocks[rank] - 2) * self.block_bytes,
            "prefix_bytes": 2 * self.block_bytes,
            "widest_step_bytes": 0,
            "bytes_per_block": self.block_bytes,
            "requested_bytes": 100 * MIB,
            "used_bytes": 10 * MIB,
            "margin_bytes": 0,
        }

    def ekv_captures_decode_steps(self, rank: int) -> bool:
        return self.captures[rank]

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

    def make(
        measured_blocks: list[int],
        budget_bytes: int = 1 << 40,
        capacity: int = 4096,
        states: bool = False,
        full_graphs: bool = True,
    ) -> Ranks:
        made.append(Ranks(vllm_config, measured_blocks, budget_bytes, capacity, states, full_graphs))
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
    assert some.core.available_gpu_memory_for_kv_cache == 2055 * some.block_bytes
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
    with pytest.raises(
        SizingError,
        match="needs 5 blocks of the extensible KV cache, 655360 bytes on rank 0; 4 fit: of 100.0 MiB",
    ):
        settle(some, some.config)
    assert "ekv_commit" not in some.calls
    assert some.committed() == [2, 2]


def test_required_blocks_count_the_null_block(ranks: Callable[..., Ranks]) -> None:
    from vllm_integration.final_size import required_blocks

    some = ranks([100])
    assert required_blocks(some.vllm_config, some.config) == 1 + math.ceil(512 / 128)
    # The concurrency is a fraction of floating-point numbers, the blocks of a request are not.
    for blocks in range(5, 1000):
        some.config.num_blocks = blocks
        for length in (512, 6 * 128, 49 * 128):
            some.vllm_config.model_config.max_model_len = length
            assert required_blocks(some.vllm_config, some.config) == 1 + length // 128


def test_measured_blocks_beyond_the_capacity_are_not_committed(ranks: Callable[..., Ranks]) -> None:
    from vllm_integration.final_size import settle

    some = ranks([80], capacity=60)
    assert settle(some, some.config).blocks == 60
    assert some.committed() == [60]
    assert "ekv_rollback" not in some.calls


def test_case_16_states_of_mamba_are_checked_against_the_final_size(
    ranks: Callable[..., Ranks], vllm_config: Any
) -> None:
    """1,024 sequences: vLLM's own check has seen the 4,096 blocks of the reservation."""
    from vllm_integration.final_size import settle

    vllm_config.scheduler_config.max_num_seqs = 1024
    some = ranks([512], states=True)
    assert some.config.has_mamba_layers
    with pytest.raises(SizingError, match="max_num_seqs 1024 needs 1024 blocks.* and 512 blocks"):
        settle(some, some.config)
    assert "ekv_commit" not in some.calls
    some = ranks([1024], states=True)
    assert settle(some, some.config).blocks == 1024


@pytest.mark.parametrize("kept", [{"full_graphs": False, "states": True}, {"states": False}])
def test_case_16_is_none_without_mamba_or_captured_decode_steps(
    ranks: Callable[..., Ranks], vllm_config: Any, kept: dict[str, bool]
) -> None:
    from vllm_integration.final_size import settle

    vllm_config.scheduler_config.max_num_seqs = 1024
    some = ranks([512], **kept)
    assert settle(some, some.config).blocks == 512
    assert ("ekv_captures_decode_steps" in some.calls) is kept["states"]


def test_case_16_one_rank_that_captures_is_enough(ranks: Callable[..., Ranks], vllm_config: Any) -> None:
    """In pipeline parallelism, where ranks without layers do not capture."""
    from vllm_integration.final_size import settle

    vllm_config.scheduler_config.max_num_seqs = 1024
    some = ranks([512, 512], states=True)
    some.captures = [False, True]
    with pytest.raises(SizingError, match="max_num_seqs 1024 needs 1024 blocks"):
        settle(some, some.config)


@pytest.mark.parametrize(
    ("mode", "whole"), [("NONE", False), ("PIECEWISE", False), ("FULL_AND_PIECEWISE", True), ("FULL", True)]
)
def test_case_16_worker_says_whether_decode_steps_are_captured_whole(mode: str, whole: bool) -> None:
    from vllm.config import CompilationConfig

    from vllm_integration.worker import ExtensibleWorker

    config = types.SimpleNamespace(compilation_config=CompilationConfig(cudagraph_mode=mode))
    worker = types.SimpleNamespace(vllm_config=config)
    assert ExtensibleWorker.ekv_captures_decode_steps(worker) is whole


@pytest.mark.parametrize("fits", [50, 30])
def test_case_16_commit_that_comes_up_short_keeps_a_block_for_each_state(
    ranks: Callable[..., Ranks], vllm_config: Any, fits: int
) -> None:
    from vllm_integration.final_size import settle

    vllm_config.scheduler_config.max_num_seqs = 40
    some = ranks([60], budget_bytes=fits * 131072, states=True)
    if fits >= 40:
        assert settle(some, some.config).blocks == fits
        return
    with pytest.raises(SizingError, match="30 blocks would fit now, and max_num_seqs 40 with Mamba layers"):
        settle(some, some.config)
    assert some.committed() == [2]


def _ask(some: Ranks, how: str) -> None:
    if how == "bytes":
        some.proposals[1]["explicit"] = True
    else:
        some.vllm_config.cache_config.num_gpu_blocks_override = 60


@pytest.mark.parametrize("how", ["bytes", "override"])
def test_size_that_was_asked_for_may_take_the_margin_too(ranks: Callable[..., Ranks], how: str) -> None:
    from vllm_integration.final_size import settle

    some = ranks([10, 10], capacity=60)
    some.free_blocks = [60, 61]
    _ask(some, how)
    assert settle(some, some.config).blocks == 60
    assert some.committed() == [60, 60]


@pytest.mark.parametrize("how", ["bytes", "override"])
def test_size_that_was_asked_for_and_is_not_free_is_refused(ranks: Callable[..., Ranks], how: str) -> None:
    from vllm_integration.final_size import settle

    some = ranks([60, 60], capacity=60)
    some.free_blocks = [60, 59]
    _ask(some, how)
    size = some.block_bytes
    text = f"60 blocks that was asked for takes {60 * size} bytes, and rank 1 has {59 * size} bytes left"
    with pytest.raises(SizingError, match=f"{text}.* at most 59 blocks fit"):
        settle(some, some.config)
    assert "ekv_commit" not in some.calls


@pytest.mark.parametrize("how", ["bytes", "override"])
def test_size_that_was_asked_for_and_comes_up_short_does_not_shrink(
    ranks: Callable[..., Ranks], how: str
) -> None:
    from vllm_integration.final_size import settle

    some = ranks([60, 60], capacity=60, budget_bytes=100 * 131072)
    _ask(some, how)
    with pytest.raises(SizingError, match="rank 1 could not back 60 blocks.* 59 blocks would fit now"):
        settle(some, some.config)
    assert some.calls.count("ekv_commit") == 1


def test_fallback_is_what_fits_on_the_rank_with_the_least_room(
    ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down to what one request needs, and on every rank."""
    from vllm_integration.final_size import settle

    some = ranks([60, 60], budget_bytes=90 * 131072)
    rollback = Ranks.ekv_rollback
    fits = {0: 40, 1: 5}  # less than each has while the other holds its prefix only
    monkeypatch.setattr(Ranks, "ekv_rollback", lambda *a: rollback(*a) | {"blocks": fits[a[1]]})
    assert settle(some, some.config).blocks == 5
    assert some.committed() == [5, 5]
    assert some.calls.count("ekv_commit") == 2


def test_explanation_leaves_an_override_as_it_was(ranks: Callable[..., Ranks]) -> None:
    from vllm_integration.final_size import explain

    some = ranks([100])
    cache_config = some.vllm_config.cache_config
    cache_config.num_gpu_blocks_override = 3
    error = explain(some, ValueError("Too small."))
    assert str(error).startswith("Too small. One request of max_model_len 512 needs 5 blocks")
    assert "num_gpu_blocks_override allows 3 blocks: raise it, or lower max_model_len" in str(error)
    assert f"needs 5 blocks of the extensible KV cache, {5 * 131072} bytes on rank 0; " in str(error)
    assert cache_config.num_gpu_blocks_override == 3


@pytest.mark.parametrize(
    ("explicit", "what"), [(True, "are what kv_cache_memory_bytes"), (False, "are there")]
)
def test_explanation_names_the_rank_with_the_least(
    ranks: Callable[..., Ranks], explicit: bool, what: str
) -> None:
    from vllm_integration.final_size import explain

    some = ranks([100, 100])
    for proposal, size in zip(some.proposals, (5 * MIB, 3 * MIB), strict=True):
        proposal.update(explicit=explicit, upper_bytes=size)
    assert f"{3 * MIB} bytes {what}" in str(explain(some, ValueError("Too small.")))


def test_error_that_has_another_cause_is_vllms_own(ranks: Callable[..., Ranks]) -> None:
    from vllm_integration.final_size import explain

    some = ranks([100])
    original = ValueError("No such layers.")

    def refuse(available: list[int]) -> list[Any]:
        raise original

    some.plan_again = refuse  # type: ignore[method-assign]
    assert explain(some, original) is original
