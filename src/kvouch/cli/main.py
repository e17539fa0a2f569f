"""The entry point of the command line. Knows the names of the commands and how errors end; runs no model.

A command is one file, `cli/<name>.py`, imported only when it is called. The file defines `<name>`: a function with
typer's annotations (`def ask(prompt: str, ...) -> None`), or a `typer.Typer` from `cli.plain.plain_app` where the
command has subcommands. To add one, write the file and add one line to COMMANDS. Commands raise KvouchError for
everything that is the user's to mend, and never catch it: `main` turns it into one line and an exit status.
"""

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvouch.cli.plain import plain_app
from kvouch.errors import KvouchError

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "ask": "Answer questions about documents that are read once.",
        "generate": "Continue a text, or token ids, as they are.",
        "chat": "Talk, each turn on top of all turns before.",
        "info": "Show this machine, and a model as it is loaded.",
        "models": "Pull models by name, and list them.",
        "manifest": "Hash every file of a model or an adapter, or check it.",
        "explain": "Say in what two models, manifests, identities or verdicts differ.",
    }
)

INTERRUPTED = 130  # 128 + SIGINT


class LazyGroup(TyperGroup):
    """A group that lists its commands from COMMANDS and imports the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return load_command(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def load_command(name: str) -> Any:
    """The click command of `cli/<name>.py`."""
    found: typer.Typer | Callable[..., None] = getattr(importlib.import_module(f"kvouch.cli.{name}"), name)
    if isinstance(found, typer.Typer):
        return typer.main.get_command(found)
    app = plain_app(COMMANDS[name])
    app.command(name=name, help=COMMANDS[name])(found)
    return typer.main.get_command(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits: 0, the status of a KvouchError, 2 for wrong usage, 130 when interrupted."""
    try:
        _program()(args=arguments, prog_name="kvouch")
    except KvouchError as error:
        typer.echo(f"kvouch: {' '.join(str(error).split())}", err=True)
        raise SystemExit(error.exit_status) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    finally:
        _flush()


def _flush() -> None:
    """Writes what is left, quietly where nobody reads any more (`kvouch ... | head`)."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # or the interpreter would flush once more as it ends, and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _program() -> Any:
    app = plain_app("Reuses the keys and values of causal language models only when it can say why they are valid.")

    @app.callback(cls=LazyGroup)
    def options(
        version: Annotated[
            bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
        ] = False,
    ) -> None:
        pass

    return typer.main.get_command(app)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"kvouch {version('kvouch')}")
        raise typer.Exit
