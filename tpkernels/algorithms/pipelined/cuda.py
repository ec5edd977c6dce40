"""``pipelined`` on GPUs: one vendor matmul per peer, overlapped with peer copies.

Algorithm: the current stream and another run one matmul per peer, in turn, so that the tail of one
overlaps with the next. A caller's product stays on the current stream: it may have memory of its
own that two at a time would share. Two others run the peer copies in turn.
all_gather_matmul      multiplies this rank's rows first, then those of rank+1, rank+2, ... when
                       they have been fetched.
matmul_reduce_scatter  computes the partials for rank+1, rank+2, ... and publishes each to its owner
                       when it is done; this rank's own comes last. Meanwhile it fetches the
                       partials of rank-1, rank-2, ...: they are done in that order.
matmul_all_reduce      the same over evenly split rows; then the sums are fetched.

Launch order: products and fetches are queued alternately. With CUDA_DEVICE_MAX_CONNECTIONS=1, which
Megatron sets, all streams share one hardware queue, and a copy that waits for its peer's word holds
up what is queued behind it. No order of launches deadlocks, since a rank publishes before it waits,
but with all fetches in front no product would overlap with them.

Sync: a call of several launches, with its proof in csrc/cuda/sync.cuh; symm/streams.py forks
and joins the side streams. A rank's memory holds its partial of all rows, at the same place on all
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tpkernels.algorithms.parts import Products, as_rows
from tpkernels.algorithms.rank_order import gathers_in_rank_order, scatters_in_rank_order
from tpkernels.algorithms.reduction import Reduction
from tpkernels.common.integers import ceil_div, round_up
from tpkernels.common.shards import shard_sizes
from tpkernels.cuda import CopyCall, sum_partials
from tpkernels.cuda.queued import queued
from tpkernels.groups.call import Call
from tpkernels.local.matmul import local_matmul
from tpkernels.local.memory import empty
from tpkernels.local.product import Weight
from tpkernels.symm.streams import SideStream

# Words of a call: the first and the last are the call's own.
DATA, _RESULT, _WORDS = 1, 2, 4
_ALIGNMENT = 256  # bytes, of the results


@gathers_in_rank_order
def gather(call: Call, x: torch.Tensor, products: Products) -> None:
    sizes, whole = list(call.problem.shard_rows), products.memory(call, x)
    rows, row_bytes = as_rows(x.contiguous()), x.shape[-1] * x.element_size()
    with (
        queued(call, x.device, _WORDS, ceil_div(max(sizes) * row_bytes, 2)) as memory,
        CopyCall(
            memory.current, call.plan.signature, products.results, memory.segments.find(x)
        ) as copies,
    ):
        if products.gathered is not None:
            begin = sum(sizes[: copies.rank])
            as_rows(whole).narrow(0, begin, rows.shape[0]).copy_(rows)
        peers, factors = call.peers_in_ring_order, products.factors
        gather_and_multiply(copies, memory.side, peers, sizes, rows, as_rows(whole), factors)


def gather_and_multiply(
    copies: CopyCall,
    side: SideStream,
    peers: Sequence[int],
    sizes: list[int],
    rows: torch.Tensor,
    whole: torch.Tensor,
    factors: list[tuple[Weight, torch.Tensor | None, torch.Tensor]],
) -> None:
    """Within a call: gather the peers' ``rows`` [sizes[rank], K] into ``whole`` [sum(sizes), K],
    in the order of ``peers``, and multiply them and the own rows for each (w, bias, out)."""
    begins = [sum(sizes[:rank]) for rank in range(len(sizes))]
    alone = not all(isinstance(w, torch.Tensor) for w, _, _ in factors)
    side.fork()
    with side.current():
        if copies.in_place is None:
            copies.put(rows, 0)
        copies.publish(DATA)
    arrived = side.copied
    try:
        for owner, following in zip((copies.rank, *peers), (*peers, None), strict=True):
            at = slice(begins[owner], begins[owner] + sizes[owner])
            with side.part(alone=alone):
                side.wait(arrived)
                for w, bias, out in factors:
                    local_matmul(rows if owner == copies.rank else whole[at], w, out[at], bias)
            if following is not None:
                there = whole.narrow(0, begins[following], sizes[following])
                fetch(copies, side, following, there, 0)
                arrived = side.copied
    finally:
        side.join()


def fetch(copies: CopyCall, side: SideStream, source: int, to: torch.Tensor, offset: int) -> None:
    """Queue a copy from ``source``, once its data are there. The wait for them runs while the copy
    before is under way."""
    with side.next():
        copies.await_word(source, DATA)
        with side.copying():
            copies.copy_from(source, to, offset)


@scatters_in_rank_order
def reduce(call: Call, x: torch.Tensor, w: Weight, out: torch.Tensor, reduction: Reduction) -> None:
    problem, rank, columns, peers = (
        call.problem,
        call.group.rank,
        w.shape[1],
        call.peers_in_ring_order,
    )
    rows, result, everywhere = as_rows(x), as_rows(out), problem.spec.keeps_sum
    sizes = shard_sizes(rows.shape[0], problem.world) if everywhere else list(problem.shard_rows)
    begins = [sum(sizes[:r]) for r in range(problem.world)]
    results_at = nbytes = rows.shape[0] * columns * problem.dtype.itemsize
    if everywhere:
        results_at = round_up(nbytes, _ALIGNMENT)
        nbytes = results_at + max(sizes) * columns * out.dtype.itemsize
    with (
        queued(call, x.device, _WORDS, ceil_div(nbytes, 2)) as memory,
        CopyCall(memory.current, call.plan.signature, [out]) as copies,
    ):
        partials = multiply_and_scatter(copies, memory.side, peers, sizes, rows, w, problem.dtype)
        residual = None if reduction.residual is None else as_rows(reduction.residual)
        own = result
        if everywhere:
            own = result.narrow(0, begins[rank], sizes[rank])
            if residual is not None:
                residual = residual.narrow(0, begins[rank], sizes[rank])
        sum_partials(own, partials, reduction.bias, residual)
        if everywhere:
            copies.put(own, results_at)
            copies.publish(_RESULT)
            for peer in peers:
                copies.fetch(peer, _RESULT, result.narrow(0, begins[peer], sizes[peer]), results_at)


def multiply_and_scatter(
    copies: CopyCall,
    side: SideStream,
    peers: Sequence[int],
    sizes: list[int],
    rows: torch.Tensor,
    w: Weight,
    wire: torch.dtype,
) -> list[torch.Tensor]:
    """Within a call: multiply ``rows`` [sum(sizes), K] by w [K, N]. Return, in rank order, all
    ranks' partials [sizes[rank], N] of this rank's part of the product."""
    rank, columns = copies.rank, w.shape[1]
    begins = [sum(sizes[:rank]) for rank in range(len(sizes))]
    row_bytes = columns * wire.itemsize
    partials = [empty((sizes[rank], columns), wire, rows.device) for _ in sizes]
    side.fork()
    try:
        # A fetch is queued one product late: it waits for a partial that its source computes, like
        # this rank its own, in that turn.
        for owner, source in zip((*peers, rank), (None, *reversed(peers)), strict=True):
            part = rows[begins[owner] : begins[owner] + sizes[owner]]
            with side.part(alone=not isinstance(w, torch.Tensor)):
                if owner == rank:
                    local_matmul(part, w, partials[rank])
                else:
                    shape = (sizes[owner], columns)
                    local_matmul(part, w, copies.view(wire, shape, begins[owner] * row_bytes))
                    copies.publish(DATA, owner)
            if source is not None:
                fetch(copies, side, source, partials[source], begins[rank] * row_bytes)
    finally:
        side.join()
    return partials
