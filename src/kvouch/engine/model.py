"""A loaded model: what computes, under which identity, with which adapters. Knows no request and holds no cache."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from kvouch.cache.concat import ConcatCache
from kvouch.cache.pool import BlockPool
from kvouch.cache.static import StaticCache
from kvouch.contract import BLOCK, TILE, Grade, KVCache, LayerWatch, Progress, Rows
from kvouch.digest import canonical_json
from kvouch.engine.backend import RollbackBackend
from kvouch.engine.bound import BoundModel, Current
from kvouch.engine.computation import Computation, Measured, Watch
from kvouch.errors import InvalidIds, UnknownAdapter, UsageError
from kvouch.identity.identity import AdapterIdentity, Identity
from kvouch.loader.adapter import read_adapter
from kvouch.loader.checkpoint import DTYPES, Checkpoint, DtypeName, read_checkpoint, return_freed_memory
from kvouch.loader.home import kvouch_home
from kvouch.loader.pull import resolve
from kvouch.models.lora import Parts, adapted
from kvouch.models.paths import PathName
from kvouch.models.step import ModelWeights

LARGEST = 3e38  # of a scale: corrections are computed in float32


@dataclass(frozen=True, kw_only=True)
class LoadedAdapter:
    """An adapter in memory: its corrections at scale 1, who it is by its files, and the model with it."""

    parts: Parts
    watch: Watch
    identity: AdapterIdentity
    computation: Computation
    base_change: str | None  # of the base that the computation was made of


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
        self.not_compiled = checkpoint.not_compiled
        self._watch = Watch(checkpoint.weights.tensors)
        self._base = Computation(checkpoint.weights, self.dtype, self.device, [self._watch])
        self._adapters: dict[str, LoadedAdapter] = {}
        self._fixed = _fixed_fields(checkpoint)
        self._identities: dict[str | None, tuple[Measured, Identity]] = {}

    @property
    def weights(self) -> ModelWeights:
        return self._base.weights

    @property
    def grade(self) -> Grade:
        return self._base.measured.grade

    @property
    def path(self) -> str:
        """What computes: `torch`, or `compiled` and the instruction set."""
        return self.weights.path.name

    @property
    def threads(self) -> int:
        """How many threads torch computed with when the grade was measured."""
        return self._base.measured.threads

    # What is computed.

    def forward(
        self,
        ids: Tensor | Sequence[int],
        cache: KVCache,
        *,
        scores: Rows = "last",
        watch: LayerWatch | None = None,
    ) -> Tensor | None:
        """`forward_cached` on ids [B, T], or on one sequence of ids; with another number of threads, probes first."""
        self._base.settle_threads()
        return self._base.forward(self.to_ids(ids), cache, scores, watch)

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

    def new_cache(self, capacity: int) -> KVCache:
        """The cache that this model is fastest with, for one sequence; the other two work with every path."""
        return self.weights.path.new_cache(self.config, capacity, dtype=self.dtype, device=self.device)

    def pool(self, positions: int) -> BlockPool:
        """A pool of blocks for so many positions of many sequences, in the layout that this model's path reads."""
        blocks, layout = -(-positions // BLOCK), self.weights.path.layout
        return BlockPool(self.config, blocks=blocks, dtype=self.dtype, device=self.device, layout=layout)

    # Who it is.

    def current(self, *, adapter: str | None = None, salt: str = "") -> Current:
        """What is computed now, and under which identity: it computes the same, whatever is loaded meanwhile."""
        loaded = None if adapter is None else self._adapter(adapter)
        computation = self._base if loaded is None else loaded.computation
        measured = computation.settle()
        if adapter is not None and loaded is not None and measured.changes[0] != loaded.base_change:
            loaded = self._adapted(loaded.parts, loaded.watch, loaded.identity)  # of the tensors that there are now
            self._adapters[adapter], computation = loaded, loaded.computation
            measured = computation.settle()
        known = self._identities.get(adapter)
        if known is None or known[0] is not measured:
            known = measured, self._identified(measured, loaded)
            self._identities[adapter] = known
        identity = replace(known[1], salt=salt) if salt else known[1]
        return Current(model=self, computation=computation, identity=identity, grade=measured.grade)

    def identity(self, *, adapter: str | None = None, salt: str = "") -> Identity:
        """The identity of what is computed now. Without a salt the same object as long as nothing changed."""
        return self.current(adapter=adapter, salt=salt).identity

    def fingerprint(self, *, adapter: str | None = None) -> str:
        """Computes the probe again, with every loaded adapter too, and returns the digest that was asked for.

        A change that no version told changes the identity, where the probe meets it (docs/identity.md).
        """
        wanted = self._computation(adapter)
        digests = {id(one): one.take_fingerprint() for one in self._computations()}
        return digests[id(wanted)]

    # Adapters.

    @property
    def adapters(self) -> Mapping[str, AdapterIdentity]:
        """The loaded adapters by name."""
        return MappingProxyType({name: one.identity for name, one in self._adapters.items()})

    def load_adapter(self, directory: str | Path, *, name: str | None = None, scale: float = 1.0) -> str:
        """Loads a LoRA adapter and returns its name: the directory's, or one that is given and may replace another.

        Raises ArtefactError, UsageError and NonFinite; whatever raises leaves the adapters as they were.
        """
        scale, name = _scale(scale), _text("name", name)
        with torch.inference_mode(False):
            found = read_adapter(Path(directory), self.weights)
            parts = found.parts(self.weights.path.pack, self.device)
        identity = AdapterIdentity(digest=found.digest, scale=scale)
        if name is None:
            name = found.name
            if name in self._adapters and self._adapters[name].identity.digest != found.digest:
                raise UsageError(f"the name {name!r} is taken by another adapter: give one with name=")
        self._adapters[name] = self._adapted(parts, Watch(lambda: _tensors(parts)), identity)
        self._identities.pop(name, None)
        return name

    def unload_adapter(self, name: str) -> None:
        """Forgets an adapter: what is bound to it refuses from now on."""
        self._adapter(name)
        del self._adapters[name]
        self._identities.pop(name, None)

    def set_scale(self, name: str, scale: float) -> None:
        """Another scale for a loaded adapter, and with it another identity."""
        old = self._adapter(name)
        self._adapters[name] = self._adapted(old.parts, old.watch, replace(old.identity, scale=_scale(scale)))
        self._identities.pop(name, None)

    # Use.

    def bind(self, *, adapter: str | None = None, salt: str = "") -> BoundModel:
        """The model as one tenant uses it: with this adapter, under this salt."""
        if adapter is not None:
            self._adapter(adapter)
        return BoundModel(model=self, adapter=adapter, salt=_text("salt", salt) or "")

    def backend(
        self,
        *,
        adapter: str | None = None,
        salt: str = "",
        read: bool = True,
        write: bool = True,
        capacity: int = TILE,
        progress: Progress | None = None,
    ) -> RollbackBackend:
        """A backend: ids in, scores out. Without `read` nothing is reused, without `write` nothing kept."""
        bound = self.bind(adapter=adapter, salt=salt)
        return RollbackBackend(bound, read=read, write=write, capacity=capacity, progress=progress)

    def _adapted(self, parts: Parts, watch: Watch, identity: AdapterIdentity) -> LoadedAdapter:
        scaled = {
            at: [replace(part, scale=part.scale * identity.scale) for part in found] for at, found in parts.items()
        }
        change = self._watch.look()
        computation = Computation(adapted(self.weights, scaled), self.dtype, self.device, [self._watch, watch])
        return LoadedAdapter(parts=parts, watch=watch, identity=identity, computation=computation, base_change=change)

    def _identified(self, measured: Measured, adapter: LoadedAdapter | None) -> Identity:
        base, *others = (f"memory:{change}" if change is not None else None for change in measured.changes)
        adapters: tuple[AdapterIdentity, ...] = ()
        if adapter is not None:
            adapters = (replace(adapter.identity, digest=others[0] or adapter.identity.digest),)
        fields = {**self._fixed, **({} if base is None else {"weights": base})}
        return Identity(**fields, adapters=adapters, numerics=measured.numerics)

    def _computation(self, adapter: str | None) -> Computation:
        return self._base if adapter is None else self._adapter(adapter).computation

    def _computations(self) -> list[Computation]:
        return [self._base, *(one.computation for one in self._adapters.values())]

    def _adapter(self, name: str) -> LoadedAdapter:
        found = self._adapters.get(name)
        if found is None:
            raise UnknownAdapter(f"adapter {name!r} is not loaded; loaded are {sorted(self._adapters) or 'none'}")
        return found


def load(
    path_or_name: str | Path,
    *,
    dtype: DtypeName = "auto",
    device: str = "cpu",
    path: PathName = "auto",
    ignore_config_fields: Iterable[str] = (),
    allow_nonfinite: bool = False,
    home: Path | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> Model:
    """Loads a model directory, a name of the catalogue or a hub id (`owner/name[@revision]`).

    `dtype="auto"` is the tensors' own; the config's, where they have several; both must agree. `path="auto"` is the
    compiled step where it can be, and torch otherwise (`Model.not_compiled` says why). Raises UsageError, UnknownModel,
    DownloadError, FileError, ConfigError, TensorError, and NonFinite where weights hold or compute no numbers.
    """
    if dtype not in ("auto", *DTYPES):
        raise UsageError(f"dtype is {dtype!r}; give one of {['auto', *DTYPES]}")
    directory = resolve(str(path_or_name), home or kvouch_home(), progress)
    checkpoint = read_checkpoint(
        directory,
        dtype=dtype,
        device=device,
        path=path,
        ignore_config_fields=ignore_config_fields,
        allow_nonfinite=allow_nonfinite,
    )
    model = Model(str(path_or_name), checkpoint)
    return_freed_memory()
    return model


def _fixed_fields(checkpoint: Checkpoint) -> dict[str, Any]:
    """The fields of the identity that a loaded model does not change."""
    config = asdict(checkpoint.config)
    rope = config.pop("rope")
    dtype = str(checkpoint.dtype).removeprefix("torch.")
    tokenizers = [file.content for file in checkpoint.manifest.files if file.role == "tokenizer"]
    return {
        "weights": f"files:{checkpoint.manifest.part('weights')}",
        "tokenizer": tokenizers[0] if tokenizers else None,
        "config": canonical_json(config),
        "positions": canonical_json({"rope": rope} if rope is not None else {"learned": True}),
        "weights_dtype": dtype,
        "cache_dtype": dtype,
    }


def _tensors(parts: Parts) -> list[Tensor]:
    return [one for found in parts.values() for part in found for one in (*part.down.tensors, *part.up.tensors)]


def _scale(scale: float) -> float:
    if type(scale) not in (int, float) or not -LARGEST <= scale <= LARGEST:
        raise UsageError(f"scale is {scale!r}; a finite number is needed")
    return float(scale)


def _text(field: str, value: str | None) -> str | None:
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{field} is {value!r}; text is needed")
    return value
