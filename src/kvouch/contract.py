"""The protocols and value types that everything else speaks: read this first. Knows shapes, not how they are computed.

Shape alphabet, used in every docstring and comment:
    B batch   T new positions   S cached + new positions   R rows (B * T, flat)
    H query heads   G key-value heads   D head size   V vocabulary   W tile width (TILE)
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor

TILE = 256
"""Width in positions of one attention tile. Tiles are absolute: [0, TILE), [TILE, 2 * TILE), ..."""

BLOCK = 16
"""Positions of one block of a cache that keeps the compiled step's layout. Blocks are absolute, as tiles are."""

Rows = Literal["last", "all", "none"]
"""Which of the new positions get scores."""


class CacheShape(Protocol):
    """What a cache needs to know of a model."""

    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class Tiles(NamedTuple):
    """Keys and values of one layer as whole tiles [B, G, n, W, D]; views, valid until the cache changes.

    Tile i holds positions [i * TILE, (i + 1) * TILE). The last one holds the newest position and is zero beyond it, so
    that no stale number can reach a sum.
    """

    keys: Tensor
    values: Tensor


class KVCache(Protocol):
    """Keys and values of positions [0, length), for every layer.

    A step calls `update` once for each layer, then `advance` once. Until `advance`, the new positions are pending:
    an error, `rollback` or `reset` drops them and leaves [0, length) untouched.
    """

    @property
    def length(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def max_length(self) -> int | None:
        """Positions it can ever hold; None where it grows."""

    @property
    def num_layers(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def nbytes(self) -> int:
        """Bytes of its tensors: exactly `cache_bytes(config, batch, capacity, dtype)`."""

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores keys and values [B, G, T, D] at [length, length + T) and returns all of them [B, G, S, D]."""

    def tiles(self, layer: int) -> Tiles:
        """The same positions as whole tiles; only between the layer's `update` and `advance`, else CacheMisuse."""

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of [0, length), each [B, G, length, D]; views, valid until the cache changes."""

    def advance(self, new_positions: int) -> None:
        """Ends a step: every layer must have been updated with just that many positions."""

    def reset(self) -> None:
        """Length 0."""

    def rollback(self, length: int) -> None:
        """Keeps [0, length); 0 <= length <= self.length, or CacheMisuse."""

    def fork(self) -> Self:
        """An independent cache with the same contents."""


@dataclass(frozen=True, kw_only=True)
class Grade:
    """What a hit promises: the bits of a miss, or its scores within a measured tolerance."""

    name: Literal["bitwise", "within"] = "bitwise"
    tolerance: float = 0.0  # largest difference of a score that the probe saw between chunkings: measured, no bound

    def __str__(self) -> str:
        return self.name if self.name == "bitwise" else f"within({self.tolerance:.1e})"


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """How rows are grouped so that a row's bits do not depend on its neighbours (found by `numerics.probe`)."""

    linear_rows: int = 1  # a matrix product gets a multiple of this many rows
    attention_rows: int = 1  # so does an attention tile

    def product_rows(self, rows: int) -> int:
        """How many rows a product gets for so many: the quantum times a power of two, or times three such.

        Few different counts, since oneDNN compiles a kernel for each and keeps it (0.6 MB).
        """
        if self.linear_rows == 1:
            return rows
        quanta = -(-rows // self.linear_rows)
        power = 1 << (quanta - 1).bit_length()
        three_quarters = power // 4 * 3
        return self.linear_rows * (three_quarters if three_quarters >= quanta else power)


Cause = Literal[
    "nothing asked", "no entry", "identity", "ids differ", "ids equal", "held", "read off", "reuse off", "quarantined"
]
"""Why a call reused what it did, and no more."""

Tier = Literal["memory"]
"""Where reused positions came from."""


@dataclass(frozen=True, kw_only=True)
class Reason:
    """The cause, and the first field or token that differs; never the text of another tenant."""

    cause: Cause
    field: str | None = None  # of the identity
    position: int | None = None  # of the first id that differs
    cached_id: int | None = None
    asked_id: int | None = None

    def __str__(self) -> str:
        match self.cause:
            case "identity":
                return f"computed under another identity: {self.field} differs"
            case "ids differ":
                return f"ids differ at {self.position:,}: cached {self.cached_id}, asked {self.asked_id}"
            case "ids equal":
                return "all ids asked are held already"
            case "held":
                return "all ids held are the beginning of those asked"
            case "nothing asked":
                return "no call has been answered"
            case "read off":
                return "reading is off for this caller"
            case "reuse off":
                return "this backend reuses nothing"
            case "quarantined":
                return "what was held failed an audit"
            case _:
                return self.cause


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a call did and why. reused + computed = asked, always.

    `operator_reason` is for who runs the system: where another tenant's state lies there, it says so, and `reason`,
    which is the caller's, does not.
    """

    reused_tokens: int
    computed_tokens: int
    reason: Reason
    grade: Grade
    operator_reason: Reason | None = field(default=None, repr=False)

    @property
    def kind(self) -> str:
        """`hit`, `miss` or `refused`."""
        return type(self).__name__.lower()

    def explain(self, *, operator: bool = False) -> str:
        """One sentence."""
        reason = self.operator_reason if operator and self.operator_reason is not None else self.reason
        return f"{self.kind}: reused {self.reused_tokens:,}, computed {self.computed_tokens:,}; {reason}"

    def to_dict(self) -> dict[str, Any]:
        """For machines: the caller's reason, and what is not None."""
        because = {name: value for name, value in asdict(self.reason).items() if value is not None}
        return {
            "kind": self.kind,
            "reused_tokens": self.reused_tokens,
            "computed_tokens": self.computed_tokens,
            "reason": because,
            "grade": str(self.grade),
        }

    def __str__(self) -> str:
        return self.explain()


@dataclass(frozen=True, kw_only=True)
class Hit(Verdict):
    """Positions were reused."""

    source: Tier = "memory"

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "source": self.source}


@dataclass(frozen=True, kw_only=True)
class Miss(Verdict):
    """Nothing that could be reused was there."""


@dataclass(frozen=True, kw_only=True)
class Refused(Verdict):
    """Nothing was reused because nothing might be: reading is off, or what was held failed an audit."""


Progress = Callable[[str, int, int], None]
"""Told of long work: stage, done, total. What it raises ends the work, as if it had not begun."""

LayerWatch = Callable[[int], None]
"""Told of each layer that a step has computed; what it raises cancels the step."""
