"""Ids in, scores out, over one cache that proves itself on every call. Knows ids, a cache and a model; knows no text.

What is reused is found by comparing token ids, never taken from what the caller says of earlier calls.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Protocol, Self

from torch import Tensor

from kvouch.cache.static import StaticCache
from kvouch.contract import TILE, Progress, Rows, Verdict
from kvouch.engine.prefix import common_length
from kvouch.errors import ContextOverflow, InvalidIds
from kvouch.loader.model import Model

NOTHING_ASKED = Verdict(reused_tokens=0, computed_tokens=0, reason="no call has been answered")


class Backend(Protocol):
    """The stateless contract: the same ids give the same scores, whatever was asked before."""

    @property
    def verdict(self) -> Verdict:
        """What the last call reused and computed, and why."""

    def next_logits(self, ids: Sequence[int]) -> Tensor:
        """Float32 scores [V] of the id that follows `ids`; the caller keeps the list, and may change it afterwards."""


class RollbackBackend:
    """Keeps the longest prefix that its cache shares with what is asked, and computes the rest.

    Whatever raises (InvalidIds and ContextOverflow before any work, NonFinite or an interrupt in it) leaves a prefix
    that was there before and nothing else. `progress` is told of the positions of a call that crosses a tile edge.
    """

    def __init__(self, model: Model, *, capacity: int = TILE, progress: Progress | None = None) -> None:
        """Room for `capacity` positions at first; a longer call moves to a larger cache."""
        self._model, self._progress = model, progress
        self._context_tokens = model.config.max_position_embeddings
        # The cache's first len(_ids) positions are those of _ids, at every moment: ids leave before their positions
        # do and come after them, so that an interrupt between two lines cannot break it.
        self._ids: list[int] = []
        self._cache: StaticCache = model.static_cache(min(capacity, self._context_tokens))
        self.verdict = NOTHING_ASKED

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids whose keys and values are held."""
        return tuple(self._ids)

    @property
    def nbytes(self) -> int:
        return self._cache.nbytes

    def next_logits(self, ids: Sequence[int]) -> Tensor:
        """Float32 scores [V] of the id that follows; at least one position is computed, since scores are not kept."""
        scores = self._answer(ids, rows="last")
        if scores is None:
            raise RuntimeError("the forward pass gave no scores for rows='last'")
        return scores[0]  # [1, V] -> [V]

    def prefill(self, ids: Sequence[int]) -> Verdict:
        """Fills the cache for `ids` without scores; what it already holds is not computed again."""
        self._answer(ids, rows="none")
        return self.verdict

    def fork(self) -> Self:
        """An independent backend that holds the same positions."""
        twin = copy.copy(self)
        twin._ids, twin._cache = list(self._ids), self._cache.fork()
        twin.verdict = NOTHING_ASKED
        return twin

    def _answer(self, ids: Sequence[int], *, rows: Rows) -> Tensor | None:
        asked, self.verdict = list(ids), NOTHING_ASKED
        shared = common_length(self._ids, asked)
        self._check(asked, first=shared)
        reason = _reason(self._ids, asked, shared, rows)
        reused = shared if rows == "none" else min(shared, len(asked) - 1)
        scores = self._compute(asked, reused, rows) if reused < len(asked) else None
        self.verdict = Verdict(reused_tokens=reused, computed_tokens=len(asked) - reused, reason=reason)
        return scores

    def _check(self, asked: list[int], *, first: int) -> None:
        """Raises before any work; ids before `first` equal held ones, which were checked when they came."""
        if not asked:
            raise InvalidIds("ids are empty: give at least one")
        vocab_size = self._model.config.vocab_size
        for index in range(first, len(asked)):
            value = asked[index]
            if type(value) is not int:
                raise InvalidIds(f"ids[{index}] is {value!r}: a whole number (a Python int) is needed")
            if not 0 <= value < vocab_size:
                raise InvalidIds(f"ids[{index}] is {value}: outside the vocabulary [0, {vocab_size})")
        if len(asked) > self._context_tokens:
            raise ContextOverflow(
                f"{len(asked):,} ids asked, {self._context_tokens:,} in the model's context: "
                f"{len(asked) - self._context_tokens:,} too many"
            )

    def _compute(self, asked: list[int], first: int, rows: Rows) -> Tensor | None:
        """Computes [first, len(asked)) behind the kept [0, first); afterwards the cache holds just `asked`."""
        scores = None
        del self._ids[first:]
        self._cache.rollback(first)
        try:
            self._make_room(len(asked))
            for start, stop in _pieces(first, len(asked)):
                last = stop == len(asked)
                scores = self._model.forward(asked[start:stop], self._cache, scores=rows if last else "none")
                self._tell(first, stop, len(asked))
            self._ids.extend(asked[first:])
        except BaseException:
            del self._ids[first:]
            self._cache.rollback(first)
            raise
        return scores

    def _make_room(self, positions: int) -> None:
        """Moves to a cache of twice the size, or of what is needed, where the present one is too small."""
        old = self._cache
        if positions <= old.capacity:
            return
        new = self._model.static_cache(min(max(positions, 2 * old.capacity), self._context_tokens))
        if old.length:
            for layer in range(old.num_layers):
                new.update(layer, *old.read(layer))
            new.advance(old.length)
        self._cache = new

    def _tell(self, first: int, stop: int, end: int) -> None:
        if self._progress is not None and end - first > TILE:
            self._progress("prefill", stop - first, end - first)


def _pieces(first: int, end: int) -> Iterator[tuple[int, int]]:
    """[first, end) cut at the edges of tiles."""
    while first < end:
        stop = min(end, (first // TILE + 1) * TILE)
        yield first, stop
        first = stop


def _reason(held: list[int], asked: list[int], shared: int, rows: Rows) -> str:
    if not held:
        return "empty cache"
    if shared < min(len(held), len(asked)):
        return f"ids differ at {shared:,}: cached {held[shared]}, asked {asked[shared]}"
    if shared < len(asked):
        return f"the cache holds the first {shared:,} ids"
    again = "" if rows == "none" else "; the last is computed again, for its scores"
    return f"the cache holds all {shared:,} ids{again}"
