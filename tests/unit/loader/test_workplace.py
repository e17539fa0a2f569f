"""Temporary folders: gone with their pull, swept when it died, left alone while it lives."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvouch.loader.workplace import OWNER_FILE, PREFIX, workplace

HOLD = """
import sys
from pathlib import Path
from kvouch.loader.workplace import workplace
with workplace(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("written")
    print(folder, flush=True)
    sys.stdin.read()
"""


@contextmanager
def another_process(models: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that holds a workplace until its stdin closes, and the folder it holds."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(models)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process, Path(process.stdout.readline().strip())
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def leftovers(models: Path) -> list[Path]:
    return list(models.glob(f"{PREFIX}*"))


def test_the_folder_is_gone_after_the_block_and_after_an_error(tmp_path: Path) -> None:
    with workplace(tmp_path / "models") as folder:
        (folder / "file").write_text("x")
        assert (folder / OWNER_FILE).read_text() == f"{os.getpid()}\n"
    with pytest.raises(KeyboardInterrupt), workplace(tmp_path / "models") as folder:
        raise KeyboardInterrupt
    assert leftovers(tmp_path / "models") == []


def test_two_at_once_have_two_folders(tmp_path: Path) -> None:
    with workplace(tmp_path) as first, workplace(tmp_path) as second:
        assert first != second
        assert first.is_dir()


def test_a_living_process_keeps_its_folder(tmp_path: Path) -> None:
    with another_process(tmp_path) as (_, theirs):
        with workplace(tmp_path):
            pass
        assert (theirs / "half").read_text() == "written"
    assert leftovers(tmp_path) == []


def test_a_killed_process_leaves_a_folder_that_the_next_one_sweeps(tmp_path: Path) -> None:
    with another_process(tmp_path) as (process, theirs):
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert leftovers(tmp_path) == [theirs]
    with workplace(tmp_path) as folder:
        assert leftovers(tmp_path) == [folder]


def test_a_folder_whose_owner_died_before_its_lock_is_swept(tmp_path: Path) -> None:
    (tmp_path / f"{PREFIX}newborn").mkdir()
    with workplace(tmp_path) as folder:
        assert leftovers(tmp_path) == [folder]
