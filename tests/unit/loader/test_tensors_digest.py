"""The digest over the tensors of a safetensors file."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kvouch.errors import FileError
from kvouch.loader.catalogue import WheelSource, find
from kvouch.loader.tensors_digest import tensors_digest

TENSORS = {"a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "b": torch.ones(4)}


def digest_of(path: Path, tensors: dict[str, Tensor], **metadata: str) -> str:
    save_file(tensors, path, metadata=metadata)
    return tensors_digest(path)


def test_the_golden_value_stands(tmp_path: Path) -> None:
    want = "b9aae1085ab2118a001bc5771dbe85150d55b0da253204570ac4dc595cf1ea2e"
    assert digest_of(tmp_path / "m", TENSORS) == want


def test_metadata_and_the_order_of_names_do_not_count(tmp_path: Path) -> None:
    turned = {name: TENSORS[name] for name in reversed(TENSORS)}
    assert digest_of(tmp_path / "m", TENSORS) == digest_of(tmp_path / "n", turned, format="pt")


@pytest.mark.parametrize(
    "other",
    [
        {"a": TENSORS["a"].clone(), "c": TENSORS["b"]},
        {"a": TENSORS["a"].reshape(3, 2), "b": TENSORS["b"]},
        {"a": TENSORS["a"].view(torch.int16), "b": TENSORS["b"]},
        {"a": TENSORS["a"], "b": TENSORS["b"].nextafter(torch.tensor(2.0))},
        {"a": TENSORS["a"]},
    ],
    ids=["name", "shape", "dtype", "one bit", "one fewer"],
)
def test_everything_else_counts(tmp_path: Path, other: dict[str, Tensor]) -> None:
    assert digest_of(tmp_path / "m", TENSORS) != digest_of(tmp_path / "n", other)


@pytest.mark.parametrize("keep_bytes", [0, 4, 40, -1])
def test_a_truncated_file_is_an_error(tmp_path: Path, keep_bytes: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:keep_bytes])
    with pytest.raises(FileError, match=r"model.safetensors: not a readable"):
        tensors_digest(path)


@pytest.mark.real_model
def test_the_pulled_model_has_the_pinned_tensors(smollm2_dir: Path) -> None:
    source = find("smollm2-135m-instruct-q4_1").source
    assert isinstance(source, WheelSource)
    assert tensors_digest(smollm2_dir / "model.safetensors") == source.tensors_digest
