"""L4, L5, L7: forks share blocks and never see each other's numbers; every block is counted. In generated histories."""

import gc
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvouch.cache.blocks import Layout
from kvouch.cache.concat import ConcatCache
from kvouch.cache.paged import PagedCache
from kvouch.cache.pool import BlockPool
from kvouch.contract import BLOCK, TILE
from kvouch.errors import CacheMisuse, CacheOverflow, CacheShapeError, PoolFull
from kvouch.numerics.bits import same_bits

pytestmark = [pytest.mark.law(4), pytest.mark.law(5), pytest.mark.law(7)]

HEADS, SIZE, LAYERS = 2, 12, 2
COUNTS = st.sampled_from([1, 2, BLOCK - 1, BLOCK, BLOCK + 1, TILE - 1, TILE + 1]) | st.integers(1, 40)
KINDS: list[tuple[torch.dtype, Layout]] = [
    (torch.float32, "step"),
    (torch.bfloat16, "step"),
    (torch.float16, "step"),
    (torch.bfloat16, "rows"),
]


@dataclass(frozen=True)
class Shape:
    num_hidden_layers: int = LAYERS
    num_key_value_heads: int = HEADS
    head_dim: int = SIZE


def numbers(count: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values [1, G, count, D]."""
    return torch.randn(1, HEADS, count, SIZE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def append(cache: Any, count: int, seed: int) -> None:
    for layer in range(LAYERS):
        pair = (numbers(count, 2 * (seed + layer) + kind, cache.dtype) for kind in range(2))
        cache.update(layer, *pair)
    cache.advance(count)


def equal(paged: PagedCache, plain: ConcatCache) -> bool:
    pairs = (zip(paged.read(layer), plain.read(layer), strict=True) for layer in range(LAYERS))
    return paged.length == plain.length and all(same_bits(a, b) for pair in pairs for a, b in pair)


def full_blocks(cache: PagedCache) -> list[int]:
    return cache.blocks[: cache.length // BLOCK]


class Sequences(RuleBasedStateMachine):
    """Sequences on a small pool beside the same sequences in caches that share nothing."""

    dtype: torch.dtype
    layout: Layout
    BLOCKS = 24

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(Shape(), blocks=self.BLOCKS, dtype=self.dtype, layout=self.layout)
        self.pairs: list[tuple[PagedCache, ConcatCache]] = []
        self.seed = 0

    def chosen(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.pairs) - 1))

    @rule()
    def new(self) -> None:
        if len(self.pairs) < 8:
            self.pairs.append((PagedCache(self.pool), ConcatCache(Shape(), dtype=self.dtype)))

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), count=COUNTS)
    def append(self, data: st.DataObject, count: int) -> None:
        paged, plain = self.pairs[self.chosen(data)]
        self.seed += 10
        shared = bool(paged.length % BLOCK) and self.pool.owners[paged.blocks[-1]] > 1
        needed = -(-(paged.length + count) // BLOCK) - len(paged.blocks) + shared
        if needed > self.pool.free:
            before, held = list(paged.blocks), self.pool.free
            with pytest.raises(PoolFull, match=f"{needed} blocks"):
                append(paged, count, self.seed)
            assert (paged.blocks, self.pool.free) == (before, held)
        else:
            append(paged, count, self.seed)
            append(plain, count, self.seed)

    @precondition(lambda self: self.pairs)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        paged, plain = self.pairs[self.chosen(data)]
        if len(self.pairs) < 8:
            free = self.pool.free
            self.pairs.append((paged.fork(), plain.fork()))
            assert self.pool.free == free  # nothing is copied

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), count=COUNTS)
    def rollback(self, data: st.DataObject, count: int) -> None:
        for cache in self.pairs[self.chosen(data)]:
            cache.rollback(max(cache.length - count, 0))

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), count=COUNTS)
    def fail(self, data: st.DataObject, count: int) -> None:
        """A step whose second layer never comes."""
        paged, _ = self.pairs[self.chosen(data)]
        pair = (numbers(count, kind, self.dtype) for kind in range(2))
        try:
            paged.update(0, *pair)
        except PoolFull:
            return
        with pytest.raises(CacheMisuse):
            paged.advance(count)

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), collected=st.booleans())
    def give_up(self, data: st.DataObject, collected: bool) -> None:
        paged, _ = self.pairs.pop(self.chosen(data))
        if not collected:
            paged.release()

    @invariant()
    def every_block_is_counted(self) -> None:
        gc.collect(0)
        self.pool.check()
        assert self.pool.free + self.pool.used == len(self.pool) == self.BLOCKS

    @invariant()
    def nobody_sees_another(self) -> None:
        assert all(equal(*pair) for pair in self.pairs)

    @invariant()
    def what_is_full_is_held_once(self) -> None:
        held = {block for paged, _ in self.pairs for block in paged.blocks}
        assert self.pool.used == len(held)


for _dtype, _layout in KINDS:
    _name = f"Test{str(_dtype).removeprefix('torch.').title()}{_layout.title()}"
    _machine = type(_name, (Sequences,), {"dtype": _dtype, "layout": _layout})
    _machine.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)  # type: ignore[attr-defined]
    globals()[_name] = _machine.TestCase  # type: ignore[attr-defined]


@pytest.fixture(params=KINDS, ids=str)
def pool(request: pytest.FixtureRequest) -> BlockPool:
    dtype, layout = request.param
    return BlockPool(Shape(), blocks=8, dtype=dtype, layout=layout)


def test_a_block_is_zeroed_when_it_is_taken_again(pool: BlockPool) -> None:
    first = PagedCache(pool)
    append(first, 40, 1)
    blocks = list(first.blocks)
    first.release()
    assert pool.take(3) == blocks  # in their order: neighbours stay neighbours
    assert not pool.planes[:, :, :, blocks].count_nonzero()


@pytest.mark.parametrize("kept", range(BLOCK + 1))
def test_rollback_clears_what_it_cuts_off(pool: BlockPool, kept: int) -> None:
    cache = PagedCache(pool)
    append(cache, BLOCK, 1)
    block = cache.blocks[0]
    cache.rollback(kept)
    assert cache.blocks == ([block] if kept else [])
    if not kept:  # it is given back, and zeroed when it is taken again
        pool.take(1)
    assert pool.planes[:, :, :, block].count_nonzero() == kept * SIZE * HEADS * LAYERS * 2


@pytest.mark.parametrize("kept", range(1, BLOCK))
def test_a_copy_holds_nothing_beyond_what_is_kept(pool: BlockPool, kept: int) -> None:
    """What the other owner has written there stays its own."""
    parent = PagedCache(pool)
    append(parent, BLOCK, 1)
    twin = parent.fork()
    twin.rollback(kept)
    append(twin, 1, 5)
    assert twin.blocks != parent.blocks
    assert pool.planes[:, :, :, twin.blocks[0]].count_nonzero() == (kept + 1) * SIZE * HEADS * LAYERS * 2
    assert pool.planes[:, :, :, parent.blocks[0]].count_nonzero() == BLOCK * SIZE * HEADS * LAYERS * 2


def test_the_last_owner_writes_in_place(pool: BlockPool) -> None:
    parent = PagedCache(pool)
    append(parent, 5, 1)
    twin = parent.fork()
    parent.release()
    block = twin.blocks[0]
    append(twin, 1, 2)
    assert twin.blocks == [block]


def test_the_last_free_block_is_given_and_none_after_it(pool: BlockPool) -> None:
    cache, other = PagedCache(pool), PagedCache(pool)
    append(cache, 7 * BLOCK, 1)
    append(other, BLOCK, 2)
    assert pool.free == 0
    with pytest.raises(PoolFull, match="1 blocks of 16 positions are needed, 0 of the pool's 8 are free"):
        append(other, 1, 3)
    assert (other.length, other.blocks) == (BLOCK, [7])
    pool.check()


def test_a_fork_of_a_full_pool_can_be_read_and_not_written(pool: BlockPool) -> None:
    cache = PagedCache(pool)
    append(cache, 8 * BLOCK - 3, 1)
    twin = cache.fork()
    with pytest.raises(PoolFull):
        append(twin, 1, 2)
    cache.release()
    append(twin, 3, 2)  # the last owner needs no copy
    assert twin.length == 8 * BLOCK


def test_released_means_gone(pool: BlockPool) -> None:
    cache = PagedCache(pool)
    append(cache, 20, 1)
    cache.release()
    cache.release()
    assert (pool.free, cache.length, cache.blocks) == (8, 0, [])
    for use in (cache.fork, cache.reset, lambda: append(cache, 1, 1), lambda: cache.rollback(0)):
        with pytest.raises(CacheMisuse, match="was released"):
            use()
    pool.check()


def test_a_limit_holds(pool: BlockPool) -> None:
    cache = PagedCache(pool, max_length=20)
    append(cache, 20, 1)
    with pytest.raises(CacheOverflow, match="holds 20"):
        append(cache, 1, 2)
    assert cache.fork().max_length == 20


def test_a_wrong_count_is_found(pool: BlockPool) -> None:
    cache = PagedCache(pool)
    append(cache, 20, 1)
    pool.owners[cache.blocks[1]] += 1
    with pytest.raises(CacheMisuse, match="counts 2 owners, 1 caches"):
        pool.check()
    pool.owners[cache.blocks[1]] -= 1
    pool._free.append(cache.blocks[0])
    with pytest.raises(CacheMisuse, match="count as free"):
        pool.check()
    pool._free.pop()
    pool.check()


def test_sizes_are_said(pool: BlockPool) -> None:
    cache = PagedCache(pool)
    append(cache, 20, 1)
    assert (len(pool), pool.used, pool.free) == (8, 2, 6)
    assert cache.nbytes == 2 * pool.block_bytes == pool.planes.nbytes // 4
    assert cache.capacity == 32
    with pytest.raises(CacheShapeError, match="blocks is 0"):
        BlockPool(Shape(), blocks=0)
