"""The weights of a model, and one step of it in plain torch: new rows in, scores out, the cache filled.

Knows no family and no file. A path is how weights are packed and how a step computes with them: TorchPath is the plain
one, that of the compiled step is in `compiled.py`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kvouch.cache.blocks import Layout
from kvouch.cache.static import StaticCache
from kvouch.contract import Arithmetic, KVCache, LayerWatch, Rows
from kvouch.errors import NonFinite
from kvouch.models.attention import QueryRows, attend
from kvouch.models.config import ModelConfig
from kvouch.models.linear import Linear, pack, storage_bytes

Place = tuple[Tensor, Tensor] | None
"""Rope's cosines and sines for the rows of a step; None where positions are learned."""


class Block(Protocol):
    """One layer of a decoder, split where attention reads the cache."""

    def project(self, x: Tensor, place: Place) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [R, H, D], keys [R, G, D] and values [R, G, D] of rows x."""

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The rows after the output projection and the feed-forward part."""

    def linears(self) -> Sequence[Linear]:
        """Its matrix products."""

    def parts(self) -> "Parts":
        """The same by what each is for."""

    def tensors(self) -> list[Tensor]:
        """Every tensor held in memory, once; asked for on every call."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A layer without its family: a norm without a bias is a root mean square norm."""

    attention_gain: Tensor
    attention_bias: Tensor | None = None
    qkv: Linear
    query_gain: Tensor | None = None
    key_gain: Tensor | None = None
    output: Linear
    mlp_gain: Tensor
    mlp_bias: Tensor | None = None
    up: Linear  # a gate's outputs come before those it multiplies
    down: Linear


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """New ids [T] of one sequence, at the positions that follow those of its cache; `rows` of them get scores."""

    weights: "ModelWeights"
    ids: Tensor
    cache: KVCache
    rows: Rows


class Path(Protocol):
    """How weights are packed, and how a step computes with them."""

    name: str
    kernels: str  # variant, dtype and build of kernels of its own, for the identity; nothing where torch's compute
    exact: bool  # by construction; otherwise the probe finds out
    layout: Layout  # of the blocks that it reads in place
    heads_dtype: torch.dtype | None  # of rope's tables and the norms of heads; None: the weights' own

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A product with a weight [N, K]."""

    def embedding(self, plain: Tensor, tied: Linear | None) -> Tensor:
        """What embeddings are looked up in: the plain table, or the packed head that holds the same numbers."""

    def new_cache(self, config: ModelConfig, capacity: int, *, dtype: torch.dtype, device: torch.device) -> KVCache:
        """The cache that its step is fastest with, for one sequence of at most `capacity` positions."""

    def step(
        self, weights: "ModelWeights", ids: Tensor, cache: KVCache, rows: Rows, watch: LayerWatch | None
    ) -> Tensor | None:
        """What `ModelWeights.step` says."""

    def step_many(self, chunks: Sequence[Chunk], watch: LayerWatch | None) -> list[Tensor | None]:
        """Scores [1 or T, V] of each chunk, each in one attention tile; fills the caches and advances none.

        The chunks' weights are those of one model, with whatever adapters.
        """


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where a checkpoint's product lies: the block's field, and its outputs [start, start + outputs)."""

    linear: str
    start: int
    outputs: int
    inputs: int


class ModelWeights(ABC):
    """The weights of one model, packed for a path."""

    head: Linear
    embedding: Tensor
    layer_prefix: str  # of a layer's tensors in a checkpoint, up to its number
    module_prefix: str  # what stands before that in a module of the whole model

    def __init__(self, config: ModelConfig, blocks: Sequence[Block], path: Path) -> None:
        self.config = config
        self.blocks = blocks
        self.path = path
        self.bound: Any = None  # what the path has made of them, as long as they are the same tensors
        self.arithmetic = Arithmetic()

    @abstractmethod
    def embed(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Place]:
        """The first rows x of ids [R] at positions [R], and where they stand."""

    @property
    @abstractmethod
    def tables(self) -> tuple[Tensor, ...]:
        """What positions are encoded by: rope's tables, or learned rows."""

    @abstractmethod
    def targets(self) -> dict[str, Target]:
        """The products of a layer that an adapter can correct, by their names in a checkpoint."""

    @abstractmethod
    def final_norm(self) -> tuple[Tensor, Tensor | None]:
        """Gain and bias of the last norm."""

    @abstractmethod
    def scores(self, x: Tensor) -> Tensor:
        """Final norm and head: [R, V]."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Every tensor held in memory, once; asked for on every call."""

    @property
    def nbytes(self) -> int:
        return sum(storage_bytes(tensor) for tensor in self.tensors())

    def step(self, ids: Tensor, cache: KVCache, rows: Rows, watch: LayerWatch | None = None) -> Tensor | None:
        """Scores of ids [B, T] at positions [cache.length, cache.length + T), all in one attention tile.

        Float32 [B, V] for `last`, [B, T, V] for `all`, None for `none`. Fills every layer of the cache and does not
        advance it; `watch` is told of each layer. Raises NonFinite, and what `watch` raises.
        """
        return self.path.step(self, ids, cache, rows, watch)


class TorchPath:
    """Plain torch, on any device: exact where the probe finds that it is."""

    name, kernels, exact = "torch", "", False
    layout: Layout = "rows"
    heads_dtype: torch.dtype | None = None

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return pack(weight, bias)

    def embedding(self, plain: Tensor, tied: Linear | None) -> Tensor:
        return plain

    def new_cache(self, config: ModelConfig, capacity: int, *, dtype: torch.dtype, device: torch.device) -> KVCache:
        return StaticCache(config, capacity=capacity, dtype=dtype, device=device)

    def step(
        self, weights: ModelWeights, ids: Tensor, cache: KVCache, rows: Rows, watch: LayerWatch | None
    ) -> Tensor | None:
        # Never within another guard of its kind: an interrupt may keep one alive until its traceback is gone, and
        # guards that end in another order than they began leave the mode on for good.
        with torch.inference_mode():
            return self._step(weights, ids, cache, rows, watch)

    def _step(
        self, weights: ModelWeights, ids: Tensor, cache: KVCache, rows: Rows, watch: LayerWatch | None
    ) -> Tensor | None:
        plan = StepRows(cache, batch=len(ids), first=cache.length, count=ids.shape[1], weights=weights)
        x, place = weights.embed(plan.pad(ids.flatten()), plan.pad(plan.positions))  # [R, hidden]
        largest = []
        for layer, block in enumerate(weights.blocks):
            queries, keys, values = block.project(x, place)
            stored = cache.update(layer, plan.by_sequence(keys), plan.by_sequence(values))
            largest += [torch.linalg.vector_norm(held[:, :, plan.first :], ord=math.inf) for held in stored]
            if layer == len(weights.blocks) - 1:  # what follows concerns only the rows that get scores
                plan.check_finite(torch.stack(largest))
                if rows == "none":
                    return None
                if rows == "last":
                    newest = plan.only_newest(cache, weights)
                    x, queries, plan = newest.pad(plan.newest(x)), newest.pad(plan.newest(queries)), newest
            x = block.finish(x, attend(queries, cache.tiles(layer), plan.queries))
            if watch is not None:
                watch(layer)
        scores = weights.scores(x)[: plan.total].float()
        plan.check_finite(scores)
        return scores if rows == "last" else scores.view(len(ids), -1, weights.config.vocab_size)

    def step_many(self, chunks: Sequence[Chunk], watch: LayerWatch | None) -> list[Tensor | None]:
        """One after the other: torch has no product whose rows differ in what they attend to."""
        found = []
        for one in chunks:
            try:
                scores = self.step(one.weights, one.ids[None], one.cache, one.rows, watch)
            except NonFinite as error:
                error.cache = one.cache
                raise
            found.append(scores[0] if scores is not None and scores.dim() == 3 else scores)
        return found


class StepRows:
    """The rows of a step: positions [first, first + count) of each of `batch` sequences, padded for the products."""

    def __init__(self, cache: KVCache, *, batch: int, first: int, count: int, weights: ModelWeights) -> None:
        self.batch, self.first, self.count = batch, first, count
        self.total = batch * count
        self.padding = weights.arithmetic.product_rows(self.total) - self.total
        self.positions = torch.arange(first, first + count, device=cache.device).repeat(batch)
        self.queries = QueryRows(
            batch=batch,
            first=first,
            count=count,
            padding=self.padding,
            heads=weights.config.num_attention_heads,
            group=weights.config.group,
            quantum=weights.arithmetic.attention_rows,
            dtype=cache.dtype,
            device=cache.device,
        )

    def pad(self, rows: Tensor) -> Tensor:
        """Repeats the last row as padding; what the extra rows compute is dropped."""
        return torch.cat([rows, rows[-1:].expand(self.padding, *rows.shape[1:])]) if self.padding else rows

    def by_sequence(self, rows: Tensor) -> Tensor:
        """[R, G, D] -> [B, G, T, D]."""
        return rows[: self.total].view(self.batch, self.count, *rows.shape[1:]).transpose(1, 2)

    def only_newest(self, cache: KVCache, weights: ModelWeights) -> "StepRows":
        """The plan for the newest position of each sequence alone."""
        if self.count == 1:
            return self
        return StepRows(cache, batch=self.batch, first=self.first + self.count - 1, count=1, weights=weights)

    def newest(self, rows: Tensor) -> Tensor:
        """[R, ...] -> [B, ...], the rows of the newest positions."""
        return rows[: self.total].view(self.batch, self.count, *rows.shape[1:])[:, -1]

    def check_finite(self, numbers: Tensor) -> None:
        """Refuses an infinity or a NaN among the numbers of a step: through a sum it would reach other positions.

        The largest size of many numbers stands for them: it is NaN where one of them is.
        """
        if not numbers.isfinite().all():
            raise nonfinite(self.first, self.count, numbers.dtype)


def nonfinite(first: int, count: int, dtype: torch.dtype, cache: KVCache | None = None) -> NonFinite:
    """What a step raises whose positions [first, first + count) compute no numbers."""
    error = NonFinite(
        f"positions {first} to {first + count - 1}: the computation gave an infinity or a NaN in {dtype}; "
        "nothing of it was kept"
    )
    error.cache = cache
    return error
