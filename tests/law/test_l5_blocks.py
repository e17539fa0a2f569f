"""L5: the cache in the step's layout is the concatenating cache, bit for bit, through generated histories."""

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from kvouch.cache.base import LayeredCache
from kvouch.cache.blocks import BlockCache
from kvouch.cache.concat import ConcatCache
from kvouch.contract import BLOCK, TILE
from kvouch.errors import CacheMisuse, CacheOverflow, CacheShapeError
from kvouch.numerics.bits import same_bits

pytestmark = pytest.mark.law(5)

CAPACITY = TILE + 40
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
COUNTS = st.sampled_from([1, 2, BLOCK - 1, BLOCK, BLOCK + 1, TILE - 1, TILE, TILE + 1]) | st.integers(1, 40)
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["step", "step", "step", "rollback", "fork", "drop"]), COUNTS), min_size=1, max_size=12
)


@dataclass(frozen=True)
class Shape:
    num_hidden_layers: int = 2
    num_key_value_heads: int = 2
    head_dim: int = 12


def update(caches: list[LayeredCache], layer: int, count: int, seed: int) -> None:
    """The same random numbers in both, and the same answers from both."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(1, 2, count, 12, generator=generator).to(caches[0].dtype) for _ in range(2))
    answers = [cache.update(layer, keys, values) for cache in caches]
    tiles = [cache.tiles(layer) for cache in caches]
    for pair in (*zip(*answers, strict=True), *zip(*tiles, strict=True)):
        assert same_bits(*pair)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(operations=OPERATIONS)
@settings(max_examples=60, deadline=None)
def test_it_holds_what_the_plain_cache_holds(dtype: torch.dtype, operations: list[tuple[str, int]]) -> None:
    blocks: Any = BlockCache(Shape(), capacity=CAPACITY, dtype=dtype)
    plain: Any = ConcatCache(Shape(), dtype=dtype)
    for number, (what, count) in enumerate(operations):
        if what == "fork":
            blocks, plain = blocks.fork(), plain.fork()
        elif what == "rollback":
            length = max(plain.length - count, 0)
            blocks.rollback(length)
            plain.rollback(length)
        elif plain.length + count <= blocks.capacity:
            for layer in range(1 if what == "drop" else 2):
                update([blocks, plain], layer, count, 10 * number + layer)
            for cache in (blocks, plain):
                if what == "step":
                    cache.advance(count)
                else:
                    with pytest.raises(CacheMisuse):
                        cache.advance(count)
        else:
            numbers = torch.zeros(1, 2, count, 12, dtype=dtype)
            with pytest.raises(CacheOverflow):
                blocks.update(0, numbers, numbers)
        assert blocks.length == plain.length
        for layer in range(2):
            assert all(map(same_bits, blocks.read(layer), plain.read(layer)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_adopts_what_another_cache_holds(dtype: torch.dtype) -> None:
    blocks, plain = BlockCache(Shape(), capacity=CAPACITY, dtype=dtype), ConcatCache(Shape(), dtype=dtype)
    keys, values = torch.randn(2, 2, 2, 21, 12).to(dtype)  # [2, layers, G, positions, D]
    for layer in range(2):
        plain.update(layer, keys[None, layer], values[None, layer])
    plain.advance(21)
    blocks.adopt(keys, values)
    for layer in range(2):
        assert all(map(same_bits, blocks.read(layer), plain.read(layer)))


def test_capacity_is_whole_blocks_and_counted() -> None:
    cache = BlockCache(Shape(), capacity=17)
    assert (cache.capacity, cache.max_length) == (32, 32)
    assert cache.nbytes == cache.planes.untyped_storage().nbytes() == 2 * 2 * 2 * 32 * 16 * 4  # D is kept as 16
    with pytest.raises(CacheShapeError, match="capacity is 0"):
        BlockCache(Shape(), capacity=0)
