"""From scores to the next id: a pure function of scores, parameters, seed and step. Knows no model and no text.

The draw of a step comes from a digest of the seed and the step: it depends on nothing that was drawn before, and is
the same on every machine.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvouch.digest import Digest
from kvouch.errors import NonFinite, UsageError

DRAW_BITS = 53  # a double's


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next id is chosen. Temperature 0 takes the best one (the lowest id of equals)."""

    temperature: float = 0.0
    top_p: float = 1.0  # only the likeliest ids that reach this share together; 1 keeps all
    seed: int = 0

    def __post_init__(self) -> None:
        if not (_is_number(self.temperature) and 0 <= self.temperature < math.inf):
            raise UsageError(f"temperature is {self.temperature!r}; give 0 (the best id always) or a number above")
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise UsageError(f"top_p is {self.top_p!r}; give a number above 0, at most 1")
        if type(self.seed) is not int or not 0 <= self.seed < 2**64:
            raise UsageError(f"seed is {self.seed!r}; give a whole number from 0 to 2**64 - 1")


def sample(scores: Tensor, params: SamplingParams, *, step: int) -> int:
    """The id that follows, from float32 scores [V]; `step` counts the ids chosen before it. Raises NonFinite."""
    best = scores.max()
    if not best.isfinite():
        raise NonFinite(f"step {step}: the best score is {float(best)}, so no id can be chosen")
    if params.temperature == 0:
        return int(scores.argmax())  # the first of equals, as torch documents
    probabilities = _nucleus(_softmax(scores, best, params.temperature), params.top_p)
    cumulative = probabilities.cumsum(0)
    target = draw(params.seed, step) * cumulative[-1:]
    index = int(torch.searchsorted(cumulative, target, right=True))
    last = int(torch.searchsorted(cumulative, cumulative[-1:]))  # where rounding took the target up to the sum
    return min(index, last)


def draw(seed: int, step: int) -> float:
    """A number in [0, 1), evenly spread over seeds and steps."""
    digest = Digest("kvouch.draw.1").field(seed.to_bytes(8, "little")).field(step.to_bytes(8, "little"))
    return (int(digest.hex()[:16], 16) >> (64 - DRAW_BITS)) / 2.0**DRAW_BITS


def _softmax(scores: Tensor, best: Tensor, temperature: float) -> Tensor:
    """Float64 probabilities [V] on the CPU; the best score is taken off first, so no temperature overflows."""
    return ((scores.cpu().double() - best.cpu().double()) / temperature).softmax(0)


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Zeroes all but the likeliest ids: the shortest list whose sum reaches `top_p`, the lower of equal ids first."""
    if top_p == 1:
        return probabilities
    # ids below this share sum to less than 1 - top_p, so none of them is needed: far fewer are left to sort
    least = min((1 - top_p) / len(probabilities), float(probabilities.max()))
    candidates = (probabilities >= least).nonzero().flatten()  # [C]
    shares, order = probabilities[candidates].sort(descending=True, stable=True)
    kept = candidates[order[shares.cumsum(0) - shares < top_p]]
    return torch.zeros_like(probabilities).index_copy(0, kept, probabilities[kept])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
