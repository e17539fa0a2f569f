"""config.json: what computes something is read or refused by name, and the files of the hub parse as they are."""

import dataclasses
from typing import Any

import pytest

from kvouch.errors import ConfigError
from kvouch.loader.config import INERT, NEUTRAL, parse_config
from kvouch.models.config import Llama3Scaling, ModelConfig, Rope
from kvouch.models.tiny import TINY_CONFIGS

LLAMA, GPT2 = TINY_CONFIGS["llama2"], TINY_CONFIGS["gpt2"]
CONTEXT = LLAMA["max_position_embeddings"]
LLAMA3_SCALING = TINY_CONFIGS["llama3"]["rope_scaling"]


def parse(base: dict[str, Any], *without: str, **fields: Any) -> ModelConfig:
    """`base` with fields added, and with those of `without` taken away."""
    return parse_config({name: value for name, value in {**base, **fields}.items() if name not in without}, "c.json")


# Real files, as the hub has them.

HUB: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt2": (
        {
            "activation_function": "gelu_new",
            "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": 0.1,
            "bos_token_id": 50256,
            "embd_pdrop": 0.1,
            "eos_token_id": 50256,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05,
            "model_type": "gpt2",
            "n_ctx": 1024,
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 1024,
            "resid_pdrop": 0.1,
            "summary_activation": None,
            "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True,
            "summary_type": "cls_index",
            "summary_use_proj": True,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
            "vocab_size": 50257,
        },
        {
            "family": "gpt2",
            "vocab_size": 50257,
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_key_value_heads": 12,
            "head_dim": 64,
            "max_position_embeddings": 1024,
            "norm_eps": 1e-5,
            "activation": "gelu_tanh",
            "tie_word_embeddings": True,
            "rope": None,
        },
    ),
    "Llama-2-7b": (
        {
            "architectures": ["LlamaForCausalLM"],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 11008,
            "max_position_embeddings": 4096,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "tie_word_embeddings": False,
            "torch_dtype": "float16",
            "transformers_version": "4.31.0.dev0",
            "use_cache": True,
            "vocab_size": 32000,
        },
        {
            "family": "llama",
            "num_key_value_heads": 32,
            "head_dim": 128,
            "norm_eps": 1e-5,
            "activation": "silu",
            "tie_word_embeddings": False,
            "rope": Rope(theta=10_000.0),
            "qkv_bias": False,
            "qk_norm": False,
        },
    ),
    "Llama-3.1-8B": (
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.43.0.dev0",
            "use_cache": True,
            "vocab_size": 128256,
        },
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "group": 4,
            "max_position_embeddings": 131072,
            "rope": Rope(
                theta=500_000.0,
                llama3=Llama3Scaling(
                    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
                ),
            ),
        },
    ),
    "SmolLM2-135M-Instruct": (
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "hidden_size": 576,
            "initializer_range": 0.041666666666666664,
            "intermediate_size": 1536,
            "is_llama_config": True,
            "max_position_embeddings": 8192,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            "pad_token_id": 2,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_interleaved": False,
            "rope_scaling": None,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
            "transformers_version": "4.42.3",
            "use_cache": True,
            "vocab_size": 49152,
        },
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "rope": Rope(theta=100_000.0),
        },
    ),
    "Mistral-7B-v0.3": (
        {
            "architectures": ["MistralForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "model_type": "mistral",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.42.0.dev0",
            "use_cache": True,
            "vocab_size": 32768,
        },
        {"family": "llama", "num_key_value_heads": 8, "rope": Rope(theta=1_000_000.0), "qkv_bias": False},
    ),
    "Qwen2-0.5B": (
        {
            "architectures": ["Qwen2ForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "eos_token_id": 151643,
            "hidden_act": "silu",
            "hidden_size": 896,
            "initializer_range": 0.02,
            "intermediate_size": 4864,
            "max_position_embeddings": 131072,
            "max_window_layers": 24,
            "model_type": "qwen2",
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "sliding_window": 131072,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.40.1",
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        {"head_dim": 64, "group": 7, "qkv_bias": True, "output_bias": False, "qk_norm": False, "norm_eps": 1e-6},
    ),
    "Qwen2.5-0.5B-Instruct": (
        {
            "architectures": ["Qwen2ForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "hidden_act": "silu",
            "hidden_size": 896,
            "initializer_range": 0.02,
            "intermediate_size": 4864,
            "max_position_embeddings": 32768,
            "max_window_layers": 21,
            "model_type": "qwen2",
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.43.1",
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        {"qkv_bias": True, "output_bias": False, "mlp_bias": False, "tie_word_embeddings": True},
    ),
    "Qwen3-0.6B": (
        {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 1024,
            "initializer_range": 0.02,
            "intermediate_size": 3072,
            "max_position_embeddings": 40960,
            "max_window_layers": 28,
            "model_type": "qwen3",
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.51.0",
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        {"head_dim": 128, "hidden_size": 1024, "qk_norm": True, "qkv_bias": False, "output_bias": False},
    ),
}


@pytest.mark.parametrize("name", HUB)
def test_the_files_of_the_hub_parse_as_they_are(name: str) -> None:
    fields, wanted = HUB[name]
    config = parse_config(fields, f"{name}/config.json")
    assert {field: getattr(config, field) for field in wanted} == wanted


@pytest.mark.parametrize("name", HUB)
def test_a_window_of_mistral_v0_1_and_an_unknown_field_are_refused_in_each(name: str) -> None:
    fields, _ = HUB[name]
    with pytest.raises(ConfigError, match=r"sliding_window|use_sliding_window"):
        parse_config({**fields, "sliding_window": 4095, "use_sliding_window": True}, "c.json")
    with pytest.raises(ConfigError, match=r"c\.json: attention_multiplier is 0\.5: unknown"):
        parse_config({**fields, "attention_multiplier": 0.5}, "c.json")


# What transformers writes today.


@pytest.mark.parametrize("whole", [True, False], ids=["to_dict", "to_diff_dict"])
@pytest.mark.parametrize("name", ["GPT2Config", "LlamaConfig", "MistralConfig", "Qwen2Config", "Qwen3Config"])
def test_what_transformers_writes_parses(name: str, whole: bool) -> None:
    transformers = pytest.importorskip("transformers")
    written = getattr(transformers, name)(**({"sliding_window": None} if name == "MistralConfig" else {}))
    config = parse_config(written.to_dict() if whole else written.to_diff_dict(), "c.json")
    assert config.vocab_size == written.vocab_size
    assert config.head_dim == getattr(written, "head_dim", written.hidden_size // written.num_attention_heads)


# Families.


@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_every_family_parses(family: str) -> None:
    fields = TINY_CONFIGS[family]
    config = parse_config(fields, "c.json")
    gpt2 = fields["model_type"] == "gpt2"
    assert config.family == ("gpt2" if gpt2 else "llama")
    assert config.num_hidden_layers == fields["n_layer" if gpt2 else "num_hidden_layers"]
    assert config.num_attention_heads == fields["n_head" if gpt2 else "num_attention_heads"]
    assert config.hidden_size == fields["n_embd" if gpt2 else "hidden_size"]
    assert config.max_position_embeddings == fields["n_positions" if gpt2 else "max_position_embeddings"]
    assert config.norm_eps == fields["layer_norm_epsilon" if gpt2 else "rms_norm_eps"]
    assert (config.rope is None) is gpt2
    assert config.qk_norm is (family == "qwen3")
    assert config.qkv_bias is (family in ("biased", "qwen2"))
    assert config.output_bias is (family == "biased")
    assert config.mlp_bias is (family == "biased")


def test_defaults_are_those_of_transformers() -> None:
    config = parse(LLAMA, "num_key_value_heads", "head_dim", "rope_theta", "rms_norm_eps", "tie_word_embeddings")
    assert (config.num_key_value_heads, config.head_dim, config.norm_eps) == (6, 8, 1e-6)
    assert config.rope == Rope(theta=10_000.0)
    assert config.tie_word_embeddings is False
    config = parse(GPT2, "layer_norm_epsilon", "activation_function")
    assert (config.norm_eps, config.activation, config.tie_word_embeddings) == (1e-5, "gelu_tanh", True)
    assert config.intermediate_size == 4 * config.hidden_size
    assert parse(GPT2, n_inner=100).intermediate_size == 100


@pytest.mark.parametrize(
    ("name", "activation"), [("silu", "silu"), ("swish", "silu"), ("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh")]
)
def test_activations_are_read(name: str, activation: str) -> None:
    assert parse(LLAMA, hidden_act=name).activation == activation
    assert parse(GPT2, activation_function=name).activation == activation


# Rope.


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3_SCALING])
def test_both_spellings_of_rope_give_the_same_config(scaling: dict[str, Any] | None) -> None:
    older = parse(LLAMA, rope_theta=5e5, rope_scaling=scaling)
    newer = parse(LLAMA, "rope_theta", rope_parameters={"rope_type": "default", **(scaling or {}), "rope_theta": 5e5})
    both = parse(LLAMA, rope_theta=5e5, rope_scaling=scaling, rope_parameters={**(scaling or {}), "rope_theta": 5e5})
    assert older == newer == both
    assert older.rope is not None
    assert older.rope.theta == 5e5
    assert (older == parse(LLAMA, rope_theta=5e5)) is (scaling is None)


def test_the_old_name_of_a_rope_type_is_read() -> None:
    for scaling in ({"type": "linear", "factor": 4}, {"type": "linear", "rope_type": "linear", "factor": 4}):
        assert parse(LLAMA, rope_scaling=scaling).rope == Rope(theta=10_000.0, linear_factor=4.0)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("rope_theta", {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        ("rope_theta", {"rope_theta": 1e4, "rope_scaling": {"rope_type": "default", "rope_theta": 5e5}}),
        (
            "factor",
            {
                "rope_scaling": {"rope_type": "linear", "factor": 4.0},
                "rope_parameters": {"rope_type": "linear", "factor": 2.0},
            },
        ),
        ("rope_type", {"rope_scaling": LLAMA3_SCALING, "rope_parameters": {"rope_type": "default"}}),
        ("rope type", {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": {"rope_type": "default"}}),
        ("rope type", {"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 4.0}}),
        (
            "partial_rotary_factor",
            {"partial_rotary_factor": 0.5, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}},
        ),
    ],
)
def test_rope_fields_that_contradict_each_other_are_refused(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"c\.json: {field} is .*(says|at once)"):
        parse(LLAMA, **fields)


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope", "su", "proportional", "", ["linear"], 3, 0])
def test_other_rope_types_are_refused(kind: Any, spelling: str) -> None:
    scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 128}
    with pytest.raises(ConfigError, match=r"rope type is .*supported are default, linear and llama3"):
        parse(LLAMA, **{spelling: scaling})


def test_a_factor_that_the_rope_type_does_not_read_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rope parameters: attention_factor is 1\.2: unknown"):
        parse(LLAMA, rope_scaling={"rope_type": "linear", "factor": 2.0, "attention_factor": 1.2})
    with pytest.raises(ConfigError, match="rope parameters: factor is 2"):
        parse(LLAMA, rope_scaling={"rope_type": "default", "factor": 2.0})
    assert parse(LLAMA, rope_scaling={"rope_type": "linear", "factor": 2.0, "attention_factor": None}).rope == Rope(
        theta=10_000.0, linear_factor=2.0
    )


@pytest.mark.parametrize(
    "missing", ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
)
def test_a_scaling_without_its_numbers_is_refused(missing: str) -> None:
    scaling = {name: value for name, value in LLAMA3_SCALING.items() if name != missing}
    with pytest.raises(ConfigError, match=f"rope parameters: {missing} is missing"):
        parse(LLAMA, rope_scaling=scaling)


@pytest.mark.parametrize("high", [1.0, 0.5])
def test_a_scaling_without_a_band_between_its_factors_is_refused(high: float) -> None:
    """Interpolation between them divides by their difference."""
    with pytest.raises(ConfigError, match=r"high_freq_factor is .*, not above low_freq_factor \(1\.0\)"):
        parse(LLAMA, rope_scaling={**LLAMA3_SCALING, "high_freq_factor": high})


@pytest.mark.parametrize(
    "fields",
    [
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
        {"partial_rotary_factor": "1.0"},
    ],
)
def test_partly_rotated_heads_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"c\.json: partial_rotary_factor is not 1\.0"):
        parse(LLAMA, **fields)
    assert parse(LLAMA, partial_rotary_factor=1.0) == parse(LLAMA)


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("value", ["linear", [["rope_type", "linear"]], 4, True])
def test_rope_fields_that_are_no_objects_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{field} is .*an object is needed"):
        parse(LLAMA, **{field: value})


# Windows.


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("window", [1, CONTEXT - 1, 0, -1, True, "4096", 4096.0, [4096]])
def test_a_window_shorter_than_the_context_is_refused(model_type: str, window: Any) -> None:
    fields = {"model_type": model_type, "sliding_window": window}
    with pytest.raises(ConfigError, match=rf"sliding_window is .*shorter than the context of {CONTEXT}"):
        parse(LLAMA, **fields, use_sliding_window=True)
    if model_type == "mistral":  # whose window has no switch
        with pytest.raises(ConfigError, match="sliding_window is"):
            parse(LLAMA, **fields, use_sliding_window=False)
        with pytest.raises(ConfigError, match="sliding_window is"):
            parse(LLAMA, **fields)
    else:
        parse(LLAMA, **fields, use_sliding_window=False)
        parse(LLAMA, **fields)


@pytest.mark.parametrize("window", [CONTEXT, CONTEXT + 1, None])
def test_a_window_that_hides_nothing_is_accepted(window: int | None) -> None:
    plain = parse(LLAMA, model_type="mistral", sliding_window=None)
    assert parse(LLAMA, model_type="mistral", sliding_window=window) == plain
    assert parse(LLAMA, sliding_window=window, use_sliding_window=True) == parse(LLAMA)


def test_an_absent_window_is_not_a_null_one() -> None:
    """Transformers takes 4,096 for a Mistral config without the field, and no window for null."""
    long = {"model_type": "mistral", "max_position_embeddings": 4097}
    with pytest.raises(ConfigError, match="sliding_window is absent, so 4096: shorter than the context of 4097"):
        parse(LLAMA, **long)
    assert parse(LLAMA, **long, sliding_window=None).max_position_embeddings == 4097
    assert parse(LLAMA, **{**long, "max_position_embeddings": 4096}).max_position_embeddings == 4096
    with pytest.raises(ConfigError, match="sliding_window is absent"):
        parse(LLAMA, model_type="qwen2", max_position_embeddings=8192, use_sliding_window=True)


@pytest.mark.parametrize(
    "kinds",
    [["full_attention", "sliding_attention"], ["chunked_attention"], "full_attention", 3, [["full_attention"]], {}],
)
def test_layer_types_other_than_full_attention_are_refused(kinds: Any) -> None:
    with pytest.raises(ConfigError, match="layer_types has"):
        parse(LLAMA, layer_types=kinds)
    assert parse(LLAMA, layer_types=["full_attention"] * 3) == parse(LLAMA)


# Other fields that compute something.


@pytest.mark.parametrize("value", ["relu", "gelu_fast", "quick_gelu", "", 1, True, ["silu"], {"silu": 1}])
def test_other_activations_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"hidden_act is .*supported are"):
        parse(LLAMA, hidden_act=value)
    with pytest.raises(ConfigError, match=r"activation_function is .*supported are"):
        parse(GPT2, activation_function=value)


@pytest.mark.parametrize("value", ["bert", "Llama", "", None, 1, True, ["llama"], {"llama": 1}])
def test_other_models_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"c\.json: model_type is .*supported are \['gpt2', 'llama'"):
        parse(LLAMA, model_type=value)
    with pytest.raises(ConfigError, match="model_type is None"):
        parse(LLAMA, "model_type")


NOT_NEUTRAL: dict[str, Any] = {
    "scale_attn_weights": False,
    "scale_attn_by_inverse_layer_idx": True,
    "reorder_and_upcast_attn": True,
    "add_cross_attention": True,
    "is_encoder_decoder": True,
    "is_decoder": "yes",
    "tie_encoder_decoder": True,
    "rope_interleaved": True,
    "quantization_config": {"quant_method": "gptq", "bits": 4},
    "use_mrope": [True],
}


@pytest.mark.parametrize("field", sorted(NOT_NEUTRAL.keys() | NEUTRAL.keys()))
@pytest.mark.parametrize("base", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_fields_that_change_the_computation_are_refused(base: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"c\.json: {field} is .*: not supported, only"):
        parse(base, **{field: NOT_NEUTRAL[field]})
    for neutral in NEUTRAL[field]:
        assert parse(base, **{field: neutral}) == parse(base)


@pytest.mark.parametrize("value", [1, None, False, {"a": 1}])
def test_a_field_that_nobody_has_described_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r'logits_scaling is .*ignore_config_fields=\["logits_scaling"\]'):
        parse(LLAMA, logits_scaling=value)


@pytest.mark.parametrize("ignored", [["b", "a"], ("a", "b"), {"a", "b"}, iter(["b", "a"])], ids=type)
def test_ignored_fields_are_ignored(ignored: Any) -> None:
    assert parse_config({**LLAMA, "a": 1, "b": 2}, "c.json", ignored) == parse(LLAMA)


def test_only_the_named_fields_are_ignored() -> None:
    with pytest.raises(ConfigError, match="logits_scaling2 is 2"):
        parse_config({**LLAMA, "logits_scaling": 1, "logits_scaling2": 2}, "c.json", ["logits_scaling"])
    with pytest.raises(ConfigError, match="logits is 1"):
        parse_config({**LLAMA, "logits": 1}, "c.json", ["logits_scaling"])


def test_an_ignored_field_may_lie_among_the_rope_parameters() -> None:
    fields = {**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 2.0, "note": 1}}
    with pytest.raises(ConfigError, match=r'ignore_config_fields=\["note"\]'):
        parse_config(fields, "c.json")
    assert parse_config(fields, "c.json", ["note"]).rope == Rope(theta=10_000.0, linear_factor=2.0)


@pytest.mark.parametrize("field", ["hidden_act", "rope_scaling", "sliding_window", "num_hidden_layers"])
def test_a_field_that_is_read_cannot_be_ignored(field: str) -> None:
    fields = {**LLAMA, "model_type": "mistral", field: "wrong"}
    with pytest.raises(ConfigError, match=f"{field} is 'wrong'"):
        parse_config(fields, "c.json", [field])


def test_inert_fields_are_inert() -> None:
    values: tuple[Any, ...] = (1, "x", None, [], {})
    for value in values:
        assert parse(LLAMA, **dict.fromkeys(INERT, value)) == parse(LLAMA)


# Types and ranges.

SIZES = {
    "llama": (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    ),
    "gpt2": ("vocab_size", "n_embd", "n_head", "n_layer", "n_positions", "n_inner"),
}
BASES = {"llama": LLAMA, "gpt2": GPT2}


@pytest.mark.parametrize("value", [0, -1, True, False, 3.0, "3", [3], {}, 2**31, 2**62, 10**400, float("nan")], ids=str)
@pytest.mark.parametrize(("family", "field"), [(family, field) for family, fields in SIZES.items() for field in fields])
def test_sizes_are_positive_whole_numbers(family: str, field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"c\.json: {field} is .*a positive whole number under 2\*\*31 is needed"):
        parse(BASES[family], **{field: value})


@pytest.mark.parametrize(
    ("family", "field"),
    [(f, n) for f, names in SIZES.items() for n in names if n not in ("num_key_value_heads", "head_dim", "n_inner")],
)
def test_sizes_without_a_default_must_be_there(family: str, field: str) -> None:
    with pytest.raises(ConfigError, match=rf"c\.json: {field} is missing"):
        parse(BASES[family], field)
    with pytest.raises(ConfigError, match=rf"c\.json: {field} is missing"):
        parse(BASES[family], **{field: None})


@pytest.mark.parametrize(
    "value", [0, -1e-5, True, "1e-5", [1], {}, float("inf"), float("nan"), 10**400, 1e39, 1e-60], ids=str
)
@pytest.mark.parametrize(
    ("family", "field"), [("llama", "rms_norm_eps"), ("gpt2", "layer_norm_epsilon"), ("llama", "rope_theta")]
)
def test_numbers_are_positive_and_fit_float32(family: str, field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"c\.json: (rope parameters: )?{field} is .*a positive number is needed"):
        parse(BASES[family], **{field: value})


def test_whole_numbers_are_numbers() -> None:
    assert parse(LLAMA, rope_theta=500000) == parse(LLAMA, rope_theta=500000.0)


@pytest.mark.parametrize("value", [1, 0, "true", [], 1.0])
@pytest.mark.parametrize("field", ["tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"])
def test_flags_are_true_or_false(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{field} is .*true or false is needed"):
        parse(LLAMA, **{field: value})


@pytest.mark.parametrize(
    ("base", "fields", "message"),
    [
        (GPT2, {"n_embd": 50}, r"n_embd is 50, not a multiple of n_head \(4\)"),
        (LLAMA, {"num_key_value_heads": 4}, "num_attention_heads is 6, not a multiple of 4 key-value heads"),
        (LLAMA, {"num_key_value_heads": 12}, "num_attention_heads is 6, not a multiple of 12 key-value heads"),
        (LLAMA, {"head_dim": 7}, "head_dim is 7.*must be even"),
        (LLAMA, {"head_dim": None, "hidden_size": 50}, "head_dim is missing"),
        (LLAMA, {"head_dim": None, "hidden_size": 54}, "head_dim is 9.*must be even"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(base: dict[str, Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(base, **fields)


def test_position_tables_have_a_bound() -> None:
    """Nothing in a Llama checkpoint contradicts a context that no memory holds the rope tables of."""
    for fields in ({"max_position_embeddings": 2**30}, {"head_dim": 2**30}):
        with pytest.raises(ConfigError, match=r"max_position_embeddings is .*; at most"):
            parse(LLAMA, **fields)
    million = parse(LLAMA, max_position_embeddings=1_010_000, head_dim=128)  # Qwen2.5-7B-Instruct-1M
    assert million.max_position_embeddings == 1_010_000


def test_a_config_is_a_frozen_value() -> None:
    config = parse(LLAMA)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.vocab_size = 1  # type: ignore[misc]
