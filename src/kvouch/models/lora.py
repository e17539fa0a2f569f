"""Low-rank adapters on packed products. Knows one product and corrections of slices of its outputs; knows no file.

y[:, start:stop] += s (x A^T) B^T (Hu et al., 2021), in float32. The product underneath is shared, never copied.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from kvouch.models.linear import Linear
from kvouch.models.step import ModelWeights


@dataclass(frozen=True, kw_only=True)
class LoraPart:
    """One correction: A [r, K] and B [n, r] as products, on outputs [start, stop)."""

    down: Linear
    up: Linear
    start: int
    stop: int
    scale: float


class LoraLinear:
    """A product with corrections."""

    def __init__(self, base: Linear, parts: Sequence[LoraPart]) -> None:
        self.base, self.parts, self.inputs = base, tuple(parts), base.inputs
        self.least_rows = max(one.least_rows for one in self.products())

    def __call__(self, x: Tensor) -> Tensor:
        y, rows = self.base(x), x.float()
        for part in self.parts:
            y[:, part.start : part.stop] += part.up(part.down(rows)) * part.scale
        return y

    def products(self) -> list[Linear]:
        """Every matrix product that it is made of."""
        return [self.base, *(one for part in self.parts for one in (part.down, part.up))]

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for one in self.products() for tensor in one.tensors]


Parts = Mapping[tuple[int, str], Sequence[LoraPart]]
"""Corrections by layer and field of the block."""


def adapted(weights: ModelWeights, parts: Parts) -> ModelWeights:
    """The same weights with corrections: all tensors of the base are shared."""
    twin = copy.copy(weights)
    twin.blocks = [_adapted_block(block, layer, parts) for layer, block in enumerate(weights.blocks)]
    return twin


def _adapted_block(block: Any, layer: int, parts: Parts) -> Any:
    corrected = {field: LoraLinear(getattr(block, field), parts[at, field]) for at, field in parts if at == layer}
    return replace(block, **corrected) if corrected else block
