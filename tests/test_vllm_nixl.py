"""Prefill in one engine and decode in another over NIXL, on the CPU build: the real transport, over UCX."""

import sys
from pathlib import Path
from typing import Any

import pytest
from test_vllm_plugin import SMALL

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(280)]

# One token more than whole blocks of 128: whoever has the blocks computes that one token.
PROMPTS = [[300 + (7 * i + j * j) % 1500 for j in range(length)] for i, length in enumerate((129, 257, 385))]
FLAG = {"additional_config": {"extensible_kv_cache": True}}
LLM = SMALL | {"kv_cache_memory_bytes": 256 << 20}
ENV = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}


@pytest.fixture(scope="module")
def reference(run_engine: Any) -> list[dict[str, Any]]:
    """What one engine without flag and connector generates from its prefix cache."""
    steps = [{"do": "cached", "prompts": [prompt], "max_tokens": 8} for prompt in PROMPTS * 2]
    answer = run_engine(LLM, steps, ENV)
    assert answer["error"] is None
    outputs = [one for answers in answer["results"][len(PROMPTS) :] for one in answers]
    assert [one["cached_tokens"] for one in outputs] == [128, 256, 384]
    return outputs


def test_decode_goes_on_with_what_another_engine_prefilled(
    tiny_model_path: Path, engine_env: dict[str, str], reference: list[dict[str, Any]], tmp_path: Path
) -> None:
    pytest.importorskip("nixl", reason="the wheels nixl and nixl-cu13 are not installed")
    from connector_proof import _outputs
    from pair import Pair

    llm = {"model": str(tiny_model_path), **LLM, **FLAG}
    pair = Pair((llm, llm), tmp_path / "log.txt", engine_env | ENV, ("", ""))
    try:
        assert pair.error is None, (tmp_path / "log.txt").read_text()[-6000:]
        decoded = pair.hand_over(PROMPTS, 8)
        naps = pair.nap()
        again = pair.hand_over(PROMPTS, 8)
    finally:
        exits = pair.close()
    assert exits == [0, 0]
    for started in pair.started:
        snapshot = started["snapshot"]
        assert len(snapshot["chunks"]) <= len(snapshot["segments"]) == 4
    # Two, three and four blocks of 256 KiB each, in four layers.
    assert [size for size, _ in decoded["moved"]] == [(2 + i) * 4 * 131072 for i in range(3)]
    assert _outputs(decoded["outputs"]) == _outputs(reference)
    assert [nap["idle"] for nap in naps] == [True, True]
    # vLLM 0.32 has no way to register again: the engines say so and go on.
    assert all("NixlConnector has registered the cache's memory" in nap["error"] for nap in naps)
    assert [output["tokens"] for output in again["outputs"]] == [one["tokens"] for one in reference]
