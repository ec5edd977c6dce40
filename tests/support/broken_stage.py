"""Stages of `benchmarks.one_gpu` that fail on purpose, for tests. BROKEN names the faults of the
first cases, separated by commas; then follow the cases of the stage REAL, if it is set."""

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
    """A machine that imports nothing."""
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
    """An error after which the context is unusable."""

    def recover() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    machine.recover = recover
    recover()
