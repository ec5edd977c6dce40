"""Calls on CUDA tensors that only queue kernels and copies over symmetric memory.

Sync: among the kernels as in kernels/sync.py. A thread watches the peers and ends the kernels'
waits when one is lost. After a failure the results are NaN, and the group's next call raises.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from tpkernels.groups.call import Call
from tpkernels.symm.cuda import CudaWorkspace
from tpkernels.symm.device import Prepared

_MOST_BOUND = 64  # launches that are kept with a planned call


def queued(
    call: Call, on: torch.device, words: int, buffer_bytes: int, sizes: tuple[int, ...] = ()
) -> CudaWorkspace:
    """Return the workspace for a call whose work is only queued, to be entered around it. Its
    ``current`` has so many words from each source and such buffers. ``sizes``: those whose `starts`
    the kernels read.

    Raises:
        CaptureError: a graph is captured and the workspace lacks something.
        WorkspaceMemoryError: on all ranks, if one has no memory for the workspace.
    """
    memory = call.workspace.cuda(on, words, buffer_bytes, call.plan.text)
    if sizes:  # here, because in a capture this raises, which it must before anything is queued
        memory.current.starts(sizes)
    return memory


class _Bound(NamedTuple):
    """A launch in a workspace."""

    state: object  # of the workspace's launch arguments
    run: Callable[..., None]


def queue(
    call: Call,
    on: torch.device,
    key: Hashable,
    prepare: Callable[[], Prepared],
    *tensors: Any,
    first: Callable[[], object] = lambda: None,
) -> None:
    """Launch what ``prepare`` returns, `bound`, for these tensors. ``first`` queues what must come
    right before it, in the same turn."""
    memory, run = bound(call, on, key, prepare)
    with memory:
        first()
        run(*tensors)


def bound(
    call: Call,
    on: torch.device,
    key: Hashable,
    prepare: Callable[[], Prepared],
    signature: int | None = None,
) -> tuple[CudaWorkspace, Callable[..., None]]:
    """Return the workspace, to be entered around a call whose work is only queued, and the launch
    of what ``prepare`` returns, bound to that workspace. It is kept for the calls with that key,
    which have tensors alike, until the workspace or its arguments change.

    Args:
        signature: of the words that the launch awaits, if it is not the plan's; part of the key.

    Raises what `queued` does.
    """
    memory = call.workspace.on_gpus[on]
    known: _Bound | None = call.kept.get(key)
    if known is None or known.state is not memory.current.state_of_arguments:
        needs = prepare()
        space = queued(call, on, needs.words, needs.buffer_bytes, needs.sizes).current
        if signature is None:
            signature = call.plan.signature
        known = _Bound(space.state_of_arguments, needs.bind(space, signature))
        if len(call.kept) >= _MOST_BOUND:
            call.kept.clear()
        call.kept[key] = known
    return memory, known.run
