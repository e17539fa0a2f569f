"""What is timed, in which order, how often. Knows a peer, ids and a clock; knows no library and writes no file."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

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
    context_tokens: int  # the model's
    decode_bound: Bound
    prefill_bound: Bound
    warm_bound: Bound

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


def measure(peer: Peer[C], ids: Sequence[int], plan: Plan, way: str, clock: Clock) -> tuple[list[Timing], dict[int, C]]:
    """Prefill, warm first token and decode; and the caches, by the length that they were prefilled to."""
    peer.feed(ids[:8], peer.new_cache(8))  # what a library does once, it does here
    timings, caches = prefill(peer, ids, plan, way, clock)
    timings += warm(peer, ids, caches[plan.warm_prefix_tokens], plan, way, clock)
    timings += [
        decode(peer, ids, _cache_for(peer, ids, caches, context, plan), context, plan, way, clock)
        for context in plan.decode_contexts
    ]
    return timings, caches


def prefill(peer: Peer[C], ids: Sequence[int], plan: Plan, way: str, clock: Clock) -> tuple[list[Timing], dict[int, C]]:
    """From ids to the next id, the new cache included."""
    timings, caches = [], {}
    for length in plan.prefill_tokens:

        def run(length: int = length) -> None:
            caches[length] = peer.new_cache(plan.capacity(length))
            peer.feed(ids[:length], caches[length])

        timings.append(
            Timing(figure=f"prefill {length}", way=way, seconds=sample(run, plan.prefill_bound, clock)),
        )
    return timings, caches


def warm(peer: Peer[C], ids: Sequence[int], prefix: C, plan: Plan, way: str, clock: Clock) -> Iterator[Timing]:
    """The first token after a cached prefix and new ids; after each run the prefix is there again."""
    length = plan.warm_prefix_tokens
    new = ids[length : length + plan.warm_new_tokens]
    figure = f"warm {length}+{len(new)}"

    def by_copy() -> None:
        peer.feed(new, peer.copy(prefix))

    def by_cut() -> None:
        peer.feed(new, prefix)
        peer.cut(prefix, length)

    for kept, run in ((peer.copying, by_copy), (peer.cutting, by_cut)):
        yield Timing(figure=figure, way=f"{way} {kept}", seconds=sample(run, plan.warm_bound, clock))


def decode(peer: Peer[C], ids: Sequence[int], cache: C, context: int, plan: Plan, way: str, clock: Clock) -> Timing:
    """One id in, the next id out. The cache comes with context - 1 positions, and has `context` at the first sample."""
    following = peer.feed(ids[context - 1 : context], cache)

    def step() -> None:
        nonlocal following
        following = peer.feed([following], cache)

    return Timing(figure=f"decode {context}", way=way, seconds=sample(step, plan.decode_bound, clock))


def _cache_for(peer: Peer[C], ids: Sequence[int], caches: dict[int, C], context: int, plan: Plan) -> C:
    """A cache with context - 1 positions: a prefilled one cut back, if it is hardly longer, else a new one."""
    near = [length for length in sorted(caches) if context <= length <= context + NEAR_TOKENS]
    if near:
        peer.cut(caches[near[0]], context - 1)
        return caches[near[0]]
    cache = peer.new_cache(plan.capacity(context))
    peer.feed(ids[: context - 1], cache)
    return cache
