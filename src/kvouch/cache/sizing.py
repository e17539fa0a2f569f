"""How many bytes a cache takes. Knows the formula; knows nothing of tensors' contents."""

import torch

from kvouch.contract import TILE, CacheShape


def cache_bytes(config: CacheShape, batch: int, positions: int, dtype: torch.dtype) -> int:
    """Bytes of keys and values: 2 * layers * batch * key-value heads * positions * head size * item size."""
    numbers = 2 * config.num_hidden_layers * batch * config.num_key_value_heads * positions * config.head_dim
    return numbers * dtype.itemsize


def whole_tiles(positions: int) -> int:
    """`positions` rounded up to a multiple of TILE."""
    return -(-positions // TILE) * TILE
