"""The forward pass over a cache: prefill, chunked prefill and decode by one code.

Knows ids, a cache and weights that can step; refuses to know identities, stores and files.
"""

from typing import Protocol, get_args

import torch
from torch import Tensor

from kvouch.contract import TILE, KVCache, LayerWatch, Rows
from kvouch.errors import CacheOverflow, CacheShapeError, ContextOverflow, InvalidIds, UsageError
from kvouch.models.config import ModelConfig


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
        with torch.inference_mode():
            while cache.length < end:
                first = cache.length
                stop = min(end, (first // TILE + 1) * TILE)
                rows: Rows = "none" if scores == "last" and stop < end else scores
                found.append(weights.step(ids[:, first - start : stop - start], cache, rows, watch))
                cache.advance(stop - first)
    except BaseException:
        cache.rollback(start)
        raise
    parts = [part for part in found if part is not None]
    if not parts:
        return None
    if scores == "all":
        return torch.cat(parts, dim=1)
    return parts[0].clone() if parts[0].is_inference() else parts[0]  # callers get plain tensors


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
