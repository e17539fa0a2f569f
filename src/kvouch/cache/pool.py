"""Blocks for many sequences: allocated once, counted by who holds them. Knows their numbers, not what is in them."""

from array import array
from collections.abc import Sequence
from threading import RLock
from typing import Any
from weakref import WeakSet

import torch

from kvouch.cache.blocks import Layout, block_numbers, numbers_together, zeros
from kvouch.contract import BLOCK, CacheShape
from kvouch.errors import CacheMisuse, CacheShapeError, PoolFull


class BlockPool:
    """`blocks` blocks of 16 positions of every layer and head; on the CPU a block takes memory once it is used.

    A block is held by one cache, or shared by several and then written by none. What a taken block held before is
    zeroed: no other request's numbers are ever in reach. Safe from several threads.
    """

    def __init__(
        self,
        config: CacheShape,
        *,
        blocks: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        layout: Layout = "rows",
    ) -> None:
        if blocks < 1:
            raise CacheShapeError(f"blocks is {blocks}: a pool has at least one")
        self.config, self.dtype, self.layout = config, dtype, layout
        self.device = torch.empty(0, device=device).device
        numbers = block_numbers(config.head_dim, layout)
        shape = (config.num_hidden_layers, 2, config.num_key_value_heads, blocks, numbers)
        self.planes = zeros(shape, dtype, self.device)
        self.owners = array("l", [0]) * blocks  # how many caches hold each block
        self.caches: WeakSet[Any] = WeakSet()  # those that live
        self._free: list[int] = []  # given back; the last is taken first
        self._fresh = 0  # blocks from here on were never used, and are zero
        self._lock = RLock()  # a cache that is collected gives its blocks back from within anything
        self._bits = self._without_threads()

    def __len__(self) -> int:
        return len(self.owners)

    @property
    def free(self) -> int:
        """Blocks that can be taken."""
        return len(self._free) + len(self) - self._fresh

    @property
    def used(self) -> int:
        """Blocks that some cache holds."""
        return len(self) - self.free

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers, heads and kinds together."""
        return self.planes.nbytes // len(self)

    def take(self, count: int) -> list[int]:
        """So many blocks of zeros, neighbours if it can be; where fewer are free PoolFull, and nothing is done."""
        with self._lock:
            if count > self.free:
                raise PoolFull(
                    f"{count} blocks of {BLOCK} positions are needed, {self.free} of the pool's {len(self)} are free: "
                    "release a cache, roll one back, or make a larger pool"
                )
            again = [self._free.pop() for _ in range(min(count, len(self._free)))]
            for block in again:
                self._bits[:, :, :, block] = 0
            new = range(self._fresh, self._fresh + count - len(again))
            self._fresh = new.stop
            found = [*again, *new]
            for block in found:
                self.owners[block] = 1
            return found

    def share(self, blocks: Sequence[int]) -> None:
        """One more holds these blocks."""
        with self._lock:
            for block in blocks:
                self.owners[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """One fewer holds these blocks; those that nobody holds are free."""
        with self._lock:
            for block in reversed(blocks):
                self.owners[block] -= 1
                if self.owners[block] == 0:
                    self._free.append(block)

    def copy(self, source: int, target: int) -> None:
        """What one block holds, into another."""
        self._bits[:, :, :, target] = self._bits[:, :, :, source]

    def clear(self, block: int, kept: int) -> None:
        """Zeroes positions [kept, 16) of a block."""
        together = numbers_together(self.dtype) if self.layout == "step" else 1
        keys, values = (self._bits[:, kind, :, block] for kind in range(2))  # each [layer, G, numbers]
        if self.layout == "step":
            keys = keys.reshape(*keys.shape[:2], -1, BLOCK, together)
            keys[:, :, :, kept:] = 0
        else:
            keys.reshape(*keys.shape[:2], BLOCK, -1)[:, :, kept:] = 0
        rows, odd = divmod(kept, together)
        values = values.reshape(*values.shape[:2], BLOCK // together, -1, together)
        values[:, :, rows + (odd > 0) :] = 0
        if odd:
            values[:, :, rows, :, odd:] = 0

    def check(self) -> None:
        """L7: every block is free or held, and held by as many as hold it; CacheMisuse where that is not so."""
        with self._lock:
            held = array("l", [0]) * len(self)
            for cache in list(self.caches):
                for block in cache.blocks:
                    held[block] += 1
            wrong = [block for block in range(len(self)) if held[block] != self.owners[block]]
            if wrong:
                first = wrong[0]
                raise CacheMisuse(
                    f"block {first} counts {self.owners[first]} owners, {held[first]} caches hold it "
                    f"({len(wrong)} blocks are wrong)"
                )
            idle = sorted([*self._free, *range(self._fresh, len(self))])
            if idle != [block for block in range(len(self)) if not held[block]]:
                raise CacheMisuse(f"{len(idle)} blocks count as free; {held.count(0)} are held by nobody")

    def _without_threads(self) -> Any:
        """The planes as whole numbers; on the CPU in numpy, whose copies start no threads beside the step's."""
        whole = self.planes.view(torch.int16 if self.dtype.itemsize == 2 else torch.int32)
        return whole.numpy() if self.device.type == "cpu" else whole
