"""Helpers of the commands: checks of option values and files, and terminal output.

All functions raise `UsageError` for invalid input.
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
from tpkernels.common.text import pluralize

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_BY_NAME = DTYPES | {dtypes.name(dtype): dtype for dtype in DTYPES.values()}
_MAX_VALUE = 10**12  # elements, bytes, repetitions, seconds
_MAX_DIGITS = 20  # including leading zeros
_MAX_WORKERS = 1024
_WIDTH = 190  # columns of output to a log or a pipe
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class UsageError(ValueError):
    """Invalid input of a command. Raised before the ranks start or while they load a model."""


def check_known(option: str, names: Iterable[str], choices: Iterable[str]) -> list[str]:
    """Return ``names`` without duplicates. Raise ``UsageError`` if a name is not in ``choices``."""
    for name in names:
        if name not in choices:
            raise UsageError(f"unknown {option} '{name}'; choose from {', '.join(choices)}")
    return list(dict.fromkeys(names))


def parse_dtype(name: str) -> torch.dtype:
    """Return the dtype for a short or full name, such as ``bf16`` or ``bfloat16``."""
    check_known("dtype", [name], _BY_NAME)
    return _BY_NAME[name]


def parse_shape(value: str) -> tuple[int, ...]:
    """Parse ``"M,N,K"``."""
    sizes = value.split(",")
    if len(sizes) != 3 or not all(map(parse_positive, sizes)):
        raise UsageError(
            f"shape '{value}' is not M,N,K: three positive integers, such as 2048,4096,4096"
        )
    return tuple(map(parse_positive, sizes))


def parse_sizes(value: str) -> list[int]:
    """Parse sizes such as ``"64K,1M,32M"`` to bytes. The units are powers of 1024."""
    sizes = []
    for size in value.split(","):
        match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", size.strip(), re.IGNORECASE)
        if match is None or not parse_positive(match[1]):
            raise UsageError(f"size '{size}' is not a number of bytes such as 65536, 64K or 32M")
        sizes.append(parse_positive(match[1]) * _UNITS[match[2].upper()])
    return sizes


def parse_positive(value: str) -> int:
    """Parse a positive integer. Returns 0 if it is not a number or unreasonably large."""
    value = value.strip()
    number = int(value) if value.isdecimal() and len(value) <= _MAX_DIGITS else 0
    return number if number <= _MAX_VALUE else 0


def require_at_least(minimum: int, *, maximum: int = _MAX_VALUE, **values: int) -> None:
    """Require each option value to be from ``minimum`` to ``maximum``."""
    for name, value in values.items():
        if not minimum <= value <= maximum:
            bound = f"at least {minimum}" if value < minimum else f"at most {maximum}"
            raise UsageError(f"--{name} is {value}; it must be {bound}")


def warn_oversubscription(ranks: int, threads: int) -> None:
    """Print a warning to stderr if the ranks have more threads than the machine has cores."""
    cores = len(os.sched_getaffinity(0))
    if ranks * threads > cores:
        print(
            f"Starting {pluralize(ranks, 'rank')} x {pluralize(threads, 'thread')} on "
            f"{pluralize(cores, 'core')}: threads share cores, which is slow.",
            file=sys.stderr,
            flush=True,
        )


def check_workers(**values: int) -> None:
    """Require numbers of ranks or threads to be from 1 to 1024."""
    require_at_least(1, maximum=_MAX_WORKERS, **values)


@contextmanager
def accessing(path: Path, verb: str) -> Iterator[None]:
    """Convert an ``OSError`` to a ``UsageError`` "cannot VERB 'PATH': reason"."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot {verb} '{path}': {error.strerror or error}") from error


def writing(path: Path) -> AbstractContextManager[None]:
    """Convert an ``OSError`` while writing to a file or folder to a ``UsageError``."""
    return accessing(path, "write")


def read_input(path: Path, *, max_bytes: int) -> bytes:
    """Read an input file of at most ``max_bytes`` bytes."""
    with accessing(path, "read"), path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise UsageError(f"'{path}' is larger than {max_bytes} bytes")
    return content


def make_output_folder(path: Path) -> None:
    """Create a folder if it is missing."""
    with accessing(path, "create folder"):
        path.mkdir(parents=True, exist_ok=True)


def writable(path: Path) -> Path:
    """Return ``path`` after checking that a file can be written there."""
    existed = path.exists()
    with writing(path):
        path.open("a").close()
    if not existed:
        path.unlink(missing_ok=True)
    return path


def console() -> Console:
    """Return a rich console on standard output."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)


def table(first: str, numbers: tuple[str, ...], last: str | None = None) -> Table:
    """Return an empty table with a column of names, columns of numbers and, unless ``last`` is
    None, a text column that wraps."""
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
    """Format a number of bytes in the largest unit in which it is at least 1."""
    size, unit = float(value), "bytes"
    for larger in ("KiB", "MiB", "GiB"):
        if size >= 1024:
            size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"
