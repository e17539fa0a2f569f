"""Equality of bits, where `torch.equal` takes -0 for 0 and refuses NaN."""

import pytest
import torch

from kvouch.numerics.bits import same_bits

NAN, INF = float("nan"), float("inf")
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_zero_has_two_patterns(dtype: torch.dtype) -> None:
    plus, minus = torch.tensor([1.0, 0.0]).to(dtype), torch.tensor([1.0, -0.0]).to(dtype)
    assert not same_bits(plus, minus)
    assert same_bits(minus, minus.clone())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_nan_equals_itself(dtype: torch.dtype) -> None:
    tensor = torch.tensor([NAN, 1.0]).to(dtype)
    assert same_bits(tensor, tensor.clone())
    assert not same_bits(tensor, torch.tensor([1.0, NAN]).to(dtype))


def test_nans_of_other_bits_differ() -> None:
    bits = torch.tensor([0x7FC00000, 0x7FC00001, -0x00400000], dtype=torch.int32)
    nans = bits.view(torch.float32)
    assert nans.isnan().all()
    assert [same_bits(nans[:1], nan[None]) for nan in nans] == [True, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_last_bit_counts(dtype: torch.dtype) -> None:
    one = torch.ones(3, dtype=dtype)
    other = one.clone()
    other[1] += torch.finfo(dtype).eps
    assert not same_bits(one, other)
    assert same_bits(torch.full((2,), INF, dtype=dtype), torch.full((2,), INF, dtype=dtype))


def test_dtype_and_shape_count() -> None:
    zeros = torch.zeros(4)
    assert not same_bits(zeros, torch.zeros(4, dtype=torch.int32))
    assert not same_bits(zeros.half(), zeros.bfloat16())
    assert not same_bits(zeros, zeros.view(2, 2))
    assert not same_bits(zeros, zeros[:3])
    assert not same_bits(torch.empty(0, 2), torch.empty(2, 0))
    assert same_bits(torch.empty(0, 2), torch.empty(0, 2))
    assert same_bits(torch.tensor(1.5), torch.tensor(1.5))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_whole_numbers_are_compared_too(dtype: torch.dtype) -> None:
    a, b = torch.tensor([0, 1]).to(dtype), torch.tensor([1, 1]).to(dtype)
    assert same_bits(a, a.clone())
    assert not same_bits(a, b)


def test_memory_layout_does_not_count() -> None:
    tensor = torch.arange(12.0).view(3, 4)
    assert same_bits(tensor.t().contiguous().t(), tensor)
    assert same_bits(torch.arange(24.0)[::2], torch.arange(0.0, 24.0, 2))
    assert same_bits(torch.tensor(2.0).expand(3), torch.tensor([2.0, 2.0, 2.0]))
