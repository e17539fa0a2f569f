"""L3 of the backend: whatever fails half-way leaves a prefix that was there before, and nothing else."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from chunkings import poison
from kvouch.contract import TILE, KVCache, LayerWatch, Rows
from kvouch.engine.backend import RollbackBackend
from kvouch.engine.model import Model
from kvouch.errors import NonFinite
from kvouch.models.tiny import LAYERS
from kvouch.numerics.bits import same_bits
from scripted import count_positions
from tiny_models import own_weights, random_ids, tiny_model

pytestmark = pytest.mark.law(3)

HELD: list[int] = random_ids(TILE + 40, seed=1)[0].tolist()
MORE: list[int] = random_ids(2 * TILE, seed=2)[0].tolist()
FAULTS = [RuntimeError("layer"), KeyboardInterrupt(), NonFinite("nan"), MemoryError()]


@pytest.fixture(scope="module")
def loaded() -> Model:
    return tiny_model("smollm2")


@pytest.fixture
def model(loaded: Model) -> Model:
    return own_weights(loaded)


def fail_at(model: Model, layer: int, step: int, fault: BaseException) -> Callable[[], None]:
    """The step of that number (from 0) raises when it updates that layer; returns what takes the fault away."""
    plain, seen = model.weights.step, [0]

    def failing(ids: Tensor, cache: KVCache, rows: Rows, watch: LayerWatch | None = None) -> Tensor | None:
        number, seen[0] = seen[0], seen[0] + 1
        given: Any = _FailingCache(cache, layer, fault) if number == step else cache
        return plain(ids, given, rows, watch)

    def mend() -> None:
        model.weights.step = plain  # type: ignore[method-assign]

    model.weights.step = failing  # type: ignore[method-assign]
    return mend


class _FailingCache:
    """A cache whose update of one layer writes, and then raises."""

    def __init__(self, cache: KVCache, layer: int, fault: BaseException) -> None:
        self._cache, self._layer, self._fault = cache, layer, fault

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        stored = self._cache.update(layer, keys, values)
        if layer == self._layer:
            raise self._fault
        return stored

    def __getattr__(self, name: str) -> object:
        return getattr(self._cache, name)


def reference(model: Model, ids: list[int]) -> Tensor:
    scores = model.forward(ids, model.concat_cache())
    if scores is None:
        raise ValueError("no scores")
    return scores[0]


def check_holds(backend: RollbackBackend, ids: list[int], model: Model) -> None:
    """The backend holds exactly `ids`: it says so, its cache has as many positions, and the next answer is right."""
    assert backend.ids == tuple(ids)
    assert backend.state.cache.length == len(ids)
    taken = count_positions(model)
    assert same_bits(backend.next_logits([*ids, 77]), reference(own_weights(model), [*ids, 77]))
    assert backend.verdict.reused_tokens == len(ids)
    assert taken() >= 1


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("call", ["next_logits", "prefill"])
def test_a_fault_in_any_layer_leaves_what_was_held(
    model: Model, layer: int, step: int, call: str, fault: BaseException
) -> None:
    backend = RollbackBackend(model)
    backend.prefill(HELD)
    mend = fail_at(model, layer, step, fault)
    with pytest.raises(type(fault)):
        getattr(backend, call)([*HELD, *MORE])
    mend()
    check_holds(backend, HELD, model)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_fault_behind_a_rollback_leaves_the_common_prefix(model: Model, layer: int) -> None:
    backend = RollbackBackend(model)
    backend.prefill(HELD)
    mend = fail_at(model, layer, 0, RuntimeError("layer"))
    with pytest.raises(RuntimeError, match="layer"):
        backend.next_logits([*HELD[:100], 256, 256, 256])
    mend()
    check_holds(backend, HELD[:100], model)


def test_a_fault_of_whoever_is_told_of_progress_leaves_what_was_held(model: Model) -> None:
    def tell(stage: str, done: int, total: int) -> None:
        if total == len(MORE) and done > TILE:
            raise KeyboardInterrupt

    backend = RollbackBackend(model, progress=tell)
    backend.prefill(HELD)
    with pytest.raises(KeyboardInterrupt):
        backend.prefill([*HELD, *MORE])
    check_holds(backend, HELD, model)


def test_no_room_to_grow_leaves_what_was_held(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = RollbackBackend(model, capacity=1)
    backend.prefill(HELD)

    def no_room(*arguments: object, **named: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(Model, "new_cache", no_room)
        with pytest.raises(MemoryError):
            backend.next_logits([*HELD, *MORE])
        with pytest.raises(MemoryError):
            RollbackBackend(model)
    check_holds(backend, HELD, model)


def test_a_fault_in_a_fork_does_not_reach_the_parent(model: Model) -> None:
    backend = RollbackBackend(model)
    backend.prefill(HELD)
    child = backend.fork()
    mend = fail_at(model, 1, 0, RuntimeError("layer"))
    with pytest.raises(RuntimeError, match="layer"):
        child.next_logits([*HELD[:3], 9])
    mend()
    check_holds(child, HELD[:3], model)
    check_holds(backend, HELD, model)


def test_numbers_beyond_the_length_do_not_matter_after_a_fault(model: Model) -> None:
    """What the failed step wrote stays in the buffer, and is never read."""
    backend = RollbackBackend(model)
    backend.prefill(HELD)
    poison(backend.state.cache, math.nan)
    check_holds(backend, HELD, model)
