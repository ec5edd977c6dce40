"""Profiler ranges for the host work of an op: matmuls, copies and sums, waits.

    tpkernels::matmul    local matmul
    tpkernels::copy      data is copied to or from peers, or reduced; waits within it have separate
                         ranges
    tpkernels::transfer  peer data moves during this range: messages are in flight, whether or not
                         the rank waits for them, or a matmul reads peer memory
    tpkernels::wait      wait for a peer, or for torch.distributed

Ranges are opened only while a profiler runs. An unused range costs 0.4 us, and a range of
``torch.profiler.record_function`` 25 us; an op lasts 13 to 31 us. AMD EPYC Zen 3, torch 2.13,
2026-11-21.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from tpkernels import torch_private
from tpkernels.symm.host import HostWorkspace

MATMUL, COPY = "tpkernels::matmul", "tpkernels::copy"
TRANSFER, WAIT = "tpkernels::transfer", "tpkernels::wait"

profiling = torch_private.profiling
_NO_RANGE: AbstractContextManager[None] = contextlib.nullcontext()


def record_range(name: str) -> AbstractContextManager[Any]:
    """Open a profiler range around a block if a profiler is running."""
    return torch_private.RecordFunctionFast(name) if profiling() else _NO_RANGE


@contextlib.contextmanager
def record_waits(workspace: HostWorkspace | None) -> Iterator[None]:
    """Open ranges around all waits of the channel, in Python and in C++."""
    if workspace is None:
        yield
        return
    channel, waits = workspace.channel, []

    def on_wait(begin: bool) -> None:
        if begin:
            waits.append(torch_private.RecordFunctionFast(WAIT))
            waits[-1].__enter__()
        else:
            waits.pop().__exit__(None, None, None)

    channel.set_on_wait(on_wait)
    try:
        yield
    finally:
        channel.set_on_wait(None)
