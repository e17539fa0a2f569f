"""A tiny Llama as a GGUF file, for tests of the converter. Needs the package gguf; makes the same file every time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, INNER, HEADS, KEY_HEADS, LAYERS = 64, 96, 4, 2, 2
LETTERS = [chr(code) for code in range(ord("!"), ord("~") + 1)] + ["Ġ", "Ċ"]
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *LETTERS, "Ġh", "12"]
MERGES = ["Ġ h", "1 2"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
PARTS = {
    "attn_norm": (HIDDEN,),
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN * KEY_HEADS // HEADS, HIDDEN),
    "attn_v": (HIDDEN * KEY_HEADS // HEADS, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_norm": (HIDDEN,),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}


def shapes() -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the file."""
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        found |= {f"blk.{layer}.{part}.weight": shape for part, shape in PARTS.items()}
    return found


def write_tiny_gguf(
    path: Path,
    *,
    integers: Mapping[str, int] | None = None,
    pre: str = "smollm",
    tensors: Mapping[str, tuple[int, ...] | None] | None = None,
    first: float | None = None,
) -> Path:
    """Writes the file; more integer fields, another split, other tensor shapes (None: left out) where a test asks."""
    writer = gguf.GGUFWriter(path, "llama")
    _write_fields(writer, pre)
    for name, value in (integers or {}).items():
        writer.add_uint32(name, value)
    random = np.random.default_rng(seed=1)
    for name, shape in (shapes() | dict(tensors or {})).items():
        if shape is not None:
            _write_tensor(writer, name, random.standard_normal(shape, dtype=np.float32), first)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_fields(writer: Any, pre: str) -> None:
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_rope_freq_base(50_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)


def _write_tensor(writer: Any, name: str, values: "np.ndarray[Any, np.dtype[np.float32]]", first: float | None) -> None:
    if values.ndim == 1:
        values[0] = values[0] if first is None else first
        writer.add_tensor(name, values)
        return
    packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
