"""Equality of bits. `torch.equal` takes -0 for 0 and refuses NaN; the integer view does neither."""

import torch
from torch import Tensor

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(as_integers(a), as_integers(b))


def as_integers(tensor: Tensor) -> Tensor:
    """The bits of each number, as an integer of its size."""
    return tensor.contiguous().view(_INTEGER[tensor.dtype.itemsize])
