"""Is a row's result independent of the rows beside it, here and now? Finds the row quanta and sets the grade.

Knows functions of rows, and how to run a model on ids in chunks; knows nothing of what the model is. Two questions:
how many rows must a product or a tile be given at least, so that no row's bits depend on how many there are; and does
the whole then give the same keys, values and scores in two large pieces as in many small ones, over a tile edge. The
first is asked of many more numbers, since rounding to 16 bits hides most differences of a sum.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvouch.contract import TILE, Arithmetic, Grade, KVCache, Rows
from kvouch.numerics.bits import same_bits

RowFunction = Callable[[Tensor], Tensor]
"""Rows [R, ...] to rows [R, ...]."""

LINEAR_QUANTA = (1, 4, 8, 16, 32)
ATTENTION_QUANTA = (4, 8, 16, 32)  # one to three rows take another kernel, whose difference rounding may hide
ROW_COUNTS = (1, 2, 3, 5, 8, 9, 16, 17, 31, 33, 60, 65, 100, 190, 193, 260, 300, 513)
BEYOND_TILE = 32  # positions past the first tile edge
CHUNKS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 31, 33, 64)


class Subject(Protocol):
    """What is probed: a model, or its first layers."""

    @property
    def least_rows(self) -> int:
        """The fewest rows that a product is worth being given."""

    def products(self) -> Iterable[tuple[RowFunction, Tensor]]:
        """Every kind of matrix product, with sample rows."""

    def attention(self) -> Iterable[tuple[RowFunction, Tensor]]:
        """Attention over full and over masked tiles, with sample rows."""

    def run(self, ids: Tensor, cache: KVCache, rows: Rows, arithmetic: Arithmetic) -> Tensor | None:
        """`forward_cached` under an arithmetic."""

    def new_cache(self, device: torch.device) -> KVCache: ...


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """The quanta to compute with and what they make true."""

    arithmetic: Arithmetic
    grade: Grade


def probe(ids: Tensor, *, layers: Subject, model: Subject) -> ProbeResult:
    """Quanta under which `layers` (a few layers and the head) is exact; without any, the tolerance of `model`."""
    linear = smallest_quantum(
        layers.products(),
        [quantum for quantum in LINEAR_QUANTA if quantum >= layers.least_rows],
        lambda quantum, rows: Arithmetic(linear_rows=quantum).product_rows(rows),
    )
    attention = smallest_quantum(layers.attention(), ATTENTION_QUANTA, lambda quantum, rows: rows + -rows % quantum)
    if linear is not None and attention is not None:
        exact = Arithmetic(linear_rows=linear, attention_rows=attention)
        if chunking_difference(layers, ids, exact) is None:
            return ProbeResult(arithmetic=exact, grade=Grade())
    plain = Arithmetic()
    difference = chunking_difference(model, ids, plain) or 0.0
    return ProbeResult(arithmetic=plain, grade=Grade(name="within", tolerance=difference))


def smallest_quantum(
    functions: Iterable[tuple[RowFunction, Tensor]], quanta: Sequence[int], padded: Callable[[int, int], int]
) -> int | None:
    """The first quantum with which rows keep their bits, for all functions; None where none does.

    `padded(quantum, rows)` is how many rows a function gets for so many.
    """
    for function, rows in functions:
        whole = function(rows)
        while quanta and not _keeps_bits(function, rows, whole, {padded(quanta[0], count) for count in ROW_COUNTS}):
            quanta = quanta[1:]
    return quanta[0] if quanta else None


def _keeps_bits(function: RowFunction, rows: Tensor, whole: Tensor, counts: Iterable[int]) -> bool:
    return all(
        same_bits(function(rows[-count:].contiguous()), whole[-count:]) for count in sorted(counts) if count < len(rows)
    )


def probe_ids(vocab_size: int, context: int, device: torch.device) -> Tensor:
    """Fixed ids [1, n]: a tile and a little more, where the context has it; multiples of a prime, so spread out."""
    count = min(TILE + BEYOND_TILE, context)
    return (torch.arange(1, count + 1, dtype=torch.int64, device=device) * 7_368_787 % vocab_size)[None]


def chunking_difference(subject: Subject, ids: Tensor, arithmetic: Arithmetic) -> float | None:
    """Largest difference of a score between two large pieces and many small ones; None if all bits agree."""
    total = ids.shape[1]
    compared = max(total - BEYOND_TILE, 0)  # scores are compared in [compared, total)
    whole, cut = subject.new_cache(ids.device), subject.new_cache(ids.device)
    if compared:
        subject.run(ids[:, :compared], whole, "none", arithmetic)
    wanted = subject.run(ids[:, compared:], whole, "all", arithmetic)  # [1, total - compared, V]
    worst, exact = 0.0, True
    for stop in _small_pieces(compared, total):
        found = subject.run(ids[:, cut.length : stop], cut, "last" if stop > compared else "none", arithmetic)
        if found is not None and wanted is not None:
            expected = wanted[:, stop - compared - 1]
            exact = exact and same_bits(found, expected)
            worst = max(worst, float((found - expected).abs().max()))
    return None if exact and _same_state(whole, cut) else worst


def _small_pieces(compared: int, total: int) -> Iterator[int]:
    """Ends of chunks: all small sizes up to `compared`, then single rows and small groups up to `total`."""
    stop = 0
    for size in CHUNKS:
        if stop + size < compared:
            stop += size
            yield stop
    if compared:
        yield compared
    for extra in (1, 2, 4, 5, 8, 9, 12, 17, 24, 25, 28):
        if compared + extra < total:
            yield compared + extra
    yield total


def _same_state(a: KVCache, b: KVCache) -> bool:
    for layer in range(a.num_layers):
        if not all(same_bits(x, y) for x, y in zip(a.read(layer), b.read(layer), strict=True)):
            return False
    return True
