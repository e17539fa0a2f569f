"""Files of a model directory: links into the hub repository's blobs only, and one clear error for all else."""

import os
from pathlib import Path

import pytest

from kvouch.artefact.files import ArtefactFiles, parse_object
from kvouch.errors import ConfigError, FileError

SECRET = "not for us"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A plain model directory; beside it a file that is none of the model's."""
    (tmp_path / "outside").write_text(SECRET)
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A snapshot of a hub repository as huggingface_hub lays it out, with one blob in `blobs/`."""
    (tmp_path / "outside").write_text(SECRET)
    repository = tmp_path / "models--o--n"
    (repository / "blobs").mkdir(parents=True)
    (repository / "blobs" / "abc").write_text('{"a": 1}')
    (repository / "snapshots" / "rev").mkdir(parents=True)
    return repository / "snapshots" / "rev"


def test_a_plain_file_is_read(directory: Path) -> None:
    (directory / "config.json").write_text('{"ä": [1, {"b": null}]}', encoding="utf-8")
    files = ArtefactFiles(directory)
    assert files.path("config.json") == directory / "config.json"
    assert files.text("config.json") == '{"ä": [1, {"b": null}]}'
    assert files.json("config.json") == {"ä": [1, {"b": None}]}


def test_a_directory_is_reached_through_a_link(directory: Path) -> None:
    """The caller chose the directory; it is what lies in it that is not trusted."""
    (directory / "config.json").write_text("{}")
    (directory.parent / "alias").symlink_to(directory)
    assert ArtefactFiles(directory.parent / "alias").path("config.json") == directory / "config.json"


@pytest.mark.parametrize("absolute", [False, True])
def test_a_link_into_the_blobs_of_the_repository_is_followed(snapshot: Path, absolute: bool) -> None:
    blobs = snapshot.parents[1] / "blobs"
    (snapshot / "config.json").symlink_to(blobs / "abc" if absolute else "../../blobs/abc")
    files = ArtefactFiles(snapshot)
    assert files.exists("config.json")
    assert files.path("config.json") == blobs / "abc"
    assert files.json("config.json") == {"a": 1}


def refused(directory: Path, name: str, reason: str) -> None:
    """Every way of reading `name` gives a FileError that says where and why."""
    files = ArtefactFiles(directory)
    for read in (files.open, files.text, files.json):
        with pytest.raises(FileError, match=reason) as caught:
            read(name)
        assert str(directory / name) in str(caught.value)
        assert SECRET not in str(caught.value)


LINK = r"a link to .*outside this hub repository's blobs/"


@pytest.mark.parametrize(
    "target",
    ["../outside", "/etc/passwd", "other.json", "../blobs/abc"],
    ids=["next to the directory", "absolute", "a file of the same directory", "blobs of no hub repository"],
)
def test_links_of_a_plain_directory_are_refused(directory: Path, target: str) -> None:
    (directory / "other.json").write_text("{}")
    (directory.parent / "blobs").mkdir()
    (directory.parent / "blobs" / "abc").write_text("{}")
    (directory / "config.json").symlink_to(target)
    refused(directory, "config.json", LINK)


@pytest.mark.parametrize(
    "target",
    [
        "../../../outside",
        "../../../models--o--other/blobs/abc",
        "../../blobs/deeper/abc",
        "../../blobs-of-mine/abc",
        "../../blobs/chained",
        "../other/config.json",
    ],
    ids=["outside", "another repository", "below blobs", "a name that begins alike", "a chain", "another revision"],
)
def test_links_out_of_the_blobs_are_refused(snapshot: Path, target: str) -> None:
    repository = snapshot.parents[1]
    for folder in (
        repository / "blobs" / "deeper",
        repository / "blobs-of-mine",
        repository.parent / "models--o--other" / "blobs",
    ):
        folder.mkdir(parents=True)
        (folder / "abc").write_text(SECRET)
    (repository / "blobs" / "chained").symlink_to("../../outside")
    (repository / "snapshots" / "other").mkdir()
    (repository / "snapshots" / "other" / "config.json").write_text("{}")
    (snapshot / "config.json").symlink_to(target)
    refused(snapshot, "config.json", LINK)


def test_blobs_of_what_is_no_snapshot_are_refused(snapshot: Path) -> None:
    """`blobs/` means something beside `snapshots/` alone."""
    moved = snapshot.parent.rename(snapshot.parents[1] / "versions") / snapshot.name
    (moved / "config.json").symlink_to("../../blobs/abc")
    refused(moved, "config.json", LINK)


def test_blobs_that_are_themselves_a_link_are_refused(snapshot: Path, tmp_path: Path) -> None:
    blobs = snapshot.parents[1] / "blobs"
    blobs.rename(tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere")
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    refused(snapshot, "config.json", LINK)


def test_a_link_that_leads_nowhere_is_there_and_unreadable(directory: Path) -> None:
    """A blob that was deleted must not look like a file that the model never had."""
    (directory / "tokenizer.json").symlink_to("../../blobs/gone")
    assert ArtefactFiles(directory).exists("tokenizer.json")
    refused(directory, "tokenizer.json", "cannot be read .*No such file")


def test_a_loop_of_links_is_refused(directory: Path) -> None:
    (directory / "a").symlink_to("b")
    (directory / "b").symlink_to("a")
    refused(directory, "a", "cannot be read")
    with pytest.raises(FileError, match="no such model directory"):
        ArtefactFiles(directory / "a")


@pytest.mark.parametrize(
    "name",
    ["../outside", "sub/../sub/file", "sub/../../outside", "/etc/passwd", "linked/file", "", ".", ".."],
    ids=lambda name: repr(name),
)
def test_names_that_are_no_plain_names_are_refused(directory: Path, name: str) -> None:
    """Names come from a model's own index file."""
    (directory / "sub").mkdir()
    (directory / "sub" / "file").write_text(SECRET)
    (directory / "linked").symlink_to(directory / "sub")
    refused(directory, name, "not a plain file name|not a regular file")


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300], ids=["NUL", "surrogate", "too long"])
def test_names_that_no_file_can_have_are_refused(directory: Path, name: str) -> None:
    assert not ArtefactFiles(directory).exists(name)
    refused(directory, name, "cannot be read")


def test_only_regular_files_are_read(directory: Path) -> None:
    (directory / "folder").mkdir()
    os.mkfifo(directory / "pipe")
    for name in ("folder", "pipe"):
        with pytest.raises(FileError, match=f"{name}: not a regular file"):
            ArtefactFiles(directory).path(name)


def test_an_empty_file_and_a_missing_one(directory: Path) -> None:
    (directory / "empty").write_bytes(b"")
    refused(directory, "empty", "empty; the directory looks half-written")
    refused(directory, "missing", "cannot be read .*No such file")
    assert not ArtefactFiles(directory).exists("missing")


def test_a_file_without_permission_is_named(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statting needs no right to read; root has every right, so the refusal is played to it."""
    (directory / "config.json").write_text("{}")
    (directory / "config.json").chmod(0)
    if os.geteuid() == 0:

        def denied(path: Path, *arguments: object, **named: object) -> None:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(FileError, match=r"config\.json: cannot be read \(Permission denied\)"):
        ArtefactFiles(directory).text("config.json")


@pytest.mark.parametrize("name", ["missing", "a\0b", "x" * 300], ids=["missing", "NUL", "too long"])
def test_a_directory_that_is_not_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileError, match="no such model directory"):
        ArtefactFiles(tmp_path / name)


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileError, match="file: not a directory"):
        ArtefactFiles(tmp_path / "file")


def test_bytes_that_are_not_utf_8_are_named(directory: Path) -> None:
    (directory / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(FileError, match=r"config\.json: not UTF-8 \(byte 7\)"):
        ArtefactFiles(directory).json("config.json")


@pytest.mark.parametrize("text", ['{"b": 1, "a": 1, "b": 2}', '{"x": [{"a": {"b": 1, "b": 1}}]}'])
def test_a_repeated_field_is_an_error(text: str) -> None:
    """Readers differ in which of the two they take."""
    with pytest.raises(ConfigError, match=r"the file: repeated fields \['b'\]"):
        parse_object(text, "the file")


def test_many_repeated_fields_are_found_in_one_pass() -> None:
    text = "{" + ",".join(f'"{number % 50_000}": 1' for number in range(100_000)) + "}"
    with pytest.raises(ConfigError, match="repeated fields"):
        parse_object(text, "the file")


@pytest.mark.parametrize(
    ("text", "found"), [("[{}]", "list"), ("1", "int"), ("null", "NoneType"), ('"{}"', "str"), ("true", "bool")]
)
def test_json_that_is_no_object(text: str, found: str) -> None:
    with pytest.raises(FileError, match=f"the file: a JSON object is needed, found {found}"):
        parse_object(text, "the file")


@pytest.mark.parametrize(
    "text",
    ["", '{"a": 1', '{"a": 1}{', "\ufeff{}", '{"a":' * 100_000, "[" * 100_000, '{"a": ' + "9" * 5000 + "}"],
    ids=["nothing", "cut", "more behind", "byte order mark", "nested objects", "nested lists", "a number too long"],
)
def test_text_that_is_not_json(text: str) -> None:
    with pytest.raises(FileError, match="the file: not JSON"):
        parse_object(text, "the file")
