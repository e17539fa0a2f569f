"""A model as the probe sees it: its matrix products and attention as functions of rows, and itself as a whole."""

import copy
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kvouch.cache.concat import ConcatCache
from kvouch.contract import TILE, Arithmetic, KVCache, Rows
from kvouch.models.attention import tile_attention
from kvouch.models.forward import forward_cached
from kvouch.models.linear import Linear
from kvouch.models.step import ModelWeights
from kvouch.numerics.probe import RowFunction

PRODUCT_ROWS = TILE  # the most that a product gets at once
HEAD_ROWS = 34  # the head is many times a layer's product
PAST_TILES = 3


class Probed:
    """The first `layers` of a model, and its head."""

    def __init__(self, weights: ModelWeights, layers: int, dtype: torch.dtype, device: torch.device) -> None:
        self._weights, self._dtype, self._device = copy.copy(weights), dtype, device
        self._weights.blocks = weights.blocks[:layers]
        self._weights.config = replace(weights.config, num_hidden_layers=len(self._weights.blocks))
        self._products = _kinds(
            one for block in weights.blocks for linear in block.linears() for one in linear.products()
        )

    @property
    def least_rows(self) -> int:
        return max(linear.least_rows for linear in self._products)

    def products(self) -> Iterator[tuple[RowFunction, Tensor]]:
        for linear in self._products:
            yield (
                torch.inference_mode()(linear),
                self._sample(PRODUCT_ROWS, linear.inputs, dtype=linear.tensors[0].dtype),
            )
        yield torch.inference_mode()(self._weights.head), self._sample(HEAD_ROWS, self._weights.head.inputs)

    def attention(self) -> Iterator[tuple[RowFunction, Tensor]]:
        config = self._weights.config
        heads, size = config.num_key_value_heads, config.head_dim
        keys, values = self._sample(2, PAST_TILES, heads, TILE, size)

        def over_tiles(rows: Tensor, visible: int) -> Tensor:
            """Queries [R, G, D] over all tiles, each showing its first keys only: [R, outputs and log-sum-exps]."""
            mask = rows.new_zeros(1, 1, len(rows), TILE)
            mask[..., visible:] = -math.inf
            queries = rows.transpose(0, 1).expand(PAST_TILES, -1, -1, -1)
            outputs, masses = tile_attention(queries, keys, values, mask)
            return torch.cat([outputs.float(), masses[..., None]], -1).permute(2, 0, 1, 3)

        for visible in (TILE, 100):
            yield partial(over_tiles, visible=visible), self._sample(TILE * config.group, heads, size)

    def run(self, ids: Tensor, cache: KVCache, rows: Rows, arithmetic: Arithmetic) -> Tensor | None:
        self._weights.arithmetic = arithmetic
        return forward_cached(ids, self._weights, self._weights.config, cache, scores=rows)

    def new_cache(self, device: torch.device) -> KVCache:
        return ConcatCache(self._weights.config, dtype=self._dtype, device=device)

    def _sample(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        numbers = torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]))
        return numbers.to(self._device, dtype or self._dtype)


def _kinds(linears: Iterable[Linear]) -> list[Linear]:
    """One product of each type, shape and dtype."""
    return list({(type(one), one.tensors[0].shape, one.tensors[0].dtype): one for one in linears}.values())
