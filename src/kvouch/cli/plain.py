"""How every typer app of the command line is set up. Knows typer's switches; knows no command.

Help and usage errors are plain text: drawing them with rich would cost its import on every call.
"""

import typer


def plain_app(summary: str) -> typer.Typer:
    """An app with plain help, no completion options, and help where a subcommand is missing."""
    return typer.Typer(
        help=summary,
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
