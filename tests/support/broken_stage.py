"""Stages of `benchmarks.one_gpu` that fail on purpose.

The environment variable BROKEN lists the faults of the first cases, separated by commas. If REAL
is set, the cases of that stage follow.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any


@contextlib.contextmanager
def opened(kind: str, seconds: float) -> Iterator[Any]:
    """Yield a machine that imports no package."""
    yield SimpleNamespace(kind=kind, recover=lambda: None)


def cases(machine: Any) -> Iterator[tuple[str, Any]]:
    for fault in filter(None, os.environ["BROKEN"].split(",")):
        yield fault, partial(globals()[fault], machine)
    if real := os.environ.get("REAL"):
        yield from importlib.import_module(f"benchmarks.one_gpu.{real}").cases(machine)


def right(machine: Any) -> dict[str, Any]:
    return {"value": 1}


def two_rows(machine: Any) -> Iterator[dict[str, Any]]:
    yield {"value": 1}
    yield {"value": 2}


def crash(machine: Any) -> Iterator[dict[str, Any]]:
    yield {"value": "before the crash"}
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(machine: Any) -> None:
    time.sleep(3600)


def wrong(machine: Any) -> dict[str, Any]:
    return {"bad": True, "error": "3 of 4 elements wrong"}


def out_of_memory(machine: Any) -> None:
    bytearray(1 << 60)


def killed_for_memory(machine: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def poisoned(machine: Any) -> None:
    """Raise an error that leaves the context unusable."""

    def recover() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    machine.recover = recover
    recover()
