"""A file read once, from its start to its end, and hashed as it comes. Knows bytes; knows nothing of what they mean.

What is hashed is what the caller gets: the same memory, read from the disk once. The hash runs on a thread of its own,
so that it costs what it takes longer than the reading.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from kvouch.digest import CHUNK_BYTES, Sha256
from kvouch.errors import FileError


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """What was read of a file."""

    size: int
    sha256: str


class HashedFile:
    """A context in which a file is read; at its end `note` is told what was. FileError where it changed meanwhile.

    Memory that was filled by `readinto` must not be written to before the context ends.
    """

    def __init__(self, real: Path, shown: Path, note: Callable[[FileRecord], None]) -> None:
        self.path, self._note = shown, note
        try:
            self._file = real.open("rb", buffering=0)
        except OSError as error:
            raise FileError(f"{shown}: cannot be read ({error.strerror})") from error
        self._before = _version(self._file.fileno())
        self.size = self._before[0]
        self.position = 0
        self._hash = Sha256()
        self._thread = ThreadPoolExecutor(1)
        self._hashing: Future[Sha256] | None = None

    def readinto(self, into: memoryview) -> None:
        """Fills `into` with the next bytes; FileError where there are not so many."""
        filled = 0
        while filled < len(into):
            try:
                count = self._file.readinto(into[filled : filled + CHUNK_BYTES])
            except OSError as error:
                raise FileError(f"{self.path}: cannot be read ({error.strerror})") from error
            if not count:
                raise FileError(f"{self.path}: ended at byte {self.position + filled}; it is truncated or changing")
            self._add(into[filled : filled + count])
            filled += count
        self.position += filled

    def read(self, count: int) -> bytes:
        """The next `count` bytes."""
        data = bytearray(count)
        self.readinto(memoryview(data))
        return bytes(data)

    def _add(self, data: memoryview) -> None:
        """Hashes data behind what is being hashed; at once where a small file has nothing waiting."""
        if self._hashing is None and self.size < CHUNK_BYTES:
            self._hash.update(data)
        else:
            self._hashing = self._thread.submit(self._hash.update, data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                while self.position < self.size:  # what the caller had no use for belongs to the file as well
                    self.read(min(CHUNK_BYTES, self.size - self.position))
                    if self._hashing is not None:
                        self._hashing.result()  # or what waits to be hashed would fill the memory
        finally:
            self._thread.shutdown(cancel_futures=kind is not None)
            after = _version(self._file.fileno())
            self._file.close()
        if kind is None:
            if self._hashing is not None:
                self._hashing.result()
            if after != self._before:
                raise FileError(f"{self.path}: changed while it was read; try again when nothing writes to it")
            self._note(FileRecord(size=self.size, sha256=self._hash.hex()))


def _version(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns
