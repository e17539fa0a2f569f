"""Many prompts at once: each gets the scores and the answer that it would get alone, and shares what can be shared."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from kvouch.contract import BLOCK, TILE
from kvouch.engine.backend import RollbackBackend, UncachedBackend
from kvouch.engine.batch import BatchedBackend, Prompt
from kvouch.engine.loop import continuations, generate, generate_many
from kvouch.engine.model import Model, load
from kvouch.engine.request import Answer, Request
from kvouch.engine.sampling import SamplingParams
from kvouch.errors import InvalidIds, PoolFull, UsageError
from kvouch.numerics.bits import same_bits
from tiny_adapters import write_adapter
from tiny_models import random_ids, tiny_directory, tiny_model


@pytest.fixture(params=["auto", "torch"])
def model(request: pytest.FixtureRequest) -> Model:
    return tiny_model("smollm2", path=request.param)


def ids_of(count: int, seed: int = 0) -> list[int]:
    found: list[int] = random_ids(count, seed=seed)[0].tolist()
    return found


def prompts_of(*ids: list[int]) -> list[Prompt]:
    return [Prompt(ids=one) for one in ids]


def test_scores_are_those_of_each_alone(model: Model) -> None:
    backend, alone = BatchedBackend(model, model.pool(4 * TILE)), UncachedBackend(model)
    asked = [ids_of(5, 1), ids_of(TILE + 9, 2), ids_of(40, 3)]
    for step in range(4):
        found = backend.next_logits(prompts_of(*asked))
        assert all(same_bits(scores, alone.next_logits(ids)) for scores, ids in zip(found, asked, strict=True))
        computed = [verdict.computed_tokens for verdict in backend.verdicts]
        assert computed == ([5, TILE + 9, 40] if step == 0 else [1, 1, 1])
        asked = [[*ids, int(scores.argmax())] for ids, scores in zip(asked, found, strict=True)]
    assert backend.counters.positions == 54 + TILE + 9


def test_the_order_and_the_number_may_change_from_call_to_call(model: Model) -> None:
    pool = model.pool(4 * TILE)
    backend, alone = BatchedBackend(model, pool), UncachedBackend(model)
    first, second, third = ids_of(30, 1), ids_of(50, 2), ids_of(21, 3)
    backend.next_logits(prompts_of(first, second))
    found = backend.next_logits(prompts_of([*second, 7], third, [*first, 8]))
    assert [one.reused_tokens for one in backend.verdicts] == [50, 0, 30]
    for scores, ids in zip(found, ([*second, 7], third, [*first, 8]), strict=True):
        assert same_bits(scores, alone.next_logits(ids))
    backend.next_logits(prompts_of([*second, 7, 1]))
    assert pool.used == -(-52 // BLOCK)  # what was not asked again is given up
    pool.check()


def test_a_prompt_that_parts_from_another_forks_it(model: Model) -> None:
    pool = model.pool(4 * TILE)
    backend, alone = BatchedBackend(model, pool), UncachedBackend(model)
    stem = ids_of(TILE + 5)
    backend.next_logits(prompts_of(stem))
    branches = [[*stem, 1], [*stem, 2], [*stem[:100], 3]]
    found = backend.next_logits(prompts_of(*branches))
    assert [one.reused_tokens for one in backend.verdicts] == [TILE + 5, TILE + 5, 100]
    assert all(same_bits(scores, alone.next_logits(ids)) for scores, ids in zip(found, branches, strict=True))
    assert pool.used == -(-(TILE + 6) // BLOCK) + 1 + 1  # a block copied by each of two forks
    pool.check()


def test_equal_prompts_are_computed_once(model: Model) -> None:
    pool = model.pool(4 * TILE)
    backend, prompt = BatchedBackend(model, pool), ids_of(TILE + 5)
    found = backend.next_logits(prompts_of(*[prompt] * 4))
    assert [one.computed_tokens for one in backend.verdicts] == [TILE + 5, 0, 0, 0]
    assert [one.kind for one in backend.verdicts] == ["miss", "hit", "hit", "hit"]
    assert all(same_bits(one, found[0]) for one in found)
    assert len({one.data_ptr() for one in found}) == 4
    assert pool.used == -(-(TILE + 5) // BLOCK)


def test_a_prefix_is_held_until_it_is_released(model: Model) -> None:
    pool = model.pool(4 * TILE)
    backend, stem = BatchedBackend(model, pool), ids_of(TILE + 5)
    assert backend.prefill(Prompt(ids=stem)).computed_tokens == TILE + 5
    assert backend.prefill(Prompt(ids=stem)).computed_tokens == 0
    for turn in range(2):
        backend.next_logits(prompts_of([*stem, turn, 1], [*stem, turn, 2]))
        assert [one.reused_tokens for one in backend.verdicts] == [TILE + 5, TILE + 5]
    backend.release()
    assert pool.used == 0
    pool.check()


def test_another_salt_and_another_adapter_share_nothing(tmp_path: Path) -> None:
    model = load(tiny_directory(tmp_path / "model", "llama2"), dtype="float32")
    name = model.load_adapter(write_adapter(tmp_path / "adapter"))
    backend, ids = BatchedBackend(model, model.pool(4 * TILE)), ids_of(40)
    backend.next_logits([Prompt(ids=ids)])
    asked = [Prompt(ids=[*ids, 1]), Prompt(ids=[*ids, 1], adapter=name), Prompt(ids=[*ids, 1], salt="other")]
    found = backend.next_logits(asked)
    assert [one.reused_tokens for one in backend.verdicts] == [40, 0, 0]
    assert str(backend.verdicts[1].reason) == "computed under another identity: adapters differs"
    assert str(backend.verdicts[2].reason) == "no entry"
    adapted = UncachedBackend(model.bind(adapter=name)).next_logits([*ids, 1])
    assert same_bits(found[1], adapted)
    assert same_bits(found[2], found[0])
    assert not same_bits(found[0], adapted)


@pytest.mark.parametrize("blocks", range(3, 9))
def test_what_fails_leaves_all_that_was_held(model: Model, blocks: int) -> None:
    """Nine blocks are needed besides what is held."""
    pool = model.pool(blocks * BLOCK)
    backend, held = BatchedBackend(model, pool), ids_of(40)
    backend.next_logits(prompts_of(held))
    with pytest.raises(PoolFull):
        backend.next_logits(prompts_of([*held, 1], [*held, 2], ids_of(7 * BLOCK, 5)))
    with pytest.raises(InvalidIds):
        backend.next_logits(prompts_of([*held, 1], [999]))
    assert (pool.used, backend.verdicts) == (3, [])
    pool.check()
    backend.next_logits(prompts_of([*held, 1]))
    assert backend.verdicts[0].reused_tokens == 40


def test_nothing_asked_is_refused(model: Model) -> None:
    with pytest.raises(UsageError, match="give at least one"):
        BatchedBackend(model, model.pool(TILE)).next_logits([])


def tick() -> float:
    return float(next(_ticks))


_ticks = itertools.count()


def alone(model: Model, request: Request) -> Answer:
    *_, last = generate(RollbackBackend(model), request, tokenizer=None, context_tokens=512, clock=tick)
    assert isinstance(last, Answer)
    return last


def test_many_answers_are_those_of_each_alone(model: Model) -> None:
    """Of different lengths: a step computes those that are not done."""
    requests = [
        Request(ids=tuple(ids_of(length, length)), max_new_tokens=new, sampling=SamplingParams(temperature=t, seed=9))
        for length, new, t in ((5, 12, 0.0), (TILE + 3, 3, 1.5), (40, 20, 0.7), (17, 1, 0.0))
    ]
    backend = BatchedBackend(model, model.pool(4 * TILE))
    answers = generate_many(backend, requests, tokenizer=None, context_tokens=512, clock=tick)
    for answer, request in zip(answers, requests, strict=True):
        wanted = alone(model, request)
        assert (answer.ids, answer.finish) == (wanted.ids, wanted.finish)
        assert answer.verdict.computed_tokens == len(request.ids)
    assert backend.counters.positions == 5 + TILE + 3 + 40 + 17 + 11 + 2 + 19


def test_continuations_share_their_prompt(model: Model) -> None:
    request = Request(ids=tuple(ids_of(TILE + 5)), max_new_tokens=8, sampling=SamplingParams(temperature=2.0, seed=3))
    pool = model.pool(4 * TILE)
    backend = BatchedBackend(model, pool)
    answers = generate_many(backend, continuations(request, 4), tokenizer=None, context_tokens=512, clock=tick)
    assert len({answer.ids for answer in answers}) == 4
    for seed, answer in enumerate(answers, start=3):
        chosen = replace(request, sampling=replace(request.sampling, seed=seed))
        assert answer.ids == alone(model, chosen).ids
    assert backend.counters.positions == TILE + 5 + 4 * 7
    pool.check()
