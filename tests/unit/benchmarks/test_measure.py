"""What is fed to a peer, and how often: with a peer that only counts and a clock that is told the time."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from benchmarks.measure import Bound, Plan, Session, sample
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

    def stretch(self, source: list[int], cache: list[int], length_tokens: int) -> None:
        cache.extend((source * length_tokens)[:length_tokens])


def plan(steps: int = 2, longest_s: float = 1e9) -> Plan:
    return Plan(
        decode_contexts=(4, 90),
        prefill_tokens=(80, 92),
        warm_prefix_tokens=80,
        warm_new_tokens=8,
        context_tokens=96,
        trial_tokens=10,
        longest_s=longest_s,
        decode_bound=Bound(least=steps, most=steps, seconds=0.0),
        prefill_bound=ONCE,
        warm_bound=ONCE,
        text_prompt_tokens=5,
        text_new_tokens=3,
        text_bound=ONCE,
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


def session(peer: CountingPeer, asked: Plan) -> Session[list[int]]:
    found = Session(peer, IDS, asked, "static", Clock())
    found.run()
    return found


def test_every_figure_is_taken_in_its_ways() -> None:
    found = session(CountingPeer(), plan())
    assert [(one.figure, one.way) for one in found.timings] == [
        ("trial 10", "static"),
        ("prefill 80", "static"),
        ("prefill 92", "static"),
        ("warm 80+8", "static copy"),
        ("warm 80+8", "static cut"),
        ("text 5+3", "static"),
        ("decode 4", "static"),
        ("decode 90", "static"),
    ]
    assert sorted(found.caches) == [80, 92]
    assert found.untimed == []


def test_calls_have_the_lengths_that_the_figures_name() -> None:
    peer = CountingPeer()
    session(peer, plan())
    warm_up, trial, *calls = peer.lengths
    assert (warm_up, trial) == ((0, 8), (0, 10))
    assert calls[:4] == [(0, 80), (0, 92), (80, 8), (80, 8)]
    assert calls[4:7] == [(0, 5), (5, 1), (6, 1)]  # a text of three new ids
    assert calls[7:11] == [(0, 3), (3, 1), (4, 1), (5, 1)]  # decode at 4: one untimed step, then two
    assert calls[11:] == [(89, 1), (90, 1), (91, 1)]  # decode at 90: the cache of 92, cut


def test_a_cache_is_no_larger_than_needed_nor_than_the_context() -> None:
    peer = CountingPeer()
    session(peer, plan())
    assert peer.capacities == [8, 18, 88, 96, 8, 11]


def test_decode_feeds_back_what_it_got() -> None:
    caches = session(CountingPeer(), plan(steps=3)).caches
    assert caches[92] == [*IDS[:90], 90, 91, 92]
    assert caches[80] == IDS[:80]


def test_a_prefill_that_would_take_too_long_is_not_timed_and_all_else_is() -> None:
    """The trial takes a second for ten ids, so 80 are foretold to take eight and 92 to take 9.2."""
    peer = CountingPeer()
    found = session(peer, plan(longest_s=9.0))
    assert found.untimed == ["prefill 92"]
    assert "prefill 92" not in [one.figure for one in found.timings]
    assert (0, 92) not in peer.lengths
    assert [one.figure for one in found.timings][-2:] == ["decode 4", "decode 90"]
    assert peer.lengths[-3:] == [(89, 1), (90, 1), (91, 1)]
    assert found.caches[92][:12] == [*IDS[:10], *IDS[:2]]


def test_a_cache_that_is_only_filled_may_take_a_tenth_as_long() -> None:
    peer = CountingPeer()
    session(peer, plan(longest_s=2.0))
    assert (0, 3) not in peer.lengths
    assert (3, 1) in peer.lengths


def test_a_context_beyond_the_ids_is_stretched() -> None:
    peer = CountingPeer()
    session(peer, replace(plan(), decode_contexts=(200,), context_tokens=300))
    assert peer.lengths[-3:] == [(199, 1), (200, 1), (201, 1)]
