"""Caches in blocks of BLOCK positions, and how a block is laid out. Knows no step.

Planes are [layer, keys or values, G, block, numbers]; a table says in which block each 16 positions of a sequence lie.
The compiled step reads and writes them in place: keys are [D/2, 16, 2] in bfloat16 and [D, 16] otherwise, values
[8, D, 2] and [16, D], with D rounded up to 16, so that attention is the same matrix product as all others. The layout
`rows` is plain [16, D], for torch.
"""

import math
from abc import abstractmethod
from typing import Literal, Self

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


Layout = Literal["step", "rows"]


def block_numbers(head_dim: int, layout: Layout) -> int:
    """Numbers of a block of one layer, kind and head."""
    return BLOCK * (head_dim if layout == "rows" else whole_blocks(head_dim))


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU in pages that the system zeroes when they are first used, from a cache line on.

    torch would fill them by its threads, which a forked child does not have and waits for in vain.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = math.prod(shape) * dtype.itemsize
    raw = np.zeros(count + CACHE_LINE, np.uint8)
    start = -raw.ctypes.data % CACHE_LINE
    return torch.from_numpy(raw[start : start + count]).view(dtype).view(shape)


class BlockedCache(LayeredCache):
    """One sequence in blocks: `planes` may hold others too, `table` [blocks] says which are its own.

    A step either updates layer by layer, or calls `prepare`, writes into the planes, and calls `filled`. What lies
    beyond the length is never read. `read` and `tiles` give copies.
    """

    planes: Tensor
    table: Tensor  # int32
    layout: Layout = "step"

    def prepare(self, new_positions: int) -> None:
        """Makes room for so many positions, as the first `update` of a step does."""
        try:
            self._check_room(new_positions)
            self._begin(self.length + new_positions)
        except BaseException:
            self.rollback(self.length)
            raise

    def filled(self, new_positions: int) -> None:
        """A step has written so many positions to every layer: they are pending."""
        self._pending = [new_positions] * len(self._pending)

    def written(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [layers, G, end - first, D] of positions that were written, pending ones included."""
        start = first // BLOCK
        inside = slice(first - start * BLOCK, end - start * BLOCK)
        held = self.planes[:, :, :, self._blocks(start, end)]
        keys, values = (self._rows(held[:, kind], kind) for kind in range(2))
        return keys[:, :, inside], values[:, :, inside]

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._read(layer, self.length)

    def tiles(self, layer: int) -> Tiles:
        tiled, end = self._tiled(layer), self._end(layer)
        keys, values = (pad(held, (0, 0, 0, tiled - end)) for held in self._read(layer, end))
        return Tiles(as_tiles(keys), as_tiles(values))

    def _write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        end = self._end(layer)
        start = self.length // BLOCK
        blocks = self._blocks(start, end)
        kept = self.length - start * BLOCK  # positions of the first block that stay
        for kind, new in enumerate((keys[0], values[0])):
            held = self._rows(self.planes[layer, kind][:, blocks], kind)
            self.planes[layer, kind][:, blocks] = self._packed(torch.cat([held[:, :kept], new], dim=1), kind)
        return self._read(layer, end)

    def _read(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [1, G, end, D] of a layer."""
        held = self.planes[layer][:, :, self._blocks(0, end)]
        keys, values = (self._rows(held[kind], kind)[None, :, :end] for kind in range(2))
        return keys, values

    def _blocks(self, start: int, end: int) -> Tensor:
        """The blocks from number `start` of the table up to position `end`."""
        return self.table[start : whole_blocks(end) // BLOCK].to(self.device, torch.int64)

    def _packed(self, rows: Tensor, kind: int) -> Tensor:
        """[..., positions, D] as blocks [..., block, numbers]; zeros fill the last one."""
        positions, size = rows.shape[-2:]
        rows = pad(rows, (0, 0, 0, whole_blocks(positions) - positions))
        if self.layout == "rows":
            plain: Tensor = rows.unflatten(-2, (-1, BLOCK)).flatten(-2)
            return plain
        rows = pad(rows, (0, whole_blocks(size) - size))
        together = numbers_together(self.dtype)
        blocks: Tensor = rows.unflatten(-2, (-1, BLOCK // together, together)).transpose(-2, -1)  # [..., 8, D, 2]
        if kind == 0:
            blocks = rows.unflatten(-2, (-1, BLOCK)).unflatten(-1, (-1, together)).transpose(-3, -2)  # [.., D/2, 16, 2]
        return blocks.flatten(-3)

    def _rows(self, blocks: Tensor, kind: int) -> Tensor:
        """[..., positions, D] of blocks [..., block, numbers]."""
        together, size = numbers_together(self.dtype), self._config.head_dim
        if self.layout == "rows":
            rows: Tensor = blocks.unflatten(-1, (BLOCK, size)).flatten(-3, -2)
        elif kind == 0:
            rows = blocks.unflatten(-1, (-1, BLOCK, together)).transpose(-3, -2).flatten(-2).flatten(-3, -2)
        else:
            rows = blocks.unflatten(-1, (BLOCK // together, -1, together)).transpose(-2, -1).flatten(-4, -2)
        return rows[..., :size]

    @abstractmethod
    def _begin(self, end: int) -> None: ...


class BlockCache(BlockedCache):
    """Blocks of its own, allocated once for `capacity` positions (rounded up to a whole block).

    `reset` and `rollback` move the length.
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
        numbers = block_numbers(config.head_dim, self.layout)
        self.planes = zeros(
            (config.num_hidden_layers, 2, config.num_key_value_heads, blocks, numbers), dtype, self.device
        )
        self.table = torch.arange(blocks, dtype=torch.int32)

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

    def adopt(self, keys: Tensor, values: Tensor) -> None:
        """Holds keys and values [layers, G, positions, D] of another cache, and nothing else."""
        self.rollback(0)
        used = whole_blocks(keys.shape[2]) // BLOCK
        for kind, rows in enumerate((keys, values)):
            self.planes[:, kind, :, :used] = self._packed(rows, kind)
        self.length = keys.shape[2]

    def fork(self) -> Self:
        twin = type(self)(self._config, capacity=self.capacity, dtype=self.dtype, device=self.device)
        used = whole_blocks(self.length) // BLOCK
        twin.planes[:, :, :, :used] = self.planes[:, :, :, :used]
        twin.length = self.length
        return twin

    def _begin(self, end: int) -> None:
        """Blocks are there already."""

    def _drop_beyond_length(self) -> None:
        """They stay in their blocks, out of reach."""
