"""Text for messages; what comes from files is made safe to show in a terminal."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

_MOST = 60  # characters of a value quoted in a message

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxlong = _repr.maxother = _MOST


def printable(text: str) -> str:
    """Escape control characters, and others that a terminal would interpret or cannot show."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def all_printable(value: Any) -> Any:
    """Make every text in a JSON value `printable`."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [all_printable(item) for item in value]
    if isinstance(value, dict):
        return {printable(name): all_printable(item) for name, item in value.items()}
    return value


def short(text: str, most: int) -> str:
    """Cut the middle out of ``text`` if it is longer than ``most``."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def counted(count: int, noun: str) -> str:
    """Return "1 rank", "2 ranks"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def of_error(error: BaseException) -> str:
    """Return an exception's kind and text, which any encoding takes: a path in it may have none."""
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    return text.encode(errors="backslashreplace").decode()


def named_values(values: Mapping[str, object]) -> str:
    """Return options as a user gives them: "timeout=20.0, autotune=True"."""
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def shown(value: object) -> str:
    """Return a value from a file in ASCII, shortened if it is long."""
    try:
        text = _repr.repr(value)
    except ValueError:  # an integer with more digits than Python converts
        text = f"a huge {type(value).__name__}"
    return short(text.encode("ascii", "backslashreplace").decode(), 2 * _MOST)
