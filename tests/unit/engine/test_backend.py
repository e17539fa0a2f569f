"""One cache behind `next_logits`: what it keeps, what it says, what it refuses."""

from typing import Any

import numpy as np
import pytest

from kvouch.contract import TILE, Hit, Miss
from kvouch.engine.backend import RollbackBackend, UncachedBackend
from kvouch.engine.model import Model
from kvouch.errors import ContextOverflow, InvalidIds
from kvouch.models.tiny import CONTEXT
from kvouch.numerics.bits import same_bits
from scripted import count_positions
from tiny_models import own_weights, random_ids, tiny_model


@pytest.fixture(scope="module")
def loaded() -> Model:
    return tiny_model("smollm2")


@pytest.fixture
def model(loaded: Model) -> Model:
    return own_weights(loaded)


def ids_of(count: int, seed: int = 0) -> list[int]:
    found: list[int] = random_ids(count, seed=seed)[0].tolist()
    return found


HELD = [3, 1, 4, 1, 5, 9]


@pytest.mark.parametrize(
    ("asked", "reused", "reason"),
    [
        ([*HELD, 2, 6], 6, "all ids held are the beginning of those asked"),
        (HELD, 5, "all ids asked are held already"),
        (HELD[:4], 3, "all ids asked are held already"),
        ([3, 1, 4, 7, 5, 9, 2], 3, "ids differ at 3: cached 1, asked 7"),
        ([8, 1], 0, "ids differ at 0: cached 3, asked 8"),
        ([3], 0, "all ids asked are held already"),
    ],
)
def test_the_longest_common_prefix_is_reused(model: Model, asked: list[int], reused: int, reason: str) -> None:
    backend = RollbackBackend(model)
    backend.next_logits(HELD)
    assert str(backend.verdict) == "miss: reused 0, computed 6; no entry"
    taken = count_positions(model)
    backend.next_logits(asked)
    assert backend.verdict.reused_tokens == reused
    assert backend.verdict.computed_tokens == len(asked) - reused == taken()
    assert str(backend.verdict.reason) == reason
    assert isinstance(backend.verdict, Hit if reused else Miss)
    assert backend.ids == tuple(asked)


def test_numbers_in_a_reason_are_grouped(model: Model) -> None:
    backend = RollbackBackend(model)
    backend.prefill(ids_of(1015))
    backend.next_logits(ids_of(1015)[:1010] + [0] * 3)
    assert str(backend.verdict.reason).startswith("ids differ at 1,010: cached ")


@pytest.mark.parametrize(("asked", "reused"), [(HELD, 6), (HELD[:2], 2), ([*HELD, 7], 6), ([3, 9, 9], 1)])
def test_prefill_computes_only_what_is_new(model: Model, asked: list[int], reused: int) -> None:
    backend = RollbackBackend(model)
    backend.prefill(HELD)
    taken = count_positions(model)
    verdict = backend.prefill(asked)
    assert (verdict.reused_tokens, verdict.computed_tokens) == (reused, len(asked) - reused)
    assert taken() == len(asked) - reused
    assert backend.ids[: len(asked)] == tuple(asked)


def test_a_prefill_that_finds_everything_drops_nothing(model: Model) -> None:
    backend = RollbackBackend(model)
    backend.prefill(HELD)
    backend.prefill(HELD[:2])
    assert backend.ids == tuple(HELD)


def test_progress_is_told_of_a_long_call_only(model: Model) -> None:
    told: list[tuple[str, int, int]] = []
    backend = RollbackBackend(model, progress=lambda *now: told.append(now))
    backend.prefill(ids_of(TILE))
    assert told == []
    backend.next_logits(ids_of(3 * TILE + 5))
    assert {(stage, total) for stage, _, total in told} == {("prefill", 2 * TILE + 5)}
    done = [now for _, now, _ in told]
    assert done == sorted(done)
    assert {TILE // model.config.num_hidden_layers, TILE, 2 * TILE} < set(done)  # layer by layer
    assert done[-1] == 2 * TILE + 5


def test_a_fork_goes_its_own_way(model: Model) -> None:
    backend = RollbackBackend(model)
    backend.prefill(HELD)
    twin = backend.fork()
    twin.next_logits([*HELD[:3], 8])
    assert twin.verdict.reused_tokens == 3
    assert twin.ids == (*HELD[:3], 8)
    assert backend.ids == tuple(HELD)
    backend.next_logits([*HELD, 1])
    assert backend.verdict.reused_tokens == 6
    assert twin.ids == (*HELD[:3], 8)


def test_the_cache_grows_and_keeps_what_it_holds(model: Model) -> None:
    backend, ids = RollbackBackend(model, capacity=1), ids_of(CONTEXT)
    sizes = []
    for length in (5, TILE, TILE + 1, 2 * TILE + 1, CONTEXT):
        backend.next_logits(ids[:length])
        sizes.append(backend.nbytes)
    assert backend.verdict.reused_tokens == 2 * TILE + 1
    assert sizes == [model.new_cache(capacity).nbytes for capacity in (5, TILE, 2 * TILE, CONTEXT, CONTEXT)]


def test_capacity_beyond_the_context_is_not_allocated(model: Model) -> None:
    assert RollbackBackend(model, capacity=10**9).nbytes == model.new_cache(CONTEXT).nbytes


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ([], "ids are empty"),
        ([3, 257], r"ids\[1\] is 257: outside the vocabulary \[0, 257\)"),
        ([3, 1, -1], r"ids\[2\] is -1; a whole number from 0"),
        ([3, 2**80], r"ids\[1\] is 1208925819614629174706176; a whole number from 0"),
        ([3, 1.5], r"ids\[1\] is 1.5; a whole number from 0"),
        ([3, "1"], r"ids\[1\] is '1'; a whole number from 0"),
        ([3, None], r"ids\[1\] is None; a whole number from 0"),
    ],
)
@pytest.mark.parametrize("call", ["next_logits", "prefill"])
def test_wrong_ids_are_named_before_any_work(model: Model, asked: list[Any], said: str, call: str) -> None:
    backend = RollbackBackend(model)
    backend.prefill([3, 5])
    taken = count_positions(model)
    with pytest.raises(InvalidIds, match=said):
        getattr(backend, call)(asked)
    assert (taken(), backend.ids) == (0, (3, 5))


@pytest.mark.parametrize("call", ["next_logits", "prefill"])
def test_too_many_ids_are_counted_before_any_work(model: Model, call: str) -> None:
    backend = RollbackBackend(model)
    backend.prefill([3, 5])
    taken = count_positions(model)
    with pytest.raises(ContextOverflow, match="1,037 ids asked, 1,024 in the model's context: 13 too many"):
        getattr(backend, call)([3, 5] + [0] * 1035)
    assert (taken(), backend.ids) == (0, (3, 5))


def test_the_callers_list_is_not_kept(model: Model) -> None:
    backend, ids = RollbackBackend(model), list(HELD)
    backend.next_logits(ids)
    ids[0] = 200
    ids.append(7)
    assert backend.ids == tuple(HELD)
    backend.next_logits(ids)
    assert backend.verdict.reused_tokens == 0


def test_a_failed_call_leaves_no_verdict_of_an_earlier_one(model: Model) -> None:
    backend = RollbackBackend(model)
    backend.next_logits(HELD)
    with pytest.raises(InvalidIds):
        backend.next_logits([999])
    assert str(backend.verdict) == "miss: reused 0, computed 0; no call has been answered"


def test_what_python_takes_for_an_index_is_an_id_warm_and_cold(model: Model) -> None:
    """numpy's whole numbers, and True for 1: the same scores, a hit on the same ids."""
    plain = UncachedBackend(model).next_logits([1, 2, 3])
    asked: list[Any] = [True, np.int64(2), np.int32(3)]
    warm = RollbackBackend(model)
    warm.prefill([1, 2])
    assert same_bits(warm.next_logits(asked), plain)
    assert same_bits(UncachedBackend(model).next_logits(asked), plain)
    assert warm.verdict.reused_tokens == 2
    wrong: Any = [np.array([1, 2]), 2, 3]
    for backend in (warm, UncachedBackend(model)):
        with pytest.raises(InvalidIds, match=r"ids\[0\] is array"):
            backend.next_logits(wrong)
