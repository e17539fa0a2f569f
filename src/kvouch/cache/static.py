"""The cache that is allocated once and written in place."""

from typing import Self

import torch
from torch import Tensor

from kvouch.cache.base import LayeredCache, as_tiles
from kvouch.cache.sizing import whole_tiles
from kvouch.contract import CacheShape, Tiles
from kvouch.errors import CacheShapeError


class StaticCache(LayeredCache):
    """One buffer for `capacity` positions (rounded up to a whole tile).

    `reset` and `rollback` move the length and clear nothing: what lies beyond the length stays in the buffer and is
    never read. A step begins by zeroing the rest of the tile that it ends in.
    """

    def __init__(
        self,
        config: CacheShape,
        *,
        capacity: int,
        batch: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(config, batch=batch, dtype=dtype, device=device)
        if capacity < 1:
            raise CacheShapeError(f"capacity is {capacity}: a static cache holds at least one position")
        shape = (config.num_hidden_layers, 2, batch, config.num_key_value_heads, whole_tiles(capacity), config.head_dim)
        self._buffer = torch.zeros(shape, dtype=dtype, device=device)
        self._layers = [(keys, values) for keys, values in self._buffer]  # each [B, G, capacity, D]
        # Views of tiles cost more than reading them does, and stay good until a step enters another tile.
        self._viewed = [0] * self.num_layers  # positions in `_tiles`
        self._tiles = [Tiles(self._buffer, self._buffer)] * self.num_layers

    @property
    def capacity(self) -> int:
        return self._buffer.shape[4]

    @property
    def max_length(self) -> int:
        return self.capacity

    def tiles(self, layer: int) -> Tiles:
        tiled = self._tiled(layer)
        if tiled != self._viewed[layer]:
            keys, values = self._layers[layer]
            self._viewed[layer] = tiled
            self._tiles[layer] = Tiles(as_tiles(keys[:, :, :tiled]), as_tiles(values[:, :, :tiled]))
        return self._tiles[layer]

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        keys, values = self._layers[layer]
        return keys[:, :, : self.length], values[:, :, : self.length]

    def fork(self) -> Self:
        twin = type(self)(self._config, capacity=self.capacity, batch=self.batch, dtype=self.dtype, device=self.device)
        twin._buffer[..., : self.length, :] = self._buffer[..., : self.length, :]
        twin.length = self.length
        return twin

    def _begin(self, end: int) -> None:
        self._buffer[..., end : whole_tiles(end), :].zero_()

    def _write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        end = self._end(layer)
        all_keys, all_values = self._layers[layer]
        all_keys[:, :, self.length : end] = keys
        all_values[:, :, self.length : end] = values
        return all_keys[:, :, :end], all_values[:, :, :end]

    def _drop_beyond_length(self) -> None:
        """They stay in the buffer, out of reach."""
