"""Tiny models on disk and loaded: what most tests run on."""

import copy
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kvouch.engine.model import Model, load
from kvouch.loader.checkpoint import DtypeName
from kvouch.models.paths import PathName
from kvouch.models.tiny import TINY_CONFIGS, tiny_tensors


def write_model(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """A model directory in the transformers layout, without a tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def tiny_directory(directory: Path, family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """One of TINY_CONFIGS written to `directory`."""
    tensors = {name: tensor.to(dtype) for name, tensor in tiny_tensors(TINY_CONFIGS[family], seed).items()}
    return write_model(directory, TINY_CONFIGS[family], tensors)


def tiny_model(family: str, dtype: DtypeName = "float32", path: PathName = "auto") -> Model:
    """One of TINY_CONFIGS: tensors that all tests share, in weights of the caller's own, whose step it may replace."""
    return own_weights(_loaded(family, dtype, path))


@cache
def _loaded(family: str, dtype: DtypeName, path: PathName) -> Model:
    with TemporaryDirectory() as directory:
        return load(tiny_directory(Path(directory), family), dtype=dtype, path=path)


def own_weights(model: Model) -> Model:
    """The same tensors in weights of one's own, whose step can be replaced without touching other tests'."""
    twin = copy.copy(model)
    twin._base = copy.copy(model._base)
    twin._base.weights = copy.copy(model.weights)
    return twin


def random_ids(count: int, *, seed: int = 0, batch: int = 1, vocabulary: int = 257) -> Tensor:
    """Ids [batch, count] from a seed."""
    return torch.randint(0, vocabulary, (batch, count), generator=torch.Generator().manual_seed(seed))
