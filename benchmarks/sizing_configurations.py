"""The configurations of `sizing_proof.py`: what is expected of stock vLLM 0.33 in each, and why.

Its profile sees the largest PyTorch *allocation* of one eager prefill of `max_num_batched_tokens` and of
one sampling of `max_num_seqs` rows, and, unless that is switched off, an estimate of what graphs take. It
gives the cache everything else of the budget, so what is left on the device beside the cache is that peak
P, the estimate and rest = total * (1 - utilization) - context: with 139.8 GiB, of which 139.1 GiB are free
when vLLM first looks, 1.4 GiB at 0.985 and 13.3 GiB at 0.9.

ordinary
    Nothing special: 0.9, default graphs, mixed sampling. Both are to start and to survive.
graphs
    Large graphs, estimation off, 0.985: stock is to die at start-up. The widest tensors are those of the
    MLP, tokens * 3 * 61,440 * 2 bytes: 5.63 GiB at 16,384 tokens, which is P, 4.22 GiB at 12,288 and 4.04
    GiB at 11,776. The graph of 12,288 tokens keeps 4.22 GiB for its pool; that leaves 5.63 + 1.4 - 4.22 =
    2.8 GiB, and the eager step that precedes the capture of 11,776 needs 4.04 GiB. At runtime the flag
    needs both the pool and an eager step of 16,384 tokens, which no graph covers, so that nothing of it
    lies idle.
after
    The same with 8,192 tokens as the largest graph: stock is to start, with 5.63 + 1.4 - 2.81 = 4.2 GiB
    left, and to die in the first prefill of 16,384 tokens, which needs 5.63 GiB.
drafts
    n-gram speculation, 14 drafts for each of 1,024 requests, default estimation, 0.985: 15,360 rows of
    logits take 4.35 GiB and one chunk of them in fp32 1 GiB, and the profile samples 1,024 rows: P is below
    1 GiB. Stock has at most about 3 GiB left, and is to die at start-up, in the warm-up that verifies
    drafts.
drafts-v1
    The same on the V1 runner at 0.9, 512 requests: its profile verifies one draft a request, so stock
    starts, with about 14 GiB left. 7,168 drafts of 151,936 logits are 4.06 GiB in fp32, and verification
    with penalties holds the logits, a raw and a processed copy, and two counts of tokens in int64: 2.2 +
    4.06 * (1 + 1 + 2 + 2) GiB are more than 26. Stock is to die under load.
ngram
    The drafts of `drafts` at 0.9, where both are to start.
multimodal
    BLIP-2's shape with one image a request and 32 tokens an image, so that one step encodes 481 images, and
    the profile 512: their pixels take 147 MiB in bfloat16, the encoder's widest layer 1.0 GiB.
lora
    8 adapters of rank 16, graphs for 0, 1, 2, 4, 8 and 9 active ones: 6 times as many graphs, at 0.9.
"""

from dataclasses import dataclass, field
from typing import Any

ESTIMATE_OFF = {"VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "0"}
FEW_GRAPHS = [1, 2, 4, 8, 16, 32, 64, 128]
WIDE_MLP = {"layers": 2, "intermediate": 61440, "kv_heads": 16}
SPECULATION = {
    "method": "ngram",
    "num_speculative_tokens": 14,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


@dataclass(frozen=True)
class Configuration:
    """One engine, with the flag and without.

    `stock` is where vLLM without the flag is to fail: "start", "load" or "" for nowhere; None where it may.
    """

    sizes: dict[str, int]
    utilization: float
    llm: dict[str, Any]
    load: dict[str, Any]
    env: dict[str, str] = field(default_factory=dict)
    stock: str | None = ""
    adapters: int = 0
    images: bool = False


PREFILL = {"requests": 600, "prompt_tokens": 2000, "max_tokens": 16}
CONFIGURATIONS = {
    "graphs": Configuration(
        WIDE_MLP,
        0.985,
        {"max_num_batched_tokens": 16384, "cudagraph_capture_sizes": [*FEW_GRAPHS, 11776, 12288]},
        PREFILL,
        ESTIMATE_OFF,
        "start",
    ),
    "after": Configuration(
        WIDE_MLP,
        0.985,
        {"max_num_batched_tokens": 16384, "cudagraph_capture_sizes": [*FEW_GRAPHS, 8192]},
        PREFILL,
        ESTIMATE_OFF,
        "load",
    ),
    "ordinary": Configuration(
        {"layers": 4}, 0.9, {}, {"requests": 1200, "prompt_tokens": 1000, "max_tokens": 64}
    ),
    "drafts": Configuration(
        {"layers": 4},
        0.985,
        {
            "max_num_batched_tokens": 16384,
            "max_num_seqs": 1024,
            "cudagraph_capture_sizes": FEW_GRAPHS,
            "speculative_config": SPECULATION,
        },
        {"requests": 1024, "prompt_tokens": 200, "max_tokens": 128, "kind": "drafts"},
        stock="start",
    ),
    "drafts-v1": Configuration(
        {"layers": 4},
        0.9,
        {
            "max_num_batched_tokens": 16384,
            "max_num_seqs": 512,
            "cudagraph_capture_sizes": FEW_GRAPHS,
            "speculative_config": SPECULATION,
        },
        {"requests": 512, "prompt_tokens": 200, "max_tokens": 128, "kind": "drafts"},
        {"VLLM_USE_V2_MODEL_RUNNER": "0"},
        "load",
    ),
    "ngram": Configuration(
        {"layers": 4},
        0.9,
        {
            "max_num_batched_tokens": 16384,
            "max_num_seqs": 1024,
            "cudagraph_capture_sizes": FEW_GRAPHS,
            "speculative_config": SPECULATION,
        },
        {"requests": 1024, "prompt_tokens": 200, "max_tokens": 128, "kind": "drafts"},
        stock=None,
    ),
    "multimodal": Configuration(
        {"layers": 4},
        0.9,
        {
            "load_format": "dummy",
            "max_num_batched_tokens": 16384,
            "max_num_seqs": 1024,
            "cudagraph_capture_sizes": FEW_GRAPHS,
        },
        {"requests": 1024, "prompt_tokens": 2, "max_tokens": 16, "kind": "images", "image_size": 224},
        images=True,
    ),
    "lora": Configuration(
        {"layers": 4},
        0.9,
        {
            "enable_lora": True,
            "max_loras": 8,
            "max_lora_rank": 16,
            "specialize_active_lora": True,
            "cudagraph_capture_sizes": [*FEW_GRAPHS, 192, 256, 384, 512],
        },
        {"requests": 1200, "prompt_tokens": 500, "max_tokens": 64, "kind": "lora"},
        adapters=8,
    ),
}
