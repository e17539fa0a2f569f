"""The tensors of a Llama GGUF under their transformers names, in bf16. Knows names and shapes; knows nothing of files.

GGUF stores the rows of the query and key projections in the order that llama.cpp's rope wants, pairs side by side;
transformers rotates the first half of a head against the second, so the rows are put back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gguf import dequantize
from safetensors.torch import save_file
from torch import Tensor

from kvouch.errors import TensorError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvouch.contract import Progress

OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER_TENSOR = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>\w+)\.weight")


def llama_tensors(tensors: Sequence[Any], config: Mapping[str, Any], progress: Progress) -> dict[str, Tensor]:
    """All tensors that the config asks for, and no other; TensorError lists what is missing, left over or misshapen."""
    shapes = expected_shapes(config)
    named = {transformers_name(tensor.name): tensor for tensor in tensors}
    missing, left_over = sorted(shapes.keys() - named.keys()), sorted(named.keys() - shapes.keys())
    if missing or left_over or len(named) != len(tensors):
        raise TensorError(f"the GGUF's tensors do not fit its config: missing {missing}, left over {left_over}")
    converted = {}
    for done, (name, tensor) in enumerate(named.items()):
        progress("convert", done, len(named))
        converted[name] = _convert(name, tensor, shapes[name], config)
    progress("convert", len(named), len(named))
    return converted


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """One safetensors file; its order is the library's own (dtype, then name), so the bytes are always the same."""
    save_file(tensors, path, metadata={"format": "pt"})


def expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a Llama with this config."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head_dim
    keys = config["num_key_value_heads"] * head_dim
    parts = {
        "attn_norm": (hidden,),
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{IN_LAYER[part]}.weight": shape for part, shape in parts.items()}
    return shapes


def transformers_name(name: str) -> str:
    """The name that transformers gives a GGUF tensor; a name that is not known stays, and is left over."""
    match = LAYER_TENSOR.fullmatch(name)
    if match and match["part"] in IN_LAYER:
        return f"model.layers.{int(match['layer'])}.{IN_LAYER[match['part']]}.weight"
    return OUTSIDE.get(name, name)


def _convert(name: str, tensor: Any, shape: tuple[int, ...], config: Mapping[str, Any]) -> Tensor:
    try:
        values: NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        raise TensorError(f"{name}: cannot dequantise {tensor.tensor_type.name}; update the package gguf") from None
    if values.shape != shape:
        raise TensorError(f"{name}: shape {values.shape} in the GGUF, want {shape}")
    if not np.isfinite(values).all():
        raise TensorError(f"{name}: holds an infinity or a NaN")
    if name.endswith("q_proj.weight"):
        values = _halves_first(values, config["num_attention_heads"])
    elif name.endswith("k_proj.weight"):
        values = _halves_first(values, config["num_key_value_heads"])
    return torch.tensor(values, dtype=torch.float32).to(torch.bfloat16)


def _halves_first(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of each head from (pair, which of two) to (which of two, pair)."""
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])  # [heads * D, hidden] -> [heads, D / 2, 2, hidden]
    return pairs.swapaxes(1, 2).reshape(rows.shape)  # -> [heads * D, hidden]
