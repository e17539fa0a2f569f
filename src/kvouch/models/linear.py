"""Matrix products with packed weights. Knows one weight and its bias; knows nothing of models.

`F.linear` is right everywhere. On x86 CPUs oneDNN multiplies faster by a weight that it has laid out once, and with
that weight alone in memory: `PackedLinear` holds nothing but the packed form. Where oneDNN has no product for a dtype
(bfloat16 below AVX-512, float16 below its AVX-512 form) the plain weight stays.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvouch.contract import TILE

MOST_ROWS = TILE  # of one product: a batch is cut, so that no more counts of rows need be known to be exact
PACK_ROWS = 16  # the number of rows that the layout is chosen for; one for a single row takes another kernel


class Linear(Protocol):
    """y = x W^T + b for rows x [R, K], W [N, K], b [N], in the dtype of W: other rows are rounded to it first."""

    def __call__(self, x: Tensor) -> Tensor: ...

    @property
    def inputs(self) -> int:
        """K."""

    @property
    def least_rows(self) -> int:
        """The fewest rows that it is worth being given."""

    def products(self) -> "Sequence[Linear]":
        """The single matrix products that it is made of."""

    @property
    def tensors(self) -> list[Tensor]:
        """What it holds in memory."""


class PlainLinear:
    """The weight as it is, multiplied by `F.linear`."""

    least_rows = 1

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias, self.inputs = weight, bias, weight.shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)

    def products(self) -> Sequence[Linear]:
        return (self,)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


class PackedLinear:
    """The weight in oneDNN's own layout, multiplied by oneDNN."""

    least_rows = 4  # cost no more than one, and fewer counts have a compiled kernel each

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)
        self.bias, self.inputs, self._dtype = bias, weight.shape[1], weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.to(self._dtype)
        if len(rows) > MOST_ROWS:
            return torch.cat([self(part) for part in rows.split(MOST_ROWS)])
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")
        return product

    def products(self) -> Sequence[Linear]:
        return (self,)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


def pack(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The fastest Linear that this device, dtype and build of torch have for a weight [N, K]."""
    return PackedLinear(weight, bias) if can_pack(weight.dtype, weight.device) else PlainLinear(weight, bias)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN packs and multiplies this dtype here; found by trying."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    try:
        PackedLinear(torch.zeros(16, 16, dtype=dtype))(torch.zeros(PACK_ROWS, 16, dtype=dtype))
    except (RuntimeError, AttributeError):
        return False
    return True


def storage_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's numbers, packed ones included."""
    return int(torch.ops.mkldnn._nbytes(tensor)) if tensor.is_mkldnn else tensor.nbytes
