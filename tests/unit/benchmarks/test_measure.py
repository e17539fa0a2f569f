"""What is fed to a peer, and how often: with a peer that only counts and a clock that is told the time."""

from collections.abc import Sequence

import pytest
from benchmarks.measure import Bound, Plan, measure, sample
from benchmarks.peers.peer import Peer

IDS = list(range(100, 200))
ONCE = Bound(least=1, most=1, seconds=0.0)


class Clock:
    """Moves one second whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class CountingPeer(Peer[list[int]]):
    """A cache is the list of its ids; the next id is how many there are."""

    copying, cutting = "copy", "cut"

    def __init__(self) -> None:
        self.lengths: list[tuple[int, int]] = []  # cached and new positions of each call
        self.capacities: list[int] = []

    def new_cache(self, capacity_tokens: int) -> list[int]:
        self.capacities.append(capacity_tokens)
        return []

    def feed(self, ids: Sequence[int], cache: list[int]) -> int:
        self.lengths.append((len(cache), len(ids)))
        cache.extend(ids)
        return len(cache)

    def cut(self, cache: list[int], length_tokens: int) -> None:
        if length_tokens > len(cache):
            raise ValueError("a cache cannot be cut to more than it has")
        del cache[length_tokens:]

    def copy(self, cache: list[int]) -> list[int]:
        return list(cache)


def plan(steps: int = 2, context_tokens: int = 96) -> Plan:
    return Plan(
        decode_contexts=(4, 90),
        prefill_tokens=(80, 92),
        warm_prefix_tokens=80,
        warm_new_tokens=8,
        context_tokens=context_tokens,
        decode_bound=Bound(least=steps, most=steps, seconds=0.0),
        prefill_bound=ONCE,
        warm_bound=ONCE,
    )


@pytest.mark.parametrize(
    ("bound", "count"),
    [
        (Bound(least=3, most=9, seconds=0.0), 3),
        (Bound(least=1, most=4, seconds=99.0), 4),
        (Bound(least=1, most=9, seconds=5.0), 5),
    ],
    ids=["never fewer than least", "never more than most", "no more once the seconds are over"],
)
def test_samples_are_bounded_by_count_and_by_seconds(bound: Bound, count: int) -> None:
    assert sample(lambda: None, bound, Clock()) == (1.0,) * count


def test_every_figure_is_taken_in_its_ways() -> None:
    timings, caches = measure(CountingPeer(), IDS, plan(), "static", Clock())
    assert [(one.figure, one.way) for one in timings] == [
        ("prefill 80", "static"),
        ("prefill 92", "static"),
        ("warm 80+8", "static copy"),
        ("warm 80+8", "static cut"),
        ("decode 4", "static"),
        ("decode 90", "static"),
    ]
    assert sorted(caches) == [80, 92]


def test_calls_have_the_lengths_that_the_figures_name() -> None:
    peer = CountingPeer()
    measure(peer, IDS, plan(), "static", Clock())
    warm_up, *calls = peer.lengths
    assert warm_up == (0, 8)
    assert calls[:4] == [(0, 80), (0, 92), (80, 8), (80, 8)]
    assert calls[4:8] == [(0, 3), (3, 1), (4, 1), (5, 1)]  # decode at 4: one untimed step, then two
    assert calls[8:] == [(89, 1), (90, 1), (91, 1)]  # decode at 90: the cache of 92, cut


def test_a_cache_is_no_larger_than_needed_nor_than_the_context() -> None:
    peer = CountingPeer()
    measure(peer, IDS, plan(), "static", Clock())
    assert peer.capacities == [8, 88, 96, 12]


def test_decode_feeds_back_what_it_got() -> None:
    _, caches = measure(CountingPeer(), IDS, plan(steps=3), "static", Clock())
    assert caches[92] == [*IDS[:90], 90, 91, 92]
    assert caches[80] == IDS[:80]
