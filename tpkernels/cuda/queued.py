"""Calls on CUDA tensors that only queue kernels and copies over symmetric memory.

Sync: the kernels synchronize as described in kernels/sync.py. A thread watches the peers and ends
the waits of the kernels if a peer is lost. After a failure the results are NaN, and the next call
of the group raises.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from tpkernels.groups.call import Call
from tpkernels.symm.cuda import CudaWorkspace
from tpkernels.symm.device import PreparedCall

_MAX_LAUNCHES = 64  # max cached launches per cached plan


def require_workspace(
    call: Call, device: torch.device, signals: int, buffer_bytes: int, sizes: tuple[int, ...] = ()
) -> CudaWorkspace:
    """Return the workspace for a call that only queues work. Enter it as a context around the call.

    Args:
        signals: signals per source rank that ``current`` must have.
        buffer_bytes: bytes per buffer that ``current`` must have.
        sizes: segment sizes whose `starts` table the kernels read.

    Raises:
        CaptureError: during graph capture, if the workspace would have to change.
        WorkspaceMemoryError: on all ranks, if any rank lacks memory for the workspace.
    """
    cuda_workspace = call.workspace.cuda_workspace(
        device, signals, buffer_bytes, call.plan.description
    )
    if sizes:  # during capture this may raise, so it precedes all queued work
        cuda_workspace.current.starts(sizes)
    return cuda_workspace


class _BoundLaunch(NamedTuple):
    """A launch that is bound to a workspace."""

    version: object  # version of the workspace launch arguments
    run: Callable[..., None]


def queue(
    call: Call,
    device: torch.device,
    key: Hashable,
    prepare: Callable[[], PreparedCall],
    *tensors: Any,
    prologue: Callable[[], object] = lambda: None,
) -> None:
    """Launch the call returned by ``prepare`` with these tensors. ``prologue`` queues work directly
    before the launch, under the same lock."""
    cuda_workspace, run = bind_launch(call, device, key, prepare)
    with cuda_workspace:
        prologue()
        run(*tensors)


def bind_launch(
    call: Call,
    device: torch.device,
    key: Hashable,
    prepare: Callable[[], PreparedCall],
    signature: int | None = None,
) -> tuple[CudaWorkspace, Callable[..., None]]:
    """Return (workspace, launch) for the call returned by ``prepare``. Enter the workspace as a
    context around the launch.

    The launch is cached under ``key`` until the workspace or its arguments change. Calls with equal
    keys must have tensors of equal shapes, strides, dtypes and alignments.

    Args:
        signature: signature of the awaited signals, if it differs from the signature of the plan.
            It must be part of the key.

    Raises:
        CaptureError, WorkspaceMemoryError: see `require_workspace`.
    """
    cuda_workspace = call.workspace.cuda_workspaces[device]
    cached: _BoundLaunch | None = call.cache.get(key)
    if cached is None or cached.version is not cuda_workspace.current.arguments_version:
        prepared = prepare()
        workspace = require_workspace(
            call, device, prepared.signals, prepared.buffer_bytes, prepared.sizes
        ).current
        if signature is None:
            signature = call.plan.signature
        cached = _BoundLaunch(workspace.arguments_version, prepared.bind(workspace, signature))
        if len(call.cache) >= _MAX_LAUNCHES:
            call.cache.clear()
        call.cache[key] = cached
    return cuda_workspace, cached.run
