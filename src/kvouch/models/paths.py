"""Which path computes a model here, and why no faster one. Knows what each path asks of a model and of the machine."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from kvouch.errors import UsageError
from kvouch.kernels.binding import LARGEST_HEAD, VARIANTS, Library, has_step, library
from kvouch.models.compiled import CompiledPath
from kvouch.models.config import ModelConfig
from kvouch.models.step import Path, TorchPath

PathName = Literal["auto", "torch", "avx2", "avx512", "avx512_bf16"]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A path, and why it is torch where it is."""

    path: Path
    reason: str | None = None


def choose_path(name: PathName, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Choice:
    """The compiled step's best variant, or one that is named; torch where it cannot be. UsageError for a name."""
    if name not in get_args(PathName):
        raise UsageError(f"path is {name!r}; give one of {list(get_args(PathName))}")
    if name == "torch":
        return Choice(path=TorchPath(), reason="asked for")
    found = _library(config, dtype, device)
    if isinstance(found, str):
        if name != "auto":
            raise UsageError(f"path {name!r} cannot be taken: {found}")
        return Choice(path=TorchPath(), reason=found)
    able = [one for one in VARIANTS if one in found.variants and has_step(one, dtype)]
    if name == "auto":
        return Choice(path=CompiledPath(found, able[-1], dtype))
    if name not in able:
        raise UsageError(f"path {name!r} cannot be taken: in {dtype} this processor runs {able}")
    return Choice(path=CompiledPath(found, name, dtype))


def _library(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Library | str:
    """The library, or why it cannot compute this model."""
    if device.type != "cpu":
        return f"the compiled step is for the CPU; this model is on {device}"
    if config.head_dim > LARGEST_HEAD:
        return f"head_dim is {config.head_dim}; the compiled step takes {LARGEST_HEAD} at most"
    return library()
