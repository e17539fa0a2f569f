"""From a model directory to weights that compute: files, config, tensors, tokenizer. Knows files; runs no model."""

import contextlib
import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, Literal

import torch
from torch import Tensor

from kvouch.artefact.files import ArtefactFiles
from kvouch.artefact.manifest import MODEL, Manifest
from kvouch.errors import ConfigError
from kvouch.loader.config import parse_config
from kvouch.loader.source import CheckpointSource, ShapeCheck, checkpoint_dtypes, drop_tied_head, read_tensors
from kvouch.loader.tokenizer import Tokenizer, load_tokenizer
from kvouch.models.config import ModelConfig
from kvouch.models.gpt2 import GPT2Weights
from kvouch.models.llama import LlamaWeights
from kvouch.models.paths import PathName, choose_path
from kvouch.models.source import TensorSource
from kvouch.models.step import ModelWeights, Path, TorchPath

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a model directory holds, read once; the manifest is of the bytes that were read."""

    config: ModelConfig
    weights: ModelWeights
    not_compiled: str | None  # why the compiled step does not compute them
    tokenizer: Tokenizer | None
    dtype: torch.dtype
    device: torch.device
    manifest: Manifest  # without the files that have no role


def read_checkpoint(
    directory: FilePath,
    *,
    dtype: DtypeName,
    device: str,
    path: PathName = "auto",
    ignore_config_fields: Iterable[str] = (),
    allow_nonfinite: bool = False,
) -> Checkpoint:
    """Reads and packs a model. Raises FileError, ConfigError, TensorError, and UsageError for a path."""
    files = ArtefactFiles(directory)
    fields = files.json("config.json")
    where = str(files.directory)
    config = parse_config(fields, f"{where}/config.json", ignore_config_fields)
    with torch.inference_mode(False):  # tensors made in it have no versions, by which a change is seen
        tensors = read_tensors(files, config.family)
        chosen = _dtype(dtype, fields, tensors, where)
        target = torch.empty(0, device=device).device
        choice = choose_path(path, config, chosen, target)
        source = CheckpointSource(tensors, dtype=chosen, device=target, where=where, allow_nonfinite=allow_nonfinite)
        weights = _build(config, tensors, source, choice.path, where)
    return Checkpoint(
        config=config,
        weights=weights,
        not_compiled=choice.reason,
        tokenizer=load_tokenizer(files, fields),
        dtype=chosen,
        device=target,
        manifest=Manifest.of_files(files, MODEL),
    )


def _dtype(asked: DtypeName, fields: dict[str, Any], tensors: dict[str, Tensor], where: str) -> torch.dtype:
    if asked != "auto":
        return DTYPES[asked]
    own = checkpoint_dtypes(tensors)
    named = next((str(fields[name]) for name in ("dtype", "torch_dtype") if fields.get(name) is not None), None)
    chosen = named if named is not None else own[0]
    if chosen not in DTYPES or (len(own) == 1 and chosen != own[0]) or (len(own) > 1 and named is None):
        raise ConfigError(f"{where}: tensors of dtype {own}, dtype {named!r} in config.json: say which with dtype=")
    return DTYPES[chosen]


def _build(
    config: ModelConfig, tensors: dict[str, Tensor], source: CheckpointSource, path: Path, where: str
) -> ModelWeights:
    """Checks every name and shape first, then packs: each tensor is freed as soon as it is taken."""
    drop_tied_head(tensors, config, where)
    check = ShapeCheck(tensors, where)
    _family(config, check, TorchPath())
    check.finish()
    return _family(config, source, path)


def _family(config: ModelConfig, source: TensorSource, path: Path) -> ModelWeights:
    if config.rope is None:
        return GPT2Weights(config, source, path)
    return LlamaWeights(config, config.rope, source, path)


def return_freed_memory() -> None:
    """Has the C library give back what loading has freed, where it can (glibc)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
