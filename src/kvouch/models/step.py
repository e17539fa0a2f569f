"""One step of a model in plain torch: new rows in, scores out, the cache filled. Knows no family and no file.

The step is the seam between the two paths: whatever else has `step` (compiled kernels, say) can stand in its place.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvouch.contract import Arithmetic, KVCache, Rows
from kvouch.errors import NonFinite
from kvouch.models.attention import QueryRows, attend
from kvouch.models.config import ModelConfig
from kvouch.models.linear import Linear, storage_bytes

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

    def tensors(self) -> list[Tensor]:
        """Every tensor held in memory, once; asked for on every call."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where a checkpoint's product lies: the block's field, and its outputs [start, start + outputs)."""

    linear: str
    start: int
    outputs: int
    inputs: int


class TorchWeights(ABC):
    """The weights of one model, packed for the torch path."""

    head: Linear
    layer_prefix: str  # of a layer's tensors in a checkpoint, up to its number
    module_prefix: str  # what stands before that in a module of the whole model

    def __init__(self, config: ModelConfig, blocks: Sequence[Block]) -> None:
        self.config = config
        self.blocks = blocks
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
    def scores(self, x: Tensor) -> Tensor:
        """Final norm and head: [R, V]."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Every tensor held in memory, once; asked for on every call."""

    @property
    def nbytes(self) -> int:
        return sum(storage_bytes(tensor) for tensor in self.tensors())

    def step(self, ids: Tensor, cache: KVCache, rows: Rows) -> Tensor | None:
        """Scores of ids [B, T] at positions [cache.length, cache.length + T), all in one attention tile.

        Float32 [B, V] for `last`, [B, T, V] for `all`, None for `none`. Fills every layer of the cache and does not
        advance it. Raises NonFinite.
        """
        plan = StepRows(cache, batch=len(ids), first=cache.length, count=ids.shape[1], weights=self)
        x, place = self.embed(plan.pad(ids.flatten()), plan.pad(plan.positions))  # [R, hidden]
        largest = []
        for layer, block in enumerate(self.blocks):
            queries, keys, values = block.project(x, place)
            stored = cache.update(layer, plan.by_sequence(keys), plan.by_sequence(values))
            largest += [torch.linalg.vector_norm(held[:, :, plan.first :], ord=math.inf) for held in stored]
            if layer == len(self.blocks) - 1:  # what follows concerns only the rows that get scores
                plan.check_finite(torch.stack(largest))
                if rows == "none":
                    return None
                if rows == "last":
                    newest = plan.only_newest(cache, self)
                    x, queries, plan = newest.pad(plan.newest(x)), newest.pad(plan.newest(queries)), newest
            x = block.finish(x, attend(queries, cache.tiles(layer), plan.queries))
        scores = self.scores(x)[: plan.total].float()
        plan.check_finite(scores)
        return scores if rows == "last" else scores.view(len(ids), -1, self.config.vocab_size)


class StepRows:
    """The rows of a step: positions [first, first + count) of each of `batch` sequences, padded for the products."""

    def __init__(self, cache: KVCache, *, batch: int, first: int, count: int, weights: TorchWeights) -> None:
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

    def only_newest(self, cache: KVCache, weights: TorchWeights) -> "StepRows":
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
            raise NonFinite(
                f"positions {self.first} to {self.first + self.count - 1}: the computation gave an infinity or a NaN "
                f"in {numbers.dtype}; nothing of it was kept"
            )
