"""The quiet fault, on the real model: one layer off by 2 per cent, and the right token nearly every time."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvouch.engine.audit import AuditedBackend
from kvouch.engine.backend import CachedBackend, RollbackBackend, UncachedBackend
from kvouch.engine.model import Model, load
from kvouch.engine.state import State
from kvouch.errors import StateDiverged
from kvouch.identity.keys import pack_ids
from kvouch.models.forward import forward_cached
from tiny_models import random_ids

pytestmark = [pytest.mark.law(6), pytest.mark.real_model]

TRIALS, PREFIX, LAYER = 20, 24, 10


@pytest.fixture(scope="module")
def model(smollm2_dir: Path) -> Model:
    return load(smollm2_dir, dtype="float32")


def mis_keyed(model: Model, ids: list[int]) -> State:
    """A state computed with one layer's feed-forward scaled, under the identity of the model without that."""
    wrong = copy.copy(model.weights)
    block: Any = wrong.blocks[LAYER]
    scaled = wrong.path.pack(block.down.plain() * 1.02)
    wrong.blocks = [*wrong.blocks[:LAYER], replace(block, down=scaled), *wrong.blocks[LAYER + 1 :]]
    cache = model.new_cache(64)
    forward_cached(model.to_ids(ids), wrong, model.config, cache, scores="none")
    return State(identity=model.identity(), cache=cache, ids=pack_ids(ids))


def test_the_token_is_right_and_the_audit_finds_it_every_time(model: Model, report: Callable[[str], None]) -> None:
    right, largest = 0, []
    reference = UncachedBackend(model)
    for trial in range(TRIALS):
        ids: list[int] = random_ids(PREFIX + 1, seed=trial, vocabulary=model.config.vocab_size)[0].tolist()
        state = mis_keyed(model, ids[:-1])
        plain, inner = CachedBackend(model), CachedBackend(model)
        plain.adopt(state)
        inner.adopt(state)
        found, wanted = plain.next_logits(ids), reference.next_logits(ids)
        assert plain.verdict.kind == "hit"  # it says of itself that it is right
        right += int(found.argmax()) == int(wanted.argmax())
        largest.append(float((found - wanted).abs().max()))
        with pytest.raises(StateDiverged, match=f"layer {LAYER + 1}, position 0"):
            AuditedBackend(inner, rate=1.0).next_logits(ids)
    report(
        f"SmolLM2 float32, one layer's feed-forward x 1.02 in the reused prefix: right token {right} times of "
        f"{TRIALS}, scores off by up to {max(largest):.2f}; the audit caught {TRIALS} of {TRIALS}"
    )
    assert right > TRIALS / 2
    assert min(largest) > 0


def test_the_identity_refuses_weights_that_were_scaled_in_memory(smollm2_dir: Path) -> None:
    model = load(smollm2_dir, dtype="float32")
    ids: list[int] = random_ids(PREFIX + 1, vocabulary=model.config.vocab_size)[0].tolist()
    backend = RollbackBackend(model)
    backend.prefill(ids[:-1])
    down: Any = model.weights.blocks[LAYER].linears()[-1]
    with torch.no_grad():
        down.weight.mul_(1.02)
    backend.next_logits(ids)
    assert (backend.verdict.kind, backend.verdict.reason.field) == ("miss", "weights")
