"""Audits: a sampled share of hits is computed again from nothing, and compared. Knows a backend; trusts none of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvouch.contract import Grade, KVCache, Reason, Refused, Verdict
from kvouch.engine.backend import NOTHING_ASKED, CachedBackend, UncachedBackend
from kvouch.engine.sampling import draw
from kvouch.errors import StateDiverged, UsageError
from kvouch.numerics.bits import as_integers, same_bits

Policy = Literal["raise", "quarantine"]
SLACK = 4.0
"""At grade `within`, how many times the measured tolerance two computations may be apart: it is no bound."""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Where reused state first differs from what is computed anew."""

    part: Literal["keys", "values", "scores"]
    layer: int | None
    position: int | None
    largest: float  # difference of a score

    def __str__(self) -> str:
        if self.layer is None:
            return f"scores differ by up to {self.largest:.3g}, keys and values of no layer"
        place = f"layer {self.layer}, position {self.position:,}"
        return f"{self.part} differ first at {place}; scores by up to {self.largest:.3g}"


class AuditedBackend:
    """A backend of which a share `rate` of the hits is audited.

    At a difference the state is given up and StateDiverged raised; or, by the policy `quarantine`, it is counted, and
    the scores that were computed anew are returned, with a verdict that says so.
    """

    def __init__(self, inner: CachedBackend, *, rate: float, seed: int = 0, policy: Policy = "raise") -> None:
        if type(rate) not in (int, float) or not 0 <= rate <= 1:
            raise UsageError(f"rate is {rate!r}; a share of calls from 0 to 1 is needed")
        if policy not in ("raise", "quarantine"):
            raise UsageError(f"policy is {policy!r}; give raise or quarantine")
        self._inner, self._rate, self._seed, self._policy = inner, rate, seed, policy
        self._reference = UncachedBackend(inner.model)
        self.hits = self.audits = self.divergences = 0
        self.last_divergence: Divergence | None = None
        self.verdict: Verdict = NOTHING_ASKED

    def next_logits(self, ids: Sequence[int]) -> Tensor:
        """Float32 scores [V] of the id that follows. Raises StateDiverged."""
        self.verdict = NOTHING_ASKED
        scores = self._inner.next_logits(ids)
        self.verdict = self._inner.verdict
        if not self.verdict.reused_tokens:
            return scores
        self.hits += 1
        if draw(self._seed, self.hits) >= self._rate:
            return scores
        self.audits += 1
        anew, cache = self._reference.compute(ids)
        found = first_divergence(
            self._inner.state.cache, cache, self.verdict.reused_tokens, scores, anew, self.verdict.grade
        )
        return scores if found is None else self._diverged(found, anew)

    def _diverged(self, divergence: Divergence, anew: Tensor) -> Tensor:
        self.divergences += 1
        self.last_divergence = divergence
        held, now = self._inner.state.identity, self._inner.model.current().identity
        self._inner.quarantine()
        if self._policy == "raise":
            self.verdict = NOTHING_ASKED
            raise StateDiverged(
                f"{divergence}; held under identity {held.digest[:16]}, computed under {now.digest[:16]}; "
                "the state is given up: ask again",
                divergence=divergence,
                held=held,
                computed=now,
            )
        asked = self.verdict.reused_tokens + self.verdict.computed_tokens
        self.verdict = Refused(
            reused_tokens=0, computed_tokens=asked, reason=Reason(cause="quarantined"), grade=self.verdict.grade
        )
        return anew


def first_divergence(
    held: KVCache, wanted: KVCache, tokens: int, scores: Tensor, anew: Tensor, grade: Grade
) -> Divergence | None:
    """The first layer and position of the reused [0, tokens) whose keys or values differ; else the scores.

    At grade `within` everything differs in its last bits: the scores judge, by SLACK times the measured tolerance or
    the rounding of their dtype, and where they are too far apart the layers are searched by the same bound.
    """
    largest = float((scores - anew).abs().max())
    bitwise = grade.name == "bitwise"
    rounding = torch.finfo(held.dtype).eps * float(anew.abs().max())
    most = SLACK * max(grade.tolerance, rounding)
    if not bitwise and largest <= most:
        return None
    parts: tuple[Literal["keys", "values"], ...] = ("keys", "values")
    for layer in range(held.num_layers):
        for part, ours, theirs in zip(parts, held.read(layer), wanted.read(layer), strict=True):
            position = _first_position(ours[:, :, :tokens], theirs[:, :, :tokens], None if bitwise else most)
            if position is not None:
                return Divergence(part=part, layer=layer, position=position, largest=largest)
    if bitwise and same_bits(scores, anew):
        return None
    return Divergence(part="scores", layer=None, position=None, largest=largest)


def _first_position(ours: Tensor, theirs: Tensor, most: float | None) -> int | None:
    """Of [B, G, S, D] each: where a bit differs, or a number by more than `most`."""
    if most is None:
        wrong = as_integers(ours) != as_integers(theirs)
    else:
        wrong = ~((ours.float() - theirs.float()).abs() <= most)  # a NaN is wrong
    positions = wrong.any(dim=3).any(dim=1).any(dim=0).nonzero()  # [S] -> [n, 1]
    return int(positions[0]) if len(positions) else None
