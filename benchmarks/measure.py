"""What is timed, in which order, how often. Knows a peer, ids and a clock; knows no library and writes no file."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from benchmarks.peers.peer import Peer

C = TypeVar("C")
Clock = Callable[[], float]

NEAR_TOKENS = 64  # a prefilled cache that is longer by this much is cut back instead of prefilling another


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Samples are taken until there are `most` of them or `seconds` are over, and never fewer than `least`."""

    least: int
    most: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The lengths to measure, and how often."""

    decode_contexts: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    warm_prefix_tokens: int  # one of `prefill_tokens`
    warm_new_tokens: int
    text_prompt_tokens: int
    text_new_tokens: int
    context_tokens: int  # the model's
    decode_bound: Bound
    trial_tokens: int  # a short prefill, from which the time of a long one is foretold
    longest_s: float  # a prefill that will take longer is not timed; one that only fills a cache, a tenth of it
    prefill_bound: Bound
    warm_bound: Bound
    text_bound: Bound

    def capacity(self, length_tokens: int) -> int:
        """The smallest cache in which all that is measured from this length fits: a static one pays for its size."""
        spare = max(self.decode_bound.most, self.warm_new_tokens)
        return min(length_tokens + spare, self.context_tokens)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one figure in one process; `way` says how, where there are several."""

    figure: str
    way: str
    seconds: tuple[float, ...]


def sample(run: Callable[[], object], bound: Bound, clock: Clock) -> tuple[float, ...]:
    """Seconds of each run."""
    taken: list[float] = []
    while len(taken) < bound.least or (len(taken) < bound.most and sum(taken) < bound.seconds):
        start = clock()
        run()
        taken.append(clock() - start)
    return tuple(taken)


class Session(Generic[C]):
    """One peer being measured: its timings so far, its caches, and how fast it was on a short prefill."""

    def __init__(self, peer: Peer[C], ids: Sequence[int], plan: Plan, way: str, clock: Clock) -> None:
        self.peer, self.plan = peer, plan
        self._ids, self._way, self._clock = ids, way, clock
        self.timings: list[Timing] = []
        self.untimed: list[str] = []  # figures that would take too long
        self.caches: dict[int, C] = {}  # by the length that they were prefilled to
        peer.feed(ids[:8], peer.new_cache(8))  # what a library does once, it does here
        seconds, self._trial = self._prefill(f"trial {plan.trial_tokens}", plan.trial_tokens)
        self._trial_s = min(seconds)

    def run(self) -> None:
        """Prefill, warm first token, a short text from the first token to the last, and decode."""
        for length in self.plan.prefill_tokens:
            figure = f"prefill {length}"
            if self._foretold_s(length) <= self.plan.longest_s:
                _, self.caches[length] = self._prefill(figure, length)
            else:
                self.untimed.append(figure)
                self.caches[length] = self._filled(length)
        self._warm(self.caches[self.plan.warm_prefix_tokens])
        self._text()
        for context in self.plan.decode_contexts:
            self.decode(self._cache_for(context), context, self._way)

    def decode(self, cache: C, context: int, way: str) -> None:
        """One id in, the next id out. The cache comes with context - 1 positions; the first sample finds `context`."""
        at = (context - 1) % len(self._ids)
        following = self.peer.feed(self._ids[at : at + 1], cache)

        def step() -> None:
            nonlocal following
            following = self.peer.feed([following], cache)

        self._take(f"decode {context}", way, step, self.plan.decode_bound)

    def _prefill(self, figure: str, length: int) -> tuple[tuple[float, ...], C]:
        """From ids to the next id, the new cache included; that cache too."""
        cache = None

        def run() -> None:
            nonlocal cache
            cache = self.peer.new_cache(self.plan.capacity(length))
            self.peer.feed(self._ids[:length], cache)

        seconds = self._take(figure, self._way, run, self.plan.prefill_bound)
        if cache is None:
            raise ValueError(f"{figure}: the bound asks for no sample")
        return seconds, cache

    def _warm(self, prefix: C) -> None:
        """The first token after a cached prefix and new ids; after each run the prefix is there again."""
        length = self.plan.warm_prefix_tokens
        new = self._ids[length : length + self.plan.warm_new_tokens]

        def by_copy() -> None:
            self.peer.feed(new, self.peer.copy(prefix))

        def by_cut() -> None:
            self.peer.feed(new, prefix)
            self.peer.cut(prefix, length)

        for kept, run in ((self.peer.copying, by_copy), (self.peer.cutting, by_cut)):
            self._take(f"warm {length}+{len(new)}", f"{self._way} {kept}", run, self.plan.warm_bound)

    def _text(self) -> None:
        """A prompt, and new ids one at a time, each the one with the highest score."""
        prompt, new = self.plan.text_prompt_tokens, self.plan.text_new_tokens

        def run() -> None:
            cache = self.peer.new_cache(prompt + new)
            following = self.peer.feed(self._ids[:prompt], cache)
            for _ in range(new - 1):
                following = self.peer.feed([following], cache)

        self._take(f"text {prompt}+{new}", self._way, run, self.plan.text_bound)

    def _take(self, figure: str, way: str, run: Callable[[], object], bound: Bound) -> tuple[float, ...]:
        seconds = sample(run, bound, self._clock)
        self.timings.append(Timing(figure=figure, way=way, seconds=seconds))
        return seconds

    def _cache_for(self, context: int) -> C:
        """A cache with context - 1 positions: a prefilled one cut back, if it is hardly longer, else a new one."""
        near = [length for length in sorted(self.caches) if context <= length <= context + NEAR_TOKENS]
        if not near:
            return self._filled(context - 1)
        self.peer.cut(self.caches[near[0]], context - 1)
        return self.caches[near[0]]

    def _filled(self, length: int) -> C:
        """A cache of that length: prefilled, or stretched from the trial where ids are few or it would take long."""
        cache = self.peer.new_cache(self.plan.capacity(length))
        if length <= len(self._ids) and self._foretold_s(length) <= self.plan.longest_s / 10:
            self.peer.feed(self._ids[:length], cache)
        else:
            self.peer.stretch(self._trial, cache, length)
        return cache

    def _foretold_s(self, length: int) -> float:
        return self._trial_s / self.plan.trial_tokens * length
