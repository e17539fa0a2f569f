"""Ways to cut a sequence into calls, and what a cache holds afterwards."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvouch.cache.blocks import BlockCache, numbers_together
from kvouch.contract import BLOCK, KVCache, Tiles
from kvouch.engine.model import Model
from kvouch.numerics.bits import same_bits

FINE = (1, 1, 1, 2, 3, 4, 5, 7, 16, 31, 64, 100, 300)
COARSE = (1, 2, 3, 7, 31, 64, 100, 150)


def random_chunks(total: int, seed: int, sizes: Sequence[int] = FINE) -> list[int]:
    """Random chunk sizes that sum to `total`."""
    rng, chunks, left = random.Random(seed), [], total
    while left:
        chunks.append(min(left, rng.choice(sizes)))
        left -= chunks[-1]
    return chunks


def run_chunks(model: Model, ids: Tensor, cache: KVCache, sizes: list[int]) -> Iterator[tuple[int, Tensor]]:
    """Feeds ids [1, T] in chunks; after each: the length, and the scores [1, V] of its last position."""
    for size in sizes:
        scores = model.forward(ids[:, cache.length : cache.length + size], cache)
        assert scores is not None
        yield cache.length, scores


class BothCaches:
    """A concatenating and a static cache that are given the same steps: what attention reads of them must be one.

    The step computes once. Its scores are those of either cache, since the tiles have the same bits in both.
    """

    def __init__(self, model: Model, length: int) -> None:
        self.concat, self.static = model.concat_cache(), model.static_cache(length)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.static, name)

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        grown, written = self.concat.update(layer, keys, values), self.static.update(layer, keys, values)
        assert all(same_bits(a, b) for a, b in zip(grown, written, strict=True)), f"layer {layer}"
        return written

    def tiles(self, layer: int) -> Tiles:
        grown, written = self.concat.tiles(layer), self.static.tiles(layer)
        assert all(same_bits(a, b) for a, b in zip(grown, written, strict=True)), f"layer {layer}"
        return written

    def advance(self, new_positions: int) -> None:
        self.concat.advance(new_positions)
        self.static.advance(new_positions)

    def rollback(self, length: int) -> None:
        self.concat.rollback(length)
        self.static.rollback(length)


def differences(a: KVCache, b: KVCache) -> list[str]:
    """Where two caches of equal length differ in a bit of K or V."""
    assert a.length == b.length
    return [
        f"layer {layer} {name}"
        for layer in range(a.num_layers)
        for name, x, y in zip("KV", a.read(layer), b.read(layer), strict=True)
        if not same_bits(x, y)
    ]


def all_scores(model: Model, ids: Tensor, cache: KVCache) -> Tensor:
    """Scores [B, T, V] of ids [B, T] in one call."""
    scores = model.forward(ids, cache, scores="all")
    assert scores is not None
    return scores


def poison(cache: KVCache, value: float) -> None:
    """Fills every position beyond the length of a cache that is allocated once with `value`."""
    if isinstance(cache, BlockCache):
        together = numbers_together(cache.dtype)
        keys = cache.planes[:, 0].unflatten(-1, (-1, BLOCK, together))  # [layers, G, block, D/2, 16, 2]
        values = cache.planes[:, 1].unflatten(-1, (BLOCK // together, -1, together))  # [layers, G, block, 8, D, 2]
        for position in range(cache.length, cache.capacity):
            block, inside = divmod(position, BLOCK)
            keys[:, :, block, :, inside] = value
            values[:, :, block, inside // together, :, inside % together] = value
        return
    buffer: Tensor = cache._buffer  # type: ignore[attr-defined]
    with torch.inference_mode(buffer.is_inference()):
        buffer[..., cache.length :, :] = value
