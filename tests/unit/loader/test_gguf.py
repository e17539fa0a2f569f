"""A GGUF as a directory: against transformers' own reader, twice the same bytes, and nothing unknown passes."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from kvouch.errors import ConfigError, FileError, KvouchError, MissingExtra, TensorError
from kvouch.loader.gguf import convert

pytest.importorskip("gguf", reason="needs the extra gguf: pip install 'kvouch[gguf]'")

from tiny_gguf import HIDDEN, TEMPLATE, TOKENS, write_tiny_gguf


def nothing(stage: str, done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def converted(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    convert(tiny, folder, nothing)
    return folder


def test_every_tensor_has_the_bits_that_transformers_reads(tiny: Path, converted: Path) -> None:
    """By the library's own reader; `from_pretrained` would want accelerate for a GGUF."""
    transformers = pytest.importorskip("transformers")
    reader = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    config = transformers.AutoConfig.from_pretrained(tiny.parent, gguf_file=tiny.name)
    model = transformers.AutoModelForCausalLM.from_config(config)
    read = reader.load_gguf_checkpoint(str(tiny), return_tensors=True, model_to_load=model)["tensors"]
    theirs = {name: torch.as_tensor(tensor) for name, tensor in read.items() if name != "lm_head.weight"}
    ours = load_file(converted / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor.view(torch.int16), theirs[name].to(torch.bfloat16).view(torch.int16)), name


def test_transformers_reads_the_directory_as_an_ordinary_model(converted: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(converted)
    assert model.dtype == torch.bfloat16
    assert model.config.rope_parameters["rope_theta"] == 50_000.0
    assert model.config.tie_word_embeddings
    tokenizer = transformers.AutoTokenizer.from_pretrained(converted)
    assert tokenizer("a 12 h").input_ids == Tokenizer.from_file(str(converted / "tokenizer.json")).encode("a 12 h").ids
    assert tokenizer.chat_template == TEMPLATE


def test_the_config_is_complete_and_carries_no_trace_of_the_gguf(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["dtype"], config["model_type"], config["vocab_size"]) == ("bfloat16", "llama", len(TOKENS))
    assert (config["num_key_value_heads"], config["head_dim"]) == (2, 16)
    assert not {"quantization_config", "_model_name_or_path", "transformers_version"} & config.keys()
    generation = json.loads((converted / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_smollm_splits_every_digit_and_keeps_control_tokens_whole(converted: Path) -> None:
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))
    assert tokenizer.encode("12 h").tokens == ["1", "2", "Ġh"]
    assert tokenizer.encode("<|im_end|>12").tokens == ["<|im_end|>", "1", "2"]
    assert tokenizer.decode(tokenizer.encode("12 h").ids) == "12 h"


def test_gpt2_keeps_digits_together(tmp_path: Path) -> None:
    convert(write_tiny_gguf(tmp_path / "tiny.gguf", pre="gpt-2"), tmp_path, nothing)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("12").tokens == ["12"]


def test_two_conversions_give_the_same_bytes(tiny: Path, converted: Path, tmp_path: Path) -> None:
    convert(tiny, tmp_path, nothing)
    names = {path.name for path in converted.iterdir()}
    assert names == {path.name for path in tmp_path.iterdir()}
    assert all((converted / name).read_bytes() == (tmp_path / name).read_bytes() for name in names)


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"pre": "llama-bpe"}, ConfigError, "tokenizer.ggml.pre: found 'llama-bpe'"),
        ({"integers": {"llama.expert_count": 8}}, ConfigError, "llama.expert_count"),
        (
            {"integers": {"llama.rope.dimension_count": 8, "llama.attention.key_length": 16}},
            ConfigError,
            "dimension_co",
        ),
        ({"integers": {"tokenizer.ggml.add_bos_token": 1}}, ConfigError, "add_bos_token"),
        ({"tensors": {"blk.1.ffn_up.weight": None}}, TensorError, r"missing \['model.layers.1.mlp.up_proj.weight'\]"),
        ({"tensors": {"rope_freqs.weight": (8,)}}, TensorError, r"left over \['rope_freqs.weight'\]"),
        ({"tensors": {"output.weight": (7, HIDDEN)}}, TensorError, "lm_head.weight: shape"),
        ({"first": float("nan")}, TensorError, "model.norm.weight: holds an infinity or a NaN"),
    ],
)
def test_what_is_not_understood_is_named(
    tmp_path: Path, options: dict[str, object], error: type[KvouchError], named: str
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", **options)  # type: ignore[arg-type]
    with pytest.raises(error, match=named):
        convert(path, tmp_path, nothing)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a gguf at all" * 100])
def test_a_file_that_is_no_gguf_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(FileError, match=r"broken\.gguf"):
        convert(path, tmp_path, nothing)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtra, match=r"pip install 'kvouch\[gguf\]'"):
        convert(tiny, tiny.parent, nothing)
