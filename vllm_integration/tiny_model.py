"""A small Qwen3 model with random weights whose output really depends on the KV cache.

Run ``python -m vllm_integration.tiny_model DIR [SHAPE]`` to make one; nothing is downloaded.
Weights of the usual training initialisation, or vLLM's dummy ones, make a model that repeats one token
whatever is in its cache, and such a model proves nothing about a cache.  Here attention is sharp and
outweighs the current token's own embedding, so every generated token follows from what earlier blocks hold.
"""

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

NUM_BYTES = 256
SPECIAL_TOKENS = ("<|end|>", "<|pad|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|user|>' if m['role'] == 'user' else '<|assistant|>' }}{{ m['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Qwen3 model; lengths in elements, ``dtype`` a torch dtype's name."""

    layers: int = 4
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 512
    vocab: int = 2048
    max_position: int = 8192
    dtype: str = "bfloat16"
    tie_word_embeddings: bool = False


SHAPES = {
    "tiny": ModelShape(),
    # Source: config.json of Qwen/Qwen3-0.6B.
    "qwen3-0.6b": ModelShape(28, 1024, 16, 8, 128, 3072, 151936, 40960, "bfloat16", True),
}


def make_tiny_model(
    path: str | Path,
    *,
    shape: str | ModelShape = "tiny",
    seed: int = 0,
    device: str | None = None,
    **sizes: Any,
) -> Path:
    """Write a complete model directory: configuration, weights in safetensors and a tokenizer.

    Parameters
    ----------
    path
        Directory to write; made if it is not there, its files of the same names are replaced.
    shape
        A name in ``SHAPES`` or a ``ModelShape``; ``sizes`` replaces single fields of it (``layers=8``).
    seed
        The weights follow from ``shape``, ``seed`` and the kind of ``device`` alone.
    device
        Where the random numbers are drawn; ``None`` draws large models on a GPU where there is one.

    Returns
    -------
    Path
        ``path``.
    """
    sizes_of = replace(SHAPES[shape] if isinstance(shape, str) else shape, **sizes)
    if sizes_of.vocab < NUM_BYTES + len(SPECIAL_TOKENS) + 64:
        raise ValueError(
            f"vocab {sizes_of.vocab} is too small: 256 bytes, specials and at least 64 words are needed"
        )
    if device is None:
        large = sizes_of.layers * sizes_of.hidden > 8192
        device = "cuda" if large and torch.cuda.is_available() else "cpu"
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    _write_json(path / "config.json", config_of(sizes_of))
    _write_json(path / "generation_config.json", {"eos_token_id": NUM_BYTES, "pad_token_id": NUM_BYTES + 1})
    write_tokenizer(path, sizes_of.vocab)
    _write_weights(path / "model.safetensors", sizes_of, seed, torch.device(device))
    return path


def config_of(s: ModelShape) -> dict[str, Any]:
    """Return the content of `config.json` for a model of this shape."""
    # Both spellings of the rotary base and of the dtype: transformers 4 reads one, transformers 5 the other.
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": s.layers,
        "hidden_size": s.hidden,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "intermediate_size": s.intermediate,
        "vocab_size": s.vocab,
        "max_position_embeddings": s.max_position,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "attention_bias": False,
        "tie_word_embeddings": s.tie_word_embeddings,
        "eos_token_id": NUM_BYTES,
        "pad_token_id": NUM_BYTES + 1,
        "torch_dtype": s.dtype,
        "dtype": s.dtype,
    }


def write_tokenizer(path: Path, vocab_size: int) -> None:
    """Write a byte-level tokenizer without merges: text is its bytes, each higher id is one word."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {token: NUM_BYTES + i for i, token in enumerate(SPECIAL_TOKENS)}
    first_word = NUM_BYTES + len(SPECIAL_TOKENS)
    vocab |= {"Ġ" + _word(i): first_word + i for i in range(vocab_size - first_word)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": SPECIAL_TOKENS[0],
            "pad_token": SPECIAL_TOKENS[1],
            "model_max_length": 10**9,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _word(index: int) -> str:
    """Return a pronounceable word of two or more syllables, unique to ``index``."""
    syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
    word = ""
    while index or len(word) < 4:
        index, digit = divmod(index, len(syllables))
        word += syllables[digit]
    return word


def _write_weights(file: Path, s: ModelShape, seed: int, device: torch.device) -> None:
    from safetensors.torch import save_file

    dtype = getattr(torch, s.dtype)
    generator = torch.Generator(device).manual_seed(seed)

    def normal(rows: int, columns: int, gain: float) -> torch.Tensor:
        weight = torch.empty(rows, columns, dtype=torch.float32, device=device)
        return weight.normal_(0.0, gain / math.sqrt(columns), generator=generator).to(dtype).cpu()

    def constant(size: int, value: float) -> torch.Tensor:
        return torch.full((size,), value, dtype=dtype)

    # Every sub-layer reads a normalised input, so `gain` is about the size of what it adds to the residual.
    # A small embedding lets the first attention outweigh it; query and key norms of g make scores with
    # standard deviation g * g, and the last norm or the head brings that of the logits to logit_size.
    embedding_size, score_norm, logit_size = 0.05, 1.7, 4.0
    tied_norm = logit_size / (embedding_size * math.sqrt(s.hidden))
    tensors = {
        "model.embed_tokens.weight": normal(s.vocab, s.hidden, embedding_size * math.sqrt(s.hidden)),
        "model.norm.weight": constant(s.hidden, tied_norm if s.tie_word_embeddings else 1.0),
    }
    for layer in range(s.layers):
        p = f"model.layers.{layer}."
        tensors |= {
            p + "input_layernorm.weight": constant(s.hidden, 1.0),
            p + "post_attention_layernorm.weight": constant(s.hidden, 1.0),
            p + "self_attn.q_norm.weight": constant(s.head_dim, score_norm),
            p + "self_attn.k_norm.weight": constant(s.head_dim, score_norm),
            p + "self_attn.q_proj.weight": normal(s.heads * s.head_dim, s.hidden, 1.0),
            p + "self_attn.k_proj.weight": normal(s.kv_heads * s.head_dim, s.hidden, 1.0),
            p + "self_attn.v_proj.weight": normal(s.kv_heads * s.head_dim, s.hidden, 1.0),
            p + "self_attn.o_proj.weight": normal(s.hidden, s.heads * s.head_dim, 2.0),
            p + "mlp.gate_proj.weight": normal(s.intermediate, s.hidden, 1.0),
            p + "mlp.up_proj.weight": normal(s.intermediate, s.hidden, 1.0),
            p + "mlp.down_proj.weight": normal(s.hidden, s.intermediate, 2.0),
        }
    if not s.tie_word_embeddings:
        head = normal(s.vocab, s.hidden, logit_size)
        head[: NUM_BYTES + len(SPECIAL_TOKENS)] = 0  # a logit of 0 never wins: only words, no end token
        tensors["lm_head.weight"] = head
    save_file(tensors, str(file), metadata={"format": "pt"})


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Make a model from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("path", type=Path, help="directory to write, made if it is not there")
    shapes = sorted(SHAPES)
    sizes = "the model's sizes: tiny (7 MB) or those of Qwen3-0.6B (1.2 GB); default: %(default)s"
    parser.add_argument("shape", nargs="?", default="tiny", choices=shapes, help=sizes)
    seed = "the random weights follow from it; default: %(default)s"
    parser.add_argument("--seed", type=int, default=0, help=seed)
    options = parser.parse_args()
    start = time.perf_counter()
    make_tiny_model(options.path, shape=options.shape, seed=options.seed)
    print(f"{options.path}: {asdict(SHAPES[options.shape])}, {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
