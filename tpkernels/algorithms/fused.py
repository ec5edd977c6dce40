"""``fused``: one Triton kernel moves the data and multiplies. The algorithms are in kernels/.

Tiles in time on rank 0 of 3. `*r` are the tiles of the rows of rank r, `->r` stores on rank r:

    all_gather_matmul        *0   wait for 1, *1   wait for 2, *2
    matmul_reduce_scatter    *1 ->1   *2 ->2   *0   wait for 1 and 2, reduce the local rows
    matmul_all_reduce        one-shot: store each tile on all ranks; every rank reduces it
                             two-shot: store each tile on its owner, which reduces it and stores
                             the sum on all ranks

On CPU tensors the kernels run under Triton's interpreter, one process per rank, in the shared
memory of the host. This is slow, but it runs the same code as GPUs.

Sync: kernels/sync.py describes the synchronization between kernels. A thread watches the peers and
aborts the waits of a kernel if a peer is lost. On CPU tensors each call is also an epoch of the
host channel. The channel detects a peer that runs a different algorithm. On GPUs a call only queues
its kernel: see cuda/queued.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import torch

from tpkernels import cuda
from tpkernels._C.host import Phase
from tpkernels.algorithms.chunks import GatherOutputs
from tpkernels.algorithms.rank_order import rank_ordered_gather, rank_ordered_reduce
from tpkernels.algorithms.reduction import Reduction
from tpkernels.cuda.queued import bind_launch, queue
from tpkernels.groups.call import Call
from tpkernels.planning.qualification import COPY_ENGINES
from tpkernels.symm.cuda import CudaWorkspace, Watcher
from tpkernels.symm.device import DeviceWorkspace, PreparedCall, kernel_error
from tpkernels.symm.gpu_memory import GpuSegment
from tpkernels.symm.streams import SideStreams

if TYPE_CHECKING:  # the module imports Triton
    from tpkernels.kernels.configs import MatmulConfig

# Smallest shard, in bytes, that copy engines copy instead of copy programs. Not measured.
COPY_ENGINE_BYTES = 4 << 20


def _run(
    call: Call,
    device: torch.device,
    key: Hashable,
    prepare: Callable[[], PreparedCall],
    *tensors: object,
) -> None:
    """Launch the kernel that ``prepare`` returns. Calls with equal keys share a prepared kernel.

    On CPU tensors the kernel has succeeded when this function returns.
    """
    if call.problem.device == "cuda":
        queue(call, device, key, prepare, *tensors)
        return
    prepared = prepare()
    workspace = call.workspace.device_workspace(
        prepared.signals, prepared.buffer_bytes, call.plan.description
    )
    run = prepared.bind(workspace, call.plan.signature)
    channel = call.workspace.channel
    channel.begin(call.plan.signature, call.plan.description)
    channel.publish(Phase.DATA)
    with Watcher(channel, [workspace]) as watcher:
        run(*tensors)
    if watcher.error is not None:
        raise watcher.error
    failure = workspace.failure()
    if failure is not None:
        channel.watch(Phase.RESULT, 0.0)  # raises a more specific error if a peer failed
        raise kernel_error(
            failure, where=call.plan.description, rank=call.group.rank, timeout=call.group.timeout
        )
    channel.publish(Phase.RESULT)
    # These waits end the epoch. Kernel signals synchronize the ranks.
    for peer in call.peers_in_ring_order:
        channel.wait(peer, Phase.DATA)


def _config(call: Call, x: torch.Tensor, w: torch.Tensor) -> MatmulConfig:
    """Return the block sizes.

    They follow from the rows of all ranks and the columns of w. Ranks that reduce have equally many
    columns, so they choose equal sizes.
    """
    from tpkernels.kernels.configs import config_for

    return config_for(x.device, x.dtype, call.problem.rows, w.shape[-1])


def _operand_key(x: torch.Tensor) -> Hashable:
    """Return the properties of an operand, besides shape and dtype, that a prepared launch uses:
    the strides, and whether TMA can read the operand.
    """
    return x.stride(), x.data_ptr() % 16 == 0


@rank_ordered_gather
def gather(call: Call, x: torch.Tensor, outputs: GatherOutputs) -> None:
    sizes, gathered = call.problem.shard_rows, outputs.gather_buffer(call, x).flatten(0, -2)
    rows, outs = x.contiguous().flatten(0, -2), [out.flatten(0, -2) for out in outputs.outs]
    weights = list(outputs.weights)
    biases = [None if bias is None else bias.contiguous() for bias in outputs.biases]
    if max(sizes) * rows.shape[1] * x.element_size() >= COPY_ENGINE_BYTES and _uses_copy_engines(
        call, x
    ):
        _gather_by_copy_engines(call, rows, weights, biases, outs, gathered)
        return

    def prepare() -> PreparedCall:
        from tpkernels.kernels import all_gather_matmul as kernel

        return kernel.prepare(
            _config(call, x, weights[0]), rows, weights, gathered, outs[0].dtype, sizes
        )

    key = tuple([_operand_key(w) for w in weights])
    _run(call, x.device, key, prepare, rows, weights, biases, outs, gathered)


def _uses_copy_engines(call: Call, x: torch.Tensor) -> bool:
    """Return True if all ranks can use copy engines and qualification has not disqualified them.

    Collective at the first call.
    """
    if call.problem.device != "cuda" or call.problem.world == 1:
        return False
    variants = call.workspace.cuda_workspaces[x.device].current.variants
    if variants and COPY_ENGINES not in variants:
        return False
    return call.group.unsupported_kernels(x.device, "CUDA", cuda.unsupported(x.device)) is None


def _gather_by_copy_engines(
    call: Call,
    rows: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    outs: list[torch.Tensor],
    gathered: torch.Tensor,
) -> None:
    """Gather chunks with copy engines while the first matmul runs, then run the other matmuls."""
    device, sizes, dtype = rows.device, call.problem.shard_rows, outs[0].dtype
    flags_by_kernels, plan_signature = cuda.flags_need_kernels(device), call.plan.signature
    # Ranks whose x is read in place publish signals with the signature of its memory. The first
    # matmul compares the signatures while it waits.
    segment = call.workspace.cuda_workspaces[device].segments.find(rows)
    signature = plan_signature if segment is None else segment.signature(plan_signature)
    peers = call.peers_in_ring_order

    def prepare() -> PreparedCall:
        from tpkernels.kernels import all_gather_matmul as kernel

        config = _config(call, rows, weights[0])
        first, chunk_rows, chunks = kernel.prepare_with_copy_engines(
            config, weights[0], gathered, dtype, sizes, flags_by_kernels
        )
        multiply_rest = kernel.bind_remaining_matmuls(config, gathered, weights[1:], dtype)
        flags = len(sizes) * chunks

        def bind(workspace: DeviceWorkspace, signature: int) -> Callable[..., None]:
            multiply_first = first.bind(workspace, signature)

            def run(
                cuda_workspace: CudaWorkspace,
                segment: GpuSegment | None,
                rows: torch.Tensor,
                weights: list[torch.Tensor],
                biases: list[torch.Tensor | None],
                outs: list[torch.Tensor],
                gathered: torch.Tensor,
            ) -> None:
                results = [gathered, *outs]
                with cuda.CopyCall(
                    cuda_workspace.current, plan_signature, results, segment, flags
                ) as copies:
                    copy_peer_rows(
                        copies,
                        cuda_workspace.side_streams,
                        peers,
                        rows,
                        gathered,
                        sizes,
                        chunk_rows,
                        chunks,
                    )
                    try:
                        multiply_first(gathered, weights[0], biases[0], outs[0])
                    finally:
                        cuda_workspace.side_streams.join()
                    multiply_rest(gathered, weights[1:], biases[1:], outs[1:])

            return run

        return first._replace(bind=bind)

    key = flags_by_kernels, signature, *[_operand_key(w) for w in weights]
    cuda_workspace, run = bind_launch(call, device, key, prepare, signature)
    with cuda_workspace:
        run(cuda_workspace, segment, rows, weights, biases, outs, gathered)


def copy_peer_rows(
    copies: cuda.CopyCall,
    side_streams: SideStreams,
    peers: Sequence[int],
    rows: torch.Tensor,
    gathered: torch.Tensor,
    sizes: tuple[int, ...],
    chunk_rows: int,
    chunks: int,
) -> None:
    """Copy the local rows and the peer rows to ``gathered``, within a call.

    A flag per chunk tells the matmul kernel that the chunk has arrived. The kernel is launched
    later. If all streams share one hardware queue, for example with CUDA_DEVICE_MAX_CONNECTIONS=1,
    the kernel starts after the last copy, without overlap.

    Args:
        peers: peers in the order of the copies.
        rows: [sizes[rank], K], the local rows.
        gathered: [sum(sizes), K].
        sizes: rows of each rank.
        chunk_rows: rows per chunk.
        chunks: maximum number of chunks of a rank.
    """
    row_bytes = rows.shape[1] * rows.element_size()
    gathered.narrow(0, sum(sizes[: copies.rank]), rows.shape[0]).copy_(rows)
    side_streams.fork()
    with side_streams.current():
        if copies.segment is None:
            copies.put(rows, 0)
        copies.publish(copies.last_signal)
    for owner in peers:
        begin = sum(sizes[:owner])
        for chunk, row in enumerate(range(0, sizes[owner], chunk_rows)):
            dst = gathered.narrow(0, begin + row, min(chunk_rows, sizes[owner] - row))
            with side_streams.next():
                if row == 0:  # later chunks are copied after the first
                    copies.await_signal(owner, copies.last_signal)
                with side_streams.copying():
                    copies.copy_from(owner, dst, row * row_bytes)
                copies.set_flag(owner * chunks + chunk)


@rank_ordered_reduce
def reduce(
    call: Call, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, reduction: Reduction
) -> None:
    problem, rows = call.problem, x.flatten(0, -2)

    def prepare() -> PreparedCall:
        config = _config(call, x, w)
        if problem.spec.scatters:
            from tpkernels.kernels import matmul_reduce_scatter as scatter

            return scatter.prepare(config, rows, w, problem.shard_rows, problem.dtype)
        from tpkernels.kernels import matmul_all_reduce as kernel

        return kernel.prepare(config, rows, w, out.dtype, problem.world, problem.dtype)

    epilogue = reduction.bias, reduction.residual
    _run(
        call,
        x.device,
        (_operand_key(rows), _operand_key(w)),
        prepare,
        rows,
        w,
        *epilogue,
        out.flatten(0, -2),
    )
