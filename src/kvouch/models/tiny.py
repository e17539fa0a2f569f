"""Seeded random models of every family, under 1 MB: config fields and tensors as a checkpoint has them.

What tests and examples load where the weights do not matter. Knows names and shapes; writes no file.
"""

from typing import Any

import torch
from torch import Tensor

VOCABULARY = 257
HIDDEN, INNER, LAYERS, CONTEXT = 48, 80, 3, 1024

_LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}

TINY_CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCABULARY,
        "n_embd": HIDDEN,
        "n_layer": LAYERS,
        "n_head": 4,
        "n_positions": CONTEXT,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
    },
    "llama2": {**_LLAMA, "num_key_value_heads": 6},
    "llama3": {
        **_LLAMA,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    "linear_rope": {**_LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "biased": {**_LLAMA, "attention_bias": True, "mlp_bias": True},
    "smollm2": {
        **_LLAMA,
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "mistral": {**_LLAMA, "model_type": "mistral", "sliding_window": None},
    "qwen2": {**_LLAMA, "model_type": "qwen2", "use_sliding_window": False, "tie_word_embeddings": True},
    "qwen3": {**_LLAMA, "model_type": "qwen3", "head_dim": 16, "attention_bias": False},
}


def tiny_tensors(config: dict[str, Any], seed: int = 0, *, prefix: str = "") -> dict[str, Tensor]:
    """Random float32 tensors for a config of TINY_CONFIGS (or another of those families), by checkpoint name."""
    shapes = _gpt2_shapes(config) if config["model_type"] == "gpt2" else _llama_shapes(config)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        numbers = torch.randn(shape, generator=generator)
        gain = "norm" in name or ".ln_" in name or name.startswith("ln_f")
        if name.endswith("bias"):
            tensors[prefix + name] = 0.2 * numbers
        elif gain:
            tensors[prefix + name] = 1 + 0.2 * numbers
        else:
            tensors[prefix + name] = numbers * 0.15
    return tensors


def _gpt2_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden = config["n_embd"]
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (config["vocab_size"], hidden),
        "wpe.weight": (config["n_positions"], hidden),
        "ln_f.weight": (hidden,),
        "ln_f.bias": (hidden,),
    }
    products = {"attn.c_attn": (1, 3), "attn.c_proj": (1, 1), "mlp.c_fc": (1, 4), "mlp.c_proj": (4, 1)}
    for layer in range(config["n_layer"]):
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"h.{layer}.{norm}.weight": (hidden,), f"h.{layer}.{norm}.bias": (hidden,)}
        for name, (inputs, outputs) in products.items():
            shapes[f"h.{layer}.{name}.weight"] = (inputs * hidden, outputs * hidden)
            shapes[f"h.{layer}.{name}.bias"] = (outputs * hidden,)
    return shapes


def _llama_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key_value = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    qwen2 = config["model_type"] == "qwen2"
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + f"{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        products = {
            "self_attn.q_proj": (query, hidden, qwen2),
            "self_attn.k_proj": (key_value, hidden, qwen2),
            "self_attn.v_proj": (key_value, hidden, qwen2),
            "self_attn.o_proj": (hidden, query, False),
            "mlp.gate_proj": (inner, hidden, False),
            "mlp.up_proj": (inner, hidden, False),
            "mlp.down_proj": (hidden, inner, False),
        }
        for name, (outputs, inputs, biased) in products.items():
            shapes[prefix + name + ".weight"] = (outputs, inputs)
            part = "attention_bias" if name.startswith("self_attn") else "mlp_bias"
            if biased or config.get(part, False):
                shapes[prefix + name + ".bias"] = (outputs,)
        if config["model_type"] == "qwen3":
            shapes |= {prefix + f"self_attn.{name}_norm.weight": (size,) for name in "qk"}
    return shapes
