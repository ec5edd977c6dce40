"""What commands share: values of options and files, checked, and text for a terminal.

Everything here raises `UsageError` for input that cannot be used.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tpkernels.common import dtypes
from tpkernels.common.text import counted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_BY_NAME = DTYPES | {dtypes.name(dtype): dtype for dtype in DTYPES.values()}
_MOST = 10**12  # elements, bytes, repetitions, seconds
_MOST_DIGITS = 20  # including leading zeros
_MOST_WORKERS = 1024
_WIDTH = 190  # columns of a log or a pipe
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class UsageError(ValueError):
    """The request cannot be carried out, as is found before any rank starts, or when the ranks load
    a model."""


def check_known(what: str, names: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return ``names`` without repetitions. ``UsageError`` if one is not in ``known``."""
    for name in names:
        if name not in known:
            raise UsageError(f"unknown {what} '{name}'; choose from {', '.join(known)}")
    return list(dict.fromkeys(names))


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype called ``bf16`` or ``bfloat16``."""
    check_known("dtype", [name], _BY_NAME)
    return _BY_NAME[name]


def shape_of(text: str) -> tuple[int, ...]:
    """Parse ``"M,N,K"``."""
    parts = text.split(",")
    if len(parts) != 3 or not all(map(number_in, parts)):
        raise UsageError(
            f"shape '{text}' is not M,N,K: three positive integers, such as 2048,4096,4096"
        )
    return tuple(map(number_in, parts))


def sizes_of(text: str) -> list[int]:
    """Parse sizes such as ``"64K,1M,32M"`` to bytes; the units are powers of 1024."""
    sizes = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", part.strip(), re.IGNORECASE)
        if match is None or not number_in(match[1]):
            raise UsageError(f"size '{part}' is not a number of bytes such as 65536, 64K or 32M")
        sizes.append(number_in(match[1]) * _UNITS[match[2].upper()])
    return sizes


def number_in(text: str) -> int:
    """Parse a positive number; return 0 if there is none or it is unreasonably large."""
    text = text.strip()
    number = int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else 0
    return number if number <= _MOST else 0


def at_least(least: int, *, most: int = _MOST, **values: int) -> None:
    """Require values of at least ``least`` that are not unreasonably large."""
    for name, value in values.items():
        if not least <= value <= most:
            bound = f"at least {least}" if value < least else f"at most {most}"
            raise UsageError(f"--{name} is {value}; it must be {bound}")


def note_crowd(ranks: int, threads: int) -> None:
    """Say on standard error that there are more threads than cores, where there are."""
    cores = len(os.sched_getaffinity(0))
    if ranks * threads > cores:
        print(
            f"Starting {counted(ranks, 'rank')} x {counted(threads, 'thread')} on "
            f"{counted(cores, 'core')}: threads share cores, which is slow.",
            file=sys.stderr,
            flush=True,
        )


def check_workers(**values: int) -> None:
    """Require numbers of ranks or threads from 1 to 1024."""
    at_least(1, most=_MOST_WORKERS, **values)


@contextmanager
def accessing(path: Path, verb: str) -> Iterator[None]:
    """Turn an ``OSError`` into a ``UsageError``: "cannot VERB 'PATH': reason"."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot {verb} '{path}': {error.strerror or error}") from error


def writing(path: Path) -> AbstractContextManager[None]:
    """Turn an ``OSError`` while writing to a file or folder into a ``UsageError``."""
    return accessing(path, "write")


def read_input(path: Path, *, most: int) -> bytes:
    """Read a file that the user named, of at most ``most`` bytes."""
    with accessing(path, "read"), path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise UsageError(f"'{path}' is larger than {most} bytes")
    return content


def make_output_folder(path: Path) -> None:
    """Create a folder if it is missing."""
    with accessing(path, "create folder"):
        path.mkdir(parents=True, exist_ok=True)


def writable(path: Path) -> Path:
    """Return ``path`` if a file can be written there."""
    existed = path.exists()
    with writing(path):
        path.open("a").close()
    if not existed:
        path.unlink(missing_ok=True)
    return path


def console() -> Console:
    """Return a console on standard output."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)


def table(first: str, numbers: tuple[str, ...], last: str | None = None) -> Table:
    """Return an empty table: a column of names, columns of numbers, a text column that wraps
    unless ``last`` is None."""
    from rich import box
    from rich.table import Table

    result = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True)
    result.add_column(first, no_wrap=True)
    for name in numbers:
        result.add_column(name, justify="right", no_wrap=True)
    if last is not None:
        result.add_column(last, min_width=16, overflow="fold")
    return result


def milliseconds(value: float) -> str:
    """Format milliseconds with three significant digits."""
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def byte_size(value: int) -> str:
    """Format bytes in the largest unit that gives at least 1."""
    size, unit = float(value), "bytes"
    for larger in ("KiB", "MiB", "GiB"):
        if size >= 1024:
            size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"
