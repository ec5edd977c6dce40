"""One Triton kernel that moves and multiplies; see kernels/ for the algorithms.

On CPU tensors the kernels run under Triton's interpreter, one process per rank, over the arena of
the host: slow, and the very code that GPUs run.

Sync: among kernels as in kernels/sync.py. A thread watches the peers and ends the kernels' waits
when one is lost. On CPU tensors each call is an epoch of the host's channel too, so a peer in a
call of another algorithm is found. On GPUs a call only queues its kernel; a failure shows in its
results, which are NaN, and is raised by the group's next call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from tpkernels._C import Phase
from tpkernels.algorithms.common import Reduction, after, as_rows, share_rows, share_shape
from tpkernels.algorithms.memory import empty
from tpkernels.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    TpkernelsError,
)
from tpkernels.symm import device
from tpkernels.symm.device import DeviceWorkspace
from tpkernels.symm.watch import Watch

if TYPE_CHECKING:
    from tpkernels.backends import Call


@contextlib.contextmanager
def _running(
    call: Call, x: torch.Tensor, words: int, buffer_bytes: int
) -> Iterator[DeviceWorkspace]:
    """One call: a kernel is launched within. On CPU tensors it has ended well when this returns."""
    if call.problem.device == "cuda":
        with _queued(call, x.device, words, buffer_bytes) as space:
            yield space
        return
    space = call.workspace.device(words, buffer_bytes, call.plan.text)
    channel = call.workspace.channel
    channel.begin(call.plan.signature, call.plan.text)
    channel.publish(Phase.DATA)
    with Watch(channel, [space]) as watch:
        yield space
    if watch.error is not None:
        raise watch.error
    failure = space.failure()
    if failure is not None:
        channel.watch(Phase.RESULT, 0.0)  # it knows more of the peers
        raise _error(call, "", *failure)
    channel.publish(Phase.RESULT)
    for peer in after(call):  # who began: the kernels' words keep the ranks in step, not these
        channel.wait(peer, Phase.DATA)


@contextlib.contextmanager
def _queued(
    call: Call, on: torch.device, words: int, buffer_bytes: int
) -> Iterator[DeviceWorkspace]:
    """A call whose kernel is left to run; what became of the ones before is found here."""
    memory = call.workspace.cuda(on, words, buffer_bytes, call.plan.text)
    failure = memory.failure()
    if failure is None or failure[0] == device.ABORTED:
        memory.check()
    if failure is not None:
        raise _error(call, "an earlier call of the group, found by ", *failure)
    with memory.in_order():
        yield memory.current


def _error(
    call: Call, where: str, kind: int, peer: int, expected: int, seen: int
) -> TpkernelsError:
    """What a kernel's wait has seen, as an exception."""
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


def all_gather_matmul(
    call: Call,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    outs: list[torch.Tensor],
    gathered: torch.Tensor | None,
) -> None:
    from tpkernels.kernels import all_gather_matmul as kernel

    problem = call.problem
    sizes = tuple(share_rows(problem, rank) for rank in range(problem.world))
    whole = empty(problem.shape, x.dtype, x.device) if gathered is None else gathered
    rows = as_rows(x.contiguous())
    with _running(call, x, *kernel.requirements(sizes, rows)) as space:
        kernel.all_gather_matmul(
            space,
            call.plan.signature,
            rows,
            weights,
            [None if bias is None else bias.contiguous() for bias in biases],
            [as_rows(out) for out in outs],
            as_rows(whole),
            sizes,
        )


def matmul_reduce_scatter(
    call: Call, x: torch.Tensor, w: torch.Tensor, reduction: Reduction
) -> torch.Tensor:
    from tpkernels.kernels import matmul_reduce_scatter as kernel

    problem, rows = call.problem, as_rows(x)
    sizes = tuple(share_rows(problem, rank) for rank in range(problem.world))
    out = empty(share_shape(call.problem, call.group.rank), reduction.out_dtype, x.device)
    needs = kernel.requirements(sizes, w.shape[1], problem.dtype, rows)
    with _running(call, x, *needs) as space:
        kernel.matmul_reduce_scatter(
            space,
            call.plan.signature,
            rows,
            w,
            reduction.bias,
            reduction.residual,
            as_rows(out),
            sizes,
            problem.dtype,
        )
    return out


def matmul_all_reduce(
    call: Call, x: torch.Tensor, w: torch.Tensor, reduction: Reduction
) -> torch.Tensor:
    from tpkernels.kernels import matmul_all_reduce as kernel

    problem, rows = call.problem, as_rows(x)
    out = empty(problem.shape, reduction.out_dtype, x.device)
    needs = kernel.requirements(
        rows.shape[0], w.shape[1], problem.world, problem.dtype, reduction.out_dtype, rows
    )
    with _running(call, x, *needs) as space:
        kernel.matmul_all_reduce(
            space,
            call.plan.signature,
            rows,
            w,
            reduction.bias,
            reduction.residual,
            as_rows(out),
            problem.dtype,
        )
    return out
