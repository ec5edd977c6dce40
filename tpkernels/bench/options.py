"""Values from command lines and files, checked; `UsageError` if one is unusable."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tpkernels import dtypes
from tpkernels.op_spec import OPS
from tpkernels.planning.algorithms import ALGORITHMS

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_BY_NAME = DTYPES | {dtypes.name(dtype): dtype for dtype in DTYPES.values()}
_MOST = 10**12  # elements, bytes, repetitions, seconds
_MOST_DIGITS = 20  # including leading zeros
_MOST_WORKERS = 1024
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class UsageError(ValueError):
    """The request cannot be carried out. Raised before any rank starts."""


def check_known(what: str, names: Iterable[str], known: Iterable[str]) -> list[str]:
    """``names`` without repetitions. ``UsageError`` if one is not in ``known``."""
    for name in names:
        if name not in known:
            raise UsageError(f"unknown {what} '{name}'; choose from {', '.join(known)}")
    return list(dict.fromkeys(names))


def dtype_named(name: str) -> torch.dtype:
    """The dtype called ``bf16`` or ``bfloat16``."""
    check_known("dtype", [name], _BY_NAME)
    return _BY_NAME[name]


def ops_named(names: list[str]) -> list[str]:
    """``names`` without repetitions, each an op."""
    return check_known("op", names, OPS)


def algorithms_named(names: list[str]) -> list[str]:
    """``names`` without repetitions, each an algorithm or auto."""
    return check_known("algorithm", names, ("auto", *ALGORITHMS))


def shape_of(text: str) -> tuple[int, ...]:
    """(M, N, K) of ``"M,N,K"``."""
    parts = text.split(",")
    if len(parts) != 3 or not all(map(number_in, parts)):
        raise UsageError(
            f"shape '{text}' is not M,N,K: three positive numbers, such as 2048,4096,4096"
        )
    return tuple(map(number_in, parts))


def sizes_of(text: str) -> list[int]:
    """Bytes of each size in ``"64K,1M,32M"``; the units are powers of 1024."""
    sizes = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", part.strip(), re.IGNORECASE)
        if match is None or not number_in(match[1]):
            raise UsageError(f"size '{part}' is not a number of bytes such as 65536, 64K or 32M")
        sizes.append(number_in(match[1]) * _UNITS[match[2].upper()])
    return sizes


def number_in(text: str) -> int:
    """The positive number in ``text``; 0 if there is none or it is unreasonably large."""
    text = text.strip()
    number = int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else 0
    return number if number <= _MOST else 0


def at_least(least: int, **values: int) -> None:
    """``UsageError`` if a value is below ``least`` or unreasonably large."""
    for name, value in values.items():
        if value < least:
            raise UsageError(f"--{name} is {value}; it must be at least {least}")
        if value > _MOST:
            raise UsageError(f"--{name} is {value}; it must be at most {_MOST}")


def check_workers(**values: int) -> None:
    """``UsageError`` if a number of ranks or threads is below 1 or unreasonably large."""
    at_least(1, **values)
    for name, value in values.items():
        if value > _MOST_WORKERS:
            raise UsageError(f"--{name} is {value}; it must be at most {_MOST_WORKERS}")


def read_input(path: Path, *, most: int) -> bytes:
    """The content of a file that the user named. ``UsageError`` if it cannot be read or has more
    than ``most`` bytes."""
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise UsageError(f"cannot read '{path}': {error.strerror}") from error
    if len(content) > most:
        raise UsageError(f"'{path}' has more than {most} bytes")
    return content


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an ``OSError`` while writing to a file or folder into a ``UsageError``."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write '{path}': {error.strerror or error}") from error


def make_output_folder(path: Path) -> None:
    """Creates a folder if it is missing. ``UsageError`` if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot create folder '{path}': {error.strerror}") from error


def writable(path: Path) -> Path:
    """``path``. ``UsageError`` if no file can be written there."""
    existed = path.exists()
    with writing(path):
        path.open("a").close()
    if not existed:
        path.unlink(missing_ok=True)
    return path
