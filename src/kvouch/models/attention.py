"""Canonical attention: over absolute tiles of the key axis, merged in tile order.

Knows queries, tiles and positions. A row's result depends on its own query and the keys up to its position, never on
how many rows came with it: each tile gives an output and a log-sum-exp, and they are merged one after the other.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvouch.contract import TILE, Tiles


class QueryRows:
    """The rows of a step that ask: positions [first, first + count) of each of `batch` sequences, in one tile.

    The `group` query heads of a key-value head are folded into rows, and rows are padded to the attention's quantum.
    """

    def __init__(
        self,
        *,
        batch: int,
        first: int,
        count: int,
        group: int,
        quantum: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.batch, self.count, self.group = batch, count, group
        self.folded = count * group
        self.padding = -self.folded % quantum
        row = torch.arange(self.folded + self.padding, device=device) // group  # a padding row may see beyond
        hidden = torch.arange(TILE, device=device) > (first % TILE + row)[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
        self.mask = mask.masked_fill_(hidden, -math.inf)  # [rows, W], for the last tile

    def fold(self, queries: Tensor) -> Tensor:
        """[B * T, H, D] -> [B, G, rows, D]."""
        heads, size = queries.shape[1] // self.group, queries.shape[2]
        rows = queries.view(self.batch, self.count, heads, self.group, size).transpose(1, 2)
        return pad(rows.reshape(self.batch, heads, self.folded, size), (0, 0, 0, self.padding))

    def unfold(self, outputs: Tensor) -> Tensor:
        """[B, G, rows, D] -> [B * T, H * D]."""
        heads, size = outputs.shape[1], outputs.shape[3]
        rows = outputs[:, :, : self.folded].view(self.batch, heads, self.count, self.group, size)
        return rows.transpose(1, 2).reshape(self.batch * self.count, heads * self.group * size)


def attend(queries: Tensor, tiles: Tiles, rows: QueryRows) -> Tensor:
    """Attention of queries [B * T, H, D] over the tiles of their layer: [B * T, H * D]."""
    folded = rows.fold(queries)
    outputs, masses = tile_attention(folded, tiles.last_keys, tiles.last_values, rows.mask)
    if tiles.past_keys.shape[2]:
        sequences = zip(folded, tiles.past_keys, tiles.past_values, outputs, masses, strict=True)
        outputs = torch.stack([_merge(*sequence) for sequence in sequences])
    return rows.unfold(outputs)


def _merge(queries: Tensor, past_keys: Tensor, past_values: Tensor, last_output: Tensor, last_mass: Tensor) -> Tensor:
    """One sequence: its full past tiles in one call (tiles as the batch), then the sum over tiles in their order.

    queries and last_output [G, rows, D], past_keys and past_values [G, n, W, D], last_mass [G, rows].
    """
    keys, values = past_keys.transpose(0, 1), past_values.transpose(0, 1)  # [n, G, W, D]
    outputs, masses = tile_attention(queries.expand(len(keys), -1, -1, -1), keys, values, None)
    masses = torch.cat([masses, last_mass[None]])  # [n + 1, G, rows]
    weights = (masses - masses.amax(0)).exp_()[..., None]
    parts = outputs.float() * weights[:-1]
    numerator, denominator = parts[0], weights[0]
    for tile in range(1, len(keys)):
        numerator, denominator = numerator + parts[tile], denominator + weights[tile]
    numerator, denominator = numerator + last_output.float() * weights[-1], denominator + weights[-1]
    return (numerator / denominator).to(last_output.dtype)


def tile_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax attention over one tile each: outputs [N, G, rows, D] and float32 log-sum-exps [N, G, rows].

    queries [N, G, rows, D], keys and values [N, G, W, D], mask [rows, W] of 0 and -inf, or None.
    """
    if queries.device.type == "cpu":
        output, mass = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, False, attn_mask=mask
        )
        return output, mass
    scores = queries.float() @ keys.float().transpose(-1, -2) / math.sqrt(queries.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(mask < 0, -math.inf)
    mass = scores.logsumexp(-1)
    return ((scores - mass[..., None]).exp() @ values.float()).to(values.dtype), mass
