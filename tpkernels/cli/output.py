"""How the commands print."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

_WIDTH = 180  # where there is no terminal: a log, a pipe


def console() -> Console:
    """Standard output."""
    return Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)


def table(title: str, left: tuple[str, ...], right: tuple[str, ...], last: str = "") -> Table:
    """An empty table: columns of text, of numbers, and one more of text."""
    result = Table(title=title, title_justify="left", title_style="bold")
    for name in left:
        result.add_column(name, no_wrap=True)
    for name in right:
        result.add_column(name, justify="right", no_wrap=True)
    if last:
        result.add_column(last)
    return result


def milliseconds(value: float) -> str:
    """Three digits that matter."""
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def byte_size(value: int) -> str:
    """Bytes in the largest unit that gives 1 or more."""
    size, unit = float(value), "bytes"
    for larger in ("KiB", "MiB", "GiB"):
        if size >= 1024:
            size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"
