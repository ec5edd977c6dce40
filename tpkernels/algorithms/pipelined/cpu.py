"""``pipelined`` on CPUs: one matmul per peer, overlapped with the work of the peers.

The matmul moves the data: it reads peer rows from shared memory, or writes partial sums to it.

all_gather_matmul      Each rank publishes its rows and multiplies them. Then it multiplies the
                       peer rows in place, in order of arrival, into the rows of the output.
matmul_reduce_scatter  Each rank multiplies the rows of rank+1, rank+2, ... into shared memory,
                       local rows last, and publishes each result. Then it sums its shard.
matmul_all_reduce      A matmul_reduce_scatter; then each rank publishes its sum and copies the
                       sums of its peers.

Timeline of one epoch on 3 ranks; `*r` is a matmul of the rows of rank r, `!` publishes:

    all_gather_matmul            matmul_reduce_scatter
    rank 0   !*0 *1 *2           *1! *2! *0  wait, sum
    rank 1   !*1 *2 *0           *2! *0! *1  wait, sum
    rank 2   !*2 *0 *1           *0! *1! *2  wait, sum

Sync: one epoch of the channel transfers one chunk per rank. In every epoch each rank waits for a
signal from every peer, even if a shard is empty, so the invariants of csrc/host/channel.h hold. A
chunk has as many rows as fit into the workspace (planning/algorithms.py).
"""

from __future__ import annotations

import torch

from tpkernels._C.host import Phase
from tpkernels.algorithms.chunks import ChunkedMatmuls, GatherOutputs, matmul_partials
from tpkernels.algorithms.reduction import Reduction, reduce_into
from tpkernels.groups.call import Call
from tpkernels.local.ranges import COPY, TRANSFER, record_range
from tpkernels.local.weight import Weight


def gather(call: Call, x: torch.Tensor, outputs: GatherOutputs) -> None:
    workspace, rank, peers = call.group.workspace, call.group.rank, call.peers_in_ring_order
    assert workspace is not None  # ensured by `choose`
    x = x.contiguous()
    segment, offset = workspace.segments.find(x)
    flat, width = x.flatten(0, -2), x.shape[-1]
    matmuls = ChunkedMatmuls(call, x, outputs, workspace.usable_bytes)
    rows, chunk_rows, channel = (
        matmuls.chunk_plan.rows,
        matmuls.chunk_plan.chunk_rows,
        workspace.channel,
    )
    for begin in range(0, max(1, *rows), chunk_rows):
        local_rows = flat[begin : begin + chunk_rows]
        channel.begin(call.plan.signature, call.plan.description)
        if segment:
            channel.set_location(segment, offset + begin * width * x.element_size())
        else:
            with record_range(COPY):
                workspace.view(rank, x.dtype, tuple(local_rows.shape)).copy_(local_rows)
        channel.publish(Phase.DATA)
        matmuls.consume(rank, begin, local_rows)
        remaining = list(peers)
        while remaining:
            peer = channel.wait_any(remaining, Phase.DATA)
            remaining.remove(peer)
            count = max(0, min(chunk_rows, rows[peer] - begin))
            with record_range(TRANSFER):
                matmuls.consume(peer, begin, workspace.peer_data(peer, x.dtype, (count, width)))
            if channel.in_segment(peer):
                channel.end_read(peer)
        if segment:  # the user may overwrite x after the call
            for peer in peers:
                channel.wait(peer, Phase.READ, rank)
    matmuls.finish()


def reduce(call: Call, x: torch.Tensor, w: Weight, out: torch.Tensor, reduction: Reduction) -> None:
    """Fill ``out`` with the local shard of the sum, or with the full sum.

    A data buffer has one slot per rank for the local partial sums, then one slot for the local
    sum.
    """
    workspace, problem = call.group.workspace, call.problem
    assert workspace is not None  # ensured by `choose`
    rank, peers, wire = call.group.rank, call.peers_in_ring_order, problem.dtype
    partials = matmul_partials(call, x, w, workspace.usable_bytes)
    chunk_plan, channel, result = partials.chunk_plan, workspace.channel, out.view(-1)
    slot, sum_offset = chunk_plan.slot_bytes, problem.world * chunk_plan.slot_bytes
    for index in range(max(1, chunk_plan.num_chunks)):
        channel.begin(call.plan.signature, call.plan.description)
        for owner in (*peers, rank):
            begin, count = chunk_plan.chunk_range(owner, index)
            partials.fill(owner, begin, workspace.view(rank, wire, (count,), owner * slot))
            channel.publish(Phase.DATA, owner)
        for peer in peers:
            channel.wait(peer, Phase.DATA, rank)
        begin, count = chunk_plan.chunk_range(rank, index)
        terms = [workspace.view(r, wire, (count,), rank * slot) for r in range(problem.world)]
        if problem.spec.scatters:
            reduce_into(result[begin : begin + count], terms, reduction, begin)
            continue
        total = workspace.view(rank, out.dtype, (count,), sum_offset)
        reduce_into(total, terms, reduction, chunk_plan.offsets[rank] + begin)
        channel.publish(Phase.RESULT)
        for owner in (rank, *peers):
            channel.wait(owner, Phase.RESULT)
            begin, count = chunk_plan.chunk_range(owner, index)
            begin += chunk_plan.offsets[owner]
            with record_range(COPY):
                total = workspace.view(owner, out.dtype, (count,), sum_offset)
                result[begin : begin + count].copy_(total)
