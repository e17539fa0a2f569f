"""From a model directory to a model that computes: files, config, weights, probe, tokenizer.

Knows where everything comes from; the forward pass it hands out knows none of it.
"""

import contextlib
import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kvouch.artefact.files import ArtefactFiles
from kvouch.cache.concat import ConcatCache
from kvouch.cache.static import StaticCache
from kvouch.contract import Grade, KVCache, Progress, Rows
from kvouch.errors import ConfigError, InvalidIds, UsageError
from kvouch.loader.config import parse_config
from kvouch.loader.home import kvouch_home
from kvouch.loader.probed import Probed
from kvouch.loader.pull import resolve
from kvouch.loader.source import CheckpointSource, ShapeCheck, checkpoint_dtypes, drop_tied_head, read_tensors
from kvouch.loader.tokenizer import Tokenizer, load_tokenizer
from kvouch.models.config import ModelConfig
from kvouch.models.forward import forward_cached
from kvouch.models.gpt2 import GPT2Weights
from kvouch.models.llama import LlamaWeights
from kvouch.models.source import TensorSource
from kvouch.models.step import TorchWeights
from kvouch.numerics.probe import probe, probe_ids

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]

PROBED_LAYERS = 2  # the second layer's keys depend on everything that the first one computes


@dataclass(kw_only=True)
class Model:
    """A loaded model: what computes, in which dtype, where, and how exact it is."""

    name: str
    config: ModelConfig
    weights: TorchWeights
    grade: Grade
    tokenizer: Tokenizer | None
    dtype: torch.dtype
    device: torch.device
    threads: int  # that torch computed with when the grade was measured

    def forward(self, ids: Tensor | Sequence[int], cache: KVCache, *, scores: Rows = "last") -> Tensor | None:
        """`forward_cached` on ids [B, T], or on one sequence of ids; with another number of threads, probes first."""
        if torch.get_num_threads() != self.threads:
            self.grade, self.threads = _measure(self.weights, self.dtype, self.device), torch.get_num_threads()
        return forward_cached(self.to_ids(ids), self.weights, self.config, cache, scores=scores)

    def to_ids(self, ids: Tensor | Sequence[int]) -> Tensor:
        """Int64 [B, T] on the model's device; InvalidIds where they are no whole numbers."""
        if isinstance(ids, Tensor):
            return ids.to(self.device)
        if not all(type(one) is int and -(2**63) <= one < 2**63 for one in ids):
            raise InvalidIds("ids must be whole numbers of 64 bits")
        return torch.tensor([list(ids)], dtype=torch.int64, device=self.device)

    def concat_cache(self, *, batch: int = 1) -> ConcatCache:
        return ConcatCache(self.config, batch=batch, dtype=self.dtype, device=self.device)

    def static_cache(self, capacity: int, *, batch: int = 1) -> StaticCache:
        return StaticCache(self.config, capacity=capacity, batch=batch, dtype=self.dtype, device=self.device)


def load(
    path_or_name: str | Path,
    *,
    dtype: DtypeName = "auto",
    device: str = "cpu",
    ignore_config_fields: Iterable[str] = (),
    home: Path | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> Model:
    """Loads a model directory, a name of the catalogue or a hub id (`owner/name[@revision]`).

    `dtype="auto"` is the tensors' own; the config's, where they have several; both must agree. Raises UsageError,
    UnknownModel, DownloadError, FileError, ConfigError, TensorError, and NonFinite where weights compute no numbers.
    """
    if dtype not in ("auto", *DTYPES):
        raise UsageError(f"dtype is {dtype!r}; give one of {['auto', *DTYPES]}")
    directory = resolve(str(path_or_name), home or kvouch_home(), progress)
    files = ArtefactFiles(directory)
    fields = files.json("config.json")
    where = str(files.directory)
    config = parse_config(fields, f"{where}/config.json", ignore_config_fields)
    tensors = read_tensors(files, config.family)
    chosen = _dtype(dtype, fields, tensors, where)
    target = torch.empty(0, device=device).device
    weights = _build(config, tensors, chosen, target, where)
    model = Model(
        name=str(path_or_name),
        config=config,
        weights=weights,
        grade=_measure(weights, chosen, target),
        tokenizer=load_tokenizer(files, fields),
        dtype=chosen,
        device=target,
        threads=torch.get_num_threads(),
    )
    _return_freed_memory()
    return model


def _measure(weights: TorchWeights, dtype: torch.dtype, device: torch.device) -> Grade:
    """Sets the row quanta that make the weights exact here and now, and says how exact they are."""
    config = weights.config
    ids = probe_ids(config.vocab_size, config.max_position_embeddings, device)
    first = Probed(weights, PROBED_LAYERS, dtype, device)
    result = probe(ids, layers=first, model=Probed(weights, config.num_hidden_layers, dtype, device))
    weights.arithmetic = result.arithmetic
    return result.grade


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
    config: ModelConfig, tensors: dict[str, Tensor], dtype: torch.dtype, device: torch.device, where: str
) -> TorchWeights:
    """Checks every name and shape first, then packs: each tensor is freed as soon as it is taken."""
    drop_tied_head(tensors, config, where)
    check = ShapeCheck(tensors, where)
    _family(config, check)
    check.finish()
    return _family(config, CheckpointSource(tensors, dtype=dtype, device=device))


def _family(config: ModelConfig, source: TensorSource) -> TorchWeights:
    if config.rope is None:
        return GPT2Weights(config, source)
    return LlamaWeights(config, config.rope, source)


def _return_freed_memory() -> None:
    """Has the C library give back what loading has freed, where it can (glibc)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
