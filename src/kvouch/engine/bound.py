"""A model as one caller uses it: bound to an adapter and a salt, and held for the length of a call. Holds no cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from kvouch.contract import Grade, KVCache, LayerWatch, Rows
from kvouch.engine.computation import Computation
from kvouch.identity.identity import Identity
from kvouch.models.config import ModelConfig
from kvouch.models.step import Chunk

if TYPE_CHECKING:
    from kvouch.engine.model import Model


@dataclass(frozen=True, kw_only=True)
class Current:
    """One computation, held for as long as a call takes, and its identity."""

    model: "Model"
    computation: Computation
    identity: Identity
    grade: Grade

    def forward(
        self, ids: Sequence[int], cache: KVCache, *, scores: Rows, watch: LayerWatch | None = None
    ) -> Tensor | None:
        """`forward_cached` on one sequence of ids."""
        return self.computation.forward(self.model.to_ids(ids), cache, scores, watch)

    def chunk(self, ids: Sequence[int], cache: KVCache, scores: Rows) -> Chunk:
        """New ids of one sequence among those of a batch, for `forward_many`."""
        return Chunk(weights=self.computation.weights, ids=self.model.to_ids(ids)[0], cache=cache, rows=scores)


@dataclass(frozen=True, kw_only=True)
class BoundModel:
    """A model with one adapter under one salt: what a backend is made for."""

    model: "Model"
    adapter: str | None
    salt: str

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def grade(self) -> Grade:
        return self.current().grade

    def current(self) -> Current:
        return self.model.current(adapter=self.adapter, salt=self.salt)

    def identity(self) -> Identity:
        return self.current().identity

    def fingerprint(self) -> str:
        return self.model.fingerprint(adapter=self.adapter)

    def new_cache(self, capacity: int) -> KVCache:
        return self.model.new_cache(capacity)
