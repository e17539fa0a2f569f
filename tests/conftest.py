"""Fixtures that every test may use. Knows where pulled models are; pulls nothing."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kvouch.loader.home import kvouch_home
from kvouch.loader.pull import list_models

SMOLLM2 = "smollm2-135m-instruct-q4_1"


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The directory of the real model, or a skip that says what to run."""
    for model in list_models(kvouch_home()):
        if model.name == SMOLLM2:
            return model.path
    pytest.skip(f"{SMOLLM2} is not under {kvouch_home()}: run `kvouch models pull {SMOLLM2}`")


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """What a test does to the number of threads ends with it: a grade belongs to a number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


_FIGURES: list[str] = []


@pytest.fixture
def report() -> Callable[[str], None]:
    """Takes a measured figure, to be shown when all tests have run."""
    return _FIGURES.append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _FIGURES:
        terminalreporter.section("figures")
        for line in _FIGURES:
            terminalreporter.line(line)
