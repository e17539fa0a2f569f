"""L1 on the torch path: scores are a function of the ids alone; how they were cut into calls changes no bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from chunkings import COARSE, BothCaches, all_scores, differences, random_chunks, run_chunks
from kvouch.contract import TILE
from kvouch.engine.model import Model, load
from kvouch.loader.checkpoint import DtypeName
from kvouch.models.tiny import TINY_CONFIGS
from kvouch.numerics.bits import same_bits
from tiny_models import random_ids, tiny_model

pytestmark = pytest.mark.law(1)

TINY_LENGTH = 2 * TILE + 37


@pytest.fixture(params=[2, 3], ids=["2 threads", "3 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def check_chunkings(model: Model, plans: list[list[int]]) -> None:
    ids = random_ids(TINY_LENGTH)
    reference = model.static_cache(TINY_LENGTH)
    wanted = all_scores(model, ids, reference)
    for plan in plans:
        both: Any = BothCaches(model, TINY_LENGTH)
        for length, scores in run_chunks(model, ids, both, plan):
            assert same_bits(scores, wanted[:, length - 1]), f"scores at {length - 1}"
        for cache in (both.concat, both.static):
            assert differences(cache, reference) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_chunking_changes_no_bit_of_a_tiny_model(family: str, dtype: DtypeName) -> None:
    model = tiny_model(family, dtype, "torch")
    assert model.grade.name == "bitwise"
    one_by_one = [[1] * TINY_LENGTH] if family in ("gpt2", "smollm2") else []
    check_chunkings(model, [*one_by_one, *(random_chunks(TINY_LENGTH, seed) for seed in range(2))])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["gpt2", "smollm2"])
def test_no_number_of_threads_changes_a_bit_under_chunking(family: str, dtype: DtypeName, threads: int) -> None:
    """A model that was probed with one number of threads is probed again with another."""
    model = tiny_model(family, dtype, "torch")
    check_chunkings(model, [random_chunks(TINY_LENGTH, threads, COARSE)])
    assert (model.threads, model.grade.name) == (threads, "bitwise")


@pytest.mark.real_model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunking_changes_no_bit_of_the_real_model(dtype: DtypeName, smollm2_dir: Path) -> None:
    """One-shot prefill, token by token, and 2 random chunkings, over a tile edge, with both caches."""
    model, length = load(smollm2_dir, dtype=dtype, path="torch"), TILE + 9
    assert model.grade.name == "bitwise"
    ids = random_ids(length, vocabulary=model.config.vocab_size)
    reference = model.static_cache(length)
    wanted = dict(run_chunks(model, ids, reference, [1] * length))
    for plan in [[length], *(random_chunks(length, seed, COARSE) for seed in range(2))]:
        both: Any = BothCaches(model, length)
        for at, scores in run_chunks(model, ids, both, plan):
            assert same_bits(scores, wanted[at]), f"{plan}: scores at {at - 1}"
        for cache in (both.concat, both.static):
            assert differences(cache, reference) == [], f"{plan}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["gpt2", "llama3", "smollm2"])
def test_a_row_of_a_batch_equals_the_row_alone(family: str, dtype: DtypeName) -> None:
    model, length = tiny_model(family, dtype, "torch"), TILE + 9
    ids = random_ids(length, batch=3)
    together = model.static_cache(length, batch=3)
    prefilled = model.forward(ids[:, :-1], together, scores="all")
    decoded = model.forward(ids[:, -1:], together)
    for row in range(3):
        alone = model.static_cache(length)
        wanted = all_scores(model, ids[row : row + 1], alone)
        assert prefilled is not None
        assert decoded is not None
        assert same_bits(prefilled[row], wanted[0, :-1])
        assert same_bits(decoded[row], wanted[0, -1])
        for layer in range(alone.num_layers):
            for x, y in zip(together.read(layer), alone.read(layer), strict=True):
                assert same_bits(x[row], y[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", TINY_CONFIGS)
@pytest.mark.parametrize("length", [2, TILE, TILE + 1, TILE + 40])
def test_the_last_id_changes_nothing_before_it(family: str, dtype: DtypeName, length: int) -> None:
    """Causality, the premise of every cache."""
    model, ids = tiny_model(family, dtype, "torch"), random_ids(length)
    other = ids.clone()
    other[0, -1] = (ids[0, -1] + 1) % model.config.vocab_size
    first, second = model.static_cache(length), model.static_cache(length)
    before, after = all_scores(model, ids, first), all_scores(model, other, second)
    assert same_bits(before[:, :-1], after[:, :-1])
    assert not same_bits(before[:, -1], after[:, -1])
    first.rollback(length - 1)
    second.rollback(length - 1)
    assert differences(first, second) == []
