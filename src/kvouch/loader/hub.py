"""A repository of the Hugging Face hub at one commit, as plain files. Knows file names and sizes; reads no model.

Takes only top-level `*.json`, `*.safetensors` and `*.jinja`: never pickles, which run code when read, and never
remote code. A lookup that fails ends the pull at once; nothing is retried for longer than the hub's own client does.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvouch.digest import sha256_file
from kvouch.errors import DownloadError
from kvouch.loader.catalogue import HubSource

if TYPE_CHECKING:
    from kvouch.contract import Progress

SUFFIXES = (".json", ".safetensors", ".jinja")
NEEDED = ("config.json", "tokenizer.json")
LOOKUP_TIMEOUT_S = 10.0
WATCH_PERIOD_S = 0.5


@dataclass(frozen=True, kw_only=True)
class HubFile:
    """A file that the hub lists; the hub knows a sha256 only of its large files."""

    name: str
    size_bytes: int
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What the hub has at one commit."""

    commit: str
    files: tuple[HubFile, ...]


class Hub(Protocol):
    """The two calls of the hub that a pull needs; either may raise whatever its client raises."""

    @property
    def endpoint(self) -> str: ...
    def look_up(self, repository: str, revision: str) -> Listing: ...
    def copy(self, repository: str, commit: str, names: Sequence[str], into: Path) -> None: ...


class HuggingFaceHub:
    """The hub through `huggingface_hub`, at the endpoint and with the token that library is set up for."""

    def __init__(self) -> None:
        from huggingface_hub import HfApi

        self._api = HfApi()

    @property
    def endpoint(self) -> str:
        return str(self._api.endpoint)

    def look_up(self, repository: str, revision: str) -> Listing:
        info = self._api.model_info(repository, revision=revision, timeout=LOOKUP_TIMEOUT_S, files_metadata=True)
        files = tuple(
            HubFile(name=file.rfilename, size_bytes=file.size or 0, sha256=file.lfs.sha256 if file.lfs else None)
            for file in info.siblings or ()
        )
        return Listing(commit=info.sha or "", files=files)

    def copy(self, repository: str, commit: str, names: Sequence[str], into: Path) -> None:
        from huggingface_hub import snapshot_download

        with _no_bars():
            snapshot_download(repository, revision=commit, local_dir=into, allow_patterns=list(names))


def take_snapshot(source: HubSource, into: Path, progress: Progress, hub: Hub | None = None) -> str:
    """Fills `into` with the files of the model and returns the commit; DownloadError lists what was tried."""
    hub = hub or HuggingFaceHub()
    with _explained(f"{hub.endpoint}: look up {source.repository} at {source.revision}"):
        listing = hub.look_up(source.repository, source.revision)
    wanted = _wanted(source, listing)
    total = sum(file.size_bytes for file in wanted)
    with (
        _explained(f"{hub.endpoint}: copy {source.repository} at {listing.commit}"),
        _watched(into, total, progress),
    ):
        hub.copy(source.repository, listing.commit, [file.name for file in wanted], into)
    shutil.rmtree(into / ".cache", ignore_errors=True)
    for done, file in enumerate(wanted):
        progress("verify", done, len(wanted))
        _check(source, into, file)
    progress("verify", len(wanted), len(wanted))
    return listing.commit


def _wanted(source: HubSource, listing: Listing) -> list[HubFile]:
    """The files to take, or a DownloadError that says which kind is missing."""
    where = f"{source.repository} at {listing.commit or source.revision}"
    if listing.commit != source.pins.get("revision", listing.commit) or not listing.commit:
        raise DownloadError(f"{where}: the hub answered with another commit than {source.revision}")
    wanted = [file for file in listing.files if "/" not in file.name and file.name.endswith(SUFFIXES)]
    names = {file.name for file in wanted}
    missing = [name for name in NEEDED if name not in names]
    if not any(name.endswith(".safetensors") for name in names):
        missing.append("*.safetensors (weights in pickles are never read)")
    if missing:
        raise DownloadError(f"{where}: it has no {' and no '.join(missing)}, so kvouch cannot use it")
    return wanted


def _check(source: HubSource, into: Path, file: HubFile) -> None:
    path = into / file.name
    if path.is_symlink() or not path.is_file():
        raise DownloadError(f"{source.repository}: {file.name} did not arrive as a plain file; pull again")
    if path.stat().st_size != file.size_bytes:
        size = path.stat().st_size
        raise DownloadError(f"{source.repository}: {file.name} has {size} bytes, not {file.size_bytes}; pull again")
    if file.sha256 is not None and sha256_file(path) != file.sha256:
        raise DownloadError(f"{source.repository}: {file.name} is not what the hub lists (sha256 differs); pull again")


@contextmanager
def _explained(attempt: str) -> Iterator[None]:
    """Turns what the hub's client raises into one line; its exceptions share no base but Exception."""
    try:
        yield
    except DownloadError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no reason given"]
        raise DownloadError(f"tried {attempt}: {type(error).__name__}: {lines[0]}") from None


@contextmanager
def _watched(folder: Path, total: int, progress: Progress) -> Iterator[None]:
    """Reports the bytes that have arrived, partial files included, whatever the version of the hub's client."""
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(WATCH_PERIOD_S):
            progress("download", min(_bytes_under(folder), total), total)

    progress("download", 0, total)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()
    progress("download", total, total)


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # renamed to its final name between the two calls
            continue
    return total


@contextmanager
def _no_bars() -> Iterator[None]:
    """Silences the client's own progress bars, and leaves its setting as it was."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    were_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not were_disabled:
            enable_progress_bars()
