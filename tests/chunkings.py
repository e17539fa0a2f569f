"""Ways to cut a sequence into calls, and what a cache holds afterwards."""

import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvouch.contract import KVCache
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
    """Fills every position beyond the length of a static cache with `value`."""
    buffer: Tensor = cache._buffer  # type: ignore[attr-defined]
    with torch.inference_mode(buffer.is_inference()):
        buffer[..., cache.length :, :] = value
