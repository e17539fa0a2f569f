"""Row-wise functions: no number of rows and no number of threads changes a bit of a row."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from kvouch.models.config import Activation
from kvouch.models.layers import activation
from kvouch.numerics.bits import same_bits

pytestmark = pytest.mark.law(1)


@pytest.fixture(params=[1, 2, 3, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [80, 192, 1531, 4864])
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
def test_an_activation_gives_a_row_the_same_bits_beside_any_others(
    name: Activation, width: int, dtype: torch.dtype, threads: int
) -> None:
    """torch's own compute the ends of each thread's range by other code than the rest."""
    rows = (3 * torch.randn(70, width, generator=torch.Generator().manual_seed(1))).to(dtype)
    function = activation(name)
    whole = function(rows)
    for count in (1, 2, 3, 7, 21, 37, 69):
        assert same_bits(function(rows[-count:].contiguous()), whole[-count:])
        halves = torch.cat([rows, rows], dim=1)[-count:, width:]  # a strided half, as the gate is
        assert same_bits(function(halves), whole[-count:])


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("silu", torch.nn.functional.silu),
        ("gelu", torch.nn.functional.gelu),
        ("gelu_tanh", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    ],
)
def test_an_activation_is_the_function_of_its_name(name: Activation, reference: Callable[[Tensor], Tensor]) -> None:
    x = torch.cat([torch.linspace(-30, 30, 4001), torch.tensor([0.0, -0.0, 1e-30, -1e4, 1e4])])[None]
    torch.testing.assert_close(activation(name)(x), reference(x.double()).float(), rtol=2e-6, atol=1e-7)
