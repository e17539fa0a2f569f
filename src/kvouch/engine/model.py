"""A loaded model: what computes, under which identity, with which adapters. Knows no request and holds no cache."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvouch.cache.concat import ConcatCache
from kvouch.cache.static import StaticCache
from kvouch.contract import Grade, KVCache, Progress, Rows
from kvouch.digest import canonical_json
from kvouch.engine.computation import Computation
from kvouch.errors import InvalidIds, UnknownAdapter, UsageError
from kvouch.identity.identity import AdapterIdentity, Identity
from kvouch.loader.adapter import read_adapter
from kvouch.loader.checkpoint import DTYPES, Checkpoint, DtypeName, read_checkpoint, return_freed_memory
from kvouch.loader.home import kvouch_home
from kvouch.loader.pull import resolve
from kvouch.models.config import ModelConfig
from kvouch.models.lora import Parts, adapted
from kvouch.models.step import TorchWeights

if TYPE_CHECKING:
    from kvouch.engine.backend import RollbackBackend


@dataclass(frozen=True, kw_only=True)
class LoadedAdapter:
    """An adapter in memory: its corrections at scale 1, who it is, and the model with it."""

    parts: Parts
    identity: AdapterIdentity
    computation: Computation


class Model:
    """One model in memory, with any number of adapters: the base weights are held once.

    `forward` computes; `identity` says what it is that is computed, looking at every tensor's version first.
    """

    def __init__(self, name: str, checkpoint: Checkpoint) -> None:
        self.name = name
        self.config = checkpoint.config
        self.tokenizer = checkpoint.tokenizer
        self.dtype, self.device = checkpoint.dtype, checkpoint.device
        self.manifest = checkpoint.manifest
        self._base = Computation(checkpoint.weights, self.dtype, self.device)
        self._adapters: dict[str, LoadedAdapter] = {}
        self._fixed = _fixed_fields(checkpoint)
        self._identities: dict[tuple[str | None, str], Identity] = {}

    @property
    def weights(self) -> TorchWeights:
        return self._base.weights

    @property
    def grade(self) -> Grade:
        return self._base.grade

    @property
    def threads(self) -> int:
        """How many threads torch computed with when the grade was measured."""
        return self._base.threads

    # What is computed.

    def forward(
        self, ids: Tensor | Sequence[int], cache: KVCache, *, scores: Rows = "last", adapter: str | None = None
    ) -> Tensor | None:
        """`forward_cached` on ids [B, T], or on one sequence of ids; with another number of threads, probes first."""
        computation = self._computation(adapter)
        if torch.get_num_threads() != computation.threads:
            computation.settle()
        return computation.forward(self.to_ids(ids), cache, scores)

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

    # Who it is.

    def identity(self, *, adapter: str | None = None, salt: str = "") -> Identity:
        """The identity of what `forward` computes now. The same object as long as nothing changed."""
        computation = self._computation(adapter)
        computation.settle()
        known = self._identities.get((adapter, salt))
        adapters = () if adapter is None else (self._adapters[adapter].identity,)
        weights = self._fixed.weights if computation.changed is None else f"memory:{computation.changed}"
        if known is None or (known.weights, known.adapters, known.numerics) != (
            weights,
            adapters,
            computation.numerics,
        ):
            known = replace(self._fixed, weights=weights, adapters=adapters, numerics=computation.numerics, salt=salt)
            self._identities[adapter, salt] = known
        return known

    def fingerprint(self, *, adapter: str | None = None) -> str:
        """Computes the probe again, and returns its digest; a change that no version told changes the identity."""
        computation = self._computation(adapter)
        computation.settle()
        return computation.take_fingerprint()

    # Adapters.

    @property
    def adapters(self) -> Mapping[str, AdapterIdentity]:
        """The loaded adapters by name."""
        return MappingProxyType({name: one.identity for name, one in self._adapters.items()})

    def load_adapter(self, directory: str | Path, *, name: str | None = None, scale: float = 1.0) -> str:
        """Loads a LoRA adapter, in the place of one of that name; returns its name (by default the directory's).

        Raises FileError, AdapterError, UsageError; whatever raises leaves the adapters as they were.
        """
        path = Path(directory)
        name = path.resolve().name if name is None else name
        with torch.inference_mode(False):
            found = read_adapter(path, self.weights)
            parts = found.parts(self.device)
        self._adapters[name] = self._adapted(parts, AdapterIdentity(digest=found.digest, scale=_scale(scale)))
        return name

    def unload_adapter(self, name: str) -> None:
        """Forgets an adapter: what is bound to it refuses from now on."""
        self._adapter(name)
        del self._adapters[name]

    def set_scale(self, name: str, scale: float) -> None:
        """Another scale for a loaded adapter, and with it another identity."""
        old = self._adapter(name)
        self._adapters[name] = self._adapted(old.parts, replace(old.identity, scale=_scale(scale)))

    # Use.

    def bind(self, *, adapter: str | None = None, salt: str = "") -> "BoundModel":
        """The model as one tenant uses it: with this adapter, under this salt."""
        if adapter is not None:
            self._adapter(adapter)
        return BoundModel(model=self, adapter=adapter, salt=salt)

    def backend(
        self,
        *,
        adapter: str | None = None,
        salt: str = "",
        read: bool = True,
        write: bool = True,
        progress: Progress | None = None,
    ) -> "RollbackBackend":
        """A backend: ids in, scores out. Without `read` nothing is reused, without `write` nothing kept."""
        from kvouch.engine.backend import RollbackBackend

        return RollbackBackend(self.bind(adapter=adapter, salt=salt), read=read, write=write, progress=progress)

    def _adapted(self, parts: Parts, identity: AdapterIdentity) -> LoadedAdapter:
        scaled = {
            at: [replace(part, scale=part.scale * identity.scale) for part in found] for at, found in parts.items()
        }
        computation = Computation(adapted(self.weights, scaled), self.dtype, self.device)
        return LoadedAdapter(parts=parts, identity=identity, computation=computation)

    def _computation(self, adapter: str | None) -> Computation:
        return self._base if adapter is None else self._adapter(adapter).computation

    def _adapter(self, name: str) -> LoadedAdapter:
        found = self._adapters.get(name)
        if found is None:
            raise UnknownAdapter(f"adapter {name!r} is not loaded; loaded are {sorted(self._adapters) or 'none'}")
        return found


@dataclass(frozen=True, kw_only=True)
class BoundModel:
    """A model with one adapter under one salt: what a backend is made for."""

    model: Model
    adapter: str | None
    salt: str

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def grade(self) -> Grade:
        return self.model._computation(self.adapter).grade

    def identity(self) -> Identity:
        return self.model.identity(adapter=self.adapter, salt=self.salt)

    def forward(self, ids: Tensor | Sequence[int], cache: KVCache, *, scores: Rows = "last") -> Tensor | None:
        return self.model.forward(ids, cache, scores=scores, adapter=self.adapter)

    def fingerprint(self) -> str:
        return self.model.fingerprint(adapter=self.adapter)

    def concat_cache(self) -> ConcatCache:
        return self.model.concat_cache()

    def static_cache(self, capacity: int) -> StaticCache:
        return self.model.static_cache(capacity)


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
    checkpoint = read_checkpoint(directory, dtype=dtype, device=device, ignore_config_fields=ignore_config_fields)
    model = Model(str(path_or_name), checkpoint)
    return_freed_memory()
    return model


def _fixed_fields(checkpoint: Checkpoint) -> Identity:
    """The identity as far as it does not change; numerics are still to come."""
    config = asdict(checkpoint.config)
    rope = config.pop("rope")
    dtype = str(checkpoint.dtype).removeprefix("torch.")
    tokenizers = [file.content for file in checkpoint.manifest.files if file.role == "tokenizer"]
    return Identity(
        weights=f"files:{checkpoint.manifest.part('weights')}",
        tokenizer=tokenizers[0] if tokenizers else None,
        config=canonical_json(config),
        positions=canonical_json({"rope": rope} if rope is not None else {"learned": True}),
        weights_dtype=dtype,
        cache_dtype=dtype,
        numerics="",
    )


def _scale(scale: float) -> float:
    if type(scale) not in (int, float) or not math.isfinite(scale):
        raise UsageError(f"scale is {scale!r}; a finite number is needed")
    return float(scale) + 0.0  # one zero
