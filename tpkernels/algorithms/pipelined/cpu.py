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
without rows. A step takes as many rows as the workspace holds (planning/steps.py).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import torch

from tpkernels._C.host import Phase
from tpkernels.algorithms.reduction import Reduction, reduce_into
from tpkernels.algorithms.rms_norm import behind_matmul_all_reduce
from tpkernels.algorithms.shards import (
    as_rows,
    edges_of,
    multiply_shard,
    partial_of_shard,
    parts_of,
    shard_shape,
    split_gather,
    split_partial,
)
from tpkernels.call import Call
from tpkernels.integers import round_up
from tpkernels.local.matmul import local_matmul
from tpkernels.local.memory import empty
from tpkernels.local.packed import columns_of
from tpkernels.local.product import Weight
from tpkernels.local.ranges import COPY, TRANSFER, recorded
from tpkernels.planning.steps import LINE_BYTES, step_rows


def _steps(call: Call, rows: int, per_rank: int = 1) -> tuple[int, Iterator[int]]:
    """Rows of one step, the same on all ranks, and the first row of each step. One row in
    ``per_rank`` belongs to a rank."""
    fitting = per_rank * step_rows(call.problem, call.workspace.usable_bytes)
    step = max(1, min(rows, fitting))
    return step, iter(range(0, max(rows, 1), step))


@functools.lru_cache(maxsize=1024)
def _parts_of_sum(rows: int, step: int, world: int, columns: int) -> frozenset[tuple[int, int]]:
    """`parts_of` an all-reduce, of which each step is split by rank."""
    edges = [edges_of(count, world) for count in {min(rows, step), rows % step}]
    sizes = {b - a for each in edges for a, b in itertools.pairwise(each)} - {0}
    return frozenset((size, columns) for size in sizes)


def all_gather_matmul(
    call: Call,
    x: torch.Tensor,
    weights: list[Weight],
    biases: list[torch.Tensor | None],
    outs: list[torch.Tensor],
    gathered: torch.Tensor | None,
) -> None:
    problem, workspace, rank = call.problem, call.workspace, call.group.rank
    x = x.contiguous()
    segment, offset = workspace.segments.find(x)
    flat, width = as_rows(x), x.shape[-1]
    row_bytes = width * x.element_size()
    rows = list(problem.shard_rows)
    step, begins = _steps(call, max(rows))
    factors = split_gather(problem, x, weights, biases, outs, gathered, step)
    whole = None if factors.gathered is None else as_rows(factors.gathered)

    def multiply(shard: torch.Tensor, owner: int, begin: int) -> None:
        multiply_shard(problem, owner, begin, shard, factors.parts, whole)

    channel = workspace.channel
    for begin in begins:
        mine = flat[begin : begin + step]
        channel.begin(call.plan.signature, call.plan.text)
        if segment:
            channel.locate(segment, offset + begin * row_bytes)
        else:
            with recorded(COPY):
                workspace.view(rank, x.dtype, tuple(mine.shape)).copy_(mine)
        channel.publish(Phase.DATA)
        multiply(mine, rank, begin)
        waiting = list(call.peers_in_ring_order)
        while waiting:
            peer = channel.wait_any(waiting, Phase.DATA)
            waiting.remove(peer)
            count = max(0, min(step, rows[peer] - begin))
            with recorded(TRANSFER):
                multiply(workspace.peer_data(peer, x.dtype, (count, width)), peer, begin)
            if channel.in_segment(peer):
                channel.end_read(peer)
        if segment:  # when we return, the user may overwrite the memory
            for peer in call.peers_in_ring_order:
                channel.wait(peer, Phase.READ, rank)
    factors.finish()


def matmul_reduce_scatter(
    call: Call, x: torch.Tensor, w: Weight, reduction: Reduction
) -> torch.Tensor:
    problem, workspace, rank = call.problem, call.workspace, call.group.rank
    assert problem.dim is not None  # a reduce-scatter has one
    flat, wire = as_rows(x), problem.dtype
    by_columns = problem.dim == len(problem.shape) - 1
    world = range(problem.world)
    if by_columns:
        rows, columns = [problem.rows for _ in world], list(problem.sizes)
    else:
        rows, columns = list(problem.shard_rows), [columns_of(w) for _ in world]
    out = empty(shard_shape(problem, rank), reduction.out_dtype, x.device)
    result = as_rows(out)
    step, begins = _steps(call, max(rows))
    flat, w = split_partial(problem, flat, w, parts_of(problem, step, columns_of(w)))
    slot = round_up(step * max(columns) * wire.itemsize, LINE_BYTES)
    channel = workspace.channel
    for begin in begins:
        counts = [max(0, min(step, rows[r] - begin)) for r in world]
        channel.begin(call.plan.signature, call.plan.text)
        for owner in [*call.peers_in_ring_order, rank]:
            to = workspace.view(rank, wire, (counts[owner], columns[owner]), owner * slot)
            partial_of_shard(problem, owner, begin, flat, w, to)
            channel.publish(Phase.DATA, owner)
        for peer in call.peers_in_ring_order:
            channel.wait(peer, Phase.DATA, rank)
        mine = (counts[rank], columns[rank])
        partials = [workspace.read(r, wire, mine, rank * slot) for r in world]
        to = result[begin : begin + counts[rank]]
        reduce_into(to, partials, reduction, begin * columns[rank])
    return out


def matmul_all_reduce(call: Call, x: torch.Tensor, w: Weight, reduction: Reduction) -> torch.Tensor:
    problem, workspace, rank = call.problem, call.workspace, call.group.rank
    flat, wire, columns = as_rows(x), problem.dtype, columns_of(w)
    out = empty(problem.shape, reduction.out_dtype, x.device)
    result = as_rows(out)
    step, begins = _steps(call, problem.rows, per_rank=problem.world)
    parts = _parts_of_sum(problem.rows, step, problem.world, columns)
    flat, w = split_partial(problem, flat, w, parts)
    results_at = round_up(step * columns * wire.itemsize, LINE_BYTES)
    channel = workspace.channel
    for begin in begins:
        count = min(step, problem.rows - begin)
        edges = edges_of(count, problem.world)
        channel.begin(call.plan.signature, call.plan.text)

        def partial(of: int, owner: int, edges: list[int] = edges) -> torch.Tensor:
            shape = (edges[owner + 1] - edges[owner], columns)
            return workspace.read(of, wire, shape, edges[owner] * columns * wire.itemsize)

        def total(owner: int, edges: list[int] = edges) -> torch.Tensor:
            shape = (edges[owner + 1] - edges[owner], columns)
            return workspace.read(owner, reduction.out_dtype, shape, results_at)

        for owner in [*call.peers_in_ring_order, rank]:
            part = flat[begin + edges[owner] : begin + edges[owner + 1]]
            local_matmul(part, w, partial(rank, owner), whole_rows=problem.rows)
            channel.publish(Phase.DATA, owner)
        for peer in call.peers_in_ring_order:
            channel.wait(peer, Phase.DATA, rank)
        partials = [partial(r, rank) for r in range(problem.world)]
        reduce_into(total(rank), partials, reduction, (begin + edges[rank]) * columns)
        channel.publish(Phase.RESULT)
        for owner in [rank, *call.peers_in_ring_order]:
            channel.wait(owner, Phase.RESULT)
            with recorded(COPY):
                result[begin + edges[owner] : begin + edges[owner + 1]].copy_(total(owner))
    return out


matmul_all_reduce_rms_norm = behind_matmul_all_reduce(matmul_all_reduce)
