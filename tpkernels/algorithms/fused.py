"""One Triton kernel that moves and multiplies; see kernels/ for the algorithms.

On CPU tensors the kernels run under Triton's interpreter, one process per rank, over the arena of
the host: slow, and the very code that GPUs run.

Sync: among kernels as in kernels/sync.py. On the host each call is an epoch of the channel, so a
peer in a call of another algorithm is found too; while a kernel runs, a thread watches the peers,
and ends its waits when one is lost.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from tpkernels._C import Phase
from tpkernels.algorithms.common import Reduction, after, as_rows, empty_share, share_rows
from tpkernels.algorithms.memory import empty
from tpkernels.errors import CollectiveMismatchError, CollectiveTimeoutError, TpkernelsError
from tpkernels.symm import device
from tpkernels.symm.device import DeviceWorkspace

if TYPE_CHECKING:
    from tpkernels.backends import Call

_LOOK_S = 0.02  # between two looks at the peers


class _Watch:
    """A thread that looks after the peers while a kernel waits for them."""

    def __init__(self, call: Call, space: DeviceWorkspace) -> None:
        self.error: TpkernelsError | None = None
        self._channel, self._space = call.workspace.channel, space
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._over.wait(_LOOK_S):
            try:
                self._channel.watch(Phase.RESULT, 0.0)
            except TpkernelsError as error:
                self.error = error
                self._space.abort(0 if error.peer is None else error.peer)
                return

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@contextlib.contextmanager
def _running(call: Call, words: int, buffer_bytes: int) -> Iterator[DeviceWorkspace]:
    """One call: a kernel is launched within, and has ended well when this returns."""
    space = call.workspace.device(words, buffer_bytes, call.plan.text)
    channel = call.workspace.channel
    channel.begin(call.plan.signature, call.plan.text)
    channel.publish(Phase.DATA)
    with _Watch(call, space) as watch:
        yield space
    if watch.error is not None:
        raise watch.error
    failure = space.failure()
    if failure is not None:
        _raise_failure(call, *failure)
    channel.publish(Phase.RESULT)
    for peer in after(call):  # who began: the kernels' words keep the ranks in step, not these
        channel.wait(peer, Phase.DATA)


def _raise_failure(call: Call, kind: int, peer: int, expected: int, seen: int) -> None:
    """Raises what the channel knows of the peers, else what the kernel's wait has seen."""
    call.workspace.channel.watch(Phase.RESULT, 0.0)
    error = CollectiveTimeoutError if kind == device.TIMEOUT else CollectiveMismatchError
    raise error(
        f"{call.plan.text}: rank {call.group.rank} waited in its kernel for rank {peer}: expected "
        f"word {expected:#018x}, seen {seen:#018x}, timeout {call.group.timeout:g} s. The group is "
        "broken: make a new one.",
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
    with _running(call, *kernel.requirements(sizes, rows)) as space:
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
    out = empty_share(call, reduction.out_dtype, x.device)
    needs = kernel.requirements(sizes, w.shape[1], problem.dtype, rows)
    with _running(call, *needs) as space:
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
    with _running(call, *needs) as space:
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
