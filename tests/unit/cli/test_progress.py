"""Progress: bars on a terminal, one line a stage elsewhere, and never on stdout."""

import io
import sys

import pytest

from kvouch.cli.progress import progress_on_stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_a_stage_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_on_stderr() as progress:
        for done in range(5):
            progress("download", done, 4)
        progress("convert", 0, 1)
    assert capsys.readouterr() == ("", "download ...\nconvert ...\n")


def test_on_a_terminal_every_stage_has_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_on_stderr() as progress:
        progress("download", 0, 0)
        progress("download", 4, 4)
        progress("convert", 1, 2)
    drawn = terminal.getvalue()
    assert "download" in drawn
    assert "100%" in drawn
    assert "50%" in drawn
    assert capsys.readouterr().out == ""
