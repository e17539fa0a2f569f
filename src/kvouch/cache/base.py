"""The bookkeeping that every cache shares: one length, pending positions, and what counts as misuse.

Knows shapes and counts; where the numbers rest is the subclass's affair.
"""

from abc import ABC, abstractmethod
from typing import Self

import torch
from torch import Tensor

from kvouch.cache.sizing import cache_bytes, whole_tiles
from kvouch.contract import TILE, CacheShape, Tiles
from kvouch.errors import CacheMisuse, CacheOverflow, CacheShapeError


class LayeredCache(ABC):
    """A cache whose layers are updated one by one, then advanced together."""

    def __init__(self, config: CacheShape, *, batch: int, dtype: torch.dtype, device: torch.device | str) -> None:
        if batch < 1:
            raise CacheShapeError(f"batch is {batch}: a cache holds at least one sequence")
        self._config = config
        self.batch = batch
        self.dtype = dtype
        self.device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0", as tensors report it
        self.length = 0
        self._pending = [0] * config.num_hidden_layers  # [length, length + pending) is written, not yet owned

    @property
    def num_layers(self) -> int:
        return len(self._pending)

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Positions that are allocated now."""

    @property
    def max_length(self) -> int | None:
        return None

    @property
    def nbytes(self) -> int:
        return cache_bytes(self._config, self.batch, self.capacity, self.dtype)

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        try:
            self._check_update(layer, keys, values)
            if not any(self._pending):
                self._begin(self.length + keys.shape[2])
            self._pending[layer] = keys.shape[2]
            return self._write(layer, keys, values)
        except BaseException:
            self.rollback(self.length)
            raise

    def advance(self, new_positions: int) -> None:
        unequal = [layer for layer, pending in enumerate(self._pending) if pending != new_positions]
        if unequal or type(new_positions) is not int or new_positions < 1:
            found = sorted(set(self._pending))
            self.rollback(self.length)
            raise CacheMisuse(
                f"advance({new_positions}): layers {unequal} were updated with other counts (seen: {found}); "
                f"the step is dropped, the length stays {self.length}"
            )
        self.length += new_positions
        self._pending = [0] * len(self._pending)

    def reset(self) -> None:
        self.rollback(0)

    def rollback(self, length: int) -> None:
        if type(length) is not int or not 0 <= length <= self.length:
            raise CacheMisuse(f"rollback({length}): the cache holds {self.length} positions; give 0 to {self.length}")
        self.length = length
        self._pending = [0] * len(self._pending)
        self._drop_beyond_length()

    @abstractmethod
    def tiles(self, layer: int) -> Tiles:
        """Keys and values as whole tiles, pending positions included."""

    @abstractmethod
    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of [0, length)."""

    @abstractmethod
    def fork(self) -> Self:
        """An independent copy."""

    @abstractmethod
    def _begin(self, end: int) -> None:
        """Called at the first update of a step that will end at position `end`."""

    @abstractmethod
    def _write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores at [length, length + T) and returns [0, length + T)."""

    @abstractmethod
    def _drop_beyond_length(self) -> None:
        """Called when positions beyond the length are given up."""

    def _end(self, layer: int) -> int:
        return self.length + self._pending[layer]

    def _tiled(self, layer: int) -> int:
        """Positions of the whole tiles that hold those of the layer."""
        if not self._pending[layer]:
            raise CacheMisuse(f"tiles of layer {layer} are there between its update and advance only")
        return whole_tiles(self._end(layer))

    def _check_update(self, layer: int, keys: Tensor, values: Tensor) -> None:
        if not 0 <= layer < len(self._pending):
            raise CacheMisuse(f"layer {layer} does not exist: the cache has {len(self._pending)} layers")
        if self._pending[layer]:
            raise CacheMisuse(f"layer {layer} was updated twice before advance; the step is dropped")
        if keys.dim() != 4 or keys.shape[2] < 1:
            raise CacheShapeError(f"keys have shape {list(keys.shape)}; [B, G, T, D] with T >= 1 is needed")
        shape = (self.batch, self._config.num_key_value_heads, keys.shape[2], self._config.head_dim)
        for name, tensor in (("keys", keys), ("values", values)):
            if tensor.shape != shape:
                raise CacheShapeError(f"{name} have shape {list(tensor.shape)}; this cache takes {list(shape)}")
            if tensor.dtype != self.dtype or tensor.device != self.device:
                raise CacheShapeError(
                    f"{name} are {tensor.dtype} on {tensor.device}; this cache is {self.dtype} on {self.device}"
                )
        self._check_room(keys.shape[2])

    def _check_room(self, new_positions: int) -> None:
        end = self.length + new_positions
        if self.max_length is not None and end > self.max_length:
            raise CacheOverflow(f"the update ends at position {end}; this cache holds {self.max_length}")


def as_tiles(rows: Tensor) -> Tensor:
    """Whole tiles of rows [B, G, n * W, D]: a view [B, G, n, W, D]."""
    batch, heads, positions, size = rows.shape
    return rows.view(batch, heads, positions // TILE, TILE, size)
