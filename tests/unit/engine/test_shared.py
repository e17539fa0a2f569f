"""Several prompts over one beginning: computed once, forked for each."""

from pathlib import Path

import pytest

from kvouch.engine.backend import RollbackBackend
from kvouch.engine.shared import prefill_shared
from kvouch.errors import ContextOverflow, UsageError
from scripted import SteppingClock, count_positions
from tiny_models import random_ids, tiny_model


def test_the_beginning_is_computed_once(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    document: list[int] = random_ids(300)[0].tolist()
    prompts = [[*document, 1, 2], [*document, 1, 3, 4], [*document, 1]]
    taken = count_positions(model)
    shared = prefill_shared(RollbackBackend(model), prompts, clock=SteppingClock())
    assert (taken(), shared.ids, shared.prefill_s) == (300, tuple(document), 1.0)
    for prompt in prompts:
        backend = shared.fork()
        backend.next_logits(prompt)
        assert taken() == len(prompt) - 300
        assert backend.verdict.reused_tokens == 300
    assert shared.backend.ids == tuple(document)


def test_nothing_in_common_is_nothing_computed(tmp_path: Path) -> None:
    model = tiny_model("gpt2")
    taken = count_positions(model)
    shared = prefill_shared(RollbackBackend(model), [[1, 2], [3]], clock=SteppingClock())
    assert (taken(), shared.ids, shared.verdict.computed_tokens) == (0, (), 0)
    shared.fork().next_logits([3])
    assert taken() == 1


def test_what_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    backend = RollbackBackend(tiny_model("gpt2"))
    with pytest.raises(UsageError, match="prompts are empty"):
        prefill_shared(backend, [], clock=SteppingClock())
    with pytest.raises(ContextOverflow):
        prefill_shared(backend, [[1] * 1026, [1] * 1026], clock=SteppingClock())
