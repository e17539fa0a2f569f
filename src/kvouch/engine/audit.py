"""Audits: a sampled share of hits is computed again from nothing, and compared. Knows a backend; trusts none of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kvouch.contract import Grade, KVCache, Verdict
from kvouch.engine.backend import CachedBackend, UncachedBackend
from kvouch.engine.sampling import draw
from kvouch.errors import StateDiverged, UsageError
from kvouch.numerics.bits import as_integers, same_bits

Policy = Literal["raise", "quarantine"]
SLACK = 4.0
"""At grade `within`, how many times the measured tolerance two computations may be apart: it is no bound."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where reused state first differs from what is computed anew."""

    part: Literal["keys", "values", "scores"]
    layer: int | None
    position: int
    largest: float  # difference of a score

    def __str__(self) -> str:
        place = (
            f"layer {self.layer}, position {self.position:,}"
            if self.layer is not None
            else "in no layer's keys or values"
        )
        return f"{self.part} differ first at {place}; scores by up to {self.largest:.3g}"


class AuditedBackend:
    """A backend of which a share `rate` of the hits is audited.

    At a difference the state is given up and StateDiverged raised; or, by the policy `quarantine`, it is counted, and
    the scores that were computed anew are returned.
    """

    def __init__(self, inner: CachedBackend, *, rate: float, seed: int = 0, policy: Policy = "raise") -> None:
        if not 0 <= rate <= 1:
            raise UsageError(f"rate is {rate!r}; a share of calls from 0 to 1 is needed")
        if policy not in ("raise", "quarantine"):
            raise UsageError(f"policy is {policy!r}; give raise or quarantine")
        self._inner, self._rate, self._seed, self._policy = inner, rate, seed, policy
        self._reference = UncachedBackend(inner.model)
        self.hits = self.audits = self.divergences = 0
        self.last_difference: Difference | None = None

    @property
    def verdict(self) -> Verdict:
        return self._inner.verdict

    def next_logits(self, ids: Sequence[int]) -> Tensor:
        scores = self._inner.next_logits(ids)
        if not self._inner.verdict.reused_tokens:
            return scores
        self.hits += 1
        if draw(self._seed, self.hits) >= self._rate:
            return scores
        self.audits += 1
        wanted, cache = self._reference.compute(ids)
        found = first_difference(self._inner.state.cache, cache, scores, wanted, self._inner.model.grade)
        if found is None:
            return scores
        return self._diverged(found, wanted)

    def _diverged(self, difference: Difference, wanted: Tensor) -> Tensor:
        self.divergences += 1
        self.last_difference = difference
        held, now = self._inner.state.identity, self._inner.model.identity()
        self._inner.quarantine()
        if self._policy == "raise":
            raise StateDiverged(
                f"{difference}; held under identity {held.digest[:16]}, computed under {now.digest[:16]}; "
                "the state is given up: ask again"
            )
        return wanted


def first_difference(held: KVCache, wanted: KVCache, scores: Tensor, anew: Tensor, grade: Grade) -> Difference | None:
    """The first layer and position whose keys or values differ beyond the grade; where none do, the scores."""
    length = min(held.length, wanted.length)
    parts: tuple[Literal["keys", "values"], ...] = ("keys", "values")
    largest = float((scores - anew).abs().max())
    most = SLACK * grade.tolerance
    for layer in range(held.num_layers):
        for part, ours, theirs in zip(parts, held.read(layer), wanted.read(layer), strict=True):
            position = _first_position(ours[:, :, :length], theirs[:, :, :length], grade, most)
            if position is not None:
                return Difference(part=part, layer=layer, position=position, largest=largest)
    same = same_bits(scores, anew) if grade.name == "bitwise" else largest <= most
    return None if same else Difference(part="scores", layer=None, position=length - 1, largest=largest)


def _first_position(ours: Tensor, theirs: Tensor, grade: Grade, most: float) -> int | None:
    """Of [B, G, S, D] each."""
    if grade.name == "bitwise":
        wrong = as_integers(ours) != as_integers(theirs)
    else:
        wrong = ~((ours.float() - theirs.float()).abs() <= most)  # a NaN is wrong
    positions = wrong.any(dim=3).any(dim=1).any(dim=0).nonzero()  # [S] -> [n, 1]
    return int(positions[0]) if len(positions) else None
