"""The forward pass over a cache: prefill, chunked prefill and decode by one code.

Knows ids, a cache and weights that can step; refuses to know identities, stores and files.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, get_args

import torch
from torch import Tensor

from kvouch.contract import TILE, KVCache, LayerWatch, Rows
from kvouch.errors import (
    CacheMisuse,
    CacheOverflow,
    CacheShapeError,
    ContextOverflow,
    InvalidIds,
    NonFinite,
    UsageError,
)
from kvouch.models.config import ModelConfig
from kvouch.models.step import Chunk


class Weights(Protocol):
    """Packed weights and the step that reads them: chosen at load."""

    def step(self, ids: Tensor, cache: KVCache, rows: Rows, watch: LayerWatch | None = None) -> Tensor | None:
        """Scores of ids [B, T], which lie in one attention tile; fills the cache and does not advance it."""


def forward_cached(
    ids: Tensor,
    weights: Weights,
    config: ModelConfig,
    cache: KVCache,
    *,
    scores: Rows = "last",
    watch: LayerWatch | None = None,
) -> Tensor | None:
    """Runs ids [B, T] at positions [cache.length, cache.length + T) and advances the cache by T.

    Returns float32 scores of the last position [B, V], of `all` [B, T, V], or None for `none`. The work is cut at
    absolute tile edges, so the bits do not depend on how ids were cut into calls. `watch` is told of each layer of
    each tile. Whatever raises leaves the cache as it was: UsageError, InvalidIds, CacheShapeError, ContextOverflow,
    CacheOverflow before any work, NonFinite in it, and what `watch` raises.
    """
    if scores not in get_args(Rows):
        raise UsageError(f"scores is {scores!r}; give one of {list(get_args(Rows))}")
    _check(ids, config, cache)
    start, end = cache.length, cache.length + ids.shape[1]
    found = []
    try:
        while cache.length < end:
            first = cache.length
            stop = min(end, (first // TILE + 1) * TILE)
            rows: Rows = "none" if scores == "last" and stop < end else scores
            found.append(weights.step(ids[:, first - start : stop - start], cache, rows, watch))
            cache.advance(stop - first)
        return _joined([part for part in found if part is not None], dim=1)
    except BaseException:
        cache.rollback(start)
        raise


MOST_ROWS = 2 * TILE
"""Positions of one step over many sequences: what a step needs of memory is bounded."""


def forward_many(
    chunks: Sequence[Chunk], config: ModelConfig, *, watch: LayerWatch | None = None
) -> list[Tensor | None]:
    """Runs the ids of many sequences, prefills and single tokens mixed, in as few steps as rows and tiles allow.

    Returns the scores of each, float32 [1, V] of the last position, [T, V] of `all`, or None. A sequence's bits do not
    depend on its neighbours. Whatever raises leaves every cache as it was; what `forward_cached` raises, and
    CacheMisuse where a cache comes twice.
    """
    if len({id(one.cache) for one in chunks}) < len(chunks):
        raise CacheMisuse("a cache comes twice in one batch: fork it, or put its ids into one chunk")
    for one in chunks:
        _check(one.ids[None], config, one.cache)
    starts = [one.cache.length for one in chunks]
    found: list[list[Tensor]] = [[] for _ in chunks]
    try:
        while pieces := _next_step(chunks, starts):
            scores = chunks[0].weights.path.step_many([piece for _, piece in pieces], watch)
            for (number, piece), part in zip(pieces, scores, strict=True):
                piece.cache.advance(len(piece.ids))
                if part is not None:
                    found[number].append(part)
        return [_joined(parts, dim=0) for parts in found]
    except BaseException as error:
        for one, start in zip(chunks, starts, strict=True):
            one.cache.rollback(start)
        if isinstance(error, NonFinite):
            broken = next(number for number, one in enumerate(chunks) if one.cache is error.cache)
            raise NonFinite(f"sequence {broken}, {error}") from None
        raise


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor | None:
    """The scores of all tiles as a plain tensor, which its caller may write to."""
    if len(parts) == 1:
        return parts[0].clone() if parts[0].is_inference() else parts[0]
    return torch.cat(list(parts), dim=dim) if parts else None


def _next_step(chunks: Sequence[Chunk], starts: Sequence[int]) -> list[tuple[int, Chunk]]:
    """What comes next of each chunk that is not done: up to its tile's edge, MOST_ROWS in all, the short ones first."""
    room, pieces = MOST_ROWS, []
    for number in sorted(range(len(chunks)), key=lambda number: len(chunks[number].ids)):
        one, start = chunks[number], starts[number]
        first, end = one.cache.length, start + len(one.ids)
        stop = min(end, (first // TILE + 1) * TILE, first + room)
        if stop > first:
            rows: Rows = "none" if one.rows == "last" and stop < end else one.rows
            pieces.append((number, replace(one, ids=one.ids[first - start : stop - start], rows=rows)))
            room -= stop - first
    return pieces


def _check(ids: Tensor, config: ModelConfig, cache: KVCache) -> None:
    if ids.dim() != 2 or ids.dtype != torch.int64 or ids.numel() == 0:
        raise InvalidIds(f"ids are {ids.dtype} of shape {list(ids.shape)}; int64 [B, T] with T >= 1 is needed")
    if cache.num_layers != config.num_hidden_layers:
        raise CacheShapeError(f"the cache has {cache.num_layers} layers; this model has {config.num_hidden_layers}")
    if len(ids) != cache.batch:
        raise CacheShapeError(f"ids hold {len(ids)} sequences; this cache holds {cache.batch}")
    lowest, highest = (int(edge) for edge in ids.aminmax())
    if lowest < 0 or highest >= config.vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise InvalidIds(f"id {wrong} is outside the vocabulary [0, {config.vocab_size})")
    end, most = cache.length + ids.shape[1], config.max_position_embeddings
    if end > most:
        raise ContextOverflow(f"{end} positions asked, {most} in the model's context: {end - most} too many")
    if cache.max_length is not None and end > cache.max_length:
        raise CacheOverflow(
            f"{end} positions asked, {cache.max_length} in the cache: {end - cache.max_length} too many"
        )
