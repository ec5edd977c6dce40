"""Text from files, made fit for a message or a terminal."""

from __future__ import annotations

import reprlib
from typing import Any

_MOST = 60  # characters of a value that a message repeats

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxlong = _repr.maxother = _MOST


def printable(text: str) -> str:
    """``text`` with escape sequences in place of control characters and of all else that a terminal
    would obey or could not show."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def all_printable(found: Any) -> Any:
    """Lists and dicts, as JSON has them, with `printable` texts in them."""
    if isinstance(found, str):
        return printable(found)
    if isinstance(found, list):
        return [all_printable(each) for each in found]
    if isinstance(found, dict):
        return {printable(name): all_printable(value) for name, value in found.items()}
    return found


def short(text: str, most: int) -> str:
    """``text`` with its middle left out where it is longer than ``most``."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def of_error(error: BaseException) -> str:
    """An exception's kind and text, which any encoding takes: a path in it may have none."""
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    return text.encode(errors="backslashreplace").decode()


def shown(value: object) -> str:
    """A value as it stands in a file, in ASCII, cut where it is long."""
    try:
        text = _repr.repr(value)
    except ValueError:  # an integer with more digits than Python converts
        text = f"a huge {type(value).__name__}"
    return short(text.encode("ascii", "backslashreplace").decode(), 2 * _MOST)
