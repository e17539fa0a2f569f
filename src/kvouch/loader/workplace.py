"""The temporary folder that a pull works in. Knows locks and dead processes; knows nothing of models.

Every pull owns one `.pull-<random>` folder and holds an fcntl lock on the file `owner` in it, which contains its
process id for people to read. The kernel drops the lock when the process ends, however it ends, so a folder whose
lock can be taken belongs to nobody and is removed by the next pull. Folders are made and swept under one more lock,
`.lock`, so that a folder is never seen between its birth and its own lock. Needs POSIX (`fcntl`).
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

PREFIX = ".pull-"
OWNER_FILE = "owner"
GATE_FILE = ".lock"


@contextmanager
def workplace(models: Path) -> Iterator[Path]:
    """A fresh folder beside the models, gone when the block ends, however it ends; sweeps dead ones first."""
    models.mkdir(parents=True, exist_ok=True)
    with (models / GATE_FILE).open("w") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        remove_dead(models)
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=models))
        owner = _own(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        owner.close()


def remove_dead(models: Path) -> None:
    """Removes the folders of pulls that no longer run. The caller holds the gate."""
    for folder in models.glob(f"{PREFIX}*"):
        if _is_dead(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _own(folder: Path) -> IO[str]:
    owner = (folder / OWNER_FILE).open("w")
    fcntl.flock(owner, fcntl.LOCK_EX)
    owner.write(f"{os.getpid()}\n")
    owner.flush()
    return owner


def _is_dead(folder: Path) -> bool:
    try:
        with (folder / OWNER_FILE).open("r+") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:  # its owner was killed before it had a lock, or is removing the folder now
        return True
    except OSError:  # the lock is held (BlockingIOError), or the folder is another user's
        return False
    return True
