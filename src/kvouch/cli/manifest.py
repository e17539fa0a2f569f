"""`kvouch manifest`: every file of a model or an adapter with its hash and role. Needs no torch."""

from pathlib import Path
from typing import Annotated

import typer

from kvouch.artefact.manifest import Manifest, dumps
from kvouch.errors import ManifestMismatch


def manifest(
    directory: Annotated[Path, typer.Argument(help="A model or adapter directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="The manifest itself, for `--check` and `explain`.")] = False,
    check: Annotated[
        Path | None, typer.Option("--check", help="A manifest that the directory must have, or exit with 1.")
    ] = None,
) -> None:
    found = Manifest.of(directory)
    if check is not None:
        wanted = Manifest.read(check)
        if wanted.digest != found.digest:
            raise ManifestMismatch(f"{check} (first) and {directory} (second) differ: {wanted.differences(found)[0]}")
    if as_json:
        typer.echo(dumps(found), nl=False)
        return
    for file in found.files:
        typer.echo(f"{file.sha256[:16]}  {file.size:>15,}  {file.role:<9}  {file.path}")
    typer.echo(f"{found.digest}  {directory}")
