"""The forward pass over a cache: what is refused before any work, and what a failure in mid-work leaves behind."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from kvouch.cache.concat import ConcatCache
from kvouch.contract import TILE, KVCache, LayerWatch, Rows
from kvouch.engine.model import Model, load
from kvouch.errors import (
    CacheError,
    CacheOverflow,
    CacheShapeError,
    ContextOverflow,
    InvalidIds,
    KvouchError,
    NonFinite,
    UsageError,
)
from kvouch.loader.config import parse_config
from kvouch.loader.source import CheckpointSource
from kvouch.models.forward import forward_cached
from kvouch.models.gpt2 import GPT2Weights
from kvouch.models.llama import LlamaWeights
from kvouch.models.paths import PathName
from kvouch.models.step import ModelWeights
from kvouch.models.tiny import CONTEXT, LAYERS, TINY_CONFIGS, VOCABULARY, tiny_tensors
from kvouch.numerics.bits import same_bits
from tiny_models import random_ids, tiny_model, write_model

FAMILIES = ["gpt2", "smollm2"]


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    return {family: tiny_model(family, path="torch") for family in FAMILIES}


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, models: dict[str, Model]) -> Model:
    found: Model = models[request.param]
    return found


def caches(model: Model, *, batch: int = 1) -> list[KVCache]:
    return [model.concat_cache(batch=batch), model.static_cache(2 * TILE, batch=batch)]


def contents(cache: KVCache) -> list[Tensor]:
    """Copies of all that a cache holds."""
    return [tensor.clone() for layer in range(cache.num_layers) for tensor in cache.read(layer)]


def same_contents(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(same_bits(x, y) for x, y in zip(a, b, strict=True))


# Before any work.


def work_was_done(*arguments: Any) -> NoReturn:
    raise AssertionError("work was done")


class Untouchable(ConcatCache):
    """A cache that must not be touched; its length can be set to anything."""


for touch in ("update", "advance", "rollback", "reset", "fork", "tiles", "read"):
    setattr(Untouchable, touch, work_was_done)


class Unused:
    """Weights that must not be used."""

    def step(self, ids: Tensor, cache: KVCache, rows: Rows, watch: LayerWatch | None = None) -> NoReturn:
        work_was_done()


def refused(
    model: Model, ids: Tensor, error: type[KvouchError], message: str, *, held: int = 0, **options: Any
) -> None:
    """The call raises, and neither the weights nor the cache heard of it."""
    cache = Untouchable(model.config, batch=2)
    cache.length = held
    with pytest.raises(error, match=message) as caught:
        forward_cached(ids, Unused(), model.config, cache, **options)
    assert type(caught.value) is error
    assert cache.length == held


@pytest.mark.parametrize(
    "ids",
    [
        torch.zeros(2, 3, dtype=torch.int32),
        torch.zeros(2, 3),
        torch.zeros(2, 3, dtype=torch.bool),
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(2, 3, 1, dtype=torch.int64),
        torch.tensor(1),
        torch.zeros(2, 0, dtype=torch.int64),
        torch.zeros(0, 3, dtype=torch.int64),
        torch.zeros(0, 0, dtype=torch.int64),
    ],
    ids=lambda ids: f"{ids.dtype}-{list(ids.shape)}",
)
def test_ids_of_another_kind_are_refused(model: Model, ids: Tensor) -> None:
    refused(model, ids, InvalidIds, r"ids are torch\..* of shape \[.*\]; int64 \[B, T\] with T >= 1 is needed")


@pytest.mark.parametrize("wrong", [-1, VOCABULARY, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("place", [(0, 0), (1, 2)])
def test_ids_outside_the_vocabulary_are_refused(model: Model, wrong: int, place: tuple[int, int]) -> None:
    ids = random_ids(3, batch=2)
    ids[place] = wrong
    refused(model, ids, InvalidIds, rf"id {wrong} is outside the vocabulary \[0, {VOCABULARY}\)")


def test_the_edges_of_the_vocabulary_are_in_it(model: Model) -> None:
    cache = model.concat_cache()
    model.forward([0, VOCABULARY - 1], cache)
    assert cache.length == 2


@pytest.mark.parametrize("batch", [1, 3])
def test_another_number_of_sequences_is_refused(model: Model, batch: int) -> None:
    refused(model, random_ids(3, batch=batch), CacheShapeError, f"ids hold {batch} sequences; this cache holds 2")


@pytest.mark.parametrize(("held", "asked"), [(0, CONTEXT + 1), (CONTEXT, 1), (CONTEXT - 2, 9), (3, CONTEXT)])
def test_the_context_is_too_short(model: Model, held: int, asked: int) -> None:
    over = held + asked - CONTEXT
    message = f"{held + asked} positions asked, {CONTEXT} in the model's context: {over} too many"
    refused(model, random_ids(asked, batch=2), ContextOverflow, message, held=held)


def test_the_context_can_be_filled_to_the_last_position(model: Model) -> None:
    cache = model.concat_cache()
    model.forward(random_ids(CONTEXT - 1), cache, scores="none")
    model.forward([5], cache, scores="none")
    assert cache.length == CONTEXT
    with pytest.raises(ContextOverflow, match="1 too many"):
        model.forward([5], cache)


def test_the_cache_is_too_short(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Untouchable, "max_length", 100)
    for held, asked in ((0, 101), (100, 1), (98, 7)):
        over = held + asked - 100
        message = f"{held + asked} positions asked, 100 in the cache: {over} too many"
        refused(model, random_ids(asked, batch=2), CacheOverflow, message, held=held)
    cache = model.static_cache(TILE)
    model.forward(random_ids(TILE), cache)
    with pytest.raises(CacheOverflow, match="1 too many"):
        model.forward([5], cache)
    assert cache.length == TILE


@pytest.mark.parametrize("scores", ["first", "", "ALL", None, True, 1, "al"])
def test_other_scores_are_refused(model: Model, scores: Any) -> None:
    refused(
        model, random_ids(3, batch=2), UsageError, r"scores is .*; give one of \['last', 'all', 'none'\]", scores=scores
    )


@pytest.mark.law(3)
@pytest.mark.parametrize("field", ["dtype", "heads", "head size", "fewer layers", "more layers"])
def test_a_cache_of_another_model_is_refused(model: Model, field: str) -> None:
    """In the first layer or at the end; nothing is kept."""
    shape = copy.copy(model.config)
    changes: dict[str, Callable[[], Any]] = {
        "dtype": lambda: None,
        "heads": lambda: object.__setattr__(shape, "num_key_value_heads", 1),
        "head size": lambda: object.__setattr__(shape, "head_dim", 2),
        "fewer layers": lambda: object.__setattr__(shape, "num_hidden_layers", LAYERS - 1),
        "more layers": lambda: object.__setattr__(shape, "num_hidden_layers", LAYERS + 1),
    }
    changes[field]()
    cache = ConcatCache(shape, dtype=torch.bfloat16 if field == "dtype" else torch.float32)
    with pytest.raises(CacheShapeError):
        model.forward(random_ids(3), cache)
    assert cache.length == 0
    assert all(tensor.shape[2] == 0 for tensor in contents(cache))
    with pytest.raises(CacheError):  # in the same way, not as a step that was begun
        model.forward(random_ids(3), cache)


# In mid-work.


class Boom(Exception):
    """What is injected."""


class FailingBlock:
    """A layer that raises the `turn`-th time that a part of it is called."""

    def __init__(self, block: Any, part: str, error: BaseException, turn: int) -> None:
        self._block, self._part, self._error, self._left = block, part, error, turn

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._block, name)
        if name != self._part:
            return found

        def called(*arguments: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                raise self._error
            return found(*arguments)

        return called


def failing(weights: ModelWeights, layer: int, part: str, *, turn: int = 1, error: BaseException | None = None) -> Any:
    """Weights that raise in a part of a layer, or in their own scores where the layer is LAYERS."""
    broken = copy.copy(weights)
    error = error or Boom()
    if layer == LAYERS:
        broken.scores = FailingBlock(weights, "scores", error, turn).scores  # type: ignore[method-assign]
    else:
        block: Any = FailingBlock(weights.blocks[layer], part, error, turn)
        broken.blocks = [*weights.blocks[:layer], block, *weights.blocks[layer + 1 :]]
    return broken


PLACES = [(layer, part) for layer in range(LAYERS) for part in ("project", "finish")] + [(LAYERS, "scores")]
LENGTHS = {"nothing held": (0, 9), "in a tile": (20, 9), "decoding": (20, 1), "from edge to edge": (TILE, TILE)}


@pytest.mark.law(3)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("layer", "part"), PLACES)
def test_an_exception_in_any_layer_leaves_what_was_there(model: Model, layer: int, part: str, lengths: str) -> None:
    held, asked = LENGTHS[lengths]
    ids = random_ids(held + asked)
    for cache, fresh in zip(caches(model), caches(model), strict=True):
        if held:
            model.forward(ids[:, :held], cache)
        before = contents(cache)
        with pytest.raises(Boom):
            forward_cached(ids[:, held:], failing(model.weights, layer, part), model.config, cache, scores="all")
        assert cache.length == held
        assert same_contents(contents(cache), before)
        goes_on(model, ids, cache, fresh)


def goes_on(model: Model, ids: Tensor, cache: KVCache, fresh: KVCache) -> None:
    """After a failure the rest of ids gives the bits that an untroubled cache gives."""
    found = model.forward(ids[:, cache.length :], cache)
    wanted = model.forward(ids, fresh)
    assert found is not None
    assert wanted is not None
    assert same_bits(found, wanted)
    assert same_contents(contents(cache), contents(fresh))


@pytest.mark.law(3)
@pytest.mark.parametrize(("layer", "part"), PLACES)
@pytest.mark.parametrize("turn", [2, 3])
def test_an_exception_in_a_later_piece_leaves_what_was_there(model: Model, layer: int, part: str, turn: int) -> None:
    """A call over two tile edges: the pieces before it had been advanced over."""
    held, ids = TILE - 6, random_ids(2 * TILE + 5)
    for cache in (model.concat_cache(), model.static_cache(3 * TILE)):
        model.forward(ids[:, :held], cache)
        before = contents(cache)
        with pytest.raises(Boom):
            forward_cached(
                ids[:, held:], failing(model.weights, layer, part, turn=turn), model.config, cache, scores="all"
            )
        assert cache.length == held
        assert same_contents(contents(cache), before)
        goes_on(model, ids, cache, model.concat_cache())


@pytest.mark.law(3)
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), MemoryError(), SystemExit()], ids=lambda error: type(error).__name__
)
def test_whatever_interrupts_leaves_what_was_there(model: Model, error: BaseException) -> None:
    """In the second of two pieces: the first had been advanced over, the second had begun."""
    held, ids = TILE - 6, random_ids(TILE + 9)
    for cache in caches(model):
        model.forward(ids[:, :held], cache)
        before = contents(cache)
        with pytest.raises(type(error)):
            forward_cached(ids[:, held:], failing(model.weights, 1, "finish", turn=2, error=error), model.config, cache)
        assert cache.length == held
        assert same_contents(contents(cache), before)
        goes_on(model, ids, cache, model.concat_cache())


@pytest.mark.law(3)
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_cache_that_fails_in_a_layer_leaves_what_was_there(
    model: Model, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = random_ids(30)
    for cache, fresh in zip(caches(model), caches(model), strict=True):
        model.forward(ids[:, :20], cache)
        before = contents(cache)
        for name in ("update", "tiles"):
            whole = getattr(cache, name)

            def part(at: int, *rest: Any, whole: Callable[..., Any] = whole) -> Any:
                found = whole(at, *rest)
                if at == layer:
                    raise Boom
                return found

            with monkeypatch.context() as patch:
                patch.setattr(cache, name, part)
                with pytest.raises(Boom):
                    model.forward(ids[:, 20:], cache)
            assert cache.length == 20
            assert same_contents(contents(cache), before)
        goes_on(model, ids, cache, fresh)


# Numbers that are none.

Spoil = Callable[..., ModelWeights]
NOT_FINITE = [float("inf"), float("-inf"), float("nan")]


@functools.cache
def weights_to_spoil(family: str) -> list[str]:
    """Names of a checkpoint's tensors that reach every row, or the scores: in the first layer, the last, and around."""
    names = tiny_tensors(TINY_CONFIGS[family])
    wanted = (".0.", f".{LAYERS - 1}.")
    return [name for name in names if any(part in name for part in wanted) or not any(c.isdigit() for c in name)]


SPOILED = [(family, name) for family in FAMILIES for name in weights_to_spoil(family)]


@pytest.fixture(scope="module")
def spoil(models: dict[str, Model]) -> Spoil:
    """A model's weights with one number of one tensor replaced; the probe is not asked, as it would refuse."""

    def spoiled(family: str, name: str, value: float, row: int = 5) -> ModelWeights:
        tensors = tiny_tensors(TINY_CONFIGS[family])
        tensors[name][row if tensors[name].dim() == 1 else (row, 5)] = value
        config = parse_config(TINY_CONFIGS[family], "config.json")
        source = CheckpointSource(
            tensors, dtype=torch.float32, device=torch.device("cpu"), where="model", allow_nonfinite=True
        )
        path, rope = models[family].weights.path, config.rope
        weights = GPT2Weights(config, source, path) if rope is None else LlamaWeights(config, rope, source, path)
        weights.arithmetic = models[family].weights.arithmetic
        return weights

    return spoiled


@pytest.mark.law(3)
@pytest.mark.parametrize(("family", "name"), SPOILED)
def test_a_weight_that_is_not_finite_is_found_and_nothing_kept(
    family: str, name: str, models: dict[str, Model], spoil: Spoil
) -> None:
    """Ids and positions that meet the number: 5 is among both."""
    model = models[family]
    ids = torch.tensor([[5, *range(20, 40)]])
    for value in NOT_FINITE:
        for cache in caches(model):
            model.forward(ids[:, :3], cache)
            before = contents(cache)
            weights: Any = spoil(family, name, value)
            step = torch.cat([ids[:, 3:], ids[:, :1]], dim=1)
            with pytest.raises(
                NonFinite,
                match=r"positions \d+ to \d+: the computation gave an infinity or a NaN in .*; nothing of it was",
            ):
                forward_cached(step, weights, model.config, cache, scores="all")
            assert cache.length == 3
            assert same_contents(contents(cache), before)


@pytest.mark.law(3)
@pytest.mark.parametrize("scores", ["none", "last"])
@pytest.mark.parametrize(("family", "name"), SPOILED)
def test_without_all_scores_nothing_that_is_not_finite_is_kept(
    family: str, name: str, scores: Rows, models: dict[str, Model], spoil: Spoil
) -> None:
    """What only the scores would show need not be found where none are asked; what is kept must be finite."""
    model = models[family]
    for value in NOT_FINITE:
        cache = model.concat_cache()
        try:
            forward_cached(
                torch.tensor([[5, *range(20, 40), 5]]), spoil(family, name, value), model.config, cache, scores=scores
            )
        except NonFinite:
            assert cache.length == 0
        else:
            assert scores == "none"
            assert ".0." not in name
            assert all(tensor.isfinite().all() for tensor in contents(cache))


@pytest.mark.law(3)
@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("row", [48 + 5, 2 * 48 + 5], ids=["keys", "values"])
def test_the_last_layers_keys_and_values_are_looked_at(
    row: int, value: float, models: dict[str, Model], spoil: Spoil
) -> None:
    """No later layer would show them, and no scores are asked."""
    model = models["gpt2"]
    weights = spoil("gpt2", f"h.{LAYERS - 1}.attn.c_attn.bias", value, row)
    for cache in caches(model):
        with pytest.raises(NonFinite):
            forward_cached(random_ids(9), weights, model.config, cache, scores="none")
        assert cache.length == 0


@pytest.mark.law(3)
@pytest.mark.parametrize("layer", range(LAYERS - 1))
def test_infinite_keys_are_found_where_their_weight_in_attention_is_zero(model: Model, layer: int) -> None:
    """Keys of one position overflow against the queries: a score of minus infinity, so no output shows it."""
    weights = copy.copy(model.weights)

    class Overflowing(FailingBlock):
        def project(self, x: Tensor, place: Any) -> tuple[Tensor, Tensor, Tensor]:
            queries, keys, values = self._block.project(x, place)
            queries, keys = queries.clone(), keys.clone()
            queries[..., 0] = queries[..., 0].abs() + 1
            keys[4, :, 0] = float("-inf")
            return queries, keys, values

    block: Any = Overflowing(weights.blocks[layer], "", Boom(), 0)
    weights.blocks = [*weights.blocks[:layer], block, *weights.blocks[layer + 1 :]]
    cache = model.concat_cache()
    with pytest.raises(NonFinite):
        forward_cached(random_ids(12), weights, model.config, cache)
    assert cache.length == 0


@pytest.mark.law(3)
@pytest.mark.parametrize(("path", "name"), [("torch", "mlp.c_fc"), ("auto", "attn.c_attn")])
def test_an_overflow_in_16_bits_is_found(tmp_path: Path, path: PathName, name: str) -> None:
    """Weights that are finite, and products that are not: the compiled step keeps only keys and values in 16 bits."""
    tensors = tiny_tensors(TINY_CONFIGS["gpt2"])
    model = load(write_model(tmp_path / "fine", TINY_CONFIGS["gpt2"], tensors), dtype="float16", path=path)
    tensors[f"h.2.{name}.weight"] *= 3e4

    def run() -> None:
        overflowing = load(write_model(tmp_path / "huge", TINY_CONFIGS["gpt2"], tensors), dtype="float16", path=path)
        overflowing.forward(random_ids(9), overflowing.concat_cache())

    with pytest.raises(NonFinite, match=r"an infinity or a NaN in torch\.float"):
        run()
    assert model.forward(random_ids(9), model.concat_cache()) is not None


def test_the_position_that_is_not_finite_is_named(models: dict[str, Model]) -> None:
    """An embedding that only one id has."""
    tensors = tiny_tensors(TINY_CONFIGS["smollm2"])
    model = models["smollm2"]
    weights: Any = copy.copy(model.weights)
    weights.embedding = tensors["model.embed_tokens.weight"].clone()
    weights.embedding[7] = float("nan")
    ids = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 5, 6]])
    cache = model.concat_cache(batch=2)
    forward_cached(ids[:, :3], weights, model.config, cache)
    with pytest.raises(NonFinite, match="positions 3 to 3: "):
        forward_cached(ids[:, 3:4], weights, model.config, cache)
    assert cache.length == 3


# What is returned.


@pytest.mark.law(1)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("held", "asked"), [(0, 1), (0, 7), (5, 1), (5, 3), (TILE - 3, 9), (TILE, 2), (TILE - 1, 1)])
def test_the_kinds_of_scores_agree(model: Model, held: int, asked: int, batch: int) -> None:
    ids = random_ids(held + asked, batch=batch)
    found: dict[str, Tensor | None] = {}
    states = []
    kinds: tuple[Rows, ...] = ("last", "all", "none")
    for kind in kinds:
        cache = model.static_cache(2 * TILE, batch=batch)
        if held:
            assert model.forward(ids[:, :held], cache, scores="none") is None
        found[kind] = model.forward(ids[:, held:], cache, scores=kind)
        states.append(contents(cache))
        assert cache.length == held + asked
    last, every = found["last"], found["all"]
    assert found["none"] is None
    assert last is not None
    assert every is not None
    assert last.shape == (batch, VOCABULARY)
    assert every.shape == (batch, asked, VOCABULARY)
    assert last.dtype == every.dtype == torch.float32
    assert same_bits(every[:, -1], last)
    assert same_contents(states[0], states[1])
    assert same_contents(states[0], states[2])


@pytest.mark.law(4)
@pytest.mark.parametrize("scores", ["last", "all"])
@pytest.mark.parametrize("asked", [1, 6, TILE + 3])
def test_scores_are_plain_tensors_of_the_caller(model: Model, scores: Rows, asked: int) -> None:
    """They can be written to outside inference mode, and nothing else changes with them."""
    ids = random_ids(asked + 1)
    cache = model.concat_cache()
    first = model.forward(ids[:, :asked], cache, scores=scores)
    assert first is not None
    assert not first.is_inference()
    before = contents(cache)
    kept = first.clone()
    first.div_(0.7).add_(1.0)
    first[..., 3] = -float("inf")
    torch.nn.Parameter(first).sum().backward()
    assert same_contents(contents(cache), before)
    again = model.forward(ids[:, :asked], model.concat_cache(), scores=scores)
    assert again is not None
    assert same_bits(again, kept)
    following, wanted = model.forward(ids[:, asked:], cache), model.forward(ids, model.concat_cache())
    assert following is not None
    assert wanted is not None
    assert same_bits(following, wanted)


def test_ids_are_left_as_they_were(model: Model) -> None:
    ids = random_ids(9)
    given = ids.clone()
    model.forward(given, model.concat_cache())
    assert torch.equal(given, ids)
