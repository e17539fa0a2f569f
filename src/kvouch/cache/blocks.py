"""The cache that the compiled step reads and writes in place. Knows the step's layout of a block.

A block holds BLOCK positions of one layer, kind and head: keys as [D/2, 16, 2] in bfloat16 and [D, 16] otherwise,
values as [8, D, 2] and [16, D], with D rounded up to 16. Attention is then the same matrix product as all others.
"""

from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvouch.cache.base import LayeredCache, as_tiles
from kvouch.contract import BLOCK, CacheShape, Tiles
from kvouch.errors import CacheShapeError


def numbers_together(dtype: torch.dtype) -> int:
    """How many numbers of a row lie side by side in the step's layouts: what one instruction multiplies and adds."""
    return 2 if dtype == torch.bfloat16 else 1


def whole_blocks(width: int) -> int:
    """`width` rounded up to a multiple of BLOCK."""
    return -(-width // BLOCK) * BLOCK


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
        self.planes = torch.zeros(shape, dtype=dtype, device=device)  # [layer, keys or values, G, block, numbers]
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

    def written(self, layer: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [1, G, end - first, D] of any positions that were written, pending ones included."""
        start = first // BLOCK
        keys, values = self._plain(layer, start, whole_blocks(end) // BLOCK)
        inside = slice(first - start * BLOCK, end - start * BLOCK)
        return keys[:, :, inside], values[:, :, inside]

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.written(layer, 0, self.length)

    def tiles(self, layer: int) -> Tiles:
        tiled, end = self._tiled(layer), self._end(layer)
        keys, values = (pad(held, (0, 0, 0, tiled - end)) for held in self.written(layer, 0, end))
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
        start, stop = self.length // BLOCK, whole_blocks(end) // BLOCK
        size, together = whole_blocks(self._config.head_dim), numbers_together(self.dtype)
        before = self.length - start * BLOCK  # positions of the first block that stay
        for kind, (held, new) in enumerate(zip(self._plain(layer, start, stop), (keys, values), strict=True)):
            rows = torch.cat([held[:, :, :before], new], dim=2)[0]  # [G, positions, D]
            rows = pad(rows, (0, size - rows.shape[-1], 0, (stop - start) * BLOCK - rows.shape[1]))
            if kind == 0:  # [G, block, D/2, 16, 2]
                packed = rows.unflatten(1, (-1, BLOCK)).unflatten(-1, (-1, together)).transpose(2, 3)
            else:  # [G, block, 8, D, 2]
                packed = rows.unflatten(1, (-1, BLOCK // together, together)).transpose(3, 4)
            self.planes[layer, kind, :, start:stop] = packed.flatten(2)
        return self.written(layer, 0, end)

    def _plain(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values [1, G, positions, D] of blocks [start, stop)."""
        together, size = numbers_together(self.dtype), self._config.head_dim
        keys, values = self.planes[layer, :, :, start:stop]
        keys = keys.unflatten(-1, (-1, BLOCK, together)).transpose(2, 3)  # [G, block, 16, D/2, 2]
        values = values.unflatten(-1, (BLOCK // together, -1, together)).transpose(3, 4)  # [G, block, 8, 2, D]
        keys, values = keys.flatten(3).flatten(1, 2), values.flatten(1, 3)  # [G, positions, D rounded up]
        return keys[None, :, :, :size], values[None, :, :, :size]

    def _drop_beyond_length(self) -> None:
        """They stay in their blocks, out of reach."""
