"""A checkpoint's tensors: which files they come from, which may be ignored, and what does not fit said in one error."""

import json
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kvouch.artefact.files import ArtefactFiles
from kvouch.errors import ConfigError, FileError, TensorError
from kvouch.loader.config import parse_config
from kvouch.loader.source import CheckpointSource, ShapeCheck, checkpoint_dtypes, drop_tied_head, read_tensors
from kvouch.models.config import Family
from kvouch.models.tiny import TINY_CONFIGS
from kvouch.numerics.bits import same_bits

INDEX = "model.safetensors.index.json"


def names(directory: Path, family: Family = "llama") -> list[str]:
    """Names that are read from a directory, sorted."""
    return sorted(read_tensors(ArtefactFiles(directory), family))


def save(path: Path, names: Iterable[str]) -> None:
    save_file({name: torch.tensor([float(number)]) for number, name in enumerate(names)}, path)


def save_shards(directory: Path, shards: Mapping[str, list[str]], **index: Any) -> None:
    """Shards by file name, and an index; `index` replaces its fields."""
    for file, held in shards.items():
        save(directory / file, held)
    weight_map = {name: file for file, held in shards.items() for name in held}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map} | index))


# Files.


def test_shards_are_read_together(tmp_path: Path) -> None:
    save_shards(tmp_path, {"model-1.safetensors": ["a", "b"], "model-2.safetensors": ["c"]})
    tensors = read_tensors(ArtefactFiles(tmp_path), "llama")
    assert {name: tensor.item() for name, tensor in tensors.items()} == {"a": 0.0, "b": 1.0, "c": 0.0}


def test_a_single_file_is_taken_before_an_index(tmp_path: Path) -> None:
    save_shards(tmp_path, {"model-1.safetensors": ["a"]})
    save(tmp_path / "model.safetensors", ["b"])
    assert names(tmp_path) == ["b"]


def test_a_shard_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    save_shards(tmp_path, {"model-1.safetensors": ["a"], "model-2.safetensors": ["b"]})
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"weight_map names \['model-2\.safetensors'\]: no such files here"):
        names(tmp_path)


@pytest.mark.parametrize("cut", [0, 4, 20])
def test_a_shard_that_is_half_written_is_named(tmp_path: Path, cut: int) -> None:
    save_shards(tmp_path, {"model-1.safetensors": ["a"], "model-2.safetensors": ["b"]})
    with (tmp_path / "model-2.safetensors").open("r+b") as file:
        file.truncate(cut)
    with pytest.raises(FileError, match=r"model-2\.safetensors: .*(half-written|truncated)"):
        names(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    """Even where the index says which of the two it means."""
    save_shards(tmp_path, {"model-1.safetensors": ["a", "b"], "model-2.safetensors": ["b", "c"]})
    with pytest.raises(TensorError, match=r"model-2\.safetensors: tensor b appears twice"):
        names(tmp_path)


def test_a_tensor_under_both_of_its_names_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", ["wte.weight", "transformer.wte.weight"])
    with pytest.raises(TensorError, match=r"wte\.weight appears twice"):
        names(tmp_path, "gpt2")
    assert names(tmp_path, "llama") == ["transformer.wte.weight", "wte.weight"]


@pytest.mark.parametrize(
    "weight_map", [None, [], "model.safetensors", {"a": None}, {"a": 1}, {"a": ["model-1.safetensors"]}], ids=repr
)
def test_an_index_that_is_no_map_is_refused(tmp_path: Path, weight_map: Any) -> None:
    save_shards(tmp_path, {"model-1.safetensors": ["a"]}, weight_map=weight_map)
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json: weight_map must map"):
        names(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["../outside.safetensors", "sub/../sub/x.safetensors", "a\0b", "", ".", "\ud800"],
    ids=lambda name: ascii(name),
)
def test_an_index_cannot_name_files_elsewhere(tmp_path: Path, name: str) -> None:
    (tmp_path / "model" / "sub").mkdir(parents=True)
    for path in ("outside.safetensors", "model/sub/x.safetensors"):
        save(tmp_path / path, ["a"])
    save_shards(tmp_path / "model", {}, weight_map={"a": name})
    with pytest.raises(ConfigError, match=r"weight_map names .*: no such files here"):
        names(tmp_path / "model")


class Trap:
    """A pickle that leaves a file behind when it is opened."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "pytorch_model-1.bin"])
def test_pickles_are_never_opened(tmp_path: Path, name: str) -> None:
    """Not for want of something better, and not where an index calls one a shard."""
    sprung = tmp_path / "sprung"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / name).write_bytes(pickle.dumps(Trap(sprung)))
    with pytest.raises(FileError, match=r"neither .*pickles, which are never opened: convert them") as caught:
        names(tmp_path / "model")
    assert name in str(caught.value)
    save_shards(tmp_path / "model", {}, weight_map={"a": name})
    with pytest.raises(FileError, match="another kind"):
        names(tmp_path / "model")
    assert not sprung.exists()
    pickle.loads(pickle.dumps(Trap(sprung)))
    assert sprung.exists()


def test_a_directory_without_weights_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json$"):
        names(tmp_path)


def test_a_link_that_leads_nowhere_is_no_missing_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("../../blobs/gone")
    with pytest.raises(FileError, match=r"model\.safetensors: cannot be read"):
        names(tmp_path)


# Names.

IGNORED = [
    "h.0.attn.bias",
    "h.11.attn.masked_bias",
    "model.layers.3.self_attn.rotary_emb.inv_freq",
    "model.rotary_emb.inv_freq",
]
KEPT = [
    "attn.bias",
    "h.0.attn.c_attn.bias",
    "h.0.attn.bias.weight",
    "h.0.attn.biased",
    "h..attn.bias",
    "h.x.attn.bias",
    "h.0.attn_bias",
    "h.0.crossattention.bias",
    "x.h.0.attn.bias",
    "rotary_emb.inv_freq",
    "model.layers.3.self_attn.rotary_emb.inv_freq2",
    "model.layers.3.mlp.rotary_emb.inv_freq",
    "model.layers.3.self_attn.q_proj.bias",
    "model.layers.3.self_attn.rotary_emb.cos_cached",
]


def test_known_buffers_are_ignored_under_their_exact_names(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", IGNORED + KEPT)
    assert names(tmp_path) == sorted(KEPT)


def test_the_prefix_of_gpt2_is_taken_off_and_no_other(tmp_path: Path) -> None:
    held = ["transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias", "transformer.wte.weight", "lm_head.weight"]
    other = ["model.wte.weight", "transformer.transformer.wte.weight", "transformer_h.weight"]
    save(tmp_path / "model.safetensors", held + other)
    kept = ["wte.weight", "lm_head.weight", "model.wte.weight", "transformer.wte.weight", "transformer_h.weight"]
    assert names(tmp_path, "gpt2") == sorted(kept)
    assert names(tmp_path, "llama") == sorted(held + other)


# Shapes.


def test_all_faults_are_one_error() -> None:
    tensors = {
        "right": torch.ones(2, 3),
        "turned": torch.ones(3, 2),
        "flat": torch.ones(6),
        "whole": torch.ones(4, dtype=torch.int32),
        "extra": torch.ones(5, 1),
    }
    check = ShapeCheck(tensors, "the directory")
    for name, shape in {"right": (2, 3), "turned": (2, 3), "flat": (2, 3), "whole": (4,), "absent": (7, 8)}.items():
        assert check.take(name, *shape).shape == shape
    with pytest.raises(TensorError) as caught:
        check.finish()
    assert str(caught.value) == (
        "the directory: the tensors do not fit the config; missing: absent [7, 8]; left over: extra [5, 1]; "
        "wrong: turned [3, 2], by the config [2, 3], flat [6], by the config [2, 3], "
        "whole of dtype torch.int32, a floating point dtype is needed"
    )


def test_a_tensor_can_be_taken_once() -> None:
    check = ShapeCheck({"a": torch.ones(2)}, "the directory")
    check.take("a", 2)
    check.finish()
    check.take("a", 2)
    with pytest.raises(TensorError, match=r"missing: a \[2\]"):
        check.finish()


def test_a_long_list_is_cut_and_counted() -> None:
    check = ShapeCheck({f"extra.{number}": torch.ones(1) for number in range(40)}, "the directory")
    for number in range(30):
        check.take(f"absent.{number}", 1)
    with pytest.raises(
        TensorError, match=r"absent\.11 \[1\] and 18 more; left over: extra\.0 .* and 28 more"
    ) as caught:
        check.finish()
    assert "absent.12" not in str(caught.value)


def test_a_config_that_is_far_off_is_not_walked_to_its_end() -> None:
    check = ShapeCheck({"extra": torch.ones(1)}, "the directory")

    def walk() -> None:
        for number in range(10**6):
            check.take(f"absent.{number}", 1)

    with pytest.raises(TensorError, match=r"missing: absent.* and .* more; the rest was not looked at") as caught:
        walk()
    assert "extra" not in str(caught.value)  # it may yet have been taken


def test_shapes_beyond_all_memory_are_refused_at_once() -> None:
    check = ShapeCheck({"a": torch.ones(1)}, "the directory")
    with pytest.raises(TensorError, match=r"wrong: a \[1\], by the config \[2147483646, 2147483646, 4\]"):
        check.take("a", 2**31 - 2, 2**31 - 2, 4)


def test_a_source_hands_out_each_tensor_once_cast() -> None:
    tensors = {"a": torch.tensor([1.0, 2.5])}
    source = CheckpointSource(tensors, dtype=torch.bfloat16, device=torch.device("cpu"), where="model")
    assert same_bits(source.take("a", 2), torch.tensor([1.0, 2.5], dtype=torch.bfloat16))
    assert tensors == {}  # its memory can be given back


# A tied head.

EMBEDDING = torch.tensor([[0.0, 1.0], [float("nan"), -2.0]])
EMBEDDING_NAMES = {"gpt2": "wte.weight", "smollm2": "model.embed_tokens.weight"}


@pytest.mark.parametrize("family", EMBEDDING_NAMES)
def test_a_tied_head_that_is_the_embedding_is_dropped(family: str) -> None:
    config = parse_config(TINY_CONFIGS[family], "c.json")
    tensors = {EMBEDDING_NAMES[family]: EMBEDDING, "lm_head.weight": EMBEDDING.clone(), "x": EMBEDDING}
    drop_tied_head(tensors, config, "the directory")
    assert tensors.keys() == {EMBEDDING_NAMES[family], "x"}


@pytest.mark.parametrize(
    "head",
    [
        torch.tensor([[0.0, 1.0], [float("nan"), -2.5]]),
        torch.tensor([[-0.0, 1.0], [float("nan"), -2.0]]),
        EMBEDDING.bfloat16(),
        EMBEDDING[:1],
    ],
    ids=["another number", "minus zero", "another dtype", "another shape"],
)
@pytest.mark.parametrize("family", EMBEDDING_NAMES)
def test_a_tied_head_that_differs_in_a_bit_is_refused(family: str, head: Tensor) -> None:
    config = parse_config(TINY_CONFIGS[family], "c.json")
    tensors = {EMBEDDING_NAMES[family]: EMBEDDING, "lm_head.weight": head}
    with pytest.raises(TensorError, match=r"the directory: lm_head\.weight differs from the embedding"):
        drop_tied_head(tensors, config, "the directory")


def test_a_head_of_its_own_stays() -> None:
    config = parse_config({**TINY_CONFIGS["smollm2"], "tie_word_embeddings": False}, "c.json")
    tensors = {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": EMBEDDING.clone()}
    drop_tied_head(tensors, config, "the directory")
    assert "lm_head.weight" in tensors


def test_a_tied_head_without_an_embedding_is_left_to_be_listed() -> None:
    tensors = {"lm_head.weight": EMBEDDING}
    drop_tied_head(tensors, parse_config(TINY_CONFIGS["smollm2"], "c.json"), "the directory")
    assert tensors.keys() == {"lm_head.weight"}


# The dtype.


def test_the_dtype_of_a_checkpoint_is_the_one_that_all_its_numbers_have() -> None:
    mask = torch.ones(2, dtype=torch.uint8)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert checkpoint_dtypes({"a": torch.ones(2, dtype=dtype), "mask": mask}) == [str(dtype).removeprefix("torch.")]


def test_several_dtypes_are_named() -> None:
    tensors = {"a": torch.ones(2), "b": torch.ones(2).bfloat16(), "c": torch.ones(2).bfloat16()}
    assert checkpoint_dtypes(tensors) == ["bfloat16", "float32"]
