"""Manifests: what is hashed, what counts, and what is refused."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvouch.artefact.files import ArtefactFiles
from kvouch.artefact.manifest import Manifest, dumps
from kvouch.engine.model import load
from kvouch.errors import ConfigError, FileError
from tiny_models import tiny_directory
from tiny_tokenizer import write_tokenizer


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    found = write_tokenizer(tiny_directory(tmp_path / "model", "smollm2"))
    (found / "README.md").write_text("words")
    (found / "onnx").mkdir()
    (found / "onnx" / "model.onnx").write_bytes(b"not ours")
    (found / ".cache").mkdir()
    (found / ".cache" / "etag").write_text("1")
    return found


def roles(manifest: Manifest) -> dict[str, str]:
    return {file.path: file.role for file in manifest.files}


def test_every_file_is_there_with_its_role(directory: Path) -> None:
    manifest = Manifest.of(directory)
    found = roles(manifest)
    assert found["model.safetensors"] == "weights"
    assert found["config.json"] == "config"
    assert found["tokenizer.json"] == "tokenizer"
    assert found["tokenizer_config.json"] == "template"
    assert found["README.md"] == found["onnx/model.onnx"] == "other"
    assert ".cache/etag" not in found
    for file in manifest.files:
        data = (directory / file.path).read_bytes()
        assert (file.size, file.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert list(found) == sorted(found)


def test_the_loaded_model_has_the_digest_of_its_directory(directory: Path) -> None:
    """What is hashed is what is loaded."""
    model = load(directory)
    assert model.manifest.digest == Manifest.of(directory).digest
    assert "README.md" not in roles(model.manifest)


def test_shards_are_weights_and_their_index_is_not(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    index = {"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("x-1.safetensors", "x-2.safetensors", "consolidated.safetensors"):
        (directory / name).write_bytes(name.encode())
    found = roles(Manifest.of(directory))
    assert [name for name, role in found.items() if role == "weights"] == ["x-1.safetensors", "x-2.safetensors"]


@pytest.mark.law(9)
@pytest.mark.parametrize(
    ("name", "content", "same"),
    [
        ("README.md", b"other words", True),
        ("NEW.txt", b"", True),
        ("config.json", {"_name_or_path": "elsewhere", "transformers_version": "1"}, True),
        ("config.json", {"rms_norm_eps": 1e-4}, False),
        ("config.json", {"new_field": 1}, False),
        ("tokenizer_config.json", {"name_or_path": "elsewhere"}, True),
        ("tokenizer_config.json", {"eos_token": "<|other|>"}, False),
        ("chat_template.jinja", b"{{ 1 }}", False),
        ("model.safetensors", b"x", False),
        ("tokenizer.json", b"{}", False),
    ],
)
def test_what_counts(name: str, content: Any, same: bool, directory: Path) -> None:
    before = Manifest.of(directory)
    path = directory / name
    if isinstance(content, dict):
        path.write_text(json.dumps({**json.loads(path.read_text()), **content}, indent=3))
    else:
        path.write_bytes(content)
    after = Manifest.of(directory)
    assert (before.digest == after.digest) is same
    differences = before.differences(after)
    assert [difference.path for difference in differences] == [name]
    assert differences[0].matters is not same
    assert ("no part of the computation" in str(differences[0])) is same


def test_it_comes_back_from_json(directory: Path, tmp_path: Path) -> None:
    manifest = Manifest.of(directory)
    path = tmp_path / "manifest.json"
    path.write_text(dumps(manifest))
    assert Manifest.read(path) == manifest
    assert Manifest.of(directory).differences(Manifest.read(path)) == []


SPOILS: dict[str, Any] = {
    "another schema": lambda fields: fields.update(schema="kvouch/manifest/9"),
    "another digest": lambda fields: fields.update(digest="0" * 64),
    "no files": lambda fields: fields.pop("files"),
    "files of no kind": lambda fields: fields.update(files=[1]),
    "a changed hash": lambda fields: next(f for f in fields["files"] if f["role"] == "weights").update(sha256="0" * 64),
    "a short hash": lambda fields: fields["files"][0].update(sha256="00"),
    "an unknown role": lambda fields: fields["files"][0].update(role="weight"),
    "a size in text": lambda fields: fields["files"][0].update(size="1"),
    "a field more": lambda fields: fields["files"][0].update(more=1),
    "files in disorder": lambda fields: fields["files"].reverse(),
    "a file twice": lambda fields: fields["files"].append(fields["files"][-1]),
}


@pytest.mark.parametrize("case", SPOILS)
def test_a_spoiled_manifest_is_refused(case: str, directory: Path, tmp_path: Path) -> None:
    fields = Manifest.of(directory).to_dict()
    SPOILS[case](fields)
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(fields))
    with pytest.raises(FileError, match=r"manifest\.json: (schema|not a whole manifest)"):
        Manifest.read(path)


def test_names_that_differ_only_in_case_are_refused(directory: Path) -> None:
    (directory / "Readme.md").write_text("other words")
    with pytest.raises(FileError, match=r"\['README.md', 'Readme.md'\] differ only in case"):
        Manifest.of(directory)
    with pytest.raises(FileError, match="differ only in case"):
        load(directory)


def test_links_out_of_the_directory_are_refused(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("x")
    (directory / "link.txt").symlink_to(tmp_path / "outside")
    with pytest.raises(FileError, match=r"link\.txt: a link to"):
        Manifest.of(directory)
    (directory / "link.txt").unlink()
    (directory / "folder").symlink_to(tmp_path)
    with pytest.raises(FileError, match="folder: a link to"):
        Manifest.of(directory)


def test_a_file_that_other_bytes_are_read_of_later_is_refused(directory: Path) -> None:
    files = ArtefactFiles(directory)
    files.text("config.json")
    (directory / "config.json").write_text((directory / "config.json").read_text() + " ")
    with pytest.raises(FileError, match="changed between two readings"):
        files.text("config.json")


def test_a_file_that_vanishes_is_named(directory: Path) -> None:
    os.symlink(directory / "nowhere", directory / "gone.txt")
    with pytest.raises(FileError, match=r"gone\.txt: cannot be read"):
        Manifest.of(directory)


def test_an_empty_directory_and_an_index_of_no_kind(tmp_path: Path) -> None:
    assert Manifest.of(tmp_path).files == ()
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": [1]}')
    with pytest.raises(ConfigError, match="weight_map must map"):
        Manifest.of(tmp_path)


@pytest.mark.parametrize("name", ["./w.safetensors", "sub//w.safetensors", ".w.safetensors", "W.safetensors", "absent"])
def test_an_index_names_files_as_they_are_listed(name: str, tmp_path: Path) -> None:
    """Or weights would be loaded that no digest covers."""
    (tmp_path / "sub").mkdir()
    for path in ("w.safetensors", "sub/w.safetensors", ".w.safetensors"):
        (tmp_path / path).write_bytes(b"x")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ConfigError, match="no such files here"):
        Manifest.of(tmp_path)


def test_folders_that_differ_only_in_case_and_names_that_no_json_holds(tmp_path: Path) -> None:
    for folder in ("one/A", "one/a"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "one" / "A" / "x").write_text("1")
    (tmp_path / "one" / "a" / "y").write_text("1")
    with pytest.raises(FileError, match=r"\['A', 'a'\] differ only in case"):
        Manifest.of(tmp_path / "one")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "\udcff.txt").write_text("1")
    with pytest.raises(FileError, match="no manifest can hold"):
        Manifest.of(tmp_path / "two")


def test_a_link_that_goes_to_a_blob_by_way_of_elsewhere_is_refused(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "abc"
    for folder in (blobs, snapshot / "onnx"):
        folder.mkdir(parents=True)
    (blobs / "1").write_bytes(b"x")
    (snapshot / "config.txt").symlink_to("../../blobs/1")
    (snapshot / "onnx" / "model.txt").symlink_to("../../../blobs/1")
    assert {file.path for file in Manifest.of(snapshot).files} == {"config.txt", "onnx/model.txt"}
    (tmp_path / "detour").symlink_to(blobs / "1")
    (snapshot / "other.txt").symlink_to(tmp_path / "detour")
    with pytest.raises(FileError, match=r"other\.txt: a link to"):
        Manifest.of(snapshot)
