"""The files of an artefact, opened safely. Knows paths, links and bytes; knows nothing of what is in them.

A link is followed only into the `blobs/` of the hub repository that the directory is a snapshot of: anything else could
be changed by whoever owns the other end.
"""

import json
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from kvouch.errors import ArtefactError, ConfigError, FileError

UNREADABLE = (OSError, RuntimeError, ValueError)
"""What pathlib raises for a path that cannot be resolved: absent or forbidden, a loop of links, no path at all."""


class ArtefactFiles:
    """Reads the files of one directory; names are relative to it."""

    def __init__(self, directory: Path) -> None:
        try:
            self.directory = directory.resolve(strict=True)
        except UNREADABLE as error:
            raise FileError(f"{directory}: no such model directory ({_reason(error)})") from error
        if not self.directory.is_dir():
            raise FileError(f"{directory}: not a directory")

    def exists(self, name: str) -> bool:
        """Whether the name is taken, be it by a link that leads nowhere: such a file is half-written, not absent."""
        return os.path.lexists(self.directory / name)

    def path(self, name: str) -> Path:
        """The real path of a regular, non-empty file; FileError otherwise."""
        path = self.directory / name
        try:
            real = path.resolve(strict=True)
            status = real.stat()
        except UNREADABLE as error:
            raise FileError(f"{path}: cannot be read ({_reason(error)})") from error
        if path.parent.resolve() != self.directory:
            raise FileError(f"{path}: not a plain file name of {self.directory}")
        if path.is_symlink() and real.parent != self._blobs():
            raise FileError(f"{path}: a link to {real}, outside this hub repository's blobs/; copy the file instead")
        if not stat.S_ISREG(status.st_mode):
            raise FileError(f"{path}: not a regular file")
        if status.st_size == 0:
            raise FileError(f"{path}: empty; the directory looks half-written")
        return real

    def text(self, name: str) -> str:
        real = self.path(name)
        try:
            return real.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise FileError(f"{self.directory / name}: not UTF-8 (byte {error.start})") from error
        except OSError as error:
            raise FileError(f"{self.directory / name}: cannot be read ({_reason(error)})") from error

    def json(self, name: str) -> dict[str, Any]:
        """The JSON object of a file; a repeated field is an error."""
        return parse_object(self.text(name), str(self.directory / name))

    def _blobs(self) -> Path | None:
        snapshots = self.directory.parent
        return snapshots.parent / "blobs" if snapshots.name == "snapshots" else None


def parse_object(text: str, where: str) -> dict[str, Any]:
    """A JSON object, with an error that names the place; a repeated field is an error."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            repeated = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise ConfigError(f"{where}: repeated fields {repeated}")
        return fields

    try:
        found = json.loads(text, object_pairs_hook=once)
    except ArtefactError:
        raise
    except (ValueError, RecursionError) as error:
        raise FileError(f"{where}: not JSON ({error})") from error
    if not isinstance(found, dict):
        raise FileError(f"{where}: a JSON object is needed, found {type(found).__name__}")
    return found


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
