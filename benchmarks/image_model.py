"""A multimodal model of BLIP-2's shape, made locally: its encoder before the text model of `tiny_model`.

BLIP-2 because it needs neither torchvision nor a tokenizer of its own. There are no weights: it is for
`load_format="dummy"`, which makes them up, and shows what memory is for, not what an image is of.
"""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from vllm_integration.tiny_model import SHAPES, ModelShape, config_of, write_tokenizer

# Source: config.json of Salesforce/blip2-opt-2.7b, with fewer layers and heads of 64.
VISION = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 6,
    "image_size": 224,
    "patch_size": 14,
}
QUERIES = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 2,
    "vocab_size": 30523,
}
TOKENS_PER_IMAGE = 32


def make_image_model(vision: dict[str, Any] | None = None, **sizes: int) -> Path:
    """Write the model's directory, with `sizes` of the text model and `vision` of the encoder; return it."""
    shape = replace(SHAPES["qwen3-0.6b"], **sizes)
    encoder = {**VISION, **(vision or {})}
    name = "-".join(str(value) for value in (shape.layers, shape.hidden, shape.vocab, encoder["hidden_size"]))
    path = Path(tempfile.gettempdir()) / f"ekv-blip2-{name}"
    path.mkdir(parents=True, exist_ok=True)
    for file, content in _files(shape, encoder).items():
        (path / file).write_text(json.dumps(content))
    write_tokenizer(path, shape.vocab - 1)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<image>", special=True, normalized=False)])
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def _files(shape: ModelShape, encoder: dict[str, Any]) -> dict[str, dict[str, Any]]:
    side = encoder["image_size"]
    return {
        "config.json": {
            "architectures": ["Blip2ForConditionalGeneration"],
            "model_type": "blip-2",
            "text_config": config_of(shape),
            "vision_config": {"model_type": "blip_2_vision_model", **encoder},
            "qformer_config": {"model_type": "blip_2_qformer", **QUERIES},
            "num_query_tokens": TOKENS_PER_IMAGE,
            "image_token_index": shape.vocab - 1,
            "torch_dtype": shape.dtype,
            "dtype": shape.dtype,
        },
        "preprocessor_config.json": {
            "image_processor_type": "BlipImageProcessor",
            "processor_class": "Blip2Processor",
            "size": {"height": side, "width": side},
            "do_resize": True,
            "do_normalize": True,
            "image_mean": [0.48, 0.46, 0.41],
            "image_std": [0.27, 0.26, 0.28],
        },
        "processor_config.json": {"processor_class": "Blip2Processor", "num_query_tokens": TOKENS_PER_IMAGE},
    }
