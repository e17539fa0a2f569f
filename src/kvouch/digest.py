"""Canonical sha256. Knows bytes, lengths and domains; knows nothing of models. The only user of hashlib.

Every field is preceded by its length, and every digest begins with its domain, so that no two different records
can be fed to the hash as the same bytes.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

CHUNK_BYTES = 1 << 20

Bytes = bytes | bytearray | memoryview


class Sha256:
    """A running plain sha256: what `sha256sum` prints."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def update(self, data: Bytes) -> Self:
        self._hash.update(data)
        return self

    def hex(self) -> str:
        return self._hash.hexdigest()


class Digest(Sha256):
    """A running sha256 over length-prefixed fields of one domain."""

    def __init__(self, domain: str) -> None:
        super().__init__()
        self.field(domain.encode())

    def field(self, data: Bytes) -> Self:
        """Adds one field: its length as 8 bytes little-endian, then its bytes."""
        view = memoryview(data).cast("B")
        return self.update(view.nbytes.to_bytes(8, "little")).update(view)

    def texts(self, *fields: str) -> Self:
        """Adds fields of UTF-8."""
        for text in fields:
            self.field(text.encode())
        return self

    def running_hex(self, data: memoryview, stops: Iterable[int]) -> list[str]:
        """The digest at each of `stops` (bytes of data from its start, ascending), in one pass over data."""
        found, start = [], 0
        for stop in stops:
            self._hash.update(data[start:stop])
            found.append(self._hash.copy().hexdigest())
            start = stop
        return found


def canonical_json(value: Any) -> str:
    """JSON in one spelling: keys sorted, no white space, UTF-8 as it is."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def sha256_stream(chunks: Iterable[bytes]) -> str:
    """Plain sha256 of the joined chunks, in hex."""
    running = Sha256()
    for chunk in chunks:
        running.update(chunk)
    return running.hex()


def sha256_file(path: Path) -> str:
    """Plain sha256 of a file, in hex, read in chunks of 1 MiB."""
    with path.open("rb") as file:
        return sha256_stream(iter(lambda: file.read(CHUNK_BYTES), b""))
