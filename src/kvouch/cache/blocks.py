"""The cache that the compiled step reads and writes in place. Knows the step's layout of a block.

A block holds BLOCK positions of one layer, kind and head: keys as [D/2, 16, 2] in bfloat16 and [D, 16] otherwise,
values as [8, D, 2] and [16, D], with D rounded up to 16. Attention is then the same matrix product as all others.
"""

import math
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvouch.cache.base import LayeredCache, as_tiles
from kvouch.contract import BLOCK, CacheShape, Tiles
from kvouch.errors import CacheShapeError

CACHE_LINE = 64


def numbers_together(dtype: torch.dtype) -> int:
    """How many numbers of a row lie side by side in the step's layouts: what one instruction multiplies and adds."""
    return 2 if dtype == torch.bfloat16 else 1


def whole_blocks(width: int) -> int:
    """`width` rounded up to a multiple of BLOCK."""
    return -(-width // BLOCK) * BLOCK


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU in pages that the system zeroes when they are first used, from a cache line on.

    torch would fill them by its threads, which a forked child does not have and waits for in vain.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = math.prod(shape) * dtype.itemsize
    raw = np.zeros(count + CACHE_LINE, np.uint8)
    start = -raw.ctypes.data % CACHE_LINE
    return torch.from_numpy(raw[start : start + count]).view(dtype).view(shape)


class BlockCache(LayeredCache):
    """One sequence in blocks, allocated once for `capacity` positions (rounded up to a whole block).

    `reset` and `rollback` move the length; what lies beyond it is never read. `read` and `tiles` give copies.
    """

    def __init__(
        self,
        config: CacheShape,
        *,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(config, batch=1, dtype=dtype, device=device)
        if capacity < 1:
            raise CacheShapeError(f"capacity is {capacity}: a cache holds at least one position")
        blocks = whole_blocks(capacity) // BLOCK
        numbers = BLOCK * whole_blocks(config.head_dim)
        shape = (config.num_hidden_layers, 2, config.num_key_value_heads, blocks, numbers)
        self.planes = _zeros(shape, dtype, self.device)  # [layer, keys or values, G, block, numbers]
        self.table = torch.arange(blocks, dtype=torch.int32)  # where the block of each 16 positions lies

    @property
    def capacity(self) -> int:
        return len(self.table) * BLOCK

    @property
    def max_length(self) -> int:
        return self.capacity

    @property
    def nbytes(self) -> int:
        """More than `cache_bytes` where the head size is no multiple of 16."""
        return self.planes.nbytes

    def filled(self, new_positions: int) -> None:
        """A step has written so many positions to every layer: they are pending."""
        self._pending = [new_positions] * len(self._pending)

    def adopt(self, keys: Tensor, values: Tensor) -> None:
        """Holds keys and values [layers, G, positions, D] of another cache, and nothing else."""
        self.rollback(0)
        used = whole_blocks(keys.shape[2]) // BLOCK
        self.planes[:, 0, :, :used] = self._packed(keys, kind=0)
        self.planes[:, 1, :, :used] = self._packed(values, kind=1)
        self.length = keys.shape[2]

    def written(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [layers, G, end - first, D] of positions that were written, pending ones included."""
        start = first // BLOCK
        inside = slice(first - start * BLOCK, end - start * BLOCK)
        keys, values = self._plain(self.planes[:, :, :, start : whole_blocks(end) // BLOCK].transpose(0, 1))
        return keys[:, :, inside], values[:, :, inside]

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._read(layer, self.length)

    def tiles(self, layer: int) -> Tiles:
        tiled, end = self._tiled(layer), self._end(layer)
        keys, values = (pad(held, (0, 0, 0, tiled - end)) for held in self._read(layer, end))
        return Tiles(as_tiles(keys), as_tiles(values))

    def fork(self) -> Self:
        twin = type(self)(self._config, capacity=self.capacity, dtype=self.dtype, device=self.device)
        used = whole_blocks(self.length) // BLOCK
        twin.planes[:, :, :, :used] = self.planes[:, :, :, :used]
        twin.length = self.length
        return twin

    def _begin(self, end: int) -> None:
        """Blocks are there already."""

    def _write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        end = self._end(layer)
        start = self.length // BLOCK
        blocks = self.planes[layer, :, :, start : whole_blocks(end) // BLOCK]
        kept = self.length - start * BLOCK  # positions of the first block that stay
        for kind, (held, new) in enumerate(zip(self._plain(blocks), (keys[0], values[0]), strict=True)):
            blocks[kind] = self._packed(torch.cat([held[:, :kept], new], dim=1), kind=kind)
        return self._read(layer, end)

    def _read(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [1, G, end, D] of a layer."""
        keys, values = self._plain(self.planes[layer, :, :, : whole_blocks(end) // BLOCK])
        return keys[None, :, :end], values[None, :, :end]

    def _packed(self, rows: Tensor, *, kind: int) -> Tensor:
        """[..., positions, D] as blocks [..., block, numbers]; zeros fill the last one."""
        positions, size = rows.shape[-2:]
        rows = pad(rows, (0, whole_blocks(size) - size, 0, whole_blocks(positions) - positions))
        together = numbers_together(self.dtype)
        blocks: Tensor = rows.unflatten(-2, (-1, BLOCK // together, together)).transpose(-2, -1)  # [..., 8, D, 2]
        if kind == 0:
            blocks = rows.unflatten(-2, (-1, BLOCK)).unflatten(-1, (-1, together)).transpose(-3, -2)  # [.., D/2, 16, 2]
        return blocks.flatten(-3)

    def _plain(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [..., positions, D] of blocks [2, ..., block, numbers]."""
        together, size = numbers_together(self.dtype), self._config.head_dim
        keys = blocks[0].unflatten(-1, (-1, BLOCK, together)).transpose(-3, -2).flatten(-2).flatten(-3, -2)
        values = blocks[1].unflatten(-1, (BLOCK // together, -1, together)).transpose(-2, -1).flatten(-4, -2)
        return keys[..., :size], values[..., :size]

    def _drop_beyond_length(self) -> None:
        """They stay in their blocks, out of reach."""
