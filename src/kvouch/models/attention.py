"""Canonical attention: over absolute tiles of the key axis, merged in tile order.

Knows queries, tiles and positions. A row's result depends on its own query and the keys up to its position, never on
how many rows came with it: each tile gives an output and a log-sum-exp, and they are merged one after the other.
"""

import math

import torch
from torch import Tensor

from kvouch.contract import TILE, Tiles


class QueryRows:
    """The rows of a step that ask: positions [first, first + count) of each of `batch` sequences, in one tile.

    The query heads of a key-value head are folded into rows, and rows are padded to the attention's quantum by
    repeating the last: one gather does both, and one undoes them.
    """

    def __init__(
        self,
        *,
        batch: int,
        first: int,
        count: int,
        padding: int,  # rows behind the last sequence's that the products get too
        heads: int,
        group: int,  # query heads of a key-value head
        quantum: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        folded = count * group
        self.rows = folded + -folded % quantum
        row = torch.arange(self.rows, device=device).clamp_(max=folded - 1)
        position, head = row // group, torch.arange(0, heads, group, device=device)[:, None] + row % group  # [G, rows]
        sequence = torch.arange(batch, device=device)[:, None, None]
        self._fold = ((sequence * count + position) * heads + head).flatten()  # [B * G * rows]

        asked = torch.arange(batch * count + padding, device=device).clamp_(max=batch * count - 1)[:, None]  # [R, 1]
        head = torch.arange(heads, device=device)
        block = asked // count * (heads // group) + head // group  # [R, H]: sequence and key-value head
        self._unfold = (block * self.rows + asked % count * group + head % group).flatten()  # [R * H]

        hidden = torch.arange(TILE, device=device) > (first % TILE + position)[:, None]
        self.mask = torch.zeros(first // TILE + 1, self.rows, TILE, dtype=dtype, device=device)  # [n, rows, W]
        self.mask[-1].masked_fill_(hidden, -math.inf)  # zeros change no bit: past tiles are seen whole

    def fold(self, queries: Tensor) -> Tensor:
        """[R, H, D] -> [B * G, 1, rows, D]."""
        size = queries.shape[-1]
        return queries.reshape(-1, size).index_select(0, self._fold).view(-1, 1, self.rows, size)

    def unfold(self, outputs: Tensor, *, width: int) -> Tensor:
        """[B * G, rows, D] -> [R, width], where width is H * D."""
        return outputs.reshape(-1, outputs.shape[-1]).index_select(0, self._unfold).view(-1, width)


def attend(queries: Tensor, tiles: Tiles, rows: QueryRows) -> Tensor:
    """Attention of queries [R, H, D] over the tiles of their layer: [R, H * D]."""
    keys, values = tiles.keys.flatten(0, 1), tiles.values.flatten(0, 1)  # [B * G, n, W, D]
    folded = rows.fold(queries).expand(-1, keys.shape[1], -1, -1)
    outputs, masses = tile_attention(folded, keys, values, rows.mask[None])
    return rows.unfold(_merge(outputs, masses), width=queries.shape[1] * queries.shape[2])


def _merge(outputs: Tensor, masses: Tensor) -> Tensor:
    """The sum over tiles, one after the other: outputs [N, n, rows, D], masses [N, n, rows] -> [N, rows, D]."""
    if masses.shape[1] == 1:
        return outputs[:, 0]
    weights = (masses - masses.amax(1, keepdim=True)).exp_()[..., None].unbind(1)
    parts = outputs.float().unbind(1)
    numerator, denominator = parts[0] * weights[0], weights[0]
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        numerator, denominator = torch.addcmul(numerator, part, weight), denominator + weight
    return numerator.div_(denominator).to(outputs.dtype)


def tile_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax attention within each tile: outputs [N, n, rows, D] and float32 log-sum-exps [N, n, rows].

    queries [N, n, rows, D], keys and values [N, n, W, D], mask [1, n, rows, W] of 0 and -inf, in the same dtype.
    """
    if queries.device.type == "cpu":
        output, mass = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, False, attn_mask=mask
        )
        return output, mass
    scores = queries.float() @ keys.float().transpose(-1, -2) / math.sqrt(queries.shape[-1])
    scores = scores.masked_fill(mask < 0, -math.inf)
    mass = scores.logsumexp(-1)
    return ((scores - mass[..., None]).exp() @ values.float()).to(values.dtype), mass
