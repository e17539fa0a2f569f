"""The probe, on subjects whose arithmetic is known: what it chooses, and what it must never call bitwise."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kvouch.cache.concat import ConcatCache
from kvouch.contract import TILE, Arithmetic, Grade, KVCache, Rows
from kvouch.numerics import probe as probing
from kvouch.numerics.bits import same_bits
from kvouch.numerics.probe import RowFunction, chunking_difference, probe, probe_ids, smallest_quantum

pytestmark = pytest.mark.law(1)

CPU = torch.device("cpu")
NEVER = 7  # no quantum is a multiple of it
FIRST = Arithmetic(linear_rows=probing.LINEAR_QUANTA[0], attention_rows=probing.ATTENTION_QUANTA[0])
NAN = float("nan")


def ids_of(count: int) -> Tensor:
    return probe_ids(257, count, CPU)


IDS = ids_of(10**6)


@dataclass(frozen=True)
class Shape:
    num_hidden_layers: int = 2
    num_key_value_heads: int = 1
    head_dim: int = 2


def rows_that_need(quantum: int) -> RowFunction:
    """Rows doubled, and the first of them wrong in its last bit where their number is no multiple of `quantum`."""

    def function(rows: Tensor) -> Tensor:
        found = rows * 2
        if len(rows) % quantum:
            found[0] += torch.finfo(torch.float32).eps * 2
        return found

    return function


@dataclass
class Fake:
    """Keys, values and scores that are simple functions of id and position, but for what is wrong with them.

    A call is padded to the arithmetic's quanta, as a model does it. Where it then is no multiple of what the subject
    needs, one number of its last position, 0.0 by rights, is replaced in each part that `wrong` names (last layer).
    """

    linear_needs: int = 1
    attention_needs: int = 1
    products_need: int | None = None  # where the products alone behave otherwise than the whole
    wrong: dict[str, float] = field(default_factory=lambda: {"scores": 0.25})
    least_rows: int = 1
    calls: list[tuple[int, int, Rows, Arithmetic]] = field(default_factory=list)

    def products(self) -> Iterable[tuple[RowFunction, Tensor]]:
        yield rows_that_need(1), torch.ones(40, 3)
        yield (
            rows_that_need(self.linear_needs if self.products_need is None else self.products_need),
            torch.ones(288, 3),
        )

    def attention(self) -> Iterable[tuple[RowFunction, Tensor]]:
        yield rows_that_need(self.attention_needs), torch.ones(3 * TILE, 2)

    def run(self, ids: Tensor, cache: KVCache, rows: Rows, arithmetic: Arithmetic) -> Tensor | None:
        first, count = cache.length, ids.shape[1]
        self.calls.append((first, count, rows, arithmetic))
        products, tiles = arithmetic.product_rows(count), count + -count % arithmetic.attention_rows
        wrong = self.wrong if products % self.linear_needs or tiles % self.attention_needs else {}
        base = (ids * 3 + torch.arange(first, first + count)).float()  # [1, T]
        parts = {
            "keys": base[:, None, :, None] * torch.tensor([1.0, 0.0]),  # [1, 1, T, 2]
            "values": base[:, None, :, None] * torch.tensor([2.0, 0.0]),
            "scores": base[:, :, None] * torch.tensor([3.0, -1.0, 0.0]),  # [1, T, 3]
        }
        for layer in range(cache.num_layers - 1):
            cache.update(layer, parts["keys"].clone(), parts["values"].clone())
        for name, number in wrong.items():
            parts[name][..., -1, -1] = number
        cache.update(cache.num_layers - 1, parts["keys"], parts["values"])
        cache.advance(count)
        return {"none": None, "last": parts["scores"][:, -1], "all": parts["scores"]}[rows]

    def new_cache(self, device: torch.device) -> KVCache:
        return ConcatCache(Shape(), device=device)


# What is chosen.


def test_exact_rows_need_nothing() -> None:
    subject = Fake()
    result = probe(IDS, layers=subject, model=Fake())
    assert result.grade == Grade()
    assert result.grade.name == str(result.grade) == "bitwise"
    assert result.arithmetic == FIRST
    assert {arithmetic for *_, arithmetic in subject.calls} == {FIRST}


@pytest.mark.parametrize("linear", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("attention", [1, 4, 32])
def test_the_smallest_quanta_that_are_exact_are_chosen(linear: int, attention: int) -> None:
    result = probe(IDS, layers=Fake(linear, attention), model=Fake(NEVER))
    assert result.grade.name == "bitwise"
    wanted = [next(q for q in probing.LINEAR_QUANTA if q % linear == 0)]
    wanted += [next(q for q in probing.ATTENTION_QUANTA if q % attention == 0)]
    assert [result.arithmetic.linear_rows, result.arithmetic.attention_rows] == wanted


def test_rows_in_multiples_of_four() -> None:
    """The rule that was measured on CPUs."""
    result = probe(IDS, layers=Fake(4, 4), model=Fake(NEVER))
    assert result.arithmetic == Arithmetic(linear_rows=4, attention_rows=4)
    assert result.grade == Grade()


def test_fewer_rows_than_the_products_are_worth_are_not_chosen() -> None:
    assert probe(IDS, layers=Fake(least_rows=4), model=Fake(NEVER)).arithmetic.linear_rows == 4


@pytest.mark.parametrize(("linear", "attention"), [(NEVER, 1), (1, NEVER), (64, 1), (3, 3)])
def test_never_exact_is_a_tolerance_measured_on_the_whole_model(linear: int, attention: int) -> None:
    layers = Fake(linear, attention, wrong={"scores": 0.25})
    model = Fake(linear, attention, wrong={"scores": 0.75})
    result = probe(IDS, layers=layers, model=model)
    assert result.grade.name == "within"
    assert result.grade.tolerance == 0.75
    assert str(result.grade) == "within(7.5e-01)"
    assert result.arithmetic == Arithmetic()  # nothing is gained by padding
    assert {arithmetic for *_, arithmetic in model.calls} == {Arithmetic()}


def test_exact_products_are_not_believed_without_the_whole() -> None:
    layers = Fake(linear_needs=NEVER, products_need=1)
    result = probe(IDS, layers=layers, model=Fake(NEVER, wrong={"scores": -0.5}))
    assert layers.calls
    assert result.grade.tolerance == 0.5


def test_an_exact_whole_is_not_believed_without_the_products() -> None:
    """In 16 bits the whole rounds most differences away."""
    result = probe(IDS, layers=Fake(products_need=4), model=Fake())
    assert result.arithmetic.linear_rows == 4
    assert result.grade.name == "bitwise"


def test_without_exact_products_nothing_is_called_bitwise() -> None:
    """However well a short run of the whole agrees."""
    result = probe(IDS, layers=Fake(products_need=NEVER), model=Fake())
    assert result.grade == Grade(name="within", tolerance=0.0)


# What is seen.

UNSEEN_BY_SCORES = [
    {"keys": 1e-30},
    {"values": 1e-30},
    {"keys": -0.0},
    {"values": -0.0},
    {"keys": NAN},
    {"values": NAN},
]


@pytest.mark.parametrize("wrong", UNSEEN_BY_SCORES, ids=str)
def test_keys_or_values_that_differ_are_not_bitwise(wrong: dict[str, float]) -> None:
    """With every score the same: a later question would see the difference."""
    difference = chunking_difference(Fake(NEVER, wrong=wrong), IDS, Arithmetic())
    assert difference == 0.0
    result = probe(IDS, layers=Fake(NEVER, wrong=wrong), model=Fake(NEVER, wrong=wrong))
    assert result.grade.name == "within"


@pytest.mark.parametrize("number", [-0.0, NAN, 1e-45])
def test_scores_that_differ_in_a_bit_are_not_bitwise(number: float) -> None:
    assert chunking_difference(Fake(NEVER, wrong={"scores": number}), IDS, Arithmetic()) is not None


@pytest.mark.parametrize("number", [0.25, -3.0, 1e6])
def test_the_difference_is_the_largest_of_any_score(number: float) -> None:
    assert chunking_difference(Fake(NEVER, wrong={"scores": number}), IDS, Arithmetic()) == abs(number)


def test_the_same_everywhere_is_no_difference() -> None:
    """NaN among the scores of both ways is the same answer twice."""
    subject = Fake(10**6, wrong={"values": 0.5})  # every call is wrong in its last position: other positions by chunks
    assert chunking_difference(subject, IDS, Arithmetic()) is not None
    assert chunking_difference(subject, ids_of(1), Arithmetic()) is None
    assert chunking_difference(Fake(10**6, wrong={"scores": NAN}), ids_of(1), Arithmetic()) is None


# Contexts.

CONTEXTS = [1, 2, 3, 5, 29, 31, 32, 33, 34, 40, 100, TILE - 1, TILE, TILE + 1, TILE + 31, TILE + 32, 10**5]


@pytest.mark.parametrize("context", CONTEXTS)
def test_short_contexts_are_probed_whole(context: int) -> None:
    """Both ways cover each position once, end where the ids end, and stay in the context."""
    subject = Fake()
    ids = ids_of(context)
    assert ids.shape == (1, min(context, TILE + 32))
    assert chunking_difference(subject, ids, Arithmetic()) is None
    starts = [number for number, (first, *_) in enumerate(subject.calls) if first == 0]
    assert len(starts) == 2
    for calls in (subject.calls[: starts[1]], subject.calls[starts[1] :]):
        assert [first for first, *_ in calls[1:]] == [first + count for first, count, *_ in calls[:-1]]
        assert calls[-1][0] + calls[-1][1] == ids.shape[1]
        assert all(count > 0 for _, count, *_ in calls)
    whole, cut = subject.calls[: starts[1]], subject.calls[starts[1] :]
    assert len(whole) <= 2
    assert {count for _, count, *_ in cut} >= {1}
    if context > TILE + 31:
        assert {count for _, count, *_ in cut} >= {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 31, 33, 64}
        assert [first for first, *_ in cut if first > TILE][:3] == [TILE + 1, TILE + 2, TILE + 4]


@pytest.mark.parametrize("context", [context for context in CONTEXTS if context > 1])
@pytest.mark.parametrize("wrong", [{"scores": 0.5}, {"keys": 0.5}, {"values": -0.0}], ids=str)
def test_single_rows_that_differ_are_found_in_every_context(context: int, wrong: dict[str, float]) -> None:
    """One row or three take another kernel than four."""
    assert chunking_difference(Fake(4, wrong=wrong), ids_of(context), Arithmetic()) is not None


def test_a_context_of_one_position_is_exact_by_its_size() -> None:
    result = probe(ids_of(1), layers=Fake(4), model=Fake(4))
    assert result.grade.name == "bitwise"
    assert result.arithmetic.linear_rows == 4  # as a batch of several has several rows


@pytest.mark.parametrize("vocabulary", [1, 2, 257, 49_152, 128_256])
def test_probe_ids_are_fixed_and_in_the_vocabulary(vocabulary: int) -> None:
    ids = probe_ids(vocabulary, 1024, CPU)
    assert ids.shape == (1, TILE + 32)
    assert ids.dtype == torch.int64
    assert 0 <= int(ids.min()) <= int(ids.max()) < vocabulary
    assert same_bits(ids, probe_ids(vocabulary, 4096, CPU))
    assert len(ids.unique()) >= min(vocabulary, TILE + 32) * 0.9


# Rows.


def rounded_up(quantum: int, rows: int) -> int:
    return rows + -rows % quantum


@pytest.mark.parametrize("quantum", probing.LINEAR_QUANTA)
def test_a_product_gets_few_different_counts_of_rows_and_all_are_probed(quantum: int) -> None:
    arithmetic = Arithmetic(linear_rows=quantum)
    counts = [arithmetic.product_rows(rows) for rows in range(1, TILE + 1)]
    assert all(rows <= count < 2 * rows + quantum for rows, count in enumerate(counts, start=1))
    assert all(count % quantum == 0 for count in counts)
    assert counts[-1] == TILE
    if quantum > 1:
        assert len(set(counts)) <= 12
        assert set(counts) <= {arithmetic.product_rows(rows) for rows in probing.ROW_COUNTS}


def test_the_largest_need_of_all_functions_decides() -> None:
    def of(*needs: int) -> int | None:
        functions = [(rows_that_need(need), torch.ones(300, 2)) for need in needs]
        return smallest_quantum(functions, (1, 4, 8, 16, 32), rounded_up)

    assert of() == of(1) == of(1, 1) == 1
    assert of(4, 1) == of(1, 4) == of(2) == 4
    assert of(4, 8) == of(8, 4) == 8
    assert of(1, NEVER) is of(NEVER, 1) is of(64) is None


def test_a_difference_in_one_bit_of_one_row_counts() -> None:
    for wrong in (-0.0, NAN):

        def function(rows: Tensor, wrong: float = wrong) -> Tensor:
            found = torch.zeros(len(rows), 3)
            if len(rows) == 5:
                found[4, 2] = wrong
            return found

        assert smallest_quantum([(function, torch.ones(300, 2))], (1, 4, 8), rounded_up) == 4
