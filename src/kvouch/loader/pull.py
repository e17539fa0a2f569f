"""Models under a home folder: pull, list, resolve. Knows names and folders; leaves how a source is read to `fetch`.

A model appears whole or not at all: it is built in a `workplace` beside the others, its record is written last, all
of it is flushed to the disk, and one rename gives it its name.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvouch.errors import DownloadError, FileError, UnknownModel
from kvouch.loader.catalogue import CatalogueEntry, catalogue_names, find, is_catalogued
from kvouch.loader.fetch import Fetch, fetch_source
from kvouch.loader.record import RECORD_FILE, Record, read_record, write_record
from kvouch.loader.workplace import workplace

if TYPE_CHECKING:
    from kvouch.contract import Progress


@dataclass(frozen=True, kw_only=True)
class PulledModel:
    """A model that is here."""

    name: str
    path: Path
    source: str
    size_bytes: int


def pull(name: str, home: Path, progress: Progress, fetch: Fetch = fetch_source) -> Path:
    """The folder of a catalogue name or hub id under `home/models`, fetched where it is not there yet.

    UnknownModel for a name that is neither; DownloadError where it cannot be had, and then nothing is left behind.
    """
    entry = find(name)
    target = home / "models" / entry.folder
    try:
        if target.exists():
            return _present(target, entry)
        with workplace(target.parent) as scratch:
            model = scratch / "model"
            model.mkdir()
            pins = fetch(entry.source, scratch, model, progress)
            write_record(model, Record(name=name, source=entry.source.label, pins=pins))
            return _land(model, target, entry)
    except OSError as error:
        raise DownloadError(f"{name} could not be written to {home}: {error}; nothing was kept") from None


def list_models(home: Path) -> list[PulledModel]:
    """Every pulled model under `home`, by name; FileError for one whose record cannot be read."""
    models = home / "models"
    try:
        folders = [folder for folder in models.iterdir() if not folder.name.startswith(".")]
        found = [_listed(folder) for folder in folders if (folder / RECORD_FILE).is_file()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise FileError(f"{models}: cannot be listed ({error}); make it readable or name another home") from None
    return sorted(found, key=lambda model: model.name)


def resolve(name_or_path: str, home: Path, progress: Progress, fetch: Fetch = fetch_source) -> Path:
    """The directory that a path, a catalogue name or a hub id stands for, in this order; pulls where it must.

    UnknownModel and DownloadError list what was tried.
    """
    if os.path.isdir(name_or_path):  # False, where Path.is_dir raises, for what cannot be a path at all
        return Path(name_or_path)
    if os.path.exists(name_or_path):
        raise UnknownModel(f"{name_or_path} is a file, and a model is a directory: give the one that holds it")
    try:
        return pull(name_or_path, home, progress, fetch)
    except UnknownModel as error:
        raise UnknownModel(f"{error}; and no directory has that path") from None
    except DownloadError as error:
        if is_catalogued(name_or_path):
            raise
        tried = f"no directory has that path, the catalogue has {catalogue_names()}"
        raise DownloadError(f"{name_or_path}: {tried}, and as a hub id: {error}") from None


def _present(target: Path, entry: CatalogueEntry) -> Path:
    """The folder, if it is what the entry means today; FileError if another model or an older pin is in its place."""
    record = read_record(target)
    for field, want, found in (
        ("name", entry.name, record.name),
        ("source", entry.source.label, record.source),
        *((field, want, record.pins.get(field)) for field, want in entry.source.pins.items()),
    ):
        if want != found:
            raise FileError(f"{target / RECORD_FILE}: {field} is {found}, want {want}; delete {target} and pull again")
    return target


def _land(model: Path, target: Path, entry: CatalogueEntry) -> Path:
    """Gives the finished folder its name in one step; where another pull was first, its result stands."""
    for path in (*model.rglob("*"), model):
        _flush(path)
    try:
        model.rename(target)
    except OSError:
        if not target.exists():
            raise
        return _present(target, entry)
    _flush(target.parent)
    return target


def _flush(path: Path) -> None:
    """Waits until a file or folder is on the disk, so that after a power cut no name stands before its bytes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _listed(folder: Path) -> PulledModel:
    record = read_record(folder)
    size_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return PulledModel(name=record.name, path=folder, source=record.source, size_bytes=size_bytes)
