"""Loading: every tensor used once, every fault one error, and weights that nothing outside can change."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kvouch.engine.model import Model, load
from kvouch.errors import ConfigError, FileError, InvalidIds, KvouchError, TensorError, UnknownModel, UsageError
from kvouch.loader.checkpoint import DtypeName
from kvouch.models.compiled import CompiledPath
from kvouch.models.linear import storage_bytes
from kvouch.models.network import Bound
from kvouch.models.tiny import TINY_CONFIGS, tiny_tensors
from kvouch.numerics.bits import same_bits
from tiny_models import random_ids, tiny_directory, tiny_model, write_model

Tensors = dict[str, Tensor]

UNTIED, TIED, GPT2 = (TINY_CONFIGS[name] for name in ("llama2", "smollm2", "gpt2"))
IDS = random_ids(24)


def scores_of(model: Model) -> Tensor:
    scores = model.forward(IDS, model.concat_cache(), scores="all")
    assert scores is not None
    return scores


def error_of(directory: Path, **options: Any) -> str:
    """The one TensorError of a directory, which names it."""
    with pytest.raises(TensorError) as caught:
        load(directory, **options)
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Tensors that do not fit.


def test_missing_left_over_and_misshapen_tensors_are_one_error(tmp_path: Path) -> None:
    tensors = tiny_tensors(UNTIED)
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    tensors["model.layers.3.mlp.up_proj.weight"] = torch.ones(80, 48)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(48)
    tensors["model.layers.2.mlp.down_proj.weight"] = torch.ones(80, 48)
    tensors["model.layers.0.input_layernorm.weight"] = torch.ones(48, dtype=torch.int64)
    message = error_of(write_model(tmp_path, UNTIED, tensors))
    missing, left_over, wrong = message.split("config; ")[1].split("; ")
    assert missing == "missing: model.layers.1.mlp.up_proj.weight [80, 48], model.norm.weight [48]"
    assert left_over.startswith("left over: ")
    assert set(left_over.removeprefix("left over: ").split(", model")) == {
        "model.layers.0.self_attn.q_proj.bias [48]",
        ".layers.3.mlp.up_proj.weight [80, 48]",
    }
    assert wrong == (
        "wrong: model.layers.0.input_layernorm.weight of dtype torch.int64, a floating point dtype is needed, "
        "model.layers.2.mlp.down_proj.weight [80, 48], by the config [48, 80]"
    )


@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_every_tensor_of_every_family_is_needed(family: str, tmp_path: Path) -> None:
    """Without any one of them: that one is named. With one more: that one."""
    config, tensors = TINY_CONFIGS[family], tiny_tensors(TINY_CONFIGS[family])
    first_layer = [name for name in tensors if ".1." not in name and ".2." not in name]
    for name in first_layer:
        rest = {other: tensor for other, tensor in tensors.items() if other != name}
        assert f"missing: {name} " in error_of(write_model(tmp_path, config, rest))
        named = {**rest, name + "x": tensors[name]}
        assert f"left over: {name}x " in error_of(write_model(tmp_path, config, named))


def test_a_head_that_is_not_tied_must_be_there(tmp_path: Path) -> None:
    tensors = tiny_tensors(UNTIED)
    head = tensors.pop("lm_head.weight")
    assert "missing: lm_head.weight [257, 48]" in error_of(write_model(tmp_path, UNTIED, tensors))
    untied_gpt2 = {**GPT2, "tie_word_embeddings": False}
    tensors = tiny_tensors(GPT2)
    assert "missing: lm_head.weight [257, 48]" in error_of(write_model(tmp_path, untied_gpt2, tensors))
    tied = scores_of(load(write_model(tmp_path, GPT2, tensors)))
    untied = scores_of(load(write_model(tmp_path, untied_gpt2, {**tensors, "lm_head.weight": head})))
    assert not same_bits(tied, untied)


@pytest.mark.parametrize("config", [GPT2, TIED], ids=["gpt2", "llama"])
def test_a_tied_head_may_be_stored_if_it_is_the_embedding(config: Mapping[str, Any], tmp_path: Path) -> None:
    tensors = tiny_tensors(dict(config))
    embedding = tensors["wte.weight" if config is GPT2 else "model.embed_tokens.weight"]
    without = scores_of(load(write_model(tmp_path, config, tensors)))
    stored = {**tensors, "lm_head.weight": embedding.clone()}
    assert same_bits(scores_of(load(write_model(tmp_path, config, stored))), without)
    stored["lm_head.weight"][200, 7] += 1e-3
    assert "lm_head.weight differs from the embedding" in error_of(write_model(tmp_path, config, stored))


def test_both_namings_of_gpt2_give_the_same_bits(tmp_path: Path) -> None:
    plain = tiny_tensors(GPT2)
    masks: Tensors = {}
    for layer in range(GPT2["n_layer"]):
        masks[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 1024, 1024, dtype=torch.uint8).tril()
        masks[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    prefixed = {f"transformer.{name}": tensor for name, tensor in {**plain, **masks}.items()}
    prefixed["lm_head.weight"] = plain["wte.weight"].clone()
    found, caches = [], []
    for number, tensors in enumerate([plain, {**plain, **masks}, prefixed]):
        model = load(write_model(tmp_path / str(number), GPT2, tensors))
        cache = model.concat_cache()
        scores = model.forward(IDS, cache, scores="all")
        assert scores is not None
        found.append(scores)
        caches.append([tensor for layer in range(cache.num_layers) for tensor in cache.read(layer)])
    for other, cached in zip(found[1:], caches[1:], strict=True):
        assert same_bits(other, found[0])
        assert all(same_bits(a, b) for a, b in zip(cached, caches[0], strict=True))


def test_shards_load_to_the_bits_of_one_file(tmp_path: Path) -> None:
    tensors = tiny_tensors(TIED)
    whole = scores_of(load(write_model(tmp_path / "whole", TIED, tensors)))
    sharded = tmp_path / "sharded"
    weight_map: dict[str, str] = {}
    sharded.mkdir()
    (sharded / "config.json").write_text(json.dumps(TIED))
    for shard in range(3):
        held = {name: tensor for number, (name, tensor) in enumerate(tensors.items()) if number % 3 == shard}
        save_file(held, sharded / f"model-{shard}.safetensors")
        weight_map |= dict.fromkeys(held, f"model-{shard}.safetensors")
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert same_bits(scores_of(load(sharded)), whole)
    index.write_text(json.dumps({"weight_map": {k: v for k, v in weight_map.items() if "-1." not in v}}))
    assert "missing: " in error_of(sharded)


# Configs that contradict the tensors.


@pytest.mark.parametrize(
    ("family", "field", "value", "named"),
    [
        ("smollm2", "vocab_size", 258, "wrong: model.embed_tokens.weight [257, 72], by the config [258, 72]"),
        ("smollm2", "hidden_size", 50, "wrong: model.embed_tokens.weight [257, 72], by the config [257, 50]"),
        ("smollm2", "intermediate_size", 81, "model.layers.0.mlp.gate_proj.weight [80, 72], by the config [81, 72]"),
        ("smollm2", "num_hidden_layers", 2, "left over: model.layers.2."),
        ("smollm2", "num_hidden_layers", 4, "missing: model.layers.3."),
        ("smollm2", "num_key_value_heads", 9, "self_attn.k_proj.weight [24, 72], by the config [72, 72]"),
        ("smollm2", "head_dim", 16, "self_attn.q_proj.weight [72, 72], by the config [144, 72]"),
        ("smollm2", "tie_word_embeddings", False, "missing: lm_head.weight"),
        ("smollm2", "attention_bias", True, "missing: model.layers.0.self_attn.q_proj.bias [72]"),
        ("smollm2", "model_type", "qwen3", "missing: model.layers.0.self_attn.q_norm.weight [8]"),
        ("qwen2", "model_type", "llama", "left over: model.layers.0.self_attn.k_proj.bias [16]"),
        ("gpt2", "n_positions", 1023, "wrong: wpe.weight [1024, 48], by the config [1023, 48]"),
        ("gpt2", "n_inner", 100, "h.0.mlp.c_fc.weight [48, 192], by the config [48, 100]"),
        ("gpt2", "n_layer", 5, "missing: h.3."),
    ],
)
def test_a_config_that_contradicts_the_tensors(family: str, field: str, value: Any, named: str, tmp_path: Path) -> None:
    config = {**TINY_CONFIGS[family], field: value}
    if config["model_type"] == "qwen3":
        config["attention_bias"] = False
    assert named in error_of(write_model(tmp_path, config, tiny_tensors(TINY_CONFIGS[family])))


HUGE = [
    (family, field, value)
    for family in ("gpt2", "smollm2")
    for field in TINY_CONFIGS[family]
    if type(TINY_CONFIGS[family][field]) is int
    for value in (2**30, 2**31 - 4)
]


@pytest.mark.parametrize(("family", "field", "value"), HUGE)
def test_huge_sizes_are_refused_at_once(family: str, field: str, value: int, tmp_path: Path) -> None:
    """Without allocating: a tensor of them would take gigabytes, and a walk over the layers hours."""
    directory = write_model(tmp_path, {**TINY_CONFIGS[family], field: value}, tiny_tensors(TINY_CONFIGS[family]))
    before, start = peak_memory_kib(), time.process_time()
    with pytest.raises((ConfigError, TensorError)) as caught:
        load(directory)
    assert any(text in str(caught.value) for text in (str(value), "n_inner", "the rest was not looked at"))
    assert time.process_time() - start < 5
    assert peak_memory_kib() - before < 100_000


def test_all_sizes_huge_at_once(tmp_path: Path) -> None:
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    error_of(write_model(tmp_path, {**TIED, **dict.fromkeys(sizes, 2**31 - 2)}, tiny_tensors(TIED)))


def peak_memory_kib() -> int:
    """The most memory that this process has had at once."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))


# Directories that are no models.


def drop(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def write(name: str, content: bytes) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        (directory / name).write_bytes(content)

    return spoil


def cut(directory: Path) -> None:
    content = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(content[: len(content) // 2])


def link_out(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory.parent / "elsewhere")
    (directory / "model.safetensors").symlink_to(directory.parent / "elsewhere")


HALF_WRITTEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (drop("config.json"), r"config\.json: cannot be read"),
    "empty config": (write("config.json", b""), r"config\.json: empty"),
    "half a config": (write("config.json", b'{"model_type": "gpt2", '), r"config\.json: not JSON"),
    "config in latin-1": (write("config.json", b'{"x": "\xe4"}'), r"config\.json: not UTF-8"),
    "config is a list": (write("config.json", b"[]"), r"config\.json: a JSON object is needed"),
    "no weights": (drop("model.safetensors"), "neither model.safetensors"),
    "empty weights": (write("model.safetensors", b""), r"model\.safetensors: empty"),
    "half the weights": (cut, r"model\.safetensors: .*truncated"),
    "weights elsewhere": (link_out, r"model\.safetensors: a link to"),
    "broken tokenizer": (write("tokenizer.json", b"{"), r"tokenizer\.json"),
}


@pytest.mark.parametrize("case", HALF_WRITTEN)
def test_a_half_written_directory_is_one_line(case: str, tmp_path: Path) -> None:
    directory = tiny_directory(tmp_path / "model", "gpt2")
    spoil, reason = HALF_WRITTEN[case]
    spoil(directory)
    with pytest.raises(FileError, match=reason) as caught:
        load(directory)
    assert "\n" not in str(caught.value)


def test_an_empty_directory_and_a_file(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"config\.json: cannot be read"):
        load(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UnknownModel, match="is a file"):
        load(tmp_path / "file")


def test_only_pickles(tmp_path: Path) -> None:
    directory = tiny_directory(tmp_path, "gpt2")
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(b"never opened")
    with pytest.raises(FileError, match=r"pytorch_model\.bin'\] are pickles, which are never opened"):
        load(directory)


def test_config_fields_can_be_ignored_by_name(tmp_path: Path) -> None:
    directory = write_model(tmp_path, {**GPT2, "my_note": 1, "mine": 2}, tiny_tensors(GPT2))
    with pytest.raises(ConfigError, match=r"config\.json: m.* is .: unknown"):
        load(directory)
    with pytest.raises(ConfigError, match="mine is 2"):
        load(directory, ignore_config_fields=["my_note"])
    assert load(directory, ignore_config_fields=iter(["mine", "my_note"])).config.family == "gpt2"


# The dtype.

NAMED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.mark.parametrize("field", [None, "dtype", "torch_dtype"])
@pytest.mark.parametrize("name", NAMED)
def test_auto_is_the_dtype_of_the_checkpoint(name: str, field: str | None, tmp_path: Path) -> None:
    tensors = {key: tensor.to(NAMED[name]) for key, tensor in tiny_tensors(TIED).items()}
    config = TIED if field is None else {**TIED, field: name}
    model = load(write_model(tmp_path, config, tensors))
    assert model.dtype == NAMED[name]
    assert model.concat_cache().dtype == model.static_cache(4).dtype == NAMED[name]
    dtypes = {tensor.dtype for tensor in model.weights.tensors()}
    assert {NAMED[name]} <= dtypes <= {NAMED[name], torch.float32}  # gains of norms may be kept in float32


@pytest.mark.parametrize("name", NAMED)
def test_a_named_dtype_gives_the_bits_of_a_cast_checkpoint(name: DtypeName, tmp_path: Path) -> None:
    cast = {key: tensor.to(NAMED[name]) for key, tensor in tiny_tensors(GPT2).items()}
    wanted = scores_of(load(write_model(tmp_path / "cast", GPT2, cast)))
    model = load(write_model(tmp_path / "plain", {**GPT2, "torch_dtype": "float32"}, tiny_tensors(GPT2)), dtype=name)
    assert model.dtype == NAMED[name]
    assert same_bits(scores_of(model), wanted)


def test_several_dtypes_need_a_name(tmp_path: Path) -> None:
    tensors = tiny_tensors(GPT2)
    tensors["h.1.ln_1.weight"] = tensors["h.1.ln_1.weight"].bfloat16()
    directory = write_model(tmp_path, GPT2, tensors)
    with pytest.raises(ConfigError, match=r"tensors of dtype \['bfloat16', 'float32'\], dtype None in config"):
        load(directory)
    assert load(directory, dtype="float32").dtype == torch.float32
    assert load(write_model(tmp_path, {**GPT2, "torch_dtype": "float32"}, tensors)).dtype == torch.float32


def test_a_dtype_in_the_config_that_the_tensors_do_not_have_is_refused(tmp_path: Path) -> None:
    """To follow it would round every weight in silence."""
    directory = write_model(tmp_path, {**GPT2, "torch_dtype": "float16"}, tiny_tensors(GPT2))
    with pytest.raises(ConfigError, match=r"tensors of dtype \['float32'\], dtype 'float16' in config.json"):
        load(directory)
    assert load(directory, dtype="float16").dtype == torch.float16


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["float64", "int8", "torch.float32", "", {"text": "float32"}, 32, True], ids=repr)
def test_a_dtype_in_the_config_that_is_none_is_refused(field: str, value: Any, tmp_path: Path) -> None:
    directory = write_model(tmp_path, {**GPT2, field: value}, tiny_tensors(GPT2))
    with pytest.raises(ConfigError, match="say which with dtype="):
        load(directory)


def test_a_checkpoint_in_64_bits_needs_a_name(tmp_path: Path) -> None:
    directory = write_model(tmp_path, GPT2, {name: tensor.double() for name, tensor in tiny_tensors(GPT2).items()})
    with pytest.raises(ConfigError, match="say which with dtype="):
        load(directory)
    assert same_bits(scores_of(load(directory, dtype="float32")), scores_of(tiny_model("gpt2")))


@pytest.mark.parametrize("name", ["float64", "torch.float32", "", "Float32", None])
def test_another_dtype_is_refused(name: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"dtype is .*; give one of"):
        load(tiny_directory(tmp_path, "gpt2"), dtype=name)
    assert set(get_args(DtypeName)) == {"auto", *NAMED}


# What is loaded.


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("family", ["gpt2", "llama2", "smollm2"])
def test_a_file_that_changes_on_the_disk_changes_nothing(family: str, dtype: DtypeName, tmp_path: Path) -> None:
    directory = tiny_directory(tmp_path, family)
    model = load(directory, dtype=dtype)
    before = scores_of(model)
    with (directory / "model.safetensors").open("r+b") as file:
        file.seek(-4000, 2)
        file.write(b"\x41" * 4000)
    assert same_bits(scores_of(model), before)
    assert not same_bits(scores_of(load(directory, dtype=dtype)), before)
    with (directory / "model.safetensors").open("r+b") as file:
        file.truncate(0)
    assert same_bits(scores_of(model), before)


def tensors_in(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor that an object holds, however deep, each once."""
    if id(thing) in seen or isinstance(thing, (str, bytes, int, float, torch.dtype, torch.device, type(None))):
        return
    seen.add(id(thing))
    if isinstance(thing, (CompiledPath, Bound)):  # scratch, and what the structs point to: no weights of their own
        return
    if isinstance(thing, Tensor):
        yield thing
        return
    if isinstance(thing, Mapping):
        parts = list(thing.values())
    elif isinstance(thing, (list, tuple)):
        parts = list(thing)
    elif dataclasses.is_dataclass(thing):
        parts = [getattr(thing, field.name) for field in dataclasses.fields(thing)]
    else:
        parts = list(getattr(thing, "__dict__", {}).values())
    for part in parts:
        yield from tensors_in(part, seen)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_nbytes_counts_every_tensor_once(family: str, dtype: DtypeName, tmp_path: Path) -> None:
    weights = tiny_model(family, dtype).weights
    held = list(tensors_in(weights, set()))
    assert len(held) > 20
    assert sorted(map(id, held)) == sorted(map(id, weights.tensors()))
    assert weights.nbytes == sum(storage_bytes(tensor) for tensor in held)
    numbers = sum(tensor.numel() for tensor in tiny_tensors(TINY_CONFIGS[family]).values())
    assert weights.nbytes >= numbers * NAMED[dtype].itemsize


def test_nothing_of_a_model_needs_its_directory(tmp_path: Path) -> None:
    model = load(tiny_directory(tmp_path / "qwen3", "qwen3"))
    (tmp_path / "qwen3").rename(tmp_path / "moved")
    assert model.tokenizer is None
    assert model.name == str(tmp_path / "qwen3")
    assert scores_of(model).shape == (1, 24, 257)


@pytest.mark.parametrize(
    "ids", [[], [1.0], [True], ["1"], [None], [[1, 2]], [2**63], [-(2**63) - 1], [10**30]], ids=repr
)
def test_ids_that_are_no_ids(ids: Any, tmp_path: Path) -> None:
    model = tiny_model("gpt2")
    with pytest.raises(InvalidIds):
        model.forward(ids, model.concat_cache())


def test_a_sequence_and_a_tensor_are_the_same_ids(tmp_path: Path) -> None:
    model = tiny_model("gpt2")
    one, other = (model.forward(ids, model.concat_cache()) for ids in (IDS, IDS[0].tolist()))
    assert one is not None
    assert other is not None
    assert same_bits(one, other)


def test_weights_that_are_not_finite_are_refused_at_load(tmp_path: Path) -> None:
    """By the probe, where the first layers meet them."""
    tensors = tiny_tensors(GPT2)
    tensors["h.0.mlp.c_fc.weight"][3, 4] = float("nan")
    with pytest.raises(KvouchError, match=r"(?i)nan|finite"):
        load(write_model(tmp_path, GPT2, tensors))
