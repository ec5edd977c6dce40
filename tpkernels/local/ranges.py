"""Profiler ranges of what an op does on the host: products, copies and sums, waits.

    tpkernels::matmul    a local product
    tpkernels::copy      data moves to or from peers, or is summed; waits within it are ranges of
                         their own
    tpkernels::transfer  data of peers moves while what the range holds is done: messages that are
                         under way, waited for or not, or a product that reads a peer's memory
    tpkernels::wait      for a peer, or for torch.distributed

They are opened where a profiler runs and nowhere else: a range that nobody sees takes 0.4 us, and
one of ``torch.profiler.record_function`` 25 us, where an op takes 13 to 31. AMD EPYC Zen 3, torch
2.13, 2026-11-21.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import profiler

from tpkernels.symm.host import HostWorkspace

MATMUL, COPY = "tpkernels::matmul", "tpkernels::copy"
TRANSFER, WAIT = "tpkernels::transfer", "tpkernels::wait"

_Range: Any = torch._C._profiler._RecordFunctionFast
_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


def profiling() -> bool:
    """Whether one of torch's profilers runs in this process."""
    return profiler._is_profiler_enabled


def recorded(name: str) -> AbstractContextManager[Any]:
    """A range of that name, for as long as the block takes."""
    return _Range(name) if profiler._is_profiler_enabled else _NOTHING


@contextlib.contextmanager
def recorded_waits(workspace: HostWorkspace | None) -> Iterator[None]:
    """Ranges of the channel's waits, wherever in the extension they are."""
    if workspace is None:
        yield
        return
    channel, waits = workspace.channel, []

    def on_wait(begin: bool) -> None:
        if begin:
            waits.append(_Range(WAIT))
            waits[-1].__enter__()
        else:
            waits.pop().__exit__(None, None, None)

    channel.set_on_wait(on_wait)
    try:
        yield
    finally:
        channel.set_on_wait(None)
