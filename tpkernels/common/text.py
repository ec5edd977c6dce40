"""Text for messages. Strings from files are escaped so that a terminal can show them safely."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from tpkernels.errors import CollectiveTimeoutError

_MAX_CHARS = 60  # maximum characters of a value in a message

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxlong = _repr.maxother = _MAX_CHARS


def printable(string: str) -> str:
    """Escape control characters and all characters that a terminal cannot print."""
    if string.isprintable():
        return string
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in string)


def all_printable(value: Any) -> Any:
    """Apply `printable` to every string in a JSON value."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [all_printable(item) for item in value]
    if isinstance(value, dict):
        return {printable(name): all_printable(item) for name, item in value.items()}
    return value


def shorten(string: str, limit: int) -> str:
    """Replace the middle of a string with an ellipsis if it is longer than ``limit``."""
    return string if len(string) <= limit else f"{string[: limit // 2]} ... {string[-limit // 2 :]}"


def pluralize(count: int, noun: str) -> str:
    """Return a count with its noun, such as "1 rank" or "2 ranks"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def describe_error(error: BaseException) -> str:
    """Return the type and message of an exception, without the calls that a timeout lists.
    Surrogates, such as in paths with undecodable bytes, are escaped, so that the string can be
    encoded."""
    message = f"{type(error).__name__}: {error}".removesuffix(": ")
    if isinstance(error, CollectiveTimeoutError):
        message = message.partition("\n\n")[0]
    return message.encode(errors="backslashreplace").decode()


def format_options(values: Mapping[str, object]) -> str:
    """Return options in call syntax, such as "timeout=20.0, autotune=True"."""
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def safe_repr(value: object) -> str:
    """Return the repr of a value from a file, in ASCII and shortened."""
    try:
        string = _repr.repr(value)
    except ValueError:  # an integer with more digits than Python converts
        string = f"a huge {type(value).__name__}"
    return shorten(string.encode("ascii", "backslashreplace").decode(), 2 * _MAX_CHARS)
