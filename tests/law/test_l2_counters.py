"""L2: reused + computed = asked, and the counters equal what the forward pass saw. The chapter's engine, counted."""

from collections.abc import Callable
from typing import Any

import pytest

from kvouch.contract import Hit, Miss
from kvouch.engine.backend import CachedBackend, RollbackBackend, UncachedBackend
from kvouch.engine.loop import generate
from kvouch.engine.model import Model
from kvouch.engine.request import Answer, Request
from scripted import SteppingClock, count_positions
from tiny_models import random_ids, tiny_model

pytestmark = pytest.mark.law(2)

REQUESTS, PROMPT, NEW = 5, 17, 32


@pytest.fixture
def model() -> Model:
    return tiny_model("gpt2")


def serve(backend: Any) -> list[tuple[int, ...]]:
    """The ids that five requests of 17 ids get, 32 each."""
    found = []
    for seed in range(REQUESTS):
        request = Request(ids=tuple(random_ids(PROMPT, seed=seed)[0].tolist()), max_new_tokens=NEW)
        events = list(generate(backend, request, tokenizer=None, context_tokens=1024, clock=SteppingClock()))
        answer = events[-1]
        assert isinstance(answer, Answer)
        found.append(answer.ids)
    return found


@pytest.mark.parametrize("kind", ["static", "concat"])
def test_five_requests_give_five_misses_and_155_hits(model: Model, kind: str) -> None:
    seen = count_positions(model)
    backend = CachedBackend(model, new_cache=model.concat_cache if kind == "concat" else None)
    ids = serve(backend)
    counters = backend.counters
    assert (counters.calls, counters.misses, counters.reuses) == (160, 5, 155)
    assert counters.resets == 4  # the first request found nothing to throw away
    assert counters.positions == seen() == REQUESTS * (PROMPT + NEW - 1) == 5 * 48
    assert ids == serve(UncachedBackend(model))


def test_without_reuse_a_request_computes_1040_positions(model: Model) -> None:
    seen = count_positions(model)
    backend = UncachedBackend(model)
    serve(backend)
    assert backend.counters.positions == seen() == REQUESTS * 1040
    assert (backend.counters.calls, backend.counters.misses) == (160, 160)


HELD = [3, 1, 4, 1, 5, 9]
CALLS = [
    ([*HELD, 2], 6, Hit, "held"),
    ([*HELD, 2, 6, 5], 6, Hit, "held"),
    (HELD, 0, Miss, "ids equal"),
    (HELD[:4], 0, Miss, "ids equal"),
    ([3, 1, 4, 2, 5, 9, 2], 0, Miss, "ids differ"),
    ([7], 0, Miss, "ids differ"),
]


@pytest.mark.parametrize(("asked", "reused", "kind", "cause"), CALLS)
def test_the_chapters_backend_hits_exactly_where_all_but_the_last_ids_are_held(
    asked: list[int], reused: int, kind: type, cause: str, model: Model
) -> None:
    backend = CachedBackend(model)
    backend.next_logits(HELD)
    seen = count_positions(model)
    backend.next_logits(asked)
    verdict = backend.verdict
    assert type(verdict) is kind
    assert verdict.reason.cause == cause
    assert (verdict.reused_tokens, verdict.computed_tokens) == (reused, len(asked) - reused)
    assert verdict.computed_tokens == seen()
    assert backend.ids == tuple(asked)


Make = Callable[[Model], CachedBackend]


@pytest.mark.parametrize("make", [CachedBackend, RollbackBackend])
def test_without_permission_to_read_everything_is_computed(make: type[CachedBackend], model: Model) -> None:
    backend = make(model, read=False)
    backend.next_logits(HELD)
    seen = count_positions(model)
    backend.next_logits([*HELD, 2])
    assert backend.verdict.kind == "refused"
    assert backend.verdict.reason.cause == "read off"
    assert seen() == 7


@pytest.mark.parametrize("make", [CachedBackend, RollbackBackend])
def test_without_permission_to_write_what_is_held_stays(make: type[CachedBackend], model: Model) -> None:
    writer = make(model)
    writer.next_logits(HELD)
    reader = make(model, write=False)
    reader.adopt(writer.state)
    for asked in ([*HELD, 2], [*HELD[:3], 8, 8], [5], [*HELD, 2]):
        reader.next_logits(asked)
        assert reader.ids == tuple(HELD)
    assert (reader.verdict.kind, reader.verdict.reused_tokens) == ("hit", len(HELD))
    assert reader.counters.resets == 0
