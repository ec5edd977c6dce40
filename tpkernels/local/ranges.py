"""Profiler ranges for the host's part of an op: products, copies and sums, waits.

    tpkernels::matmul    a local product
    tpkernels::copy      data moves to or from peers, or is summed; waits within it have their own
                         ranges
    tpkernels::transfer  peers' data moves during the work in this range: messages are under way,
                         waited for or not, or a product reads a peer's memory
    tpkernels::wait      for a peer, or for torch.distributed

They are opened only while a profiler runs: an unused range takes 0.4 us, and one of
``torch.profiler.record_function`` 25 us, when an op takes 13 to 31. AMD EPYC Zen 3, torch 2.13,
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
_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


def recorded(name: str) -> AbstractContextManager[Any]:
    """Open a range of that name around a block; no range unless a profiler is running."""
    return torch_private.RecordFunctionFast(name) if profiling() else _NOTHING


@contextlib.contextmanager
def recorded_waits(workspace: HostWorkspace | None) -> Iterator[None]:
    """Open ranges around all waits of the channel, wherever in the extension they happen."""
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
