"""The row-wise parts of a layer: norms, rope, activations. A row's result depends on that row alone.

The residual stream and the gains of the layers' norms are float32 in every model; a norm's result is rounded once, to
the dtype of the products that read it.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kvouch.models.config import Activation, Rope

RowFunction = Callable[[Tensor], Tensor]

LANES = 64  # elements of two of the widest vector registers, in the narrowest dtype: one turn of torch's vector loop
GRAIN = 32768  # torch's own: fewer elements than this are never cut among threads


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last dimension (Zhang and Sennrich, 2019); x and weight of one dtype."""
    return F.rms_norm(x, weight.shape, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm over the last dimension (Ba et al., 2016)."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def rope_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians a position for each pair of a head: float32 [D / 2]."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    frequencies = frequencies / rope.linear_factor
    if rope.llama3 is None:
        return frequencies
    scaling = rope.llama3
    # Rotations that a frequency makes over the original context: few -> scaled down, many -> kept.
    turns = scaling.original_max_position_embeddings * frequencies / (2 * torch.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def rope_tables(rope: Rope, head_dim: int, positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines [positions, D], ready for `rotate`; angles are taken in float32."""
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * rope_frequencies(rope, head_dim)
    cosines, sines = angles.cos(), angles.sin()
    return torch.cat([cosines, cosines], -1).to(dtype), torch.cat([-sines, sines], -1).to(dtype)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary positions (Su et al., 2021) on x [R, heads, D] with tables [R, 1, D]; halves are the pairs."""
    return torch.addcmul(x * cosines, x.roll(x.shape[-1] // 2, -1), sines)


def activation(name: Activation) -> RowFunction:
    """The function that a config's activation names, on rows [R, I]."""
    match name:
        case "silu":
            return partial(whole_lanes, F.silu)
        case "gelu":
            return partial(whole_lanes, F.gelu)
        case "gelu_tanh":
            return partial(whole_lanes, partial(F.gelu, approximate="tanh"))


def whole_lanes(function: RowFunction, x: Tensor) -> Tensor:
    """An elementwise function of rows [R, I], computed by torch's vector code for every element.

    On the CPU torch cuts the elements into one range a thread and computes what does not fill a vector register at the
    end of each by scalar code, whose last bit can differ: a row's bits would depend on how many rows there are.
    """
    if x.device.type != "cpu" or (x.shape[1] % LANES == 0 and _range_elements(x.numel()) % LANES == 0):
        return function(x)
    padded = F.pad(x, (0, -x.shape[1] % LANES))
    blocks = [function(block) for block in padded.flatten().split(GRAIN)]
    return torch.cat(blocks).view_as(padded)[:, : x.shape[1]]


def _range_elements(elements: int) -> int:
    """How many elements torch gives each thread."""
    threads = min(torch.get_num_threads(), -(-elements // GRAIN))
    return -(-elements // threads)
