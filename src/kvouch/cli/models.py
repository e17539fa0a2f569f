"""`kvouch models`: pull by name, and list what is here. Knows how to print; leaves the work to `loader.pull`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from kvouch.cli.plain import plain_app
from kvouch.cli.progress import progress_on_stderr
from kvouch.loader.catalogue import CATALOGUE
from kvouch.loader.home import kvouch_home
from kvouch.loader.pull import PulledModel, list_models, pull

models = plain_app("Pull models by name, and list them.")


@models.command("pull")
def pull_command(
    name: Annotated[str, typer.Argument(help="A catalogue name, or a hub id owner/name[@revision].")],
) -> None:
    """Fetch a model once, and print its directory."""
    with progress_on_stderr() as progress:
        path = pull(name, kvouch_home(), progress)
    typer.echo(path)


@models.command("ls")
def list_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
) -> None:
    """List the models that are here, then the names that can be pulled."""
    here = list_models(kvouch_home())
    rows = [_row(model) for model in here]
    names = {model.name for model in here}
    rows += [_row_to_pull(entry.name, entry.source.label) for entry in CATALOGUE if entry.name not in names]
    typer.echo(json.dumps(rows, indent=2) if as_json else table(rows))


Row = dict[str, str | int | None]


def table(rows: list[Row]) -> str:
    """Name, size and source in aligned columns."""
    cells = [("NAME", "SIZE", "SOURCE")]
    cells += [(str(row["name"]), readable_size(row["size_bytes"]), str(row["source"])) for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(2)]
    return "\n".join(f"{name:<{widths[0]}}  {size:>{widths[1]}}  {source}" for name, size, source in cells)


def readable_size(size_bytes: str | int | None) -> str:
    """Megabytes, or that there are none yet."""
    return f"{size_bytes / 1e6:,.1f} MB" if isinstance(size_bytes, int) else "not pulled"


def _row(model: PulledModel) -> Row:
    return _fields(model.name, model.size_bytes, model.source, model.path)


def _row_to_pull(name: str, source: str) -> Row:
    return _fields(name, None, source, None)


def _fields(name: str, size_bytes: int | None, source: str, path: Path | None) -> Row:
    return {"name": name, "size_bytes": size_bytes, "source": source, "path": str(path) if path else None}
