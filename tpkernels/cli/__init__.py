"""The command line. Each command is a module that is imported only when the command runs.

Exit codes: 0 success, 1 wrong result, regression or failed rank, 2 invalid input.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from tpkernels.launch import RankError

COMMANDS = (
    *("info", "demo", "bench", "compare", "tune", "explain", "shard", "generate", "serve"),
    "verify",
    "profile",
    "qualify",
    "stuck",
)
_TYPER_SETTINGS: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": "markdown",
}
_MAX_MESSAGE = 1000  # maximum characters of an error


@contextmanager
def exit_codes() -> Iterator[None]:
    """Convert expected errors into a message and an exit code, without a traceback."""
    from tpkernels.common.text import printable, shorten
    from tpkernels.launch import RankError
    from tpkernels.launch.terminal import UsageError

    try:
        yield
    except BrokenPipeError as error:  # the reader ended, such as `head`; discard further output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(130) from error
    except UsageError as error:
        if os.environ.get("RANK", "0") == "0":  # under torchrun every rank raises the same error
            typer.echo(f"Error: {shorten(printable(str(error)), _MAX_MESSAGE)}", err=True)
        raise typer.Exit(2) from error
    except RankError as error:
        if (message := _find_usage_error(error)) is not None:
            typer.echo(f"Error: {shorten(printable(message), _MAX_MESSAGE)}", err=True)
            raise typer.Exit(2) from error
        typer.echo(f"FAIL: {error}", err=True)
        raise typer.Exit(1) from error


def _find_usage_error(error: RankError) -> str | None:
    """Return the message of the `UsageError` that ended the ranks, or None for other errors."""
    for outcome in error.outcomes:
        if outcome.error is not None and outcome.error_type == "UsageError":
            return outcome.error.rpartition("UsageError: ")[2].strip()
    return None


class _Commands(TyperGroup):
    """Command group that imports only the module of the requested command."""

    def list_commands(self, ctx: object) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: object, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        # Everything after the script of `profile` belongs to the script, including options.
        settings = {"allow_interspersed_args": False} if cmd_name == "profile" else {}
        function = exit_codes()(getattr(import_module(f"tpkernels.cli.{cmd_name}"), cmd_name))
        command = typer.Typer(**_TYPER_SETTINGS)
        command.command(cmd_name, context_settings=settings)(function)
        return typer.main.get_command(command)


app = typer.Typer(
    cls=_Commands,
    help="Fused communication and compute for tensor parallelism in PyTorch.",
    no_args_is_help=True,
    **_TYPER_SETTINGS,
)


def _print_version(requested: bool) -> None:
    if requested:
        from tpkernels.common.version import VERSION

        typer.echo(f"tpkernels {VERSION}")
        raise typer.Exit


@app.callback()
def _handle_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Handle options that precede the command."""


def main() -> None:
    """Run the console script ``tpkernels``."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # like stderr
    app(prog_name="tpkernels")
