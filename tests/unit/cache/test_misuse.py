"""What a cache is not made for is a typed error, after which it is as it was and goes on working."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kvouch.cache.base import LayeredCache
from kvouch.cache.concat import ConcatCache
from kvouch.cache.sizing import cache_bytes, whole_tiles
from kvouch.cache.static import StaticCache
from kvouch.contract import TILE
from kvouch.errors import CacheMisuse, CacheOverflow, CacheShapeError
from kvouch.loader.config import parse_config
from kvouch.numerics.bits import same_bits


@dataclass(frozen=True)
class Shape:
    num_hidden_layers: int = 3
    num_key_value_heads: int = 2
    head_dim: int = 4


SHAPE, BATCH, HELD = Shape(), 2, 5
NEXT = 100  # positions from here on hold other numbers than those that are held

MAKERS: dict[str, Callable[[], LayeredCache]] = {
    "concat": lambda: ConcatCache(SHAPE, batch=BATCH),
    "static": lambda: StaticCache(SHAPE, capacity=TILE, batch=BATCH),
}


def numbers(layer: int, first: int, count: int) -> Tensor:
    """[B, G, count, D], different for every layer and position."""
    positions = torch.arange(first, first + count).float()[:, None].expand(BATCH, 2, count, 4)
    return positions + 1000 * (layer + 1)


def step(cache: LayeredCache, first: int, count: int) -> None:
    """A whole step: values are the keys with the other sign."""
    for layer in range(cache.num_layers):
        cache.update(layer, numbers(layer, first, count), -numbers(layer, first, count))
    cache.advance(count)


def check(cache: LayeredCache, *held: tuple[int, int]) -> None:
    """The cache holds just these runs of numbers (first, count)."""
    assert cache.length == sum(count for _, count in held)
    assert cache.nbytes == cache_bytes(SHAPE, BATCH, cache.capacity, torch.float32) == tensor_bytes(cache)
    for layer in range(cache.num_layers):
        wanted = torch.cat([numbers(layer, first, count) for first, count in held], dim=2)
        keys, values = cache.read(layer)
        assert same_bits(keys, wanted)
        assert same_bits(values, -wanted)


def tensor_bytes(cache: LayeredCache) -> int:
    """Bytes of the storages that a cache keeps alive, each once."""
    tensors = cache._keys + cache._values if isinstance(cache, ConcatCache) else [cache._buffer]  # type: ignore[attr-defined]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@pytest.fixture(params=MAKERS)
def cache(request: pytest.FixtureRequest) -> LayeredCache:
    """A cache that holds HELD positions."""
    made = MAKERS[request.param]()
    step(made, 0, HELD)
    check(made, (0, HELD))
    return made


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


GOOD = zeros(2, 2, 3, 4)

WRONG_UPDATES: dict[str, tuple[Tensor, Tensor]] = {
    "batch": (zeros(1, 2, 3, 4), zeros(1, 2, 3, 4)),
    "batch of values": (GOOD, zeros(3, 2, 3, 4)),
    "heads": (zeros(2, 6, 3, 4), zeros(2, 6, 3, 4)),
    "one head for all": (zeros(2, 1, 3, 4), zeros(2, 1, 3, 4)),
    "head size": (zeros(2, 2, 3, 8), zeros(2, 2, 3, 8)),
    "head size of values": (GOOD, zeros(2, 2, 3, 1)),
    "dtype": (GOOD.bfloat16(), GOOD.bfloat16()),
    "dtype of values": (GOOD, GOOD.double()),
    "whole numbers": (GOOD.int(), GOOD.int()),
    "device": (GOOD.to("meta"), GOOD.to("meta")),
    "no positions": (zeros(2, 2, 0, 4), zeros(2, 2, 0, 4)),
    "3-D": (zeros(2, 3, 4), zeros(2, 3, 4)),
    "3-D values": (GOOD, zeros(2, 3, 4)),
    "5-D": (GOOD[None], GOOD[None]),
    "0-D": (torch.tensor(1.0), torch.tensor(1.0)),
    "more keys than values": (GOOD, zeros(2, 2, 2, 4)),
    "fewer keys than values": (GOOD, zeros(2, 2, 4, 4)),
    "positions before heads": (zeros(2, 3, 2, 4), zeros(2, 3, 2, 4)),
}


@pytest.mark.law(3)
@pytest.mark.parametrize("at", range(SHAPE.num_hidden_layers))
@pytest.mark.parametrize("case", WRONG_UPDATES)
def test_tensors_that_do_not_fit_are_refused(cache: LayeredCache, case: str, at: int) -> None:
    """In any layer of a step: those before it are dropped with it."""
    for layer in range(at):
        cache.update(layer, numbers(layer, NEXT, 3), numbers(layer, NEXT, 3))
    with pytest.raises(CacheShapeError, match=r"(keys|values) (have shape|are) .*(is needed|this cache)"):
        cache.update(at, *WRONG_UPDATES[case])
    check(cache, (0, HELD))
    step(cache, NEXT, 2)
    check(cache, (0, HELD), (NEXT, 2))


@pytest.mark.law(3)
@pytest.mark.parametrize("layer", [-1, 3, 10**9])
def test_a_layer_that_is_not_there_is_refused(cache: LayeredCache, layer: int) -> None:
    cache.update(0, GOOD, GOOD)
    with pytest.raises(CacheMisuse, match=rf"layer {layer} does not exist: the cache has 3 layers"):
        cache.update(layer, GOOD, GOOD)
    check(cache, (0, HELD))
    step(cache, NEXT, 2)
    check(cache, (0, HELD), (NEXT, 2))


@pytest.mark.law(3)
@pytest.mark.parametrize("count", [1, 3, 4])
def test_a_layer_updated_twice_is_refused(cache: LayeredCache, count: int) -> None:
    """With as many positions or with others; the first update goes with the second."""
    cache.update(0, numbers(0, NEXT, 3), numbers(0, NEXT, 3))
    cache.update(1, numbers(1, NEXT, 3), numbers(1, NEXT, 3))
    with pytest.raises(CacheMisuse, match="layer 1 was updated twice before advance"):
        cache.update(1, numbers(1, NEXT, count), numbers(1, NEXT, count))
    check(cache, (0, HELD))
    step(cache, NEXT, 2)
    check(cache, (0, HELD), (NEXT, 2))


UNEQUAL: dict[str, tuple[list[int], int]] = {  # positions given to each layer, then what advance is told
    "nothing": ([0, 0, 0], 1),
    "nothing by nothing": ([0, 0, 0], 0),
    "a step by nothing": ([3, 3, 3], 0),
    "a step backwards": ([3, 3, 3], -3),
    "fewer than were given": ([3, 3, 3], 2),
    "more than were given": ([3, 3, 3], 4),
    "a layer left out": ([3, 0, 3], 3),
    "the last layer left out": ([3, 3, 0], 3),
    "a longer layer": ([3, 4, 3], 3),
    "a shorter layer": ([3, 3, 1], 3),
}


@pytest.mark.law(3)
@pytest.mark.parametrize("case", UNEQUAL)
def test_layers_that_were_not_updated_alike_do_not_advance(cache: LayeredCache, case: str) -> None:
    counts, told = UNEQUAL[case]
    for layer, count in enumerate(counts):
        if count:
            cache.update(layer, numbers(layer, NEXT, count), numbers(layer, NEXT, count))
    with pytest.raises(CacheMisuse, match=rf"advance\({told}\): .*the length stays {HELD}"):
        cache.advance(told)
    check(cache, (0, HELD))
    step(cache, NEXT, 2)
    check(cache, (0, HELD), (NEXT, 2))


@pytest.mark.law(3)
@pytest.mark.parametrize("at", range(SHAPE.num_hidden_layers))
def test_an_update_past_the_capacity_is_refused(at: int) -> None:
    cache = MAKERS["static"]()
    step(cache, 0, HELD)
    most = TILE - HELD
    for layer in range(at):
        cache.update(layer, numbers(layer, NEXT, most), numbers(layer, NEXT, most))
    with pytest.raises(CacheOverflow, match=f"ends at position {TILE + 1}; this cache holds {TILE}"):
        cache.update(at, numbers(at, NEXT, most + 1), numbers(at, NEXT, most + 1))
    check(cache, (0, HELD))
    step(cache, NEXT, most)
    check(cache, (0, HELD), (NEXT, most))
    with pytest.raises(CacheOverflow):
        cache.update(0, numbers(0, 0, 1), numbers(0, 0, 1))
    check(cache, (0, HELD), (NEXT, most))


def test_capacities_round_up_to_a_tile() -> None:
    for asked, held in {1: TILE, TILE: TILE, TILE + 1: 2 * TILE}.items():
        assert StaticCache(SHAPE, capacity=asked).capacity == StaticCache(SHAPE, capacity=asked).max_length == held
        assert whole_tiles(asked) == held
    assert ConcatCache(SHAPE).max_length is None


@pytest.mark.parametrize("number", [0, -1])
def test_a_cache_for_nothing_is_refused(number: int) -> None:
    with pytest.raises(CacheShapeError, match=f"batch is {number}"):
        ConcatCache(SHAPE, batch=number)
    with pytest.raises(CacheShapeError, match=f"batch is {number}"):
        StaticCache(SHAPE, capacity=TILE, batch=number)
    with pytest.raises(CacheShapeError, match=f"capacity is {number}"):
        StaticCache(SHAPE, capacity=number)


@pytest.mark.law(5)
@pytest.mark.parametrize("length", [-1, HELD + 1, -HELD, 10**9])
def test_a_rollback_that_cannot_be_done_is_refused(cache: LayeredCache, length: int) -> None:
    with pytest.raises(CacheMisuse, match=rf"rollback\({length}\): the cache holds {HELD} positions"):
        cache.rollback(length)
    check(cache, (0, HELD))


@pytest.mark.law(3)
@pytest.mark.parametrize(
    "drop", [lambda cache: cache.rollback(HELD), lambda cache: cache.rollback(2), LayeredCache.reset]
)
def test_what_is_pending_goes_with_a_rollback(cache: LayeredCache, drop: Callable[[LayeredCache], Any]) -> None:
    cache.update(0, numbers(0, NEXT, 3), numbers(0, NEXT, 3))
    drop(cache)
    kept = cache.length
    step(cache, NEXT, 2)
    check(cache, *([(0, kept)] if kept else []), (NEXT, 2))


@pytest.mark.law(3)
def test_a_write_that_fails_half_way_is_dropped(cache: LayeredCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may run out between the keys and the values of a layer."""
    write = type(cache)._write

    def failing(self: LayeredCache, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        found = write(self, layer, keys, values)
        if layer == 1:
            raise MemoryError
        return found

    monkeypatch.setattr(type(cache), "_write", failing)
    cache.update(0, GOOD, GOOD)
    with pytest.raises(MemoryError):
        cache.update(1, GOOD, GOOD)
    monkeypatch.undo()
    check(cache, (0, HELD))
    with pytest.raises(CacheMisuse):
        cache.advance(3)
    step(cache, NEXT, 2)
    check(cache, (0, HELD), (NEXT, 2))


# What update returns, and whose it is.


def test_update_returns_all_positions_and_copies_what_it_is_given(cache: LayeredCache) -> None:
    given = numbers(0, NEXT, 3).contiguous()
    keys, values = cache.update(0, given, -given)
    wanted = torch.cat([numbers(0, 0, HELD), numbers(0, NEXT, 3)], dim=2)
    assert same_bits(keys, wanted)
    assert same_bits(values, -wanted)
    given.fill_(-1)
    assert same_bits(keys, wanted)


def test_layers_and_directions_share_no_memory() -> None:
    for make in MAKERS.values():
        made = make()
        step(made, 0, HELD)
        for layer in range(made.num_layers):
            for tensor in made.read(layer):
                before = [other.clone() for index in range(made.num_layers) for other in made.read(index)]
                tensor.fill_(7.0)
                after = [other for index in range(made.num_layers) for other in made.read(index)]
                assert sum(not same_bits(a, b) for a, b in zip(before, after, strict=True)) == 1


@pytest.mark.law(4)
def test_a_fork_is_independent(cache: LayeredCache) -> None:
    twin = cache.fork()
    assert type(twin) is type(cache)
    assert (twin.batch, twin.dtype, twin.device, twin.capacity) == (
        cache.batch,
        cache.dtype,
        cache.device,
        cache.capacity,
    )
    check(twin, (0, HELD))
    step(cache, NEXT, 2)
    step(twin, 2 * NEXT, 4)
    check(cache, (0, HELD), (NEXT, 2))
    check(twin, (0, HELD), (2 * NEXT, 4))
    cache.rollback(1)
    cache.read(0)[0].fill_(-7)
    check(twin, (0, HELD), (2 * NEXT, 4))
    twin.reset()
    step(twin, NEXT, 1)
    check(twin, (NEXT, 1))


@pytest.mark.law(4)
def test_a_fork_in_mid_step_has_nothing_of_the_step(cache: LayeredCache) -> None:
    cache.update(0, numbers(0, NEXT, 3), -numbers(0, NEXT, 3))
    twin = cache.fork()
    check(twin, (0, HELD))
    step(twin, 2 * NEXT, 2)
    for layer in (1, 2):
        cache.update(layer, numbers(layer, NEXT, 3), -numbers(layer, NEXT, 3))
    cache.advance(3)
    check(cache, (0, HELD), (NEXT, 3))
    check(twin, (0, HELD), (2 * NEXT, 2))


# Bytes.

GPT2_SMALL = parse_config(
    {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257},
    "c.json",
)
MIB = 2**20


@pytest.mark.parametrize(
    ("dtype", "mebibytes"), [(torch.float32, 72), (torch.float16, 36), (torch.bfloat16, 36)], ids=str
)
def test_the_figure_of_the_chapter(dtype: torch.dtype, mebibytes: int) -> None:
    """GPT-2 small with 1,024 positions."""
    assert cache_bytes(GPT2_SMALL, 1, 1024, dtype) == mebibytes * MIB
    assert cache_bytes(GPT2_SMALL, 3, 512, dtype) == 3 * mebibytes * MIB // 2
    cache = StaticCache(GPT2_SMALL, capacity=1024, dtype=dtype, device="meta")
    assert cache.nbytes == cache._buffer.nbytes == mebibytes * MIB


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_bytes_are_those_of_the_tensors(batch: int, dtype: torch.dtype) -> None:
    static = StaticCache(SHAPE, capacity=TILE + 1, batch=batch, dtype=dtype)
    assert static.nbytes == cache_bytes(SHAPE, batch, 2 * TILE, dtype) == tensor_bytes(static)
    grown = ConcatCache(SHAPE, batch=batch, dtype=dtype)
    assert grown.nbytes == cache_bytes(SHAPE, batch, 0, dtype) == tensor_bytes(grown) == 0
    for count in (1, 7):
        for layer in range(grown.num_layers):
            grown.update(layer, zeros(batch, 2, count, 4, dtype=dtype), zeros(batch, 2, count, 4, dtype=dtype))
        grown.advance(count)
        assert grown.nbytes == cache_bytes(SHAPE, batch, grown.length, dtype) == tensor_bytes(grown)


def test_a_rollback_of_a_concat_cache_gives_memory_back() -> None:
    """A view of the first positions would keep all of them alive."""
    cache = MAKERS["concat"]()
    step(cache, 0, 1000)
    full = tensor_bytes(cache)
    assert full == cache_bytes(SHAPE, BATCH, 1000, torch.float32)
    for kept in (999, 10, 0):
        cache.rollback(kept)
        assert tensor_bytes(cache) == cache.nbytes == full * kept // 1000
        twin = cache.fork()
        assert tensor_bytes(twin) == twin.nbytes == full * kept // 1000


def test_a_dropped_step_of_a_concat_cache_gives_memory_back(cache: LayeredCache) -> None:
    before = tensor_bytes(cache)
    cache.update(0, numbers(0, NEXT, 200), numbers(0, NEXT, 200))
    with pytest.raises(CacheMisuse):
        cache.advance(200)
    assert tensor_bytes(cache) == before
