"""One matmul per peer, overlapped with the work of the peers. The matmul itself moves the data.

all_gather_matmul      each rank publishes its rows and multiplies them. Then it multiplies the
                       peers' rows in place, in order of arrival, into the output's rows.
matmul_reduce_scatter  each rank multiplies the rows of rank+1, rank+2, ... straight into shared
                       memory and publishes each part when it is done, its own rows last. Then it
                       sums its part.
matmul_all_reduce      the same; then each rank publishes its sum, and the others copy it.

One step of 3 ranks in time; `*r` is a matmul of rank r's rows, `!` publishes:

    all_gather_matmul            matmul_reduce_scatter
    rank 0   !*0 *1 *2           *1! *2! *0  wait, sum
    rank 1   !*1 *2 *0           *2! *0! *1  wait, sum
    rank 2   !*2 *0 *1           *0! *1! *2  wait, sum

Sync: every step of rows is one call of the channel, so the channel's proof holds
(csrc/host/channel.h). In every step each rank waits for a word of every peer, even for parts
without rows. A step takes as many rows as the workspace holds (planning/algorithms.py).
"""

from __future__ import annotations

import torch

from tpkernels._C.host import Phase
from tpkernels.algorithms.parts import Products, SplitProducts, partials_of_product
from tpkernels.algorithms.reduction import Reduction, reduce_into
from tpkernels.groups.call import Call
from tpkernels.local.product import Weight
from tpkernels.local.ranges import COPY, TRANSFER, recorded


def gather(call: Call, x: torch.Tensor, products: Products) -> None:
    workspace, rank, peers = call.group.workspace, call.group.rank, call.peers_in_ring_order
    assert workspace is not None  # else `choose` takes another algorithm
    x = x.contiguous()
    segment, offset = workspace.segments.find(x)
    flat, width = x.flatten(0, -2), x.shape[-1]
    made = SplitProducts(call, x, products, workspace.usable_bytes)
    rows, step, channel = made.split.rows, made.split.step, workspace.channel
    for begin in range(0, max(1, *rows), step):
        mine = flat[begin : begin + step]
        channel.begin(call.plan.signature, call.plan.text)
        if segment:
            channel.locate(segment, offset + begin * width * x.element_size())
        else:
            with recorded(COPY):
                workspace.view(rank, x.dtype, tuple(mine.shape)).copy_(mine)
        channel.publish(Phase.DATA)
        made.use(rank, begin, mine)
        waiting = list(peers)
        while waiting:
            peer = channel.wait_any(waiting, Phase.DATA)
            waiting.remove(peer)
            count = max(0, min(step, rows[peer] - begin))
            with recorded(TRANSFER):
                made.use(peer, begin, workspace.peer_data(peer, x.dtype, (count, width)))
            if channel.in_segment(peer):
                channel.end_read(peer)
        if segment:  # when we return, the user may overwrite the memory
            for peer in peers:
                channel.wait(peer, Phase.READ, rank)
    made.finish()


def reduce(call: Call, x: torch.Tensor, w: Weight, out: torch.Tensor, reduction: Reduction) -> None:
    """Fill ``out`` with this rank's part of the sum, or with all of it. A data buffer has a slot
    for each rank's part of this rank's partial, then one for this rank's sum."""
    workspace, problem = call.group.workspace, call.problem
    assert workspace is not None  # else `choose` takes another algorithm
    rank, peers, wire = call.group.rank, call.peers_in_ring_order, problem.dtype
    partials = partials_of_product(call, x, w, workspace.usable_bytes)
    split, channel, result = partials.split, workspace.channel, out.view(-1)
    slot, sums_at = split.slot_bytes, problem.world * split.slot_bytes
    for index in range(max(1, split.steps)):
        channel.begin(call.plan.signature, call.plan.text)
        for owner in (*peers, rank):
            begin, count = split.piece(owner, index)
            partials.fill(owner, begin, workspace.view(rank, wire, (count,), owner * slot))
            channel.publish(Phase.DATA, owner)
        for peer in peers:
            channel.wait(peer, Phase.DATA, rank)
        begin, count = split.piece(rank, index)
        terms = [workspace.view(r, wire, (count,), rank * slot) for r in range(problem.world)]
        if problem.spec.scatters:
            reduce_into(result[begin : begin + count], terms, reduction, begin)
            continue
        total = workspace.view(rank, out.dtype, (count,), sums_at)
        reduce_into(total, terms, reduction, split.begins[rank] + begin)
        channel.publish(Phase.RESULT)
        for owner in (rank, *peers):
            channel.wait(owner, Phase.RESULT)
            begin, count = split.piece(owner, index)
            begin += split.begins[owner]
            with recorded(COPY):
                total = workspace.view(owner, out.dtype, (count,), sums_at)
                result[begin : begin + count].copy_(total)
