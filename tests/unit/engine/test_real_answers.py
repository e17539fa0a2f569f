"""The real model answers, and what it reuses is counted in its own steps."""

import time
from pathlib import Path

import pytest

from kvouch.cli.ask import layout
from kvouch.engine.backend import RollbackBackend
from kvouch.engine.conversation import Conversation
from kvouch.engine.loop import generate
from kvouch.engine.model import Model, load
from kvouch.engine.request import Answer, Request
from kvouch.engine.shared import prefill_shared
from kvouch.loader.tokenizer import Tokenizer
from scripted import count_positions
from tiny_models import own_weights

pytestmark = pytest.mark.real_model

DOCUMENT = (
    "The harbour of Vesterholm was built in 1742 by the engineer Anna Lindqvist, after a storm had taken the old "
    "wooden pier. The lighthouse was added in 1760. A ticket to the island of Tern costs 12 crowns. The museum is open "
    "from May to September, every day but Monday."
)


@pytest.fixture(scope="module")
def loaded(smollm2_dir: Path) -> Model:
    return load(smollm2_dir, dtype="float32")


@pytest.fixture
def model(loaded: Model) -> Model:
    return own_weights(loaded)


@pytest.fixture
def tokenizer(model: Model) -> Tokenizer:
    assert model.tokenizer is not None
    return model.tokenizer


def answer(model: Model, backend: RollbackBackend, ids: list[int], max_new_tokens: int) -> Answer:
    assert model.tokenizer is not None
    request = Request(ids=tuple(ids), max_new_tokens=max_new_tokens, stop_ids=model.tokenizer.stop_ids)
    context_tokens = model.config.max_position_embeddings
    *_, last = generate(
        backend, request, tokenizer=model.tokenizer, context_tokens=context_tokens, clock=time.perf_counter
    )
    assert isinstance(last, Answer)
    return last


def test_the_capital_of_france(model: Model, tokenizer: Tokenizer) -> None:
    found = answer(model, RollbackBackend(model), tokenizer.encode("The capital of France is"), 3)
    assert found.text.startswith(" Paris")


def test_the_second_turn_of_a_chat_reuses_all_earlier_ids(model: Model, tokenizer: Tokenizer) -> None:
    """Every id that was ever asked: the first prompt, and its answer up to the id that ended it."""
    backend = RollbackBackend(model)
    asked = Conversation.begin().asked("What is the capital of France? One word.", tokenizer)
    first = answer(model, backend, list(asked.ids), 24)
    assert "Paris" in first.text
    held = backend.ids
    assert held == (asked.ids + first.ids)[: len(asked.ids) + first.new_tokens - 1]
    again = asked.answered(first.ids, first.text).asked("And of Italy?", tokenizer)
    taken = count_positions(model)
    second = answer(model, backend, list(again.ids), 1)
    assert again.ids[: len(held)] == held
    assert second.verdict.reused_tokens == len(held)
    assert taken() == second.verdict.computed_tokens == len(again.ids) - len(held)


def test_three_questions_share_their_document(model: Model, tokenizer: Tokenizer) -> None:
    questions = ("Who built the harbour?", "How much is a ticket to Tern?", "When is the museum open?")
    prompts = [tokenizer.encode(tokenizer.render(layout([DOCUMENT], one)), special=False) for one in questions]
    taken = count_positions(model)
    shared = prefill_shared(RollbackBackend(model), prompts, clock=time.perf_counter)
    count = len(shared.ids)
    assert taken() == count >= len(tokenizer.encode(DOCUMENT))
    for prompt, said in zip(prompts, ("Lindqvist", "12", "May to September"), strict=True):
        found = answer(model, shared.fork(), prompt, 20)
        assert said in found.text
        assert taken() == len(prompt) - count + found.new_tokens - 1
        assert (found.verdict.reused_tokens, found.verdict.computed_tokens) == (count, len(prompt) - count)
