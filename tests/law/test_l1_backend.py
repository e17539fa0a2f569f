"""L1 and L2 of the backend: whatever it was asked before, its scores are those of no reuse, and its counts are true."""

import random
from collections.abc import Iterator

import pytest

from kvouch.contract import TILE
from kvouch.engine.backend import RollbackBackend
from kvouch.engine.model import Model
from kvouch.numerics.bits import same_bits
from scripted import count_positions
from tiny_models import own_weights, tiny_model

FAMILIES = ("gpt2", "llama3", "smollm2", "qwen3")
EDGES = [n for tiles in (1, 2) for n in (tiles * TILE - 1, tiles * TILE, tiles * TILE + 1)]


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request: pytest.FixtureRequest) -> Model:
    return tiny_model(request.param)


@pytest.fixture
def model(loaded: Model) -> Model:
    assert loaded.grade.name == "bitwise"
    return own_weights(loaded)


def history(seed: int, calls: int) -> Iterator[list[int]]:
    """Prompts that continue, repeat, shorten, or leave earlier ones somewhere; lengths often at a tile's edge."""
    rng, ids = random.Random(seed), [5]
    for _ in range(calls):
        kept = rng.choice([len(ids), len(ids), rng.randrange(len(ids) + 1), 0])
        target = rng.choice([kept + 1, kept + 1, kept, rng.choice(EDGES), rng.randrange(1, 2 * TILE + 40)])
        ids = ids[: min(kept, target)] + [rng.randrange(257) for _ in range(target - kept)]
        ids = ids or [rng.randrange(257)]
        yield list(ids)


@pytest.mark.law(1)
@pytest.mark.law(2)
@pytest.mark.parametrize("seed", range(3))
def test_any_history_gives_the_bits_of_no_reuse_and_true_counts(model: Model, seed: int) -> None:
    reference = own_weights(model)
    taken = count_positions(model)
    backend, held = RollbackBackend(model, capacity=1), list[int]()
    for ids in history(seed, calls=14):
        scores = backend.next_logits(ids)
        wanted = reference.forward(ids, reference.concat_cache())
        assert wanted is not None
        assert same_bits(scores, wanted[0]), f"after {len(held)} ids held, {len(ids)} asked"
        verdict = backend.verdict
        assert verdict.computed_tokens == taken()
        assert verdict.reused_tokens + verdict.computed_tokens == len(ids)
        assert held[: verdict.reused_tokens] == ids[: verdict.reused_tokens]
        assert (
            verdict.reused_tokens == len(ids) - 1
            or held[: verdict.reused_tokens + 1] != ids[: verdict.reused_tokens + 1]
        )
        held = ids


@pytest.mark.law(1)
def test_forks_and_prefills_give_the_bits_of_no_reuse(model: Model) -> None:
    parent, document = RollbackBackend(model), next(history(7, 1)) * 50
    parent.prefill(document)
    for tail in ([1], [2, 3], [1, 2, 3, 4, 5]):
        child = parent.fork()
        wanted = model.forward([*document, *tail], model.concat_cache())
        assert wanted is not None
        assert same_bits(child.next_logits([*document, *tail]), wanted[0])
        assert child.verdict.reused_tokens == len(document)


@pytest.mark.law(2)
@pytest.mark.parametrize("length", [1, 2, *EDGES])
def test_identical_ids_compute_one_position(model: Model, length: int) -> None:
    backend, ids = RollbackBackend(model), [n % 257 for n in range(length)]
    first = backend.next_logits(ids)
    taken = count_positions(model)
    assert same_bits(backend.next_logits(ids), first)
    assert taken() == 1
    assert (backend.verdict.reused_tokens, backend.verdict.computed_tokens) == (length - 1, 1)
