"""From scores to the next id: a pure function of scores, parameters, seed and step. Knows no model and no text.

The draw of a step comes from a digest of the seed and the step: it depends on nothing that was drawn before, and is
the same on every machine.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvouch.digest import Digest
from kvouch.errors import NonFinite, UsageError

Scores = NDArray[np.float32]
Shares = NDArray[np.float64]
DRAW_BITS = 53  # a double's
LARGEST = 1e30  # of a parameter: scores are float32


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next id is chosen. Temperature 0 takes the best one (the lowest id of equals)."""

    temperature: float = 0.0
    top_k: int = 0  # only so many of the likeliest ids; 0 keeps all
    top_p: float = 1.0  # only the likeliest ids that reach this share together; 1 keeps all
    min_p: float = 0.0  # only ids at least this times as likely as the likeliest; 0 keeps all
    repetition_penalty: float = 1.0  # scores of ids that came before are divided by it, negative ones multiplied
    logit_bias: tuple[tuple[int, float], ...] = ()  # ids, and what is added to their scores
    seed: int = 0

    def __post_init__(self) -> None:
        if type(self.top_k) is not int or self.top_k < 0:
            raise UsageError(f"top_k is {self.top_k!r}; give 0 (all ids) or how many to keep")
        if not (_is_number(self.min_p) and 0 <= self.min_p <= 1):
            raise UsageError(f"min_p is {self.min_p!r}; give a number from 0 to 1")
        if not (_is_number(self.repetition_penalty) and 0 < self.repetition_penalty <= LARGEST):
            raise UsageError(f"repetition_penalty is {self.repetition_penalty!r}; give a number above 0 (1: none)")
        pairs = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        try:
            object.__setattr__(self, "logit_bias", tuple((one, bias) for one, bias in pairs))
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"logit_bias is {self.logit_bias!r}; give ids and what is added to their scores"
            ) from error
        for one, bias in self.logit_bias:
            if type(one) is not int or one < 0 or not (_is_number(bias) and -LARGEST <= bias <= LARGEST):
                raise UsageError(f"logit_bias has {one!r}: {bias!r}; give ids and finite numbers")
        if not (_is_number(self.temperature) and 0 <= self.temperature <= LARGEST):
            raise UsageError(f"temperature is {self.temperature!r}; give 0 (the best id always) or a number above")
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise UsageError(f"top_p is {self.top_p!r}; give a number above 0, at most 1")
        if type(self.seed) is not int or not 0 <= self.seed < 2**64:
            raise UsageError(f"seed is {self.seed!r}; give a whole number from 0 to 2**64 - 1")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """An id, and the logarithm of its probability under the scores as they were sampled from, at temperature 1."""

    id: int
    logprob: float


def sample(scores: Tensor, params: SamplingParams, *, step: int, ids: Sequence[int] = ()) -> Choice:
    """The id that follows, from float32 scores [V] of the id after `ids`; `step` counts the ids chosen before it.

    The penalty and the bias come first, then top-k, top-p and min-p on what the temperature gives. Raises NonFinite,
    and UsageError for a bias on an id that does not exist.
    """
    shaped = _shaped(scores.cpu().numpy(), params, ids)
    chosen = _chosen(shaped, params, step)
    wide = shaped.astype(np.float64) - shaped.max()
    return Choice(id=chosen, logprob=float(wide[chosen] - np.log(np.exp(wide).sum())))


# In numpy, on one thread: torch's threads spin on behind a large operation, in the way of those of the next step.


def _shaped(scores: Scores, params: SamplingParams, ids: Sequence[int]) -> Scores:
    """Scores with the repetition penalty (Keskar et al., 2019) and the bias."""
    if params.repetition_penalty != 1.0 and ids:
        seen, penalty = np.array(sorted(set(ids))), np.float32(params.repetition_penalty)
        found = scores[seen]
        scores = scores.copy()
        scores[seen] = np.where(found > 0, found / penalty, found * penalty)
    if params.logit_bias:
        beyond = [one for one, _ in params.logit_bias if one >= len(scores)]
        if beyond:
            raise UsageError(f"logit_bias has id {beyond[0]}: outside the vocabulary [0, {len(scores)})")
        scores = scores.copy()
        for one, bias in params.logit_bias:
            scores[one] += np.float32(bias)
    return scores


def _chosen(scores: Scores, params: SamplingParams, step: int) -> int:
    best = scores.max()
    if not np.isfinite(best):
        raise NonFinite(f"step {step}: the best score is {float(best)}, so no id can be chosen")
    if params.temperature == 0:
        return int(scores.argmax())  # the first of equals
    probabilities = _nucleus(_softmax(_likeliest(scores, params.top_k), best, params.temperature), params.top_p)
    probabilities = probabilities * (probabilities >= params.min_p * probabilities.max())
    cumulative = probabilities.cumsum()
    index = int(np.searchsorted(cumulative, draw(params.seed, step) * cumulative[-1], side="right"))
    last = int(np.searchsorted(cumulative, cumulative[-1]))  # where rounding took the target up to the sum
    return min(index, last)


def draw(seed: int, step: int) -> float:
    """A number in [0, 1), evenly spread over seeds and steps."""
    digest = Digest("kvouch.draw.1").field(seed.to_bytes(8, "little")).field(step.to_bytes(8, "little"))
    return (int(digest.hex()[:16], 16) >> (64 - DRAW_BITS)) / 2.0**DRAW_BITS


def _softmax(scores: Scores, best: np.float32, temperature: float) -> Shares:
    """Float64 probabilities [V]; the best score is taken off first, so no temperature overflows."""
    with np.errstate(over="ignore"):  # a small temperature takes what is far below the best to minus infinity
        shares: Shares = np.exp((scores.astype(np.float64) - np.float64(best)) / temperature)
    shares /= shares.sum()
    return shares


def _likeliest(scores: Scores, top_k: int) -> Scores:
    """All but the `top_k` best scores at minus infinity; of equals the lower ids stay."""
    if not 0 < top_k < len(scores):
        return scores
    kept = np.argsort(-scores, kind="stable")[:top_k]
    alone = np.full_like(scores, -math.inf)
    alone[kept] = scores[kept]
    return alone


def _nucleus(probabilities: Shares, top_p: float) -> Shares:
    """Zeroes all but the likeliest ids: the shortest list whose sum reaches `top_p`, the lower of equal ids first."""
    if top_p == 1:
        return probabilities
    # ids below this share sum to less than 1 - top_p, so none of them is needed: far fewer are left to sort
    least = min((1 - top_p) / len(probabilities), float(probabilities.max()))
    candidates = np.flatnonzero(probabilities >= least)  # [C]
    order = np.argsort(-probabilities[candidates], kind="stable")
    shares = probabilities[candidates[order]]
    kept = candidates[order[shares.cumsum() - shares < top_p]]
    alone = np.zeros_like(probabilities)
    alone[kept] = probabilities[kept]
    return alone


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
