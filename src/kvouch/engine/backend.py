"""Backends: ids in, scores out, over one cache that proves itself on every call. Knows ids, a cache and a model.

What is reused is found by comparing the identity and every token id, never taken from what the caller says of earlier
calls. `UncachedBackend` reuses nothing; `CachedBackend` is the chapter's; `RollbackBackend` keeps what still fits.
"""

import copy
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, Self

from torch import Tensor

from kvouch.contract import TILE, Grade, Hit, KVCache, LayerWatch, Miss, Progress, Reason, Refused, Rows, Verdict
from kvouch.engine.state import Match, State, match
from kvouch.errors import ContextOverflow, InvalidIds
from kvouch.identity.identity import Identity
from kvouch.identity.keys import pack_ids
from kvouch.models.config import ModelConfig

NOTHING_ASKED = Miss(reused_tokens=0, computed_tokens=0, reason=Reason(cause="nothing asked"), grade=Grade())


class Backend(Protocol):
    """The stateless contract: the same ids give the same scores, whatever was asked before."""

    @property
    def verdict(self) -> Verdict:
        """What the last call reused and computed, and why."""

    def next_logits(self, ids: Sequence[int]) -> Tensor:
        """Float32 scores [V] of the id that follows `ids`; the caller keeps the list, and may change it afterwards."""


class Computing(Protocol):
    """One computation, the same for as long as it is held."""

    @property
    def identity(self) -> Identity: ...
    @property
    def grade(self) -> Grade: ...
    def forward(
        self, ids: Sequence[int], cache: KVCache, *, scores: Rows, watch: LayerWatch | None = None
    ) -> Tensor | None: ...


class Computes(Protocol):
    """What a backend asks of a model: `Model` itself, or a model bound to an adapter and a salt."""

    @property
    def config(self) -> ModelConfig: ...
    def current(self) -> Computing: ...
    def new_cache(self, capacity: int) -> KVCache: ...


@dataclass(kw_only=True)
class Counters:
    """What a backend did since it was made. Positions are those that the forward pass saw."""

    calls: int = 0
    reuses: int = 0
    resets: int = 0  # calls that threw away all that was held
    positions: int = 0

    @property
    def misses(self) -> int:
        return self.calls - self.reuses


class UncachedBackend:
    """Computes every position of every call: what all others are compared with."""

    def __init__(self, model: Computes) -> None:
        self._model = model
        self.counters = Counters()
        self.verdict: Verdict = NOTHING_ASKED

    def next_logits(self, ids: Sequence[int]) -> Tensor:
        return self.compute(ids)[0]

    def compute(self, ids: Sequence[int]) -> tuple[Tensor, KVCache]:
        """Scores [V], and the keys and values that they were computed with."""
        self.verdict = NOTHING_ASKED
        asked = packed(ids)
        check_range(asked, self._model.config)
        now, cache = self._model.current(), self._model.new_cache(len(asked))
        scores = _scores(now.forward(asked, cache, scores="last"))
        self.counters.calls += 1
        self.counters.positions += len(asked)
        self.verdict = Miss(
            reused_tokens=0, computed_tokens=len(asked), reason=Reason(cause="reuse off"), grade=now.grade
        )
        return scores, cache


class CachedBackend:
    """The chapter's: one cache, a hit exactly where it holds all ids but the last k >= 1; otherwise it is thrown away.

    Whatever raises (InvalidIds and ContextOverflow before any work, NonFinite or an interrupt in it) leaves a prefix
    that was there before and nothing else. `progress` is told how far a call of more than a tile is, layer by layer.
    """

    def __init__(
        self,
        model: Computes,
        *,
        new_cache: Callable[[], KVCache] | None = None,
        capacity: int = TILE,
        read: bool = True,
        write: bool = True,
        progress: Progress | None = None,
    ) -> None:
        """On a cache that `new_cache` makes; by default the model's fastest, for `capacity` positions, which grows.

        Without `read` a call reuses nothing; without `write` it leaves what was held before it, and works on a copy
        (what a call computed is computed again by the next).
        """
        self._model, self._progress = model, progress
        self._read, self._write = read, write
        room = min(capacity, model.config.max_position_embeddings)
        self._new_cache = new_cache if new_cache is not None else partial(model.new_cache, room)
        self._state = State(identity=model.current().identity, cache=self._new_cache())
        self._quarantined = False
        self.counters = Counters()
        self.verdict: Verdict = NOTHING_ASKED

    @property
    def model(self) -> Computes:
        return self._model

    @property
    def state(self) -> State:
        """What is held; the backend's own, to be read and not changed."""
        return self._state

    def adopt(self, state: State) -> None:
        """Takes over a state that is to be judged like any other: by its identity and its ids."""
        self._state, self._quarantined = state.fork(), False

    def quarantine(self) -> None:
        """Gives up what is held; the next call is told that it was refused."""
        own = self._state.identity.salt == self._model.current().identity.salt  # another tenant's is no entry
        self._quarantined |= bool(self._state.ids) and own
        self._state.keep(0)

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids whose keys and values are held."""
        return tuple(self._state.ids)

    @property
    def nbytes(self) -> int:
        return self._state.cache.nbytes

    def next_logits(self, ids: Sequence[int]) -> Tensor:
        """Float32 scores [V] of the id that follows; at least one position is computed, since scores are not kept."""
        return _scores(self._answer(ids, rows="last"))

    def prefill(self, ids: Sequence[int]) -> Verdict:
        """Fills the cache for `ids` without scores; what can be reused is not computed again."""
        self._answer(ids, rows="none")
        return self.verdict

    def fork(self) -> Self:
        """An independent backend that holds the same positions; its counters begin anew."""
        twin = copy.copy(self)
        twin._state, twin.counters, twin.verdict = self._state.fork(), Counters(), NOTHING_ASKED
        twin._quarantined = False
        return twin

    def _usable(self, found: Match, held: int, asked: int, rows: Rows) -> int:
        """How many of the matching positions are reused."""
        return held if found.tokens == held < asked else 0

    def _answer(self, ids: Sequence[int], *, rows: Rows) -> Tensor | None:
        self.verdict = NOTHING_ASKED
        asked = packed(ids)
        now, state = self._model.current(), self._state
        found = match(state, now.identity, asked)
        check_range(asked, self._model.config, first=found.tokens)
        reused = self._usable(found, len(state.ids), len(asked), rows) if self._read else 0
        thrown_away = bool(state.ids) and not reused and self._write
        scores = None
        if reused < len(asked):
            scores = self._compute(now, self._ready(now.identity, reused), asked, reused, rows)
        self.counters.calls += 1
        self.counters.reuses += reused > 0
        self.counters.resets += thrown_away
        self.counters.positions += len(asked) - reused
        self.verdict = self._judged(found, reused, len(asked) - reused, now.grade)
        return scores

    def _ready(self, identity: Identity, reused: int) -> State:
        """A state of this identity that holds the first `reused` positions; without `write` not the own one."""
        if self._state.identity is not identity and self._state.identity != identity:
            state = State(identity=identity, cache=self._new_cache())  # the old one may be of another dtype
        else:
            state = self._state if self._write else self._state.fork()
            state.keep(reused)
        if self._write:
            self._state = state
        return state

    def _judged(self, found: Match, reused: int, computed: int, grade: Grade) -> Verdict:
        kind: type[Verdict] = Hit if reused else Miss
        reason = found.reason
        if self._quarantined or not self._read:
            kind, reason = Refused, Reason(cause="quarantined" if self._quarantined else "read off")
            self._quarantined = False
        return kind(
            reused_tokens=reused,
            computed_tokens=computed,
            reason=reason,
            operator_reason=found.operator_reason,
            grade=grade,
        )

    def _compute(self, now: Computing, state: State, asked: "array[int]", first: int, rows: Rows) -> Tensor | None:
        """Computes [first, len(asked)) behind the kept [0, first); afterwards the state holds just `asked`."""
        scores = None
        try:
            self._make_room(state, len(asked))
            for start, stop in _pieces(first, len(asked)):
                last = stop == len(asked)
                watch = self._told(start - first, stop - first, len(asked) - first)
                scores = now.forward(asked[start:stop], state.cache, scores=rows if last else "none", watch=watch)
                if watch is not None:
                    watch(self._model.config.num_hidden_layers - 1)
            state.ids.extend(asked[first:])
        except BaseException:
            state.keep(first)
            raise
        return scores

    def _told(self, start: int, stop: int, total: int) -> LayerWatch | None:
        """Tells of the layers of positions [start, stop) out of a total as of so many positions."""
        progress, layers = self._progress, self._model.config.num_hidden_layers
        if progress is None or total <= TILE:
            return None
        return lambda layer: progress("prefill", start + (stop - start) * (layer + 1) // layers, total)

    def _make_room(self, state: State, positions: int) -> None:
        """Moves to a cache of twice the size, or of what is needed, where the present one is too small."""
        old = state.cache
        if old.max_length is None or positions <= old.max_length:
            return
        new = self._model.new_cache(min(max(positions, 2 * old.capacity), self._model.config.max_position_embeddings))
        if old.length:
            for layer in range(old.num_layers):
                new.update(layer, *old.read(layer))
            new.advance(old.length)
        state.cache = new


class RollbackBackend(CachedBackend):
    """Keeps the longest prefix that its cache shares with what is asked (the chapter's exercise 6)."""

    def _usable(self, found: Match, held: int, asked: int, rows: Rows) -> int:
        return found.tokens if rows == "none" else min(found.tokens, asked - 1)


def check_range(asked: "array[int]", config: ModelConfig, *, first: int = 0) -> None:
    """Raises before any work; ids before `first` equal held ones, which were checked when they came."""
    for index in range(first, len(asked)):
        if asked[index] >= config.vocab_size:
            raise InvalidIds(f"ids[{index}] is {asked[index]}: outside the vocabulary [0, {config.vocab_size})")
    context = config.max_position_embeddings
    if len(asked) > context:
        raise ContextOverflow(
            f"{len(asked):,} ids asked, {context:,} in the model's context: {len(asked) - context:,} too many"
        )


def packed(ids: Sequence[int]) -> "array[int]":
    """The ids as they are held and compared; InvalidIds for an empty list, or the first that is no whole number."""
    found = pack_ids(ids)
    if not found:
        raise InvalidIds("ids are empty: give at least one")
    return found


def _scores(found: Tensor | None) -> Tensor:
    if found is None:
        raise RuntimeError("the forward pass gave no scores for rows='last'")
    return found[0]  # [1, V] -> [V]


def _pieces(first: int, end: int) -> Iterator[tuple[int, int]]:
    """[first, end) cut at the edges of tiles."""
    while first < end:
        stop = min(end, (first // TILE + 1) * TILE)
        yield first, stop
        first = stop
