"""Progress on stderr. Knows terminals; knows nothing of what is being done."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from kvouch.contract import Progress


@contextmanager
def progress_on_stderr() -> Iterator[Progress]:
    """A bar for each stage where stderr is a terminal, one line for each stage where it is not."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<8}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        stages: dict[str, TaskID] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = bars.add_task(stage, total=None)
            bars.update(stages[stage], completed=done, total=total or None)  # an unknown total pulses

        yield report


def _lines() -> Progress:
    seen: set[str] = set()

    def report(stage: str, done: int, total: int) -> None:
        if stage not in seen:
            seen.add(stage)
            typer.echo(f"{stage} ...", err=True)

    return report
