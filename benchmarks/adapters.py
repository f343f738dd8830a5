"""LoRA adapters with random weights for a model of `vllm_integration.tiny_model`, in PEFT's format."""

import json
import zlib
from pathlib import Path
from typing import Any

MODULES = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}


def make_adapters(model: str, count: int, rank: int) -> list[str]:
    """Write `count` adapters of `rank` beside the model, unless they are there, and return their paths."""
    config = json.loads((Path(model) / "config.json").read_text())
    paths = [Path(model).with_name(f"{Path(model).name}-lora-{rank}-{number}") for number in range(count)]
    for path in paths:
        if not (path / "adapter_config.json").exists():
            _write(path, config, rank)
    return [str(path) for path in paths]


def _write(path: Path, config: dict[str, Any], rank: int) -> None:
    import torch
    from safetensors.torch import save_file

    heads = config["head_dim"] * config["num_attention_heads"]
    shared = config["head_dim"] * config["num_key_value_heads"]
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    shapes = {  # inputs and outputs of each module
        "q_proj": (hidden, heads),
        "k_proj": (hidden, shared),
        "v_proj": (hidden, shared),
        "o_proj": (heads, hidden),
        "gate_proj": (hidden, intermediate),
        "up_proj": (hidden, intermediate),
        "down_proj": (intermediate, hidden),
    }
    generator = torch.Generator().manual_seed(zlib.crc32(path.name.encode()))
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module, parent in MODULES.items():
            inputs, outputs = shapes[module]
            prefix = f"base_model.model.model.layers.{layer}.{parent}.{module}"
            # Large enough that an adapter changes what the model says.
            for name, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
                weight = torch.randn(shape, generator=generator) * shape[1] ** -0.5
                tensors[f"{prefix}.{name}.weight"] = weight.to(torch.bfloat16)
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(path / "adapter_model.safetensors"))
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(MODULES),
    }
    (path / "adapter_config.json").write_text(json.dumps(adapter))
