"""A backend that says what it is told to, and one that counts what a model really computes."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvouch.contract import Grade, Hit, KVCache, LayerWatch, Reason, Rows, Verdict
from kvouch.engine.backend import NOTHING_ASKED
from kvouch.engine.model import Model
from kvouch.errors import ContextOverflow


class ScriptedBackend:
    """Chooses the ids of a script, one a call, whatever is asked; keeps the lists that it was asked."""

    def __init__(self, script: Sequence[int], *, vocabulary: int = 257, context_tokens: int = 10_000) -> None:
        self._script, self._vocabulary, self._context_tokens = list(script), vocabulary, context_tokens
        self.asked: list[list[int]] = []
        self.verdict: Verdict = NOTHING_ASKED

    def next_logits(self, ids: Sequence[int]) -> Tensor:
        if len(ids) > self._context_tokens:
            raise ContextOverflow(f"{len(ids)} ids asked")
        self.verdict = Hit(
            reused_tokens=len(self.asked), computed_tokens=len(ids), reason=Reason(cause="held"), grade=Grade()
        )
        scores = torch.zeros(self._vocabulary)
        scores[self._script[len(self.asked)]] = 1.0
        self.asked.append(list(ids))
        return scores


def count_positions(model: Model) -> Callable[[], int]:
    """From now on the model's steps are counted; each call gives the positions since the last one.

    It counts the rows that reach the layers, within `forward_cached`: what a verdict says is not looked at.
    """
    step, seen = model.weights.step, [0]

    def counted(ids: Tensor, cache: KVCache, rows: Rows, watch: LayerWatch | None = None) -> Tensor | None:
        seen[0] += ids.numel()
        return step(ids, cache, rows, watch)

    def taken() -> int:
        count, seen[0] = seen[0], 0
        return count

    model.weights.step = counted  # type: ignore[method-assign]
    return taken


class SteppingClock:
    """A clock that is one second later whenever it is looked at."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s
