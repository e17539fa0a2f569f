"""A sequence whose blocks lie in a pool, shared with its forks until one of them writes. Knows tables and lengths."""

from typing import Self
from weakref import finalize

import numpy as np
import torch

from kvouch.cache.blocks import BlockedCache, whole_blocks
from kvouch.cache.pool import BlockPool
from kvouch.contract import BLOCK
from kvouch.errors import CacheMisuse


class PagedCache(BlockedCache):
    """Positions [0, length) of one sequence in blocks of a pool.

    `fork` copies nothing: whoever first writes into a partly filled block that is shared copies that block. `rollback`
    gives blocks back and clears what it cuts off. Where the pool cannot give all blocks that an operation needs, it
    raises PoolFull and nothing has changed. `release`, or being collected, gives all blocks back.
    """

    def __init__(self, pool: BlockPool, *, max_length: int | None = None) -> None:
        super().__init__(pool.config, batch=1, dtype=pool.dtype, device=pool.device)
        self.pool, self.layout, self.planes = pool, pool.layout, pool.planes
        self.blocks: list[int] = []  # of the table, in order
        self.table = torch.zeros(0, dtype=torch.int32)
        self._max_length = max_length
        self._returned = finalize(self, pool.give_back, self.blocks)
        self._returned.atexit = False
        pool.caches.add(self)

    @property
    def capacity(self) -> int:
        """Positions of the blocks that it holds."""
        return len(self.blocks) * BLOCK

    @property
    def max_length(self) -> int | None:
        return self._max_length

    @property
    def nbytes(self) -> int:
        """Of the blocks that it holds, shared ones included."""
        return len(self.blocks) * self.pool.block_bytes

    def fork(self) -> Self:
        self._check_held()
        twin = type(self)(self.pool, max_length=self._max_length)
        shared = self.blocks[: whole_blocks(self.length) // BLOCK]
        self.pool.share(shared)
        twin.blocks += shared
        twin.table, twin.length = self.table[: len(shared)].clone(), self.length
        return twin

    def release(self) -> None:
        """Gives all blocks back; the cache cannot be used afterwards, and releasing it again does nothing."""
        self._returned()
        self.blocks.clear()
        self.length, self._pending = 0, [0] * len(self._pending)

    def rollback(self, length: int) -> None:
        self._check_held()
        super().rollback(length)

    def _check_room(self, new_positions: int) -> None:
        self._check_held()
        super()._check_room(new_positions)

    def _check_held(self) -> None:
        if not self._returned.alive:
            raise CacheMisuse("this cache was released: its blocks belong to others now")

    def _begin(self, end: int) -> None:
        """Takes the blocks up to `end`, and one more for a copy where the block that is written first is shared."""
        pool, kept = self.pool, self.length % BLOCK
        first = self.length // BLOCK
        copied = bool(kept) and pool.owners[self.blocks[first]] > 1
        taken = pool.take(max(whole_blocks(end) // BLOCK - len(self.blocks), 0) + copied)
        if copied:
            source, target = self.blocks[first], taken.pop(0)
            pool.copy(source, target)
            self.blocks[first] = target
            pool.give_back([source])
            pool.clear(target, kept)
        self.blocks += taken
        if taken or copied:
            self._write_table()

    def _drop_beyond_length(self) -> None:
        keep, inside = whole_blocks(self.length) // BLOCK, self.length % BLOCK
        dropped = self.blocks[keep:]
        del self.blocks[keep:]
        self.pool.give_back(dropped)
        if inside and self.pool.owners[self.blocks[-1]] == 1:
            self.pool.clear(self.blocks[-1], inside)
        if dropped:
            self._write_table()

    def _write_table(self) -> None:
        self.table = torch.from_numpy(np.array(self.blocks, np.int32))
