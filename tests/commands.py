"""Running commands in this process, on a tiny model that speaks bytes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvouch.cli.main import main
from tiny_models import tiny_directory
from tiny_tokenizer import write_tokenizer


@dataclass(frozen=True, kw_only=True)
class Ran:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Ran:
    """Runs `kvouch ...`; what it wrote before is dropped."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    written = capsys.readouterr()
    status = caught.value.code or 0
    assert isinstance(status, int)
    return Ran(status=status, out=written.out, err=written.err)


def check_refused(ran: Ran, said: str, status: int) -> None:
    """One line that says what is wrong, on stderr alone, and the right exit status."""
    assert ran.out == ""
    assert ran.err.count("\n") == 1, ran.err
    assert ran.err.startswith("kvouch: ")
    assert said in ran.err
    assert ran.status == status


def talking_model(directory: Path, family: str = "smollm2", *, stops: bool = False) -> Path:
    """A tiny model with the byte tokenizer and a chat template; without `stops`, no id ends its answers."""
    return write_tokenizer(tiny_directory(directory, family), fields=None if stops else {})
