"""Exit codes of the commands: 0 success, 1 wrong result or regression, 2 unusable input."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from tpkernels.launch import RankError
from tpkernels.terminal import UsageError
from tpkernels.text import printable, short

_MOST_MESSAGE = 1000  # characters of an error


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn errors that need no traceback into a message and an exit code: 2 for unusable input, 1
    for ranks that failed."""
    try:
        yield
    except UsageError as error:
        if os.environ.get("RANK", "0") == "0":  # under torchrun every rank raises the same error
            typer.echo(f"Error: {short(printable(str(error)), _MOST_MESSAGE)}", err=True)
        raise typer.Exit(2) from error
    except RankError as error:
        typer.echo(f"FAIL: {error}", err=True)
        raise typer.Exit(1) from error
