"""The row-wise parts of a layer: norms, rope, activations. A row's result depends on that row alone.

The residual stream and the gains of the layers' norms are float32 in every model; a norm's result is rounded once, to
the dtype of the products that read it.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kvouch.models.config import Activation, Rope


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last dimension (Zhang and Sennrich, 2019); x and weight of one dtype.

    By five operations: torch's own function makes nine of it on a CPU, and costs twice as much for a row.
    """
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)  # [R, 1]
    inverse = length.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    normed: Tensor = (x * inverse).mul_(weight)
    return normed.to(x.dtype)


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


def activation(name: Activation) -> Callable[[Tensor], Tensor]:
    """The function that a config's activation names: of rows [R, I], in float32."""
    match name:
        case "silu":
            return silu
        case "gelu":
            return gelu
        case "gelu_tanh":
            return gelu_tanh


# torch's own fused activations compute what does not fill a vector register by other code, at places that depend on the
# number of rows and threads, and their last bits differ there. Its exp and erf do not, nor do products and sums.


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    x = x.float()
    return x / (-x).exp_().add_(1)


def gelu(x: Tensor) -> Tensor:
    """x times the normal distribution up to x (Hendrycks and Gimpel, 2016)."""
    x = x.float()
    return (x * math.sqrt(0.5)).erf_().add_(1).mul_(0.5) * x


def gelu_tanh(x: Tensor) -> Tensor:
    """The same by tanh's approximation, written with the sigmoid that tanh is."""
    x = x.float()
    inner = (x * x).mul_(0.044715).add_(1).mul_(x)  # x + 0.044715 x^3
    return x / inner.mul_(-2 * math.sqrt(2 / math.pi)).exp_().add_(1)
