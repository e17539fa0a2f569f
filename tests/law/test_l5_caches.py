"""L5: every cache does what was asked or raises; checked by generated histories against a list."""

from collections.abc import Callable
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvouch.cache.base import LayeredCache
from kvouch.cache.concat import ConcatCache
from kvouch.cache.sizing import cache_bytes
from kvouch.cache.static import StaticCache
from kvouch.contract import TILE
from kvouch.errors import CacheMisuse, CacheOverflow

pytestmark = pytest.mark.law(5)


@dataclass(frozen=True)
class Shape:
    num_hidden_layers: int = 2
    num_key_value_heads: int = 2
    head_dim: int = 4


SHAPE, BATCH, CAPACITY = Shape(), 2, 2 * TILE
EDGES = st.sampled_from([1, 2, TILE - 1, TILE, TILE + 1]) | st.integers(1, 40)


def numbers_at(positions: torch.Tensor, layer: int, sign: int) -> torch.Tensor:
    """[B, G, T, D]: position p of a layer holds a number that no other position, layer or head holds."""
    place = torch.arange(BATCH * 2 * 4).double().view(BATCH, 2, 1, 4) / 64
    return (sign * (positions.double()[None, None, :, None] + 10_000 * layer + 1 + place)).float()


def numbers(first: int, count: int, layer: int, sign: int) -> torch.Tensor:
    return numbers_at(torch.arange(first, first + count), layer, sign)


class CacheMachine(RuleBasedStateMachine):
    """One cache, its forks, and a list of the numbers that each must hold."""

    make: Callable[[], LayeredCache]

    @initialize()
    def start(self) -> None:
        self.pairs: list[tuple[LayeredCache, list[int]]] = [(type(self).make(), [])]
        self.next = 0

    @rule(which=st.integers(0, 3), count=EDGES)
    def step(self, which: int, count: int) -> None:
        cache, held = self.pairs[which % len(self.pairs)]
        base, self.next = self.next, self.next + count
        try:
            for layer in range(cache.num_layers):
                keys, values = cache.update(layer, numbers(base, count, layer, 1), numbers(base, count, layer, -1))
                assert keys.shape[2] == values.shape[2] == len(held) + count
                self.check_tiles(cache, layer, [*held, *range(base, base + count)])
            cache.advance(count)
        except CacheOverflow:
            assert cache.max_length is not None
            assert len(held) + count > cache.max_length
        else:
            held.extend(range(base, base + count))

    @rule(which=st.integers(0, 3), count=EDGES, layer=st.integers(0, 1))
    def interrupted_step(self, which: int, count: int, layer: int) -> None:
        """Layers updated unequally: advance refuses, and the cache is as it was."""
        cache, held = self.pairs[which % len(self.pairs)]
        if cache.max_length is not None and len(held) + count > cache.max_length:
            return
        cache.update(layer, numbers(7, count, layer, 1), numbers(7, count, layer, 1))
        with pytest.raises(CacheMisuse):
            cache.advance(count)

    @rule(which=st.integers(0, 3), length=st.integers(-2 * CAPACITY, 2 * CAPACITY))
    def rollback(self, which: int, length: int) -> None:
        cache, held = self.pairs[which % len(self.pairs)]
        if 0 <= length <= len(held):
            cache.rollback(length)
            del held[length:]
        else:
            with pytest.raises(CacheMisuse):
                cache.rollback(length)

    @rule(which=st.integers(0, 3), back=st.integers(0, 3))
    def rollback_a_little(self, which: int, back: int) -> None:
        held = self.pairs[which % len(self.pairs)][1]
        self.rollback(which, max(len(held) - back, 0))

    @rule(which=st.integers(0, 3))
    def reset(self, which: int) -> None:
        cache, held = self.pairs[which % len(self.pairs)]
        cache.reset()
        held.clear()

    @rule(which=st.integers(0, 3))
    def fork(self, which: int) -> None:
        cache, held = self.pairs[which % len(self.pairs)]
        if len(self.pairs) < 4:
            self.pairs.append((cache.fork(), list(held)))

    @invariant()
    def contents(self) -> None:
        for cache, held in getattr(self, "pairs", []):
            assert cache.length == len(held)
            assert cache.nbytes == cache_bytes(SHAPE, BATCH, cache.capacity, torch.float32)
            for layer in range(cache.num_layers):
                for tensor, sign in zip(cache.read(layer), (1, -1), strict=True):
                    assert torch.equal(tensor, expected(held, layer, sign))

    def check_tiles(self, cache: LayeredCache, layer: int, held: list[int]) -> None:
        """Whole tiles in order, the last one zero beyond its end."""
        for tiles, sign in zip(cache.tiles(layer), (1, -1), strict=True):
            joined = tiles.flatten(2, 3)
            assert joined.shape[2] == -(-len(held) // TILE) * TILE
            assert torch.equal(joined[:, :, : len(held)], expected(held, layer, sign))
            assert not joined[:, :, len(held) :].any()


def expected(held: list[int], layer: int, sign: int) -> torch.Tensor:
    return numbers_at(torch.tensor(held, dtype=torch.int64), layer, sign)


class ConcatMachine(CacheMachine):
    make = staticmethod(lambda: ConcatCache(SHAPE, batch=BATCH))


class StaticMachine(CacheMachine):
    make = staticmethod(lambda: StaticCache(SHAPE, capacity=CAPACITY, batch=BATCH))


SETTINGS = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestConcat = ConcatMachine.TestCase
TestConcat.settings = SETTINGS
TestStatic = StaticMachine.TestCase
TestStatic.settings = SETTINGS
