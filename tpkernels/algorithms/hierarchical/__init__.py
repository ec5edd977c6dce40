"""Two levels for groups that span hosts: within a host, and between hosts.

all_gather             Each rank sends its shard to one rank of every other host. Meanwhile the
                       ranks of a host see each other's shards, then those that have arrived.
all_gather_matmul      The same; each shard is multiplied as soon as it is there, on CPUs where it
                       lies.
reduce_scatter         A running sum for each rank goes from host to host. Each host adds its
                       partials. Where that is fewer bytes, partials travel instead.
matmul_reduce_scatter  The same; partials that travel are multiplied first.
all_reduce, matmul_all_reduce   A reduce-scatter of the elements or rows, then an all-gather.

A shard crosses the link of a host once, not once for each rank of the host, and a sum crosses it
instead of a partial from each rank. routes.py says who sends what, and why that gives the same bits
as the other algorithms. On CPU tensors the ranks of a host share memory, and messages go between
hosts (within.py, sums.py); on CUDA tensors all are transfers of the process group (batches.py).

Sync: on CPU tensors every call begins with greetings (transport/point_to_point.py), as without
shared memory, and is one or more calls of the node's channel. Messages travel between the ranks'
own memory, never to or from the node's workspace. So the channel's proof holds for the latter,
whatever the other hosts do (csrc/host/channel.h).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

import torch

from tpkernels.algorithms.hierarchical.batches import Batches
from tpkernels.algorithms.hierarchical.sums import Parts, Shared
from tpkernels.algorithms.reduction import Reduction
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
from tpkernels.planning.problem import Problem
from tpkernels.planning.steps import chunk_bytes, step_rows

Levels: TypeAlias = Shared | Batches


def _levels(call: Call) -> Levels:
    return Shared(call) if call.problem.device == "cpu" else Batches(call)


def all_gather(call: Call, x: torch.Tensor) -> torch.Tensor:
    problem = call.problem
    out = empty(problem.shape, x.dtype, x.device)
    counts = shard_counts(problem)
    blocks = out.split(list(problem.sizes), problem.dim)
    if problem.outer == 1:
        whole = list(out.view(-1).split(counts))
    else:  # shards are not contiguous in the output
        whole = [empty([count], x.dtype, x.device) for count in counts]
    whole[call.group.rank].copy_(x.reshape(-1))
    _gather_flat(_levels(call), whole)
    if problem.outer != 1:
        for owner, shard in enumerate(whole):
            blocks[owner].copy_(shard.view(shard_shape(problem, owner)))
    return out


def _gather_flat(levels: Levels, whole: Sequence[torch.Tensor]) -> None:
    """Fill ``whole``, a flat tensor for each rank; this rank's own is filled already. Ends the
    call."""
    problem, rank = levels.call.problem, levels.call.group.rank
    shards = {owner: whole[owner] for owner in levels.received} | {rank: whole[rank]}

    def place(owner: int, begin: int, part: torch.Tensor) -> None:
        if owner not in shards:
            whole[owner][begin : begin + part.numel()].copy_(part)

    step = chunk_bytes(problem, levels.node.usable_bytes) // whole[rank].itemsize
    levels.gather(shards, [shard.numel() for shard in whole], step, place)
    levels.end()


def all_gather_matmul(
    call: Call,
    x: torch.Tensor,
    weights: list[Weight],
    biases: list[torch.Tensor | None],
    outs: list[torch.Tensor],
    gathered: torch.Tensor | None,
) -> None:
    problem, levels = call.problem, _levels(call)
    width, counts = problem.shape[-1], shard_counts(problem)
    rows = max(1, step_rows(problem, levels.node.usable_bytes))
    factors = split_gather(problem, x, weights, biases, outs, gathered, rows)
    gathered, memory = factors.gathered, None
    if gathered is not None and problem.outer == 1:  # shards are contiguous in it
        memory = gathered.view(-1).split(counts)
    received = {
        rank: empty([counts[rank]], x.dtype, x.device) if memory is None else memory[rank]
        for rank in levels.received
    }
    shards = received | {call.group.rank: x.contiguous().view(-1)}
    whole = None if gathered is None else as_rows(gathered)

    def multiply(owner: int, begin: int, part: torch.Tensor) -> None:
        to = None if memory is not None and owner in received else whole
        multiply_shard(problem, owner, begin // width, part.view(-1, width), factors.parts, to)

    levels.gather(shards, counts, rows * width, multiply)
    levels.end()
    factors.finish()


def reduce_scatter(call: Call, x: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    problem, levels = call.problem, _levels(call)
    out = empty(shard_shape(problem, call.group.rank), reduction.out_dtype, x.device)
    shards = x.split(list(problem.sizes), problem.dim)
    parts = _parts_of([shard.contiguous().view(-1) for shard in shards], levels)
    levels.reduce(parts, out.view(-1), reduction)
    levels.end()
    return out


def matmul_reduce_scatter(
    call: Call, x: torch.Tensor, w: Weight, reduction: Reduction
) -> torch.Tensor:
    problem, levels = call.problem, _levels(call)
    assert problem.dim is not None  # a reduce-scatter has one
    flat, ranks = as_rows(x), range(problem.world)
    if problem.dim == len(problem.shape) - 1:
        rows, columns = [problem.rows for _ in ranks], list(problem.sizes)
    else:
        rows, columns = list(problem.shard_rows), [columns_of(w) for _ in ranks]
    step = max(1, min(max(rows), step_rows(problem, levels.node.usable_bytes)))
    flat, w = split_partial(problem, flat, w, _products_of(problem, step, columns_of(w)))

    def fill(owner: int, begin: int, to: torch.Tensor) -> None:
        if to.numel():
            to = to.view(-1, columns[owner])
            partial_of_shard(problem, owner, begin // columns[owner], flat, w, to)

    out = empty(shard_shape(problem, call.group.rank), reduction.out_dtype, x.device)
    parts = Parts(
        counts=[n * width for n, width in zip(rows, columns, strict=True)],
        steps=[max(1, step * width) for width in columns],
        fill=fill,
    )
    levels.reduce(parts, out.view(-1), reduction)
    levels.end()
    return out


def all_reduce(call: Call, x: torch.Tensor, out: torch.Tensor, reduction: Reduction) -> None:
    """``out`` may be ``x``: a part is overwritten with its sum, which is complete only when the
    partials of all ranks have been read or received."""
    flat = x.contiguous().view(-1)
    edges = edges_of(flat.numel(), call.group.world)
    levels = _levels(call)
    parts = _parts_of([flat[a:b] for a, b in itertools.pairwise(edges)], levels)
    _all_reduce(levels, parts, out.view(-1), edges, reduction)


def matmul_all_reduce(call: Call, x: torch.Tensor, w: Weight, reduction: Reduction) -> torch.Tensor:
    problem, rows, world = call.problem, as_rows(x), call.group.world
    columns, edges = columns_of(w), edges_of(problem.rows, world)
    out, levels = empty(problem.shape, reduction.out_dtype, x.device), _levels(call)
    step = max(1, min(edges[1], step_rows(problem, levels.node.usable_bytes)))
    rows, w = split_partial(problem, rows, w, _products_of(problem, step, columns))

    def fill(owner: int, begin: int, to: torch.Tensor) -> None:
        first, count = edges[owner] + begin // columns, to.numel() // columns
        part = rows[first : first + count]
        local_matmul(part, w, to.view(count, columns), whole_rows=problem.rows)

    parts = Parts(
        counts=[(b - a) * columns for a, b in itertools.pairwise(edges)],
        steps=[max(1, step * columns)] * world,
        fill=fill,
    )
    _all_reduce(levels, parts, out.view(-1), [row * columns for row in edges], reduction)
    return out


all_reduce_rms_norm = behind_all_reduce(all_reduce)
matmul_all_reduce_rms_norm = behind_matmul_all_reduce(matmul_all_reduce)


def _all_reduce(
    levels: Levels, parts: Parts, out: torch.Tensor, edges: list[int], reduction: Reduction
) -> None:
    """Rank r sums elements [edges[r], edges[r + 1]); then the sums are gathered."""
    rank = levels.call.group.rank
    sums = [out[begin:end] for begin, end in itertools.pairwise(edges)]
    levels.reduce(parts, sums[rank], reduction, edges[rank])
    _gather_flat(levels, sums)


def _products_of(problem: Problem, step: int, columns: int) -> frozenset[tuple[int, int]]:
    """Those of a reduction: partials that travel are multiplied at once."""
    return parts_of(problem, step, columns) | parts_of(problem, problem.rows, columns)


def _parts_of(partials: list[torch.Tensor], levels: Levels) -> Parts:
    """Return the parts of a tensor that is there, as flat tensors."""

    def fill(owner: int, begin: int, to: torch.Tensor) -> None:
        to.copy_(partials[owner][begin : begin + to.numel()])

    counts = [partial.numel() for partial in partials]
    chunk = chunk_bytes(levels.call.problem, levels.node.usable_bytes) // partials[0].itemsize
    step = max(1, min(chunk, max(counts)))
    return Parts(counts, [step] * len(counts), fill, partials.__getitem__)
