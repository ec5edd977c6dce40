"""Calls on CUDA tensors that only queue kernels and copies over symmetric memory.

Sync: among the kernels as in kernels/sync.py. A thread watches the peers and ends the kernels'
waits when one is lost. After a failure the results are NaN, and the group's next call raises.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from tpkernels.call import Call
from tpkernels.symm.cuda import CudaWorkspace
from tpkernels.symm.device import Launch


def queued(
    call: Call, on: torch.device, words: int, buffer_bytes: int, sizes: tuple[int, ...] = ()
) -> AbstractContextManager[CudaWorkspace]:
    """A call whose work is only queued, in a workspace (``current``) with that many words from each
    source and such buffers. ``sizes``: those whose `starts` the kernels read.

    Raises:
        CaptureError: a graph is captured and the workspace lacks something.
    """
    memory = call.workspace.cuda(on, words, buffer_bytes, call.plan.text)
    if sizes:  # here, because in a capture this raises, which it must before anything is queued
        memory.current.starts(sizes)
    return memory.in_order()


def queue(call: Call, on: torch.device, launch: Launch) -> None:
    """Queues a prepared call."""
    with queued(call, on, launch.words, launch.buffer_bytes, launch.sizes) as memory:
        launch.run(memory.current, call.plan.signature)
