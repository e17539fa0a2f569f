"""kvouch as a peer, over the cache that its path is fastest with. Knows kvouch, nothing of transformers."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import kvouch
from benchmarks.peers.peer import Peer
from kvouch.contract import KVCache
from kvouch.loader.checkpoint import DtypeName
from kvouch.models.paths import PathName
from kvouch.numerics.bits import same_bits

PIECES = (1, 2, 3, 4, 5, 1, 31, 7, 64, 33, 100, 12, 1)  # sizes of chunks; what is left over comes last


def load_model(directory: Path, dtype: DtypeName, path: PathName) -> kvouch.Model:
    return kvouch.load(directory, dtype=dtype, path=path)


class KvouchPeer(Peer[KVCache]):
    """A kvouch model."""

    copying, cutting = "fork", "rollback"

    def __init__(self, model: kvouch.Model) -> None:
        self._model = model

    def new_cache(self, capacity_tokens: int) -> KVCache:
        return self._model.new_cache(capacity_tokens)

    def feed(self, ids: Sequence[int], cache: KVCache) -> int:
        return int(_scores(self._model, ids, cache).cpu().numpy().argmax())  # without torch's threads, as the engine

    def cut(self, cache: KVCache, length_tokens: int) -> None:
        cache.rollback(length_tokens)

    def copy(self, cache: KVCache) -> KVCache:
        return cache.fork()

    def stretch(self, source: KVCache, cache: KVCache, length_tokens: int) -> None:
        times = -(-length_tokens // source.length)
        for layer in range(source.num_layers):
            keys, values = (one.repeat(1, 1, times, 1)[:, :, :length_tokens] for one in source.read(layer))
            cache.update(layer, keys, values)
        cache.advance(length_tokens)


def chunks_are_equal(model: kvouch.Model, ids: Sequence[int]) -> bool:
    """Whether ids in one piece and ids in chunks give the same bits: all keys, all values, the last scores."""
    whole, cut = model.new_cache(len(ids)), model.new_cache(len(ids))
    expected = found = _scores(model, ids, whole)
    for size in (*PIECES, len(ids)):
        piece = ids[cut.length : cut.length + size]
        if piece:
            found = _scores(model, piece, cut)
    states = [same_bits(a, b) for n in range(whole.num_layers) for a, b in zip(whole.read(n), cut.read(n), strict=True)]
    return same_bits(expected, found) and all(states)


def _scores(model: kvouch.Model, ids: Sequence[int], cache: KVCache) -> Tensor:
    with torch.inference_mode():
        scores = model.forward(ids, cache)
    if scores is None:
        raise RuntimeError("the forward pass gave no scores")
    return scores
