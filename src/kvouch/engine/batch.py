"""Many prompts at once over one pool: ids in, scores out, each as if it were alone. Knows states; samples nothing."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from kvouch.cache.paged import PagedCache
from kvouch.cache.pool import BlockPool
from kvouch.contract import Hit, Miss, Reason, Rows, Verdict
from kvouch.engine.backend import Counters, check_range, packed
from kvouch.engine.bound import Current
from kvouch.engine.model import Model
from kvouch.engine.state import Match, State, match
from kvouch.errors import UsageError
from kvouch.models.forward import forward_many


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What is asked for one sequence: all of its ids, under which adapter and salt."""

    ids: Sequence[int]
    adapter: str | None = None
    salt: str = ""


@dataclass(kw_only=True)
class _Asked:
    """A prompt under way: what computes it, the state that it goes on with, and how far that fitted."""

    ids: "array[int]"
    now: Current
    state: State
    found: Match
    reused: int
    own: bool  # the state is a fork or new: nobody else's until the call succeeds


class BatchedBackend:
    """The stateless contract for many sequences: each list of ids gives the scores that it would give alone.

    Held are the sequences of the last call, and what `prefill` put there. A prompt goes on with the held sequence that
    shares most with it, or with a fork of it; equal prompts are computed once. Whatever raises, PoolFull too, leaves
    all that was held as it was.
    """

    def __init__(self, model: Model, pool: BlockPool) -> None:
        self._model, self._pool = model, pool
        self._last: list[State] = []
        self._kept: list[State] = []
        self.counters = Counters()
        self.verdicts: list[Verdict] = []  # of the last call's prompts

    def next_logits(self, prompts: Sequence[Prompt]) -> list[Tensor]:
        """Float32 scores [V] of the id that follows each."""
        answers = self._answer(prompts, "last")
        return [scores[0] for scores in answers if scores is not None]

    def prefill(self, prompt: Prompt) -> Verdict:
        """Computes a prefix that prompts can share, and holds it until `release`."""
        last, self._last = self._last, []
        try:
            self._answer([prompt], "none")
            self._kept += self._last
        finally:
            self._last = last
        return self.verdicts[0]

    def release(self) -> None:
        """Gives up all that is held."""
        _release([*self._last, *self._kept])
        self._last, self._kept = [], []

    def _answer(self, prompts: Sequence[Prompt], rows: Rows) -> list[Tensor | None]:
        if not prompts:
            raise UsageError("prompts are empty: give at least one")
        self.verdicts = []
        ids = [packed(one.ids) for one in prompts]
        for one in ids:
            check_range(one, self._model.config)
        keys = [(one.adapter, one.salt, held.tobytes()) for one, held in zip(prompts, ids, strict=True)]
        repeated = [key in keys[:number] for number, key in enumerate(keys)]
        current = {who: self._model.current(adapter=who[0], salt=who[1]) for who in {key[:2] for key in keys}}
        asked: dict[tuple[str | None, str, bytes], _Asked] = {}  # equal prompts once
        forks: dict[int, State] = {}
        try:
            for number, key in enumerate(keys):
                if not repeated[number]:
                    taken = [one.state for one in asked.values()]
                    asked[key] = self._begun(current[key[:2]], ids[number], number, taken, rows)
            found = dict(zip(asked, self._computed(list(asked.values()), rows), strict=True))
            for number, key in enumerate(keys):
                if repeated[number]:
                    forks[number] = asked[key].state.fork()
        except BaseException:
            _release([*(one.state for one in asked.values() if one.own), *forks.values()])
            raise
        states = [forks.get(number, asked[key].state) for number, key in enumerate(keys)]
        _release(old for old in self._last if not _among(old, states))
        self._last = states
        self.verdicts = [self._judged(asked[key], again) for key, again in zip(keys, repeated, strict=True)]
        return [_copied(found[key]) if again else found[key] for key, again in zip(keys, repeated, strict=True)]

    def _begun(self, now: Current, ids: "array[int]", number: int, taken: Sequence[State], rows: Rows) -> _Asked:
        """The prompt with the state that it goes on with: one of the last call's, a fork of one, or a new one."""
        most = len(ids) if rows == "none" else len(ids) - 1
        source, found = None, Match(tokens=0, reason=Reason(cause="no entry"))
        for state in [*self._last[number : number + 1], *self._last, *self._kept]:
            fits = match(state, now.identity, ids)
            if source is None or fits.tokens > found.tokens:
                source, found = state, fits
            if found.tokens >= most:
                break
        reused = min(found.tokens, most)
        if source is None or not reused:
            state, own = State(identity=now.identity, cache=PagedCache(self._pool)), True
        elif reused == len(source.ids) and _among(source, self._last) and not _among(source, taken):
            state, own = source, False
        else:
            state, own = source.fork(), True
            state.keep(reused)
        return _Asked(ids=ids, now=now, state=state, found=found, reused=reused, own=own)

    def _computed(self, asked: Sequence[_Asked], rows: Rows) -> list[Tensor | None]:
        """Scores of each; afterwards its state holds all of its ids."""
        new = [one for one in asked if one.reused < len(one.ids)]
        chunks = [one.now.chunk(one.ids[one.reused :], one.state.cache, rows) for one in new]
        found = iter(forward_many(chunks, self._model.config) if chunks else [])
        scores = [next(found) if one.reused < len(one.ids) else None for one in asked]
        for one in new:
            one.state.ids.extend(one.ids[one.reused :])
        return scores

    def _judged(self, one: _Asked, repeated: bool) -> Verdict:
        reused = len(one.ids) if repeated else one.reused
        computed = len(one.ids) - reused
        self.counters.calls += 1
        self.counters.reuses += reused > 0
        self.counters.positions += computed
        reason = Reason(cause="ids equal") if repeated else one.found.reason
        kind: type[Verdict] = Hit if reused else Miss
        return kind(
            reused_tokens=reused,
            computed_tokens=computed,
            reason=reason,
            operator_reason=one.found.operator_reason,
            grade=one.now.grade,
        )


def _among(state: State, states: Sequence[State]) -> bool:
    return any(state is one for one in states)


def _copied(scores: Tensor | None) -> Tensor | None:
    return None if scores is None else scores.clone()


def _release(states: Iterable[State]) -> None:
    for state in states:
        if isinstance(state.cache, PagedCache):
            state.cache.release()
