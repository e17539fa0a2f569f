"""Tiny LoRA adapters in the PEFT layout, for the models of TINY_CONFIGS."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kvouch.models.tiny import HIDDEN, INNER, LAYERS

LLAMA_TARGETS = {"self_attn.q_proj": (48, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}  # of "llama2": outputs, inputs
GPT2_TARGETS = {"attn.c_attn": (3 * HIDDEN, HIDDEN), "mlp.c_proj": (HIDDEN, 4 * HIDDEN)}

CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "some/base",
    "r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.05,
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "inference_mode": True,
    "target_modules": ["q_proj", "down_proj"],
}


def lora_tensors(
    targets: Mapping[str, tuple[int, int]], *, rank: int = 4, seed: int = 0, prefix: str = "model.layers."
) -> dict[str, Tensor]:
    """Random A and B of every layer and target, by their names in a checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for layer in range(LAYERS):
        for name, (outputs, inputs) in targets.items():
            module = f"base_model.model.{prefix}{layer}.{name}"
            found[f"{module}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * 0.2
            found[f"{module}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * 0.2
    return found


def write_adapter(directory: Path, tensors: Mapping[str, Tensor] | None = None, **fields: Any) -> Path:
    """An adapter for "llama2", or with other tensors and fields."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({**CONFIG, **fields}))
    save_file(dict(tensors or lora_tensors(LLAMA_TARGETS)), directory / "adapter_model.safetensors")
    return directory


def write_gpt2_adapter(directory: Path, *, seed: int = 0) -> Path:
    tensors = lora_tensors(GPT2_TARGETS, seed=seed, prefix="transformer.h.")
    return write_adapter(directory, tensors, target_modules=["c_attn", "mlp.c_proj"], fan_in_fan_out=True)
