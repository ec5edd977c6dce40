"""Printing: the console, an empty table, numbers with units."""

from __future__ import annotations

import sys

from rich import box
from rich.console import Console
from rich.table import Table

_WIDTH = 190  # without a terminal: a log or a pipe


def console() -> Console:
    """Standard output."""
    return Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)


def table(first: str, numbers: tuple[str, ...], last: str) -> Table:
    """An empty table: a column of names, columns of numbers, and a text column that wraps."""
    result = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True)
    result.add_column(first, no_wrap=True)
    for name in numbers:
        result.add_column(name, justify="right", no_wrap=True)
    result.add_column(last, min_width=16, overflow="fold")
    return result


def milliseconds(value: float) -> str:
    """Three significant digits."""
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def byte_size(value: int) -> str:
    """Bytes in the largest unit that gives at least 1."""
    size, unit = float(value), "bytes"
    for larger in ("KiB", "MiB", "GiB"):
        if size >= 1024:
            size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"
