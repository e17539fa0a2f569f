"""kvouch_home."""

from pathlib import Path

import pytest

from kvouch.loader.home import kvouch_home


def test_the_variable_names_the_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVOUCH_HOME", str(tmp_path))
    assert kvouch_home() == tmp_path


def test_a_tilde_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KVOUCH_HOME", "~/models")
    assert kvouch_home() == tmp_path / "models"


@pytest.mark.parametrize("value", [None, ""])
def test_without_it_the_home_is_in_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str | None
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KVOUCH_HOME", raising=False)
    if value is not None:
        monkeypatch.setenv("KVOUCH_HOME", value)
    assert kvouch_home() == tmp_path / ".cache" / "kvouch"
