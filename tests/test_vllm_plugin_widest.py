"""The widest step: what it adds to vLLM's profile run, and a whole engine with speculative decoding."""

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_vllm_plugin import ENV, FLAG, SMALL, SNAPSHOT, check_engine_is_consistent

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(280)]

Run = Callable[..., dict[str, Any]]
DRAFTS = 4
NGRAM = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": DRAFTS,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
}
# Text that repeats itself, so that n-grams are found and some of the drafts are taken.
GENERATE = {
    "do": "generate",
    "prompts": [[300 + j % 7 for j in range(n)] for n in (40, 130)],
    "max_tokens": 24,
}


def test_speculative_engine_equals_stock_and_measures_every_draft(run_engine: Run) -> None:
    """Case 6, on the CPU build's V1 runner with n-grams."""
    steps = [GENERATE, {"do": "figures"}, SNAPSHOT, {"do": "rpc", "method": "probe_widest_step"}, GENERATE]
    llm = SMALL | FLAG | NGRAM | {"worker_extension_cls": "widest_probe.Extension"}
    env = ENV | {"PYTHONPATH": str(Path(__file__).parent)}
    answer = run_engine(llm, steps, env, import_first=True)
    assert answer["error"] is None
    outputs, figures, snapshots, (seen,), again = answer["results"]
    check_engine_is_consistent(figures, snapshots)
    requests = SMALL["max_num_seqs"]
    # Every request with all its drafts, and all of them with penalties; and so for ordinary sampling.
    assert seen["verified"]
    for rows, drafts, penalties, mask in seen["verified"]:
        assert (rows, drafts, penalties) == (requests * (1 + DRAFTS), [DRAFTS] * requests, True)
        assert mask == [requests, 2048]  # the tiny model's vocabulary
    assert [requests, True, 1] in seen["sampled"]
    assert max(seen["tokens"]) == SMALL["max_num_batched_tokens"]
    assert "could not be measured" not in answer["log"]
    # It was run a second time, in the middle of serving, and nothing that serves has noticed.
    stock = run_engine(SMALL | NGRAM, [GENERATE], ENV)
    assert outputs == again == stock["results"][0]


def test_engine_with_adapters_measures_with_one_in_each_row(run_engine: Run) -> None:
    """Rows whose adapter the last step of warm-up chose, or nobody, are out of bounds in the kernels."""
    llm = SMALL | FLAG | {"enable_lora": True, "max_loras": 2, "max_num_seqs": 32}
    llm |= {"worker_extension_cls": "widest_probe.Extension"}
    env = ENV | {"PYTHONPATH": str(Path(__file__).parent)}
    answer = run_engine(llm, [{"do": "rpc", "method": "probe_widest_step"}, GENERATE], env, import_first=True)
    assert answer["error"] is None
    ((seen,), outputs) = answer["results"]
    assert [32, True, 1] in seen["sampled"]
    assert all(len(output["tokens"]) == GENERATE["max_tokens"] for output in outputs)


@pytest.mark.parametrize(
    ("requests", "tokens", "drafts", "fit"),
    [(16, 2048, 16, 16), (256, 2048, 16, 7), (8, 8, 4, 1), (1, 64, 3, 3)],
)
def test_drafts_of_all_requests_fit_one_step(requests: int, tokens: int, drafts: int, fit: int) -> None:
    from vllm_integration.widest_sampling import draft_tokens_per_request

    assert draft_tokens_per_request(requests, tokens, drafts) == fit


@pytest.mark.parametrize(
    ("requests", "tokens", "drafts", "rows"),
    [(1024, 16384, 14, 15_360), (1024, 16384, 16, 16_384), (16, 2048, 16, 272), (4, 8, 16, 8)],
)
def test_most_draft_rows_of_one_step(requests: int, tokens: int, drafts: int, rows: int) -> None:
    from vllm_integration.widest_logits import most_draft_rows

    assert most_draft_rows(requests, tokens, drafts) == rows


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("chunk", [5, 1000])
def test_v2_logits_of_drafts_and_prompts_are_made_whole(
    monkeypatch: pytest.MonkeyPatch, chunk: int, lora: bool
) -> None:
    """Case 6: 16 requests with 16 drafts each. The V2 runner needs a GPU; its tensors do not."""
    import sys
    import weakref

    import torch

    from vllm_integration import widest_logits

    made: list[tuple[Any, ...]] = []
    tensors: list[Any] = []
    alive: list[int] = []  # of those made before, whenever one is made
    empty = torch.empty

    def kept(tensor: Any) -> Any:
        alive.append(sum(made_before() is not None for made_before in tensors))
        tensors.append(weakref.ref(tensor))
        return tensor

    def recorded(size: Any, **options: Any) -> Any:
        made.append((*size, options["dtype"]))
        return kept(empty(size, **options))

    def compute_logits(hidden: Any) -> Any:
        assert not lora
        made.append((hidden.shape[0], 48, hidden.dtype))
        return kept(hidden.new_empty((hidden.shape[0], 48)))

    v2 = "vllm.v1.worker.gpu."
    sampler = types.SimpleNamespace(get_max_chunk_logits=lambda vocabulary: chunk)
    monkeypatch.setitem(sys.modules, v2 + "spec_decode.rejection_sampler", sampler)
    prompts = types.SimpleNamespace(CHUNK_SIZE=512)
    package = types.SimpleNamespace(prompt_logprob=prompts)
    monkeypatch.setitem(sys.modules, v2 + "sample", package)
    monkeypatch.setattr(widest_logits, "samples", lambda worker: True)
    monkeypatch.setattr(torch, "empty", recorded)
    warned: list[Any] = []
    monkeypatch.setattr(widest_logits, "not_measured", lambda *args: warned.append(args))
    speculative = types.SimpleNamespace(num_speculative_tokens=16)
    worker = types.SimpleNamespace(
        device=torch.device("cpu"),
        use_v2_model_runner=True,
        vllm_config=types.SimpleNamespace(speculative_config=speculative, lora_config=lora or None),
        scheduler_config=types.SimpleNamespace(max_num_seqs=16, max_num_batched_tokens=2048),
        model_config=types.SimpleNamespace(
            dtype=torch.bfloat16, get_hidden_size=lambda: 32, get_vocab_size=lambda: 48
        ),
        model_runner=types.SimpleNamespace(model=types.SimpleNamespace(compute_logits=compute_logits)),
    )
    widest_logits.make_widest_logits(worker)
    drafts = [(272, 48, torch.bfloat16), (min(272, chunk), 48, torch.float32)]
    assert made == [*drafts, *[(512, 48, torch.bfloat16)] * 2]
    # All logits beside a chunk of them in fp32, and each chunk of prompts beside the one before it.
    assert alive == [0, 1, 0, 1]
    assert not warned
    worker.model_runner.batch_sharder = object()
    widest_logits.make_widest_logits(worker)
    assert len(made) == 6 and "drafts" in warned[0][0]


def budget(cache_size: int, per_item: int, items: int, compute: int = 1 << 20) -> Any:
    """vLLM's `MultiModalBudget`, as far as the widest step reads it."""
    return types.SimpleNamespace(
        encoder_cache_size=cache_size,
        get_encoder_budget=lambda: min(compute, cache_size),
        mm_max_toks_per_item={"image": per_item} if per_item else {},
        mm_max_items_per_batch={"image": items} if per_item else {},
        get_modality_with_max_tokens=lambda: "image",
    )


@pytest.mark.parametrize(
    ("mm_budget", "tokens"),
    [
        (budget(16_384, 1024, 16), 0),
        (budget(16_384, 1024, 4), 12_288),  # few requests at a time, but entries stay
        (budget(16_384, 5000, 3), 1384),
        (budget(16_384, 0, 0), 16_384),  # embeddings are given, there is no encoder
        (budget(16_384, 1024, 16, compute=0), 0),
        (budget(1024, 4096, 1), 0),
    ],
)
def test_encoder_cache_is_filled_up_to_its_budget(mm_budget: Any, tokens: int) -> None:
    from vllm_integration.widest_step import encoder_shortfall_tokens

    assert encoder_shortfall_tokens(mm_budget) == tokens


@pytest.mark.parametrize("runner", ["V1", "V2"])
@pytest.mark.parametrize("skipped", [False, True])
def test_encoder_cache_case_7_is_held_on_both_runners(
    monkeypatch: pytest.MonkeyPatch, runner: str, skipped: bool
) -> None:
    """16,384 tokens of hidden size 4,096 in bfloat16, of which the dummies fill a quarter."""
    import torch
    import vllm.distributed.parallel_state as state
    import vllm.multimodal.encoder_budget as encoder_budget

    from vllm_integration import widest_step

    mm_budget = budget(16_384, 1024, 4)
    monkeypatch.setattr(state, "get_pp_group", lambda: types.SimpleNamespace(is_first_rank=True))
    monkeypatch.setattr(encoder_budget, "MultiModalBudget", lambda *args, **kwargs: mm_budget)
    has = {"mm_budget": mm_budget} if runner == "V1" else {"mm_registry": None}
    worker = types.SimpleNamespace(
        device=torch.device("meta"),
        vllm_config=None,
        model_runner=types.SimpleNamespace(supports_mm_inputs=True, **has),
        model_config=types.SimpleNamespace(
            dtype=torch.bfloat16,
            get_inputs_embeds_size=lambda: 4096,
            multimodal_config=types.SimpleNamespace(skip_mm_profiling=skipped),
        ),
    )
    held = widest_step._rest_of_encoder_cache(worker)
    if skipped:
        assert held is None
    else:
        assert held.nbytes == (16_384 - 4 * 1024) * 4096 * 2


@pytest.mark.parametrize("with_prompt_len", [False, True], ids=["0.31", "0.29"])
def test_v2_sampler_rows_get_every_feature(with_prompt_len: bool) -> None:
    from vllm_integration import widest_sampling

    class Sampler:
        def __init__(self) -> None:
            self.rows: dict[int, Any] = {}
            self.applied = 0

        def apply_staged_writes(self) -> None:
            self.applied += 1

    class Before(Sampler):
        def add_request(self, req_idx: int, prompt_len: int, sampling_params: Any) -> None:
            self.rows[req_idx] = sampling_params

    class After(Sampler):
        def add_request(self, req_idx: int, sampling_params: Any) -> None:
            self.rows[req_idx] = sampling_params

    sampler = (Before if with_prompt_len else After)()
    widest_sampling._stage_every_feature(sampler, 3)
    assert sorted(sampler.rows) == [0, 1, 2]
    assert all(p.top_p < 1 and p.repetition_penalty > 1 and p.logprobs for p in sampler.rows.values())
    assert sampler.applied == 1


@pytest.mark.parametrize("kept, ran", [((5, 3), "ab"), ((3, 5), "aba"), ((4, 4), "aba")])
def test_the_order_that_keeps_least_is_the_last_that_ran(kept, ran):
    from vllm_integration.least_cache import leave_least

    order, sizes = [], dict(zip("ab", kept, strict=True))
    assert leave_least(("a", "b"), lambda way: order.append(way) or sizes[way]) == list(kept)
    assert "".join(order) == ran


class Runner:
    """A model runner on a CPU whose model has no samplers."""

    supports_mm_inputs, is_pooling_model, max_num_tokens = False, True, 64

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.suppressed, self.ran = error, False, []

    @property
    def eplb(self) -> Any:
        return self

    @contextmanager
    def suppress(self) -> Iterator[None]:
        self.suppressed = True
        yield
        self.suppressed = False

    def profile_run(self, **options: bool) -> None:
        self.ran.append(options | {"suppressed": self.suppressed})
        if self.error:
            raise self.error

    def _dummy_run(self, tokens: int, **options: bool) -> tuple[None, None]:
        self.ran.append(options | {"tokens": tokens})
        return None, None


def made_worker(vllm_config: Any, runner: Runner, **more: Any) -> Any:
    from vllm.config import CompilationMode

    return types.SimpleNamespace(
        rank=3,
        device=types.SimpleNamespace(type="cpu"),
        model_config=vllm_config.model_config,
        vllm_config=vllm_config,
        compilation_config=types.SimpleNamespace(mode=CompilationMode.NONE),
        model_runner=runner,
        **more,
    )


def test_step_that_fails_for_another_reason_than_memory_ends_no_start(
    vllm_config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm_integration.widest_step import run_widest_step

    assert run_widest_step(made_worker(vllm_config, Runner()), 8) is True
    runner = Runner(AssertionError("Workspace is locked"))
    assert run_widest_step(made_worker(vllm_config, runner), 8) is False
    assert "rank 3 could not run the widest step" in caplog.text
    assert "AssertionError: Workspace is locked" in caplog.text
    with pytest.raises(torch.OutOfMemoryError):
        run_widest_step(made_worker(vllm_config, Runner(torch.OutOfMemoryError("no"))), 8)


def test_runner_that_only_has_a_record_of_experts_load_runs_the_step(vllm_config: Any) -> None:
    """The V2 runner of 0.29 to 0.32 has no `suppress`."""
    from vllm_integration.widest_step import run_widest_step

    class Before(Runner):
        eplb = types.SimpleNamespace()

    runner = Before()
    assert run_widest_step(made_worker(vllm_config, runner), 8) is True
    assert runner.ran == [{"suppressed": False}]


def test_dummy_steps_are_those_of_vllms_worker(vllm_config: Any) -> None:
    """Experts' load is left alone (since 0.33), and tokens go to random experts where asked (since 0.31)."""
    from vllm_integration.least_cache import _narrower_steps
    from vllm_integration.widest_step import run_widest_step

    for randomize in (True, False):
        expected = {"randomize_inputs": True} if randomize else {}
        runner = Runner()
        worker = made_worker(vllm_config, runner, randomize_dummy_inputs=randomize)
        run_widest_step(worker, 8)
        assert runner.ran == [expected | {"suppressed": True}]
        runner.ran.clear()
        _narrower_steps(worker)
        steps = [expected | {"is_profile": True, "tokens": tokens} for tokens in (48, 32, 16)]
        assert runner.ran == steps


def drafting_worker(**change: Any) -> Any:
    """As much of a V2 worker with drafts as verifying them looks at."""
    given = {"v2": True, "speculative": object(), "pooling": False, "jit_warmup": True} | change
    return types.SimpleNamespace(
        use_v2_model_runner=given["v2"],
        execute_model="execute",
        sample_tokens="sample",
        vllm_config=types.SimpleNamespace(
            speculative_config=given["speculative"],
            kernel_config=types.SimpleNamespace(enable_jit_warmup=given["jit_warmup"]),
        ),
        model_runner=types.SimpleNamespace(
            kv_cache_config=types.SimpleNamespace(num_blocks=1000), is_pooling_model=given["pooling"]
        ),
    )


@pytest.mark.parametrize(
    ("change", "verifies", "warns"),
    [
        ({}, True, False),
        ({"v2": False}, False, False),
        ({"speculative": None}, False, False),
        ({"pooling": True}, False, False),
        ({"jit_warmup": False}, False, True),
        ({"jit_warmup": False, "v2": False}, False, False),
    ],
)
def test_v2_drafts_are_verified_where_warm_up_has_run_that(
    caplog: pytest.LogCaptureFixture, change: dict[str, Any], verifies: bool, warns: bool
) -> None:
    from vllm_integration.widest_step import _verifies_drafts

    assert _verifies_drafts(drafting_worker(**change)) is verifies
    assert ("enable_jit_warmup off" in caplog.text) is warns


@pytest.mark.parametrize("error", [None, ValueError("no such kernel"), torch.OutOfMemoryError("no")])
def test_v2_drafts_are_verified_within_the_backed_blocks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception | None
) -> None:
    """By vLLM's own warm-up, which needs a GPU: here it is replaced by what it was given."""
    from vllm.v1.worker.gpu import warmup

    from vllm_integration.widest_step import _verify_drafts

    seen: list[Any] = []

    def warmup_kernels(runner: Any, execute_model: Any, sample_tokens: Any) -> None:
        seen.append((runner.kv_cache_config.num_blocks, execute_model, sample_tokens))
        if error:
            raise error

    monkeypatch.setattr(warmup, "warmup_kernels", warmup_kernels)
    worker = drafting_worker()
    if isinstance(error, torch.OutOfMemoryError):
        with pytest.raises(torch.OutOfMemoryError):
            _verify_drafts(worker, 8)
    else:
        _verify_drafts(worker, 8)
    assert seen == [(8, "execute", "sample")]
    assert worker.model_runner.kv_cache_config.num_blocks == 1000
    told = "the rows of speculative decoding could not be measured" in caplog.text
    assert told is isinstance(error, ValueError)
