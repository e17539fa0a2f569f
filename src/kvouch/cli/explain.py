"""`kvouch explain`: in what two models, manifests, identities or verdicts differ. Exit status 1 where they do."""

from pathlib import Path
from typing import Annotated

import typer

from kvouch.cli.differences import between


def explain(
    a: Annotated[Path, typer.Argument(metavar="A", help="A directory, or a JSON file that kvouch wrote.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another of the same kind.")],
) -> None:
    lines = between(a, b)
    typer.echo("\n".join(lines) if lines else "no difference")
    raise typer.Exit(1 if lines else 0)
