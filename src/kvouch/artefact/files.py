"""The files of an artefact, opened safely. Knows paths, links and bytes; knows nothing of what is in them.

A link is followed only into the `blobs/` of the hub repository that the directory is a snapshot of: anything else could
be changed by whoever owns the other end. Every byte that is handed out has been hashed.
"""

import json
import os
import stat
from collections import Counter
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from kvouch.artefact.reading import FileRecord, HashedFile
from kvouch.errors import ArtefactError, ConfigError, FileError

UNREADABLE = (OSError, RuntimeError, ValueError)
"""What pathlib raises for a path that cannot be resolved: absent or forbidden, a loop of links, no path at all."""


class ArtefactFiles:
    """Reads the files of one directory; names are relative to it, in POSIX form."""

    def __init__(self, directory: Path) -> None:
        try:
            self.directory = directory.resolve(strict=True)
        except UNREADABLE as error:
            raise FileError(f"{directory}: no such model directory ({_reason(error)})") from error
        if not self.directory.is_dir():
            raise FileError(f"{directory}: not a directory")
        self._records: dict[str, FileRecord] = {}

    def names(self) -> list[str]:
        """Every file, sorted, but for what begins with a dot; FileError where names are alike but for case."""
        found = []
        for folder, folders, files in os.walk(self.directory, onerror=self._unlisted):
            folders[:] = [name for name in folders if not name.startswith(".")]
            inside = PurePosixPath(Path(folder).relative_to(self.directory).as_posix())
            linked = [name for name in folders if Path(folder, name).is_symlink()]
            found += [str(inside / name) for name in [*files, *linked] if not name.startswith(".")]
        spellings: dict[str, set[str]] = {}
        for name in found:
            if not name.isprintable():
                raise FileError(f"{self.directory}: {name!r} is a name that no manifest can hold; rename the file")
            for path in (PurePosixPath(name), *PurePosixPath(name).parents):
                spellings.setdefault(str(path).casefold(), set()).add(str(path))
        for same in spellings.values():
            if len(same) > 1:
                names = sorted(same)
                raise FileError(f"{self.directory}: {names} differ only in case: elsewhere one is taken for the other")
        return sorted(found)

    def exists(self, name: str) -> bool:
        """Whether the name is taken, be it by a link that leads nowhere: such a file is half-written, not absent."""
        return os.path.lexists(self.directory / name)

    def path(self, name: str) -> Path:
        """The real path of a regular file of the directory; FileError otherwise."""
        path = self.directory / name
        try:
            real = path.resolve(strict=True)
            folder = path.parent.resolve(strict=True)
            status = real.stat()
        except UNREADABLE as error:
            raise FileError(f"{path}: cannot be read ({_reason(error)})") from error
        if folder != path.parent or not folder.is_relative_to(self.directory):
            raise FileError(f"{path}: not a plain file name of {self.directory}")
        if path.is_symlink() and not self._is_blob(path, real):
            raise FileError(f"{path}: a link to {real}, outside this hub repository's blobs/; copy the file instead")
        if not stat.S_ISREG(status.st_mode):
            raise FileError(f"{path}: not a regular file")
        return real

    def open(self, name: str) -> HashedFile:
        """The file, to be read once from start to end; FileError where it is empty or no file of the directory."""
        real = self.path(name)
        if real.stat().st_size == 0:
            raise FileError(f"{self.directory / name}: empty; the directory looks half-written")
        return self._hashed(name, real)

    def record(self, name: str) -> FileRecord:
        """Size and sha256 of what was read under that name; reads it now where nothing was."""
        if name not in self._records:
            with self._hashed(name, self.path(name)):
                pass
        return self._records[name]

    def text(self, name: str) -> str:
        with self.open(name) as file:
            data = file.read(file.size)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise FileError(f"{self.directory / name}: not UTF-8 (byte {error.start})") from error

    def json(self, name: str) -> dict[str, Any]:
        """The JSON object of a file; a repeated field is an error."""
        return parse_object(self.text(name), str(self.directory / name))

    def _hashed(self, name: str, real: Path) -> HashedFile:
        return HashedFile(real, self.directory / name, partial(self._note, name))

    def _note(self, name: str, record: FileRecord) -> None:
        """Remembers what was read; FileError where an earlier reading gave other bytes."""
        if self._records.setdefault(name, record) != record:
            raise FileError(f"{self.directory / name}: changed between two readings; try again when nothing writes")

    def _unlisted(self, error: OSError) -> None:
        raise FileError(f"{error.filename}: cannot be listed ({error.strerror})") from error

    def _is_blob(self, link: Path, real: Path) -> bool:
        """Whether a link goes straight to a file of the blobs/ beside the hub's snapshots."""
        snapshots = next((one for one in (self.directory, *self.directory.parents) if one.name == "snapshots"), None)
        target = Path(os.path.normpath(link.parent / os.readlink(link)))
        return snapshots is not None and target == real and real.parent == snapshots.parent / "blobs"


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
