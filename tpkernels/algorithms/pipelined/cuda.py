"""``pipelined`` on GPUs: one library matmul per peer, overlapped with peer copies.

Algorithm: matmuls alternate between the current stream and a side stream, so that the tail of one
overlaps with the start of the next. A `CustomMatmul` stays on the current stream, because two
concurrent calls might share a workspace. Peer copies alternate between two more streams.
all_gather_matmul      multiplies the local rows first, then the rows of rank+1, rank+2, ... when
                       they have been copied.
matmul_reduce_scatter  computes the partial sums for rank+1, rank+2, ..., local rows last, and
                       publishes each to its owner. Meanwhile it copies the partial sums of rank-1,
                       rank-2, ...: they are complete in that order.
matmul_all_reduce      a matmul_reduce_scatter over evenly split rows; then the sums are copied.

Launch order: matmuls and copies are queued alternately. With CUDA_DEVICE_MAX_CONNECTIONS=1, set by
Megatron, all streams share one hardware queue, and a copy that waits for a signal blocks all work
queued after it. No launch order deadlocks, since a rank publishes before it waits. But if all
copies were queued first, no matmul would overlap with them.

Sync: a call of several launches; csrc/cuda/sync.cuh has the proof. symm/streams.py forks and joins
the side streams. The memory of a rank holds its partial sums of all rows, at equal offsets on all
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tpkernels.algorithms.chunks import GatherOutputs, as_rows
from tpkernels.algorithms.rank_order import rank_ordered_gather, rank_ordered_reduce
from tpkernels.algorithms.reduction import Reduction
from tpkernels.common.integers import ceil_div, round_up
from tpkernels.common.shards import shard_sizes
from tpkernels.cuda import CopyCall, sum_partials
from tpkernels.cuda.queued import require_workspace
from tpkernels.groups.call import Call
from tpkernels.local.matmul import local_matmul
from tpkernels.local.memory import empty
from tpkernels.local.weight import Weight
from tpkernels.symm.streams import SideStreams

# Indices of the signals of a call, and their number. The first and the last signal (0 and 3) belong
# to the call protocol.
DATA, _RESULT, _NUM_SIGNALS = 1, 2, 4
_ALIGNMENT = 256  # bytes; alignment of the results


@rank_ordered_gather
def gather(call: Call, x: torch.Tensor, outputs: GatherOutputs) -> None:
    sizes, gathered = list(call.problem.shard_rows), outputs.gather_buffer(call, x)
    rows, row_bytes = as_rows(x.contiguous()), x.shape[-1] * x.element_size()
    with (
        require_workspace(
            call, x.device, _NUM_SIGNALS, ceil_div(max(sizes) * row_bytes, 2)
        ) as cuda_workspace,
        CopyCall(
            cuda_workspace.current,
            call.plan.signature,
            outputs.results,
            cuda_workspace.segments.find(x),
        ) as copies,
    ):
        if outputs.gathered is not None:
            begin = sum(sizes[: copies.rank])
            as_rows(gathered).narrow(0, begin, rows.shape[0]).copy_(rows)
        peers, matmuls = call.peers_in_ring_order, outputs.matmul_args
        gather_and_multiply(
            copies, cuda_workspace.side_streams, peers, sizes, rows, as_rows(gathered), matmuls
        )


def gather_and_multiply(
    copies: CopyCall,
    side_streams: SideStreams,
    peers: Sequence[int],
    sizes: list[int],
    rows: torch.Tensor,
    gathered: torch.Tensor,
    matmuls: list[tuple[Weight, torch.Tensor | None, torch.Tensor]],
) -> None:
    """Gather the peer rows and multiply all rows, within a call.

    Args:
        peers: peers in the order of the copies.
        rows: [sizes[rank], K], the local rows.
        gathered: [sum(sizes), K], filled with the peer rows.
        matmuls: (w, bias, out) of each matmul.
    """
    offsets = [sum(sizes[:rank]) for rank in range(len(sizes))]
    serial = not all(isinstance(w, torch.Tensor) for w, _, _ in matmuls)
    side_streams.fork()
    with side_streams.current():
        if copies.segment is None:
            copies.put(rows, 0)
        copies.publish(DATA)
    arrived = side_streams.copied
    try:
        for owner, next_owner in zip((copies.rank, *peers), (*peers, None), strict=True):
            owner_rows = slice(offsets[owner], offsets[owner] + sizes[owner])
            with side_streams.chunk(serial=serial):
                side_streams.wait(arrived)
                for w, bias, out in matmuls:
                    local_matmul(
                        rows if owner == copies.rank else gathered[owner_rows],
                        w,
                        out[owner_rows],
                        bias,
                    )
            if next_owner is not None:
                dst = gathered.narrow(0, offsets[next_owner], sizes[next_owner])
                fetch(copies, side_streams, next_owner, dst, 0)
                arrived = side_streams.copied
    finally:
        side_streams.join()


def fetch(
    copies: CopyCall, side_streams: SideStreams, source: int, dst: torch.Tensor, offset: int
) -> None:
    """Queue a copy from ``source`` that waits for its data signal.

    The wait overlaps with the previous copy.
    """
    with side_streams.next():
        copies.await_signal(source, DATA)
        with side_streams.copying():
            copies.copy_from(source, dst, offset)


@rank_ordered_reduce
def reduce(call: Call, x: torch.Tensor, w: Weight, out: torch.Tensor, reduction: Reduction) -> None:
    problem, rank, columns, peers = (
        call.problem,
        call.group.rank,
        w.shape[1],
        call.peers_in_ring_order,
    )
    rows, result, keeps_sum = as_rows(x), as_rows(out), problem.spec.keeps_sum
    sizes = shard_sizes(rows.shape[0], problem.world) if keeps_sum else list(problem.shard_rows)
    offsets = [sum(sizes[:r]) for r in range(problem.world)]
    result_offset = nbytes = rows.shape[0] * columns * problem.dtype.itemsize
    if keeps_sum:
        result_offset = round_up(nbytes, _ALIGNMENT)
        nbytes = result_offset + max(sizes) * columns * out.dtype.itemsize
    with (
        require_workspace(call, x.device, _NUM_SIGNALS, ceil_div(nbytes, 2)) as cuda_workspace,
        CopyCall(cuda_workspace.current, call.plan.signature, [out]) as copies,
    ):
        partials = multiply_and_scatter(
            copies, cuda_workspace.side_streams, peers, sizes, rows, w, problem.dtype
        )
        residual = None if reduction.residual is None else as_rows(reduction.residual)
        local_result = result
        if keeps_sum:
            local_result = result.narrow(0, offsets[rank], sizes[rank])
            if residual is not None:
                residual = residual.narrow(0, offsets[rank], sizes[rank])
        sum_partials(local_result, partials, reduction.bias, residual)
        if keeps_sum:
            copies.put(local_result, result_offset)
            copies.publish(_RESULT)
            for peer in peers:
                copies.fetch(
                    peer, _RESULT, result.narrow(0, offsets[peer], sizes[peer]), result_offset
                )


def multiply_and_scatter(
    copies: CopyCall,
    side_streams: SideStreams,
    peers: Sequence[int],
    sizes: list[int],
    rows: torch.Tensor,
    w: Weight,
    wire: torch.dtype,
) -> list[torch.Tensor]:
    """Multiply ``rows`` [sum(sizes), K] by w [K, N], within a call.

    Returns:
        The partial sums [sizes[rank], N] of all ranks for the local shard, in rank order.
    """
    rank, columns = copies.rank, w.shape[1]
    offsets = [sum(sizes[:rank]) for rank in range(len(sizes))]
    row_bytes = columns * wire.itemsize
    partials = [empty((sizes[rank], columns), wire, rows.device) for _ in sizes]
    side_streams.fork()
    try:
        # A copy is queued one matmul late: its source computes the awaited partial during the
        # previous iteration.
        for owner, source in zip((*peers, rank), (None, *reversed(peers)), strict=True):
            chunk = rows[offsets[owner] : offsets[owner] + sizes[owner]]
            with side_streams.chunk(serial=not isinstance(w, torch.Tensor)):
                if owner == rank:
                    local_matmul(chunk, w, partials[rank])
                else:
                    shape = (sizes[owner], columns)
                    local_matmul(chunk, w, copies.view(wire, shape, offsets[owner] * row_bytes))
                    copies.publish(DATA, owner)
            if source is not None:
                fetch(copies, side_streams, source, partials[source], offsets[rank] * row_bytes)
    finally:
        side_streams.join()
    return partials
