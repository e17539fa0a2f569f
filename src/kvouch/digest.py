"""Canonical sha256. Knows bytes, lengths and domains; knows nothing of models. The only user of hashlib.

Every field is preceded by its length, and every digest begins with its domain, so that no two different records
can be fed to the hash as the same bytes.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

CHUNK_BYTES = 1 << 20


class Digest:
    """A running sha256 over length-prefixed fields of one domain."""

    def __init__(self, domain: str) -> None:
        self._hash = hashlib.sha256()
        self.field(domain.encode())

    def field(self, data: bytes | bytearray | memoryview) -> "Digest":
        """Adds one field: its length as 8 bytes little-endian, then its bytes."""
        view = memoryview(data).cast("B")
        self._hash.update(view.nbytes.to_bytes(8, "little"))
        self._hash.update(view)
        return self

    def hex(self) -> str:
        return self._hash.hexdigest()


def sha256_stream(chunks: Iterable[bytes]) -> str:
    """Plain sha256 of the joined chunks, in hex: what `sha256sum` prints."""
    running = hashlib.sha256()
    for chunk in chunks:
        running.update(chunk)
    return running.hexdigest()


def sha256_file(path: Path) -> str:
    """Plain sha256 of a file, in hex, read in chunks of 1 MiB."""
    with path.open("rb") as file:
        return sha256_stream(iter(lambda: file.read(CHUNK_BYTES), b""))
