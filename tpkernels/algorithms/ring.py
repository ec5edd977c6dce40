"""Sends and receives between pairs of ranks, overlapped with the matmul of local data.

all_gather_matmul      shards travel round the ring from neighbour to neighbour, in both directions.
                       In step s each rank passes on the shards that arrived in step s-1, and
                       multiplies them meanwhile. On an even ring both directions reach the opposite
                       rank in the same step; each brings half of that rank's shard.
matmul_reduce_scatter  in step s each rank multiplies the rows of rank+s and sends them there, its
                       own rows last. When it has the partials of all ranks it sums them.
matmul_all_reduce      the same on parts of the rows, then the sums travel round the ring.

What rank 0 of 4 does; a number is the owner of a shard or of rows:

    all_gather_matmul        step 1      step 2
      sends to rank 1        0           half of 3
      sends to rank 3        0           half of 1
      receives               3, 1        2, in halves
      multiplies             0           3, 1           2
    matmul_reduce_scatter    step 1      step 2         step 3
      multiplies             1           2              3             0
      sends                              1              2             3
      receives partials of               3              2             1, then sums

Partials go straight to their owner. If neighbours passed on running sums, each chunk's sum would
start at a different rank, which breaks the contract of fixed rank order. Either way each rank sends
(W-1)/W of the tensor. Links without all-to-all have to route transfers between ranks that are not
neighbours.

No shared memory and no collective of the backend is needed: any process group with send and recv
will do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from tpkernels.algorithms.exchange import Exchange, counts_of, place
from tpkernels.algorithms.reduction import Reduction, reduce_into
from tpkernels.algorithms.rms_norm import behind_all_reduce, behind_matmul_all_reduce
from tpkernels.algorithms.shards import (
    as_rows,
    edges_of,
    multiply_shard,
    partial_of_shard,
    parts_of,
    shard_counts,
    shard_shape,
    split_gather,
    split_partial,
)
from tpkernels.call import Call
from tpkernels.local.matmul import local_matmul
from tpkernels.local.memory import empty
from tpkernels.local.packed import columns_of
from tpkernels.local.product import Weight
from tpkernels.local.ranges import TRANSFER, recorded
from tpkernels.transport.point_to_point import PeerLinks, enter
from tpkernels.transport.waits import announce_done


@dataclass(frozen=True)
class Hop:
    """What one rank does in one direction in one step of the ring: it sends part of rank ``sent``'s
    shard to rank ``to``, and receives the same part of rank ``received``'s shard from rank
    ``source``. The part is number ``part`` of ``parts`` equal ones."""

    to: int
    source: int
    sent: int
    received: int
    part: int = 0
    parts: int = 1

    def of(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the part of a flat shard that travels."""
        edges = [shard.numel() * i // self.parts for i in (self.part, self.part + 1)]
        return shard[edges[0] : edges[1]]


def hops(rank: int, world: int) -> Iterator[list[Hop]]:
    """The steps of an all-gather round the ring."""
    right, left = (rank + 1) % world, (rank - 1) % world
    for step in range(1, world // 2 + 1):
        up = Hop(right, left, (rank - step + 1) % world, (rank - step) % world)
        down = Hop(left, right, (rank + step - 1) % world, (rank + step) % world)
        if 2 * step < world:
            yield [up, down]
        elif world == 2:
            yield [up]
        else:  # the last step of an even ring: both directions bring the opposite rank's shard
            yield [replace(up, part=0, parts=2), replace(down, part=1, parts=2)]


def _gather(
    call: Call,
    link: PeerLinks,
    shards: Sequence[torch.Tensor],
    use: Callable[[int], None] = lambda owner: None,
) -> None:
    """Fill ``shards``, flat and contiguous; this rank's own is filled already. ``use(owner)`` runs
    once for each shard that is here, while others travel."""
    here = [call.group.rank]
    for step in hops(call.group.rank, call.group.world):
        with recorded(TRANSFER):
            started = link.start(
                [(hop.of(shards[hop.sent]), hop.to) for hop in step],
                [(hop.of(shards[hop.received]), hop.source) for hop in step],
            )
            for owner in here:
                use(owner)
            link.wait(started)
        here = sorted({hop.received for hop in step})
    for owner in here:
        use(owner)


def _scatter(
    call: Call,
    link: PeerLinks,
    part_of: Callable[[int], torch.Tensor],
    counts: Sequence[int],
    device: torch.device,
) -> list[torch.Tensor]:
    """Send ``part_of(owner)``, flat and contiguous, to each owner while the next one is computed;
    this rank's own comes last. Returns the ranks' parts for this rank, in rank order, of
    ``counts`` elements."""
    rank, world = call.group.rank, call.group.world
    theirs = [count for r, count in enumerate(counts) if r != rank]
    parts = list(empty([sum(theirs)], call.problem.dtype, device).split(theirs))
    sent, started = [], []
    for step in range(1, world):
        to, source = (rank + step) % world, (rank - step) % world
        sent.append(part_of(to))
        started += link.start([(sent[-1], to)], [(parts[source - (source > rank)], source)])
    with recorded(TRANSFER):
        parts.insert(rank, part_of(rank))
        link.wait(started)
    return parts


def _shards(call: Call, x: torch.Tensor, whole: torch.Tensor | None) -> list[torch.Tensor]:
    """A flat buffer for the shard of each rank; this rank's holds ``x``. The buffers are parts of
    the gathered ``whole``, if there is one and shards are contiguous in it."""
    problem, rank = call.problem, call.group.rank
    counts = shard_counts(problem)
    if whole is not None and problem.outer == 1:
        shards = list(whole.view(-1).split(counts))
        shards[rank].copy_(x.reshape(-1))
        return shards
    shards = [empty([0 if r == rank else n], x.dtype, x.device) for r, n in enumerate(counts)]
    shards[rank] = x.contiguous().view(-1)
    return shards


def all_gather(call: Call, x: torch.Tensor) -> torch.Tensor:
    problem, link = call.problem, enter(call)
    out = empty(problem.shape, x.dtype, x.device)
    shards = _shards(call, x, out)

    def place(owner: int) -> None:
        if problem.outer != 1:
            shard = shards[owner].view(shard_shape(problem, owner))
            out.split(list(problem.sizes), problem.dim)[owner].copy_(shard)

    _gather(call, link, shards, place)
    announce_done(call)
    return out


def all_gather_matmul(
    call: Call,
    x: torch.Tensor,
    weights: list[Weight],
    biases: list[torch.Tensor | None],
    outs: list[torch.Tensor],
    gathered: torch.Tensor | None,
) -> None:
    problem, link = call.problem, enter(call)
    step = max(problem.shard_rows)
    factors = split_gather(problem, x, weights, biases, outs, gathered, step)
    whole = factors.gathered
    shards = _shards(call, x, whole)
    to = as_rows(whole) if whole is not None and problem.outer != 1 else None

    def multiply(owner: int) -> None:
        rows = shards[owner].view(problem.shard_rows[owner], problem.shape[-1])
        multiply_shard(problem, owner, 0, rows, factors.parts, to)

    _gather(call, link, shards, multiply)
    announce_done(call)
    factors.finish()


def _reduce_scatter(
    call: Call,
    link: PeerLinks,
    part_of: Callable[[int], torch.Tensor],
    reduction: Reduction,
    device: torch.device,
) -> torch.Tensor:
    out = empty(shard_shape(call.problem, call.group.rank), reduction.out_dtype, device)
    parts = _scatter(call, link, part_of, [out.numel()] * call.group.world, device)
    reduce_into(out.view(-1), parts, reduction)
    announce_done(call)
    return out


def reduce_scatter(call: Call, x: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    shards = x.split(list(call.problem.sizes), call.problem.dim)
    return _reduce_scatter(
        call, enter(call), lambda owner: shards[owner].contiguous().view(-1), reduction, x.device
    )


def all_to_all(call: Call, x: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """Each piece goes straight to its owner."""
    link, out, given = enter(call), exchange.result(call, x), exchange.given(x)
    places = exchange.taken(call, out)

    def part_of(owner: int) -> torch.Tensor:
        return given[owner].contiguous().view(-1)

    place(_scatter(call, link, part_of, counts_of(places), x.device), places)
    announce_done(call)
    return out


def matmul_reduce_scatter(
    call: Call, x: torch.Tensor, w: Weight, reduction: Reduction
) -> torch.Tensor:
    problem, rows = call.problem, as_rows(x)
    rows, w = split_partial(problem, rows, w, parts_of(problem, problem.rows, columns_of(w)))

    def part_of(owner: int) -> torch.Tensor:
        shape = shard_shape(problem, owner)
        part = empty([prod(shape)], problem.dtype, x.device)
        to = part.view(prod(shape[:-1]), shape[-1])
        partial_of_shard(problem, owner, 0, rows, w, to)
        return part

    return _reduce_scatter(call, enter(call), part_of, reduction, x.device)


def _all_reduce(
    call: Call,
    out: torch.Tensor,
    edges: list[int],
    part_of: Callable[[int], torch.Tensor],
    reduction: Reduction,
) -> None:
    """Rank r sums elements [edges[r], edges[r + 1]); then the sums are gathered."""
    rank, link = call.group.rank, enter(call)
    sums = [out[begin:end] for begin, end in itertools.pairwise(edges)]
    parts = _scatter(call, link, part_of, [sums[rank].numel()] * len(sums), out.device)
    reduce_into(sums[rank], parts, reduction, edges[rank])
    _gather(call, link, sums)
    announce_done(call)


def all_reduce(call: Call, x: torch.Tensor, out: torch.Tensor, reduction: Reduction) -> None:
    """``out`` may be ``x``: a part is overwritten only when its sum is complete."""
    flat, world = x.contiguous().view(-1), call.group.world
    edges = edges_of(flat.numel(), world)

    def part_of(owner: int) -> torch.Tensor:
        return flat[edges[owner] : edges[owner + 1]]

    _all_reduce(call, out.view(-1), edges, part_of, reduction)


def matmul_all_reduce(call: Call, x: torch.Tensor, w: Weight, reduction: Reduction) -> torch.Tensor:
    problem, rows, world = call.problem, as_rows(x), call.group.world
    columns, edges = columns_of(w), edges_of(problem.rows, world)
    out = empty(problem.shape, reduction.out_dtype, x.device)
    rows, w = split_partial(problem, rows, w, parts_of(problem, problem.rows, columns))

    def part_of(owner: int) -> torch.Tensor:
        count = edges[owner + 1] - edges[owner]
        partial = empty([count * columns], problem.dtype, x.device)
        part = rows[edges[owner] : edges[owner + 1]]
        local_matmul(part, w, partial.view(count, columns), whole_rows=problem.rows)
        return partial

    _all_reduce(call, out.view(-1), [row * columns for row in edges], part_of, reduction)
    return out


all_reduce_rms_norm = behind_all_reduce(all_reduce)
matmul_all_reduce_rms_norm = behind_matmul_all_reduce(matmul_all_reduce)
