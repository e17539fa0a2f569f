"""L1, L3: a sequence's bits do not depend on its neighbours, and a batch that fails changes nothing."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from chunkings import differences
from kvouch.cache.paged import PagedCache
from kvouch.cache.pool import BlockPool
from kvouch.contract import BLOCK, TILE, KVCache
from kvouch.engine.bound import Current
from kvouch.engine.model import Model, load
from kvouch.errors import CacheMisuse, CacheShapeError, ContextOverflow, InvalidIds, NonFinite, PoolFull, UsageError
from kvouch.kernels.binding import VARIANTS, has_step, library
from kvouch.loader.checkpoint import DTYPES, DtypeName
from kvouch.models.forward import forward_many
from kvouch.models.paths import PathName
from kvouch.models.tiny import TINY_CONFIGS
from kvouch.numerics.bits import same_bits
from tiny_adapters import LLAMA_TARGETS, lora_tensors, write_adapter
from tiny_models import random_ids, tiny_directory, tiny_model

pytestmark = [pytest.mark.law(1), pytest.mark.law(3)]

STEP = library()
RUNS = STEP.variants if not isinstance(STEP, str) else ()
CASES: list[Any] = [(variant, dtype) for variant in VARIANTS for dtype in DTYPES if has_step(variant, DTYPES[dtype])]
CASES += [("torch", "float32")]


@pytest.fixture(params=CASES, ids=lambda case: "-".join(case))
def case(request: pytest.FixtureRequest) -> tuple[PathName, DtypeName]:
    if request.param[0] not in (*RUNS, "torch"):
        pytest.skip(f"this processor does not run {request.param[0]}")
    found: tuple[PathName, DtypeName] = request.param
    return found


def ids_of(count: int, seed: int) -> list[int]:
    found: list[int] = random_ids(count, seed=seed)[0].tolist()
    return found


def together(currents: Sequence[Current], ids: Sequence[list[int]], caches: Sequence[KVCache]) -> list[Tensor]:
    """All scores of each sequence's new ids, computed in one batch."""
    chunks = [now.chunk(new, cache, "all") for now, new, cache in zip(currents, ids, caches, strict=True)]
    found = forward_many(chunks, currents[0].model.config)
    return [scores for scores in found if scores is not None]


def alone(now: Current, ids: list[int]) -> tuple[Tensor, KVCache]:
    """All scores of a sequence in one call without neighbours."""
    cache = now.model.new_cache(len(ids))
    scores = now.forward(ids, cache, scores="all")
    assert scores is not None
    return scores[0], cache


@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_a_sequence_is_the_same_in_every_company(case: tuple[PathName, DtypeName], family: str) -> None:
    """2 to 16 sequences in random order, prefills and single tokens mixed, some forked in mid-block and mid-tile."""
    variant, dtype = case
    model = tiny_model(family, dtype, variant)
    now, rng = model.current(), Random(0)
    count = 6 if variant == "torch" else 16
    prompts = [ids_of(rng.choice([3, BLOCK, 40, TILE, TILE + 9, 2 * TILE + 30]), seed) for seed in range(count)]
    for number in range(1, count, 3):  # the same beginning as the one before, up to the middle of a block or tile
        shared = prompts[number - 1][: rng.choice([10, TILE + 5, 2 * TILE + 21])]
        prompts[number] = [*shared, *ids_of(20, 100 + number)]
    expected = [alone(now, prompt) for prompt in prompts]
    for size in (2, 5, count):
        torch.set_num_threads(1 + size % 3)
        chosen = rng.sample(range(count), size)
        pool = model.pool(sum(len(prompts[n]) + 2 * BLOCK for n in chosen))
        caches: dict[int, PagedCache] = {}
        for n in chosen:
            source = caches.get(n - 1)
            if n % 3 == 1 and source is not None and source.length:
                caches[n] = source.fork()
                common = next(
                    (i for i, (a, b) in enumerate(zip(prompts[n], prompts[n - 1], strict=False)) if a != b), 0
                )
                caches[n].rollback(min(common, source.length, len(prompts[n]) - 1))
            else:
                caches[n] = PagedCache(pool)
                start = rng.randrange(len(prompts[n]))
                if start:
                    now.forward(prompts[n][:start], caches[n], scores="none")
        while going := [n for n in chosen if caches[n].length < len(prompts[n])]:
            firsts = [caches[n].length for n in going]
            pieces = [
                prompts[n][first : first + rng.choice([1, 1, 1, 2, 7, 100, 300])]
                for n, first in zip(going, firsts, strict=True)
            ]
            found = together([now] * len(going), pieces, [caches[n] for n in going])
            for n, first, scores in zip(going, firsts, found, strict=True):
                assert same_bits(scores, expected[n][0][first : first + len(scores)]), f"sequence {n} at {first}"
            pool.check()
        for n in chosen:
            assert differences(caches[n], expected[n][1]) == []


def test_adapters_are_mixed_by_row(case: tuple[PathName, DtypeName], tmp_path: Path) -> None:
    variant, dtype = case
    model = load(tiny_directory(tmp_path / "model", "llama2"), dtype=dtype, path=variant)
    names = [None, model.load_adapter(write_adapter(tmp_path / "one")), None]
    second = write_adapter(tmp_path / "two", lora_tensors(LLAMA_TARGETS, seed=3))
    names[2] = model.load_adapter(second)
    currents = [model.current(adapter=names[n % 3]) for n in range(7)]
    prompts = [ids_of(length, length) for length in (1, 5, 12, 30, TILE + 3, 2, 9)]
    expected = [alone(now, ids) for now, ids in zip(currents, prompts, strict=True)]
    pool = model.pool(4 * TILE)
    caches = [PagedCache(pool) for _ in prompts]
    found = together(currents, prompts, caches)
    for scores, cache, (wanted, held) in zip(found, caches, expected, strict=True):
        assert same_bits(scores, wanted)
        assert differences(cache, held) == []
    assert not same_bits(alone(currents[1], prompts[2])[0], expected[2][0])  # it matters which


@pytest.mark.real_model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_twenty_prompts_of_the_real_model(dtype: DtypeName, smollm2_dir: Path) -> None:
    """In batches of 2 to 16 and in other orders, forked in mid-block: all scores, keys and values."""
    model = load(smollm2_dir, dtype=dtype)
    if model.path == "torch":
        pytest.skip(f"no compiled step: {model.not_compiled}")
    now, rng, size = model.current(), Random(1), model.config.vocab_size
    stem = random_ids(TILE + 21, seed=99, vocabulary=size)[0].tolist()
    prompts = [random_ids(rng.randrange(2, 60), seed=n, vocabulary=size)[0].tolist() for n in range(20)]
    prompts = [[*stem, *ids] if n % 4 == 0 else ids for n, ids in enumerate(prompts)]
    expected = [alone(now, ids) for ids in prompts]
    pool = model.pool(20 * 2 * TILE)
    trunk = PagedCache(pool)
    now.forward(stem, trunk, scores="none")
    for count in (2, 7, 16):
        order = rng.sample(range(20), 20)
        for group in (order[start : start + count] for start in range(0, 20, count)):
            caches = [trunk.fork() if n % 4 == 0 else PagedCache(pool) for n in group]
            new = [prompts[n][cache.length :] for n, cache in zip(group, caches, strict=True)]
            found = together([now] * len(group), new, caches)
            for n, scores, cache in zip(group, found, caches, strict=True):
                assert same_bits(scores, expected[n][0][-len(scores) :])
                assert differences(cache, expected[n][1]) == []
                cache.release()
    pool.check()


@pytest.mark.parametrize("value", [1e30, 3e38, float("inf"), float("nan")])
def test_stale_memory_reaches_nothing(case: tuple[PathName, DtypeName], value: float) -> None:
    """Every number of the pool that no sequence has written, from one step to the next."""
    variant, dtype = case
    if variant == "torch":
        pytest.skip("torch reads copies of what is held, padded with zeros")
    model = tiny_model("smollm2", dtype, variant)
    now, pool = model.current(), model.pool(3 * TILE)
    prompts = [ids_of(length, length) for length in (5, 40, TILE + 20)]
    expected = [alone(now, prompt)[0] for prompt in prompts]
    pool.planes.copy_(torch.tensor(value).to(pool.dtype))  # beyond float16 it is infinity
    pool._fresh = 0  # zeroing would hide it
    caches = [PagedCache(pool) for _ in prompts]
    pool._bits = _Unwritten(pool._bits)
    for piece in (slice(0, 4), slice(4, 31), slice(31, None)):
        going = [n for n in range(3) if prompts[n][piece]]
        found = together([now] * len(going), [prompts[n][piece] for n in going], [caches[n] for n in going])
        for n, scores in zip(going, found, strict=True):
            assert same_bits(scores, expected[n][piece])


class _Unwritten:
    """Numbers that are not zeroed."""

    def __init__(self, bits: Any) -> None:
        self.bits = bits

    def __getitem__(self, at: Any) -> Any:
        return self.bits[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        if not isinstance(value, int):
            self.bits[at] = value


# What goes wrong.


@pytest.fixture(params=["auto", "torch"])
def model(request: pytest.FixtureRequest) -> Model:
    return tiny_model("smollm2", path=request.param)


def started(model: Model, pool: BlockPool, lengths: Sequence[int]) -> list[PagedCache]:
    caches = [PagedCache(pool) for _ in lengths]
    for length, cache in zip(lengths, caches, strict=True):
        model.forward(ids_of(length, length), cache, scores="none")
    return caches


@pytest.mark.parametrize("spare", range(4))
def test_a_full_pool_stops_all_and_harms_none(model: Model, spare: int) -> None:
    """The four need five blocks, one of them for a copy."""
    pool, now = model.pool((6 + spare) * BLOCK), model.current()
    caches = started(model, pool, [BLOCK, 2 * BLOCK - 1, 20])
    caches.append(caches[2].fork())
    held = [(cache.length, list(cache.blocks), [t.clone() for t in cache.read(1)]) for cache in caches]
    new = [ids_of(BLOCK + 1, 50), ids_of(2, 51), ids_of(1, 52), ids_of(BLOCK - 3, 53)]
    with pytest.raises(PoolFull, match="free"):
        together([now] * 4, new, caches)
    for cache, (length, blocks, numbers) in zip(caches, held, strict=True):
        assert cache.length == length
        assert all(map(same_bits, cache.read(1), numbers))
        assert len(cache.blocks) == len(blocks)
    pool.check()
    caches[0].release()  # the others go on
    found = together([now], [new[1]], [caches[1]])
    assert same_bits(found[0], alone(now, [*ids_of(2 * BLOCK - 1, 2 * BLOCK - 1), *new[1]])[0][-2:])


@pytest.mark.parametrize("layer", [0, 1])
def test_what_raises_in_a_layer_advances_nobody(model: Model, layer: int) -> None:
    pool, now = model.pool(4 * TILE), model.current()
    caches = started(model, pool, [7, TILE - 2, 30])

    def watch(number: int) -> None:
        if number == layer and all(cache.length >= 30 for cache in caches[1:]):
            raise RuntimeError("out of luck")

    chunks = [now.chunk(ids_of(count, count), cache, "last") for count, cache in zip((1, 5, 20), caches, strict=True)]
    free = pool.free
    with pytest.raises(RuntimeError, match="out of luck"):
        forward_many(chunks, model.config, watch=watch)
    assert [cache.length for cache in caches] == [7, TILE - 2, 30]
    assert pool.free == free
    pool.check()


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_numbers_that_are_none_name_their_sequence(model: Model, broken: int) -> None:
    """By its place in the batch, whatever order it is computed in."""
    pool, now = model.pool(2 * TILE), model.current()
    caches = started(model, pool, [7, 20, 9])
    pool.planes[0, 1, 0, caches[broken].blocks[0]] = float("inf")
    first = caches[broken].length
    with pytest.raises(NonFinite, match=f"^sequence {broken}, positions {first} to {first + 3 - broken}:"):
        together([now] * 3, [ids_of(4, 1), ids_of(3, 2), ids_of(2, 3)], caches)
    assert [cache.length for cache in caches] == [7, 20, 9]
    pool.check()


def test_misuse_is_refused_before_any_work(model: Model) -> None:
    pool, now = model.pool(4 * TILE), model.current()
    one, two = started(model, pool, [7, 20])
    with pytest.raises(CacheMisuse, match="comes twice"):
        together([now] * 2, [[1], [2]], [one, one])
    with pytest.raises(InvalidIds, match="outside the vocabulary"):
        together([now] * 2, [[1], [999]], [one, two])
    with pytest.raises(InvalidIds):
        together([now] * 2, [[1], []], [one, two])
    with pytest.raises(ContextOverflow):
        together([now] * 2, [[1], ids_of(model.config.max_position_embeddings, 1)], [one, two])
    two.release()
    with pytest.raises(CacheMisuse, match="was released"):
        together([now] * 2, [[1], [2]], [one, two])
    assert one.length == 7
    pool.check()


def test_caches_of_other_pools_and_models_are_refused(tmp_path: Path) -> None:
    model = tiny_model("smollm2")
    if model.path == "torch":
        pytest.skip(f"no compiled step: {model.not_compiled}")
    now = model.current()
    one, other = PagedCache(model.pool(TILE)), PagedCache(model.pool(TILE))
    with pytest.raises(CacheShapeError, match="one pool"):
        together([now] * 2, [[1], [2]], [one, other])
    with pytest.raises(CacheShapeError, match="one pool"):
        together([now] * 2, [[1], [2]], [one, model.static_cache(8)])
    stranger = load(tiny_directory(tmp_path, "smollm2", seed=1), dtype="float32").current()
    with pytest.raises(UsageError, match="one model"):
        together([now, stranger], [[1], [2]], [one, one.fork()])
    assert (one.length, other.length) == (0, 0)
