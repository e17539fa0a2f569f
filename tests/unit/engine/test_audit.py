"""Audits: a state that is not what it says is caught with certainty, and one that is never disturbs."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from kvouch.contract import Grade
from kvouch.engine.audit import AuditedBackend, first_divergence
from kvouch.engine.backend import CachedBackend, RollbackBackend, UncachedBackend
from kvouch.engine.model import Model
from kvouch.engine.state import State
from kvouch.errors import StateDiverged, UsageError
from kvouch.numerics.bits import same_bits
from tiny_models import random_ids, tiny_model

PREFIX: list[int] = random_ids(24, seed=4)[0].tolist()


@pytest.fixture(params=["gpt2", "smollm2"])
def model(request: pytest.FixtureRequest) -> Model:
    return tiny_model(request.param)


def spoiled(model: Model, layer: int, position: int, *, keys: bool) -> State:
    """A state under the right identity, with one number in one layer off by its last bit."""
    backend = RollbackBackend(model)
    backend.prefill(PREFIX)
    state = backend.state.fork()
    layers = [[held.clone() for held in state.cache.read(one)] for one in range(state.cache.num_layers)]
    held = layers[layer][0 if keys else 1]
    number = held[0, 0, position, 0]
    held[0, 0, position, 0] = torch.nextafter(number, number + 1)
    state.cache.reset()
    for one, pair in enumerate(layers):
        state.cache.update(one, *pair)
    state.cache.advance(len(state.ids))
    return state


@pytest.mark.law(1)
@pytest.mark.parametrize("keys", [True, False])
@pytest.mark.parametrize(("layer", "position"), [(0, 0), (1, 11), (2, 23)])
def test_one_bit_of_one_number_is_found_where_it_is(model: Model, layer: int, position: int, keys: bool) -> None:
    inner = CachedBackend(model)
    inner.adopt(spoiled(model, layer, position, keys=keys))
    audited = AuditedBackend(inner, rate=1.0)
    digest = model.identity().digest[:16]
    part = "keys" if keys else "values"
    place = f"{part} differ first at layer {layer}, position {position};.*{digest}"
    with pytest.raises(StateDiverged, match=place) as caught:
        audited.next_logits([*PREFIX, 7])
    assert caught.value.held == caught.value.computed == model.identity()
    assert inner.ids == ()
    assert same_bits(audited.next_logits([*PREFIX, 7]), UncachedBackend(model).next_logits([*PREFIX, 7]))
    assert (inner.verdict.kind, inner.verdict.reason.cause) == ("refused", "quarantined")
    assert audited.next_logits([*PREFIX, 7, 9]) is not None
    assert inner.verdict.kind == "hit"


def test_by_policy_the_right_answer_is_given_and_the_state_given_up(model: Model) -> None:
    inner = CachedBackend(model)
    inner.adopt(spoiled(model, 0, 3, keys=True))
    audited = AuditedBackend(inner, rate=1.0, policy="quarantine")
    found = audited.next_logits([*PREFIX, 7])
    assert same_bits(found, UncachedBackend(model).next_logits([*PREFIX, 7]))
    assert (audited.hits, audited.audits, audited.divergences) == (1, 1, 1)
    assert (audited.verdict.kind, audited.verdict.reason.cause) == ("refused", "quarantined")
    assert (audited.verdict.reused_tokens, audited.verdict.computed_tokens) == (0, 25)
    assert str(audited.last_divergence).startswith("keys differ first at layer 0, position 3")
    assert inner.ids == ()


def test_what_is_right_is_never_disturbed(model: Model) -> None:
    audited = AuditedBackend(RollbackBackend(model), rate=1.0)
    for end in range(1, 24):
        audited.next_logits(PREFIX[:end])
    assert (audited.hits, audited.audits, audited.divergences) == (22, 22, 0)


def test_the_share_is_kept(model: Model) -> None:
    audited = AuditedBackend(RollbackBackend(model), rate=0.25, seed=3)
    for end in range(1, 200):
        audited.next_logits(random_ids(200)[0].tolist()[:end])
    assert audited.hits == 198
    assert 30 < audited.audits < 70
    never = AuditedBackend(RollbackBackend(model), rate=0.0)
    never.next_logits(PREFIX)
    never.next_logits([*PREFIX, 1])
    assert (never.hits, never.audits) == (1, 0)


@pytest.mark.parametrize("rate", [-0.1, 1.5, float("nan")])
def test_a_rate_is_a_share(rate: float, model: Model) -> None:
    with pytest.raises(UsageError, match="rate is"):
        AuditedBackend(RollbackBackend(model), rate=rate)
    with pytest.raises(UsageError, match="policy is"):
        AuditedBackend(RollbackBackend(model), rate=0.5, policy=cast(Any, "ignore"))


def test_at_grade_within_the_measured_tolerance_counts(model: Model) -> None:
    cache = model.concat_cache()
    scores = model.forward(PREFIX, cache)
    if scores is None:
        pytest.fail("no scores")
    within = Grade(name="within", tolerance=1e-3)

    def judged(change: float) -> Any:
        other: Tensor = scores[0] + change
        return first_divergence(cache, cache, len(PREFIX), scores[0], other, within)

    assert judged(0.0) is None
    assert judged(3e-3) is None  # four times what was measured
    assert judged(5e-3).part == "scores"
    assert judged(float("nan")).part == "scores"


def test_only_what_was_reused_is_judged(model: Model) -> None:
    """A reader without permission to write keeps A + B; asked A + C it reuses A, and B is not compared with C."""
    writer = RollbackBackend(model)
    writer.prefill(PREFIX)
    reader = RollbackBackend(model, write=False)
    reader.adopt(writer.state)
    audited = AuditedBackend(reader, rate=1.0)
    audited.next_logits([*PREFIX[:10], 200, 201, 202])
    assert (audited.audits, audited.divergences) == (1, 0)
    assert reader.ids == tuple(PREFIX)


def test_quarantine_is_told_once_and_not_of_what_is_adopted_later(model: Model) -> None:
    writer, inner = RollbackBackend(model), RollbackBackend(model)
    writer.prefill(PREFIX)
    for backend in (writer, inner):
        backend.next_logits([*PREFIX, 1])
    inner.quarantine()
    inner.quarantine()
    assert inner.fork().verdict.kind == "miss"
    inner.next_logits([*PREFIX, 1])
    assert inner.verdict.reason.cause == "quarantined"
    inner.quarantine()
    inner.adopt(writer.state)
    inner.next_logits([*PREFIX, 1, 2])
    assert inner.verdict.kind == "hit"
