"""Calls on CUDA tensors that only queue kernels and copies over symmetric memory.

Sync: among the kernels as in kernels/sync.py. A thread watches the peers and ends the kernels'
waits when one is lost. After a failure the results are NaN, and the group's next call raises.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from tpkernels.call import Call
from tpkernels.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    TpkernelsError,
)
from tpkernels.symm import device
from tpkernels.symm.cuda import CudaWorkspace
from tpkernels.symm.device import Launch


@contextlib.contextmanager
def queued(
    call: Call, on: torch.device, words: int, buffer_bytes: int, sizes: tuple[int, ...] = ()
) -> Iterator[CudaWorkspace]:
    """A call whose work is only queued, in a workspace (``current``) with that many words from each
    source and such buffers. ``sizes``: those whose `starts` the kernels read.

    Raises:
        TpkernelsError: an earlier call of the group has failed meanwhile.
        CaptureError: a graph is captured and the workspace lacks something.
    """
    memory = call.workspace.cuda(on, words, buffer_bytes, call.plan.text)
    if sizes:  # here, because in a capture this raises, which it must before anything is queued
        memory.current.starts(sizes)
    failure = memory.failure()
    if failure is None or failure[0] == device.ABORTED:
        memory.check()
    if failure is not None:
        raise kernel_error(call, "an earlier call of the group, found by ", *failure)
    with memory.in_order():
        yield memory


def queue(call: Call, on: torch.device, launch: Launch) -> None:
    """Queues a prepared call."""
    with queued(call, on, launch.words, launch.buffer_bytes, launch.sizes) as memory:
        launch.run(memory.current, call.plan.signature)


def kernel_error(
    call: Call, where: str, kind: int, peer: int, expected: int, seen: int
) -> TpkernelsError:
    """The exception for a kernel's failed wait."""
    error = {
        device.TIMEOUT: CollectiveTimeoutError,
        device.MISMATCH: CollectiveMismatchError,
        device.ABORTED: PeerLostError,
    }[kind]
    return error(
        f"{where}{call.plan.text}: rank {call.group.rank} waited in its kernel for rank {peer}: "
        f"expected word {expected:#018x}, seen {seen:#018x}, timeout {call.group.timeout:g} s. The "
        "results are NaN and the group is broken: make a new one.",
        peer=peer,
    )
