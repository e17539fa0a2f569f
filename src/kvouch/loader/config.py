"""config.json, read strictly. Knows the fields of the transformers layout; refuses by name what it does not support.

A field that could change the computation is either read here or refused. Fields that never do are listed in `INERT`;
any other name is refused too, since nobody has said what it computes.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from kvouch.errors import ConfigError
from kvouch.models.config import Activation, Family, Llama3Scaling, ModelConfig, Rope

FAMILIES: dict[str, Family] = {
    "gpt2": "gpt2",
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
}

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

INERT = frozenset(
    """
    _name_or_path _commit_hash transformers_version transformers.js_config architectures auto_map dtype torch_dtype
    use_cache bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id
    forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens bad_words_ids
    initializer_range attention_dropout attn_pdrop embd_pdrop resid_pdrop hidden_dropout pretraining_tp
    is_llama_config gradient_checkpointing id2label label2id num_labels problem_type task_specific_params
    finetuning_task summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    output_attentions output_hidden_states return_dict return_dict_in_generate output_scores torchscript use_bfloat16
    tf_legacy_loss pruned_heads chunk_size_feed_forward tokenizer_class prefix attn_implementation
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences
    remove_invalid_values exponential_decay_length_penalty cross_attention_hidden_size n_ctx max_window_layers
    """.split()
)
"""Fields that no forward pass here reads: names, special ids, dropout, settings of training and of sampling."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "tie_encoder_decoder": (False,),
    "rope_interleaved": (False,),
    "quantization_config": (None,),
    "use_mrope": (False,),
}
"""Fields that change the computation, with the values under which they do not."""

SMALLEST, LARGEST = 2.0**-126, 3.4e38  # numbers are computed with in float32
DEFAULT_WINDOW = 4096  # what transformers takes for Mistral and Qwen where sliding_window is absent (null is none)
MOST_POSITION_NUMBERS = 2**28  # positions * head size: one table of a gigabyte in float32


class ConfigFields:
    """The fields of one config.json: each is taken once; what is left over must be inert."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self._fields = dict(fields)
        self._where = where

    def error(self, field: str, problem: str) -> ConfigError:
        return ConfigError(f"{self._where}: {field} {problem}")

    def take(self, field: str, default: Any = None) -> Any:
        value = self._fields.pop(field, None)
        return default if value is None else value

    def size(self, field: str, default: int | None = None) -> int:
        """A positive whole number."""
        value = self.take(field, default)
        if value is None:
            raise self.error(field, "is missing")
        if type(value) is not int or not 0 < value < 2**31:
            raise self.error(field, f"is {value!r}; a positive whole number under 2**31 is needed")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        value = self.take(field, default)
        if value is None:
            raise self.error(field, "is missing")
        if type(value) not in (int, float) or not SMALLEST <= value <= LARGEST:
            raise self.error(field, f"is {value!r}; a positive number is needed")
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        value = self.take(field, default)
        if type(value) is not bool:
            raise self.error(field, f"is {value!r}; true or false is needed")
        return value

    def activation(self, field: str, default: str) -> Activation:
        value = self.take(field, default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise self.error(field, f"is {value!r}; supported are {sorted(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    def mapping(self, field: str) -> dict[str, Any]:
        """The fields of an object that are not null; none where it is absent."""
        value = self.take(field, {})
        if not isinstance(value, dict):
            raise self.error(field, f"is {value!r}; an object is needed")
        return {name: inner for name, inner in value.items() if inner is not None}

    def __contains__(self, field: str) -> bool:
        return field in self._fields

    def finish(self, ignored: frozenset[str]) -> None:
        """ConfigError for the first field left over that is neither inert nor neutral."""
        for field, value in self._fields.items():
            if field in INERT or field in ignored:
                continue
            if field not in NEUTRAL:
                hint = f'if it does not, pass ignore_config_fields=["{field}"]'
                raise self.error(field, f"is {value!r}: unknown, so it may change the computation; {hint}")
            if value not in NEUTRAL[field]:
                allowed = " or ".join(repr(one) for one in NEUTRAL[field])
                raise self.error(field, f"is {value!r}: not supported, only {allowed}")


def parse_config(fields: Mapping[str, Any], where: str, ignored: Iterable[str] = ()) -> ModelConfig:
    """A ModelConfig from the fields of a config.json; ConfigError names the field that cannot be computed."""
    reader, ignored = ConfigFields(fields, where), frozenset(ignored)
    model_type = reader.take("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise reader.error("model_type", f"is {model_type!r}; supported are {sorted(FAMILIES)}")
    config = _gpt2(reader) if model_type == "gpt2" else _llama(reader, model_type, ignored)
    reader.finish(ignored)
    return config


def _gpt2(reader: ConfigFields) -> ModelConfig:
    hidden, heads = reader.size("n_embd"), reader.size("n_head")
    if hidden % heads:
        raise reader.error("n_embd", f"is {hidden}, not a multiple of n_head ({heads})")
    return ModelConfig(
        family="gpt2",
        vocab_size=reader.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=reader.size("n_inner", 4 * hidden),
        num_hidden_layers=reader.size("n_layer"),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        max_position_embeddings=reader.size("n_positions"),
        norm_eps=reader.number("layer_norm_epsilon", 1e-5),
        activation=reader.activation("activation_function", "gelu_new"),
        tie_word_embeddings=reader.flag("tie_word_embeddings", True),
    )


def _llama(reader: ConfigFields, model_type: str, ignored: frozenset[str]) -> ModelConfig:
    hidden, heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    key_value_heads = reader.size("num_key_value_heads", heads)
    if heads % key_value_heads:
        raise reader.error("num_attention_heads", f"is {heads}, not a multiple of {key_value_heads} key-value heads")
    head_dim = reader.size("head_dim", hidden // heads if hidden % heads == 0 else None)
    if head_dim % 2:
        raise reader.error("head_dim", f"is {head_dim} (hidden_size {hidden}, {heads} heads); it must be even")
    positions = reader.size("max_position_embeddings")
    if positions * head_dim > MOST_POSITION_NUMBERS:
        most = MOST_POSITION_NUMBERS // head_dim
        raise reader.error("max_position_embeddings", f"is {positions}; at most {most} with head_dim {head_dim}")
    _refuse_windows(reader, model_type, positions)
    attention_bias = reader.flag("attention_bias", False)
    return ModelConfig(
        family="llama",
        vocab_size=reader.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=reader.size("intermediate_size"),
        num_hidden_layers=reader.size("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=head_dim,
        max_position_embeddings=positions,
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        activation=reader.activation("hidden_act", "silu"),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        rope=_rope(reader, ignored),
        qkv_bias=attention_bias or model_type == "qwen2",
        output_bias=attention_bias and model_type != "qwen2",
        mlp_bias=reader.flag("mlp_bias", False),
        qk_norm=model_type == "qwen3",
    )


def _refuse_windows(reader: ConfigFields, model_type: str, positions: int) -> None:
    """Full attention only: a window shorter than the context computes something else."""
    windowed = reader.flag("use_sliding_window", False) or model_type == "mistral"  # mistral knows no such flag
    named = "sliding_window" in reader
    window = reader.take("sliding_window") if named else DEFAULT_WINDOW
    if windowed and window is not None and (type(window) is not int or window < positions):
        found = f"is {window!r}" if named else f"is absent, so {window}"
        raise reader.error("sliding_window", f"{found}: shorter than the context of {positions}, not supported")
    kinds = reader.take("layer_types", [])
    others = kinds if not isinstance(kinds, list) else [kind for kind in kinds if kind != "full_attention"]
    if others != []:
        raise reader.error("layer_types", f"has {others!r}: only a list of full_attention is supported")


def _rope(reader: ConfigFields, ignored: frozenset[str]) -> Rope:
    """`rope_theta` and `rope_scaling`, or the newer `rope_parameters` that holds both; a contradiction is refused."""
    fields = reader.mapping("rope_parameters")
    older = reader.mapping("rope_scaling")
    for name in ("rope_theta", "partial_rotary_factor"):
        value = reader.take(name)
        if value is not None:
            _agree(reader, name, value, older, "rope_scaling")
    for name, value in older.items():
        _agree(reader, name, value, fields, "rope_parameters")
    inner = ConfigFields(fields, reader.error("rope", "parameters").args[0])
    if inner.take("partial_rotary_factor", 1.0) != 1.0:
        raise reader.error("partial_rotary_factor", "is not 1.0: not supported")
    old, new = inner.take("type"), inner.take("rope_type")
    kind = next(one for one in (new, old, "default") if one is not None)
    if old is not None and new is not None and old != new:
        raise reader.error("rope type", f"is {old!r} and {new!r} at once")
    base = inner.number("rope_theta", 10_000.0)
    match kind:
        case "default":
            rope = Rope(theta=base)
        case "linear":
            rope = Rope(theta=base, linear_factor=inner.number("factor"))
        case "llama3":
            rope = Rope(theta=base, llama3=_llama3(inner))
        case _:
            raise reader.error("rope type", f"is {kind!r}; supported are default, linear and llama3")
    inner.finish(ignored)
    return rope


def _agree(reader: ConfigFields, name: str, value: Any, fields: dict[str, Any], origin: str) -> None:
    """Adds a field to those of `origin`, which must not say otherwise."""
    if name in fields and fields[name] != value:
        raise reader.error(name, f"is {value!r}, but {origin} says {fields[name]!r}")
    fields[name] = value


def _llama3(inner: ConfigFields) -> Llama3Scaling:
    low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
    if low >= high:
        raise inner.error("high_freq_factor", f"is {high}, not above low_freq_factor ({low})")
    return Llama3Scaling(
        factor=inner.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=inner.size("original_max_position_embeddings"),
    )
