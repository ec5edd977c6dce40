"""One Triton kernel that moves and multiplies; see kernels/ for the algorithms.

On CPU tensors the kernels run under Triton's interpreter, one process per rank, over the arena of
the host: slow, and the very code that GPUs run.

Sync: among kernels as in kernels/sync.py. A thread watches the peers and ends the kernels' waits
when one is lost. On CPU tensors each call is an epoch of the host's channel too, so a peer in a
call of another algorithm is found. On GPUs a call only queues its kernel: see queued.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from tpkernels import cuda
from tpkernels._C.host import Phase
from tpkernels.algorithms.reduction import Reduction
from tpkernels.algorithms.shards import as_rows, shard_rows, shard_shape
from tpkernels.call import Call
from tpkernels.cuda.queued import kernel_error, queued
from tpkernels.local.memory import empty
from tpkernels.symm.device import DeviceWorkspace
from tpkernels.symm.side_stream import SideStream
from tpkernels.symm.watch import Watch

if TYPE_CHECKING:  # it imports Triton
    from tpkernels.kernels.configs import MatmulConfig

# Bytes of a shard from which on copy engines bring it, rather than programs of the kernel. Not
# measured.
COPY_ENGINE_BYTES = 4 << 20


@contextlib.contextmanager
def _running(
    call: Call, x: torch.Tensor, words: int, buffer_bytes: int
) -> Iterator[DeviceWorkspace]:
    """One call: a kernel is launched within. On CPU tensors it has ended well when this returns."""
    if call.problem.device == "cuda":
        with queued(call, x.device, words, buffer_bytes) as memory:
            yield memory.current
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
        raise kernel_error(call, "", *failure)
    channel.publish(Phase.RESULT)
    # Who began: the kernels' words keep the ranks in step, not these.
    for peer in call.peers_in_ring_order:
        channel.wait(peer, Phase.DATA)


def _config(call: Call, x: torch.Tensor) -> MatmulConfig:
    """How the kernels are cut, on all ranks alike: by the rows of all."""
    from tpkernels.kernels.configs import choose

    return choose(x.device, x.dtype, call.problem.rows, call.plan.config)


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
    sizes = tuple(shard_rows(problem, rank) for rank in range(problem.world))
    whole = empty(problem.shape, x.dtype, x.device) if gathered is None else gathered
    rows = as_rows(x.contiguous())
    if max(sizes) * rows.shape[1] * x.element_size() >= COPY_ENGINE_BYTES and _copies(call, x):
        _gather_by_copies(call, rows, weights, biases, outs, as_rows(whole), sizes)
        return
    config = _config(call, x)
    with _running(call, x, *kernel.requirements(config, sizes, rows)) as space:
        kernel.all_gather_matmul(
            space,
            call.plan.signature,
            config,
            rows,
            weights,
            [None if bias is None else bias.contiguous() for bias in biases],
            [as_rows(out) for out in outs],
            as_rows(whole),
            sizes,
        )


def _copies(call: Call, x: torch.Tensor) -> bool:
    """Whether all ranks have copy engines at their service. Collective, at the first call."""
    if call.problem.device != "cuda" or call.problem.world == 1:
        return False
    return call.group.unsupported_kernels(x.device, "CUDA", cuda.unsupported(x.device)) is None


def _gather_by_copies(
    call: Call,
    rows: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    outs: list[torch.Tensor],
    whole: torch.Tensor,
    sizes: tuple[int, ...],
) -> None:
    from tpkernels.kernels import all_gather_matmul as kernel
    from tpkernels.kernels.matmul import matmul

    biases = [None if bias is None else bias.contiguous() for bias in biases]
    outs = [as_rows(out) for out in outs]
    config = _config(call, rows)
    needs = kernel.copied_requirements(config, sizes, rows)
    with queued(call, rows.device, *needs) as memory:
        space, signature = memory.current, call.plan.signature
        with cuda.CopyCall(space, signature, [whole, *outs]) as copies:
            _, step = kernel.chunk_tiles(config, rows)
            bring_rows(copies, memory.side, call.peers_in_ring_order, rows, whole, sizes, step)
            try:
                kernel.multiply_arriving(
                    space, signature, config, weights[0], biases[0], outs[0], whole, sizes
                )
            finally:
                memory.side.join()
            for w, bias, out in zip(weights[1:], biases[1:], outs[1:], strict=True):
                matmul(whole, w, bias, out=out, config=config)


def bring_rows(
    copies: cuda.CopyCall,
    side: SideStream,
    peers: Sequence[int],
    rows: torch.Tensor,
    whole: torch.Tensor,
    sizes: tuple[int, ...],
    step: int,
) -> None:
    """Within a call: rows [sizes[rank], K] and, in the order of ``peers``, those of the others come
    to ``whole`` [sum(sizes), K]; a word tells the kernel of each chunk of ``step`` rows."""
    from tpkernels.kernels import all_gather_matmul as kernel

    row_bytes = rows.shape[1] * rows.element_size()
    whole.narrow(0, sum(sizes[: copies.rank]), rows.shape[0]).copy_(rows)
    side.fork()
    with side.current():
        copies.put(rows, 0)
        copies.publish(copies.last_word)
        for owner in peers:
            begin = sum(sizes[:owner])
            for chunk, top in enumerate(range(0, sizes[owner], step)):
                to = whole.narrow(0, begin + top, min(step, sizes[owner] - top))
                copies.fetch(owner, copies.last_word, to, top * row_bytes)
                copies.pass_on(owner, kernel.FIRST_CHUNK + chunk)


def matmul_reduce_scatter(
    call: Call, x: torch.Tensor, w: torch.Tensor, reduction: Reduction
) -> torch.Tensor:
    from tpkernels.kernels import matmul_reduce_scatter as kernel

    problem, rows = call.problem, as_rows(x)
    sizes = tuple(shard_rows(problem, rank) for rank in range(problem.world))
    out = empty(shard_shape(call.problem, call.group.rank), reduction.out_dtype, x.device)
    config = _config(call, x)
    needs = kernel.requirements(config, sizes, w.shape[1], problem.dtype)
    with _running(call, x, *needs) as space:
        kernel.matmul_reduce_scatter(
            space,
            call.plan.signature,
            config,
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
    config = _config(call, x)
    needs = kernel.requirements(
        config, rows.shape[0], w.shape[1], problem.world, problem.dtype, reduction.out_dtype
    )
    with _running(call, x, *needs) as space:
        kernel.matmul_all_reduce(
            space,
            call.plan.signature,
            config,
            rows,
            w,
            reduction.bias,
            reduction.residual,
            as_rows(out),
            problem.dtype,
        )
    return out
