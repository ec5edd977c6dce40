"""Which Python functions run within a block."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def functions_called(package: str) -> Iterator[list[str]]:
    """The functions of a module, or of a package and its modules, that are called within."""
    called: list[str] = []

    def trace(frame: Any, event: str, argument: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and f"{module}.".startswith(f"{package}."):
            called.append(f"{module}.{frame.f_code.co_name}")

    sys.setprofile(trace)
    try:
        yield called
    finally:
        sys.setprofile(None)
