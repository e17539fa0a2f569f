"""The config of a Llama model from the metadata of its GGUF. Knows field names; reads no file and no tensor.

Every `llama.*` field is either used, or known to repeat another one and compared with it, or refused.
"""

from collections.abc import Mapping
from typing import Any

from kvouch.errors import ConfigError

Fields = Mapping[str, Any]

SIZES = {
    "hidden_size": "llama.embedding_length",
    "intermediate_size": "llama.feed_forward_length",
    "max_position_embeddings": "llama.context_length",
    "num_attention_heads": "llama.attention.head_count",
    "num_hidden_layers": "llama.block_count",
}
TOKENS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
HEAD_COUNT_KV = "llama.attention.head_count_kv"
HEAD_SIZES = ("llama.attention.key_length", "llama.attention.value_length", "llama.rope.dimension_count")
ROPE_THETA = "llama.rope.freq_base"
NORM_EPS = "llama.attention.layer_norm_rms_epsilon"
VOCAB_SIZE = "llama.vocab_size"
DEFAULT_ROPE_THETA = 10_000.0  # llama.cpp's, where the file says nothing
KNOWN = {*SIZES.values(), HEAD_COUNT_KV, *HEAD_SIZES, ROPE_THETA, NORM_EPS, VOCAB_SIZE}


def llama_config(fields: Fields, *, tied: bool) -> dict[str, Any]:
    """`config.json` as transformers writes it for LlamaForCausalLM; ConfigError names the GGUF field that is wrong."""
    if fields.get("general.architecture") != "llama":
        found = fields.get("general.architecture")
        raise ConfigError(f"GGUF field general.architecture: found {found!r}, and only 'llama' is converted")
    unknown = sorted(name for name in fields if name.startswith("llama.") and name not in KNOWN)
    if unknown:
        raise ConfigError(f"GGUF fields that are not understood, so nothing was converted: {', '.join(unknown)}")
    sizes = {ours: _integer(fields, theirs) for ours, theirs in SIZES.items()}
    tokens = {ours: _integer(fields, theirs) for ours, theirs in TOKENS.items() if theirs in fields}
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "head_dim": _head_dim(fields, sizes),
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "mlp_bias": False,
        "model_type": "llama",
        "num_key_value_heads": _integer(fields, HEAD_COUNT_KV)
        if HEAD_COUNT_KV in fields
        else sizes["num_attention_heads"],
        "rms_norm_eps": _number(fields, NORM_EPS),
        "rope_scaling": None,
        "rope_theta": _number(fields, ROPE_THETA) if ROPE_THETA in fields else DEFAULT_ROPE_THETA,
        "tie_word_embeddings": tied,
        "use_cache": True,
        "vocab_size": _vocab_size(fields),
        **sizes,
        **tokens,
    }


def _head_dim(fields: Fields, sizes: Mapping[str, int]) -> int:
    """The size of a head, which a GGUF may say up to three times; all must agree."""
    stated = {name: _integer(fields, name) for name in HEAD_SIZES if name in fields}
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    if not stated and hidden % heads:
        raise ConfigError(f"GGUF field {SIZES['hidden_size']}: {hidden} does not divide into {heads} heads")
    head_dim = next(iter(stated.values())) if stated else hidden // heads
    for name, size in stated.items():
        if size != head_dim:
            raise ConfigError(f"GGUF field {name}: found {size}, want {head_dim} as in {next(iter(stated))}")
    return head_dim


def _vocab_size(fields: Fields) -> int:
    return _integer(fields, VOCAB_SIZE) if VOCAB_SIZE in fields else len(fields.get("tokenizer.ggml.tokens", ()))


def _integer(fields: Fields, name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"GGUF field {name}: want a whole number, found {value!r}")
    return value


def _number(fields: Fields, name: str) -> float:
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ConfigError(f"GGUF field {name}: want a number above zero, found {value!r}")
    return float(value)
