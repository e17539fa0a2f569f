"""L3 where a program is interrupted: whatever line it stands at, the cache is as it was or holds all of the call."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from chunkings import differences
from kvouch.engine.model import Model
from kvouch.models.paths import PathName
from kvouch.numerics.bits import same_bits
from tiny_models import random_ids, tiny_model

BEFORE, AFTER = 10, 40


def interrupted_at(number: int, call: Callable[[], Any]) -> bool:
    """Raises KeyboardInterrupt at a numbered event of the interpreter (a call, a line, a return) within `call`."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += 1
        if count == number:
            raise KeyboardInterrupt
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(former)
    return count >= number


@pytest.mark.law(3)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # ctypes drops what its callback raises
@pytest.mark.parametrize("path", ["auto", "torch"])
@pytest.mark.parametrize("new_cache", [lambda model: model.new_cache(AFTER), Model.concat_cache], ids=["own", "concat"])
def test_an_interrupt_at_any_line_of_a_step(new_cache: Callable[[Model], Any], path: PathName) -> None:
    """Nothing is half done, and torch computes as it did before for the rest of the program."""
    model, ids = tiny_model("smollm2", path=path), random_ids(AFTER + 1)
    reference = new_cache(model)
    model.forward(ids[:, :AFTER], reference)
    wanted: Any = model.forward(ids[:, AFTER - 1 : AFTER], _rolled_back(reference))
    number, undone = 0, 0
    while True:
        number += 1
        cache = new_cache(model)
        model.forward(ids[:, :BEFORE], cache)
        if not interrupted_at(number, lambda cache=cache: model.forward(ids[:, BEFORE:AFTER], cache)):  # type: ignore[misc]
            break
        assert not torch.is_inference_mode_enabled(), f"event {number}"
        assert cache.length in (BEFORE, AFTER), f"event {number}"
        undone += cache.length == BEFORE
        found: Any = model.forward(ids[:, cache.length : AFTER], cache) if cache.length < AFTER else wanted
        assert same_bits(found, wanted), f"event {number}"
        assert differences(cache, reference) == [], f"event {number}"
    assert undone > 200


def _rolled_back(cache: Any) -> Any:
    cache.rollback(AFTER - 1)
    return cache
