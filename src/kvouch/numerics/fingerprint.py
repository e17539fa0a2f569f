"""Fingerprints: a digest of the bits that a model really computes here, for fixed ids.

Covers what no list of names can: dequantisation, kernels, the CPU's dispatch, most changes of a weight in memory. Knows
how to run a model on ids; knows nothing of what the model is.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvouch.contract import Grade, KVCache, Rows
from kvouch.digest import Digest
from kvouch.numerics.bits import same_bits
from kvouch.numerics.probe import BEYOND_TILE

SCHEMA = "kvouch/fingerprint/1"


class Runner(Protocol):
    """What is fingerprinted."""

    def __call__(self, ids: Tensor, cache: KVCache, scores: Rows) -> Tensor | None: ...


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """The digest of all keys, values and scores of the probe, and of the tables of positions; and the scores."""

    digest: str
    scores: Tensor  # [n, V], of the last positions of the probe
    grade: Grade  # of these positions computed together, against one by one

    def difference(self, other: "Fingerprint") -> float:
        """Largest difference of a score; infinity where one is NaN or the shapes differ."""
        if self.scores.shape != other.scores.shape:
            return float("inf")
        worst = float((self.scores - other.scores).abs().max())
        return worst if worst == worst else float("inf")


def fingerprint(run: Runner, cache: KVCache, ids: Tensor, tables: Iterable[Tensor]) -> Fingerprint:
    """Computes ids [1, n] on an empty cache: all of them in two pieces, and then the last again, one a call.

    The last positions are those behind the first tile, or behind what is left of 32 where there is no whole tile.
    """
    digest, total = Digest(SCHEMA), ids.shape[1]
    first = max(total - BEYOND_TILE, 0)
    if first:
        run(ids[:, :first], cache, "none")
    scores = run(ids[:, first:], cache, "all")
    if scores is None:
        raise RuntimeError("the forward pass gave no scores for scores='all'")
    add_tensor(digest, scores)
    together = []
    for layer in range(cache.num_layers):
        for held in cache.read(layer):
            add_tensor(digest, held)
            together.append(held[:, :, first:].clone())
    cache.rollback(first)
    singles = []
    for position in range(first, total):
        one = run(ids[:, position : position + 1], cache, "last")
        if one is not None:
            singles.append(one)
            add_tensor(digest, one)
    apart = [held[:, :, first:] for layer in range(cache.num_layers) for held in cache.read(layer)]
    for held in apart:
        add_tensor(digest, held)
    for table in tables:
        add_tensor(digest, table)
    alone = torch.stack(singles, dim=1)  # [1, n, V]
    if same_bits(alone, scores) and all(map(same_bits, apart, together)):
        grade = Grade()
    else:
        grade = Grade(name="within", tolerance=float((alone - scores).abs().max()))
    return Fingerprint(digest=digest.hex(), scores=scores[0], grade=grade)


def add_tensor(digest: Digest, tensor: Tensor) -> None:
    """Adds dtype, shape and bytes; of a packed tensor its plain form."""
    plain = (tensor.to_dense() if tensor.is_mkldnn else tensor).detach().cpu().contiguous()
    digest.texts(str(plain.dtype), str(list(plain.shape)))
    digest.field(plain.flatten().view(torch.uint8).numpy().data if plain.numel() else b"")
