"""What is asked of every peer: feed ids to a cache, cut it, copy it. Knows no library, no clock and no model."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

C = TypeVar("C")


class Peer(Protocol[C]):
    """One way to run one model; `C` is its cache of keys and values."""

    @property
    def copying(self) -> str:
        """What `copy` is called in this library."""

    @property
    def cutting(self) -> str:
        """What `cut` is called in this library."""

    def new_cache(self, capacity_tokens: int) -> C:
        """An empty cache that will hold at most so many positions."""

    def feed(self, ids: Sequence[int], cache: C) -> int:
        """Appends ids to the cache, and gives the id with the highest score after the last of them."""

    def cut(self, cache: C, length_tokens: int) -> None:
        """Keeps positions [0, length)."""

    def copy(self, cache: C) -> C:
        """An independent cache with the same contents."""

    def stretch(self, source: C, cache: C, length_tokens: int) -> None:
        """Fills an empty cache with positions [0, length) whose keys and values are those of another, over and over.

        Where a prefill takes minutes: what a step costs does not depend on the numbers in the cache.
        """
