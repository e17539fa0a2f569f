"""The cache that grows by concatenation: the plainest one, and the reference for all others."""

from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvouch.cache.base import LayeredCache, as_tiles
from kvouch.contract import CacheShape, Tiles


class ConcatCache(LayeredCache):
    """Each update makes a new tensor, a little longer than the last. Capacity is the length."""

    def __init__(
        self,
        config: CacheShape,
        *,
        batch: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(config, batch=batch, dtype=dtype, device=device)
        empty = torch.empty(batch, config.num_key_value_heads, 0, config.head_dim, dtype=dtype, device=device)
        self._keys = [empty] * config.num_hidden_layers  # each [B, G, S, D]
        self._values = [empty] * config.num_hidden_layers

    @property
    def capacity(self) -> int:
        return self.length

    def tiles(self, layer: int) -> Tiles:
        beyond = self._tiled(layer) - self._end(layer)
        keys, values = (pad(rows[layer], (0, 0, 0, beyond)) for rows in (self._keys, self._values))
        return Tiles(as_tiles(keys), as_tiles(values))

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._keys[layer][:, :, : self.length], self._values[layer][:, :, : self.length]

    def fork(self) -> Self:
        twin = type(self)(self._config, batch=self.batch, dtype=self.dtype, device=self.device)
        twin._keys = [keys[:, :, : self.length].clone() for keys in self._keys]
        twin._values = [values[:, :, : self.length].clone() for values in self._values]
        twin.length = self.length
        return twin

    def _begin(self, end: int) -> None:
        """Nothing lies beyond the length."""

    def _write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        held_keys, held_values = self.read(layer)
        self._keys[layer] = torch.cat([held_keys, keys], dim=2)
        self._values[layer] = torch.cat([held_values, values], dim=2)
        return self._keys[layer], self._values[layer]

    def _drop_beyond_length(self) -> None:
        for rows in (self._keys, self._values):
            for layer, tensor in enumerate(rows):
                if tensor.shape[2] > self.length:
                    rows[layer] = tensor[:, :, : self.length].clone()  # a view would keep the long tensor alive
