"""Equality of bits. `torch.equal` takes -0 for 0 and refuses NaN; the integer view does neither."""

import torch
from torch import Tensor

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    integer = _INTEGER[a.dtype.itemsize]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))
