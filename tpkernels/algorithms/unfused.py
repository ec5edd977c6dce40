"""The plain way: a ``torch.distributed`` collective, then the matmul, or the other way round.

    all_gather_matmul        |-- all-gather --|------ matmul ------|
    matmul_reduce_scatter    |------ matmul ------|-- all-to-all --|-- sum --|
    matmul_all_reduce        the same, then       |-- all-gather --|

It runs on any process group, and ``auto`` chooses it where ranks share no memory. A rank in another
call is detected before anything is sent; see ``transport``.

Reductions move the partials with an all-to-all and sum them locally, in fp32 and in rank order.
That moves as many bytes as a reduce-scatter, and gives the same bits as every other algorithm.

On CUDA tensors the collectives of NCCL go straight into the result:

Gathers        one all-gather. Uneven shards go as a list, which NCCL sends as one group of
               broadcasts: no padding travels.
Reductions     with numerics "vendor" one reduce-scatter or all-reduce of the process group, and one
               launch behind it for bias, residual and another dtype; with "ordered" one launch sums
All-to-alls    one all-to-all, between copies of the pieces and to their places.

The shards of a dim with others before it do not lie together: they are copied, in one launch if
they are even. Gloo cannot do all this with CUDA tensors; they go through the host's memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import timedelta
from math import prod
from typing import Any

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    ProcessGroup,
    ReduceScatterOptions,
)

from tpkernels.algorithms.parts import (
    Products,
    edges_of,
    matmul_partial,
    shard_counts,
    shard_shape,
)
from tpkernels.algorithms.pieces import Exchange, counts_of, place
from tpkernels.algorithms.reduction import (
    Reduction,
    behind_all_reduce,
    behind_matmul_all_reduce,
    reduce_into,
    reduced,
)
from tpkernels.call import Call
from tpkernels.integers import ceil_div, round_up
from tpkernels.local.memory import empty
from tpkernels.local.product import Weight
from tpkernels.planning.problem import VENDOR
from tpkernels.transport.point_to_point import enter
from tpkernels.transport.waits import announce_done, finish

# A reduction on the host moves in steps of this size, so that the allocator can reuse their buffers
# instead of taking fresh pages.
_STEP_BYTES = 4 << 20
_PART_UNIT = 8  # elements of a rank's part of an all-reduce by NCCL: the kernel loads 8 at a time


def all_gather(call: Call, x: torch.Tensor) -> torch.Tensor:
    enter(call).wait()
    if _by_nccl(call) or call.group.world == 1:
        out = empty(call.problem.shape, x.dtype, x.device)
        _gather_by_nccl(call, x, out)
        return out
    return _gather(call, x)


def all_gather_matmul(call: Call, x: torch.Tensor, products: Products) -> None:
    enter(call).wait()
    if call.group.world == 1:
        whole = x if call.problem.device == "cuda" else x.contiguous()
        if products.gathered is not None:
            products.gathered.copy_(x)
    elif _by_nccl(call):
        whole = products.memory(call, x)
        _gather_by_nccl(call, x, whole)
    else:
        whole = _gather(call, x)
        if products.gathered is not None:
            products.gathered.copy_(whole)
    products.multiply(whole)


def all_to_all(call: Call, x: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    enter(call).wait()
    out = exchange.result(call, x)
    if call.group.world == 1:
        return out.copy_(x)
    places = exchange.taken(call, out)
    if _by_nccl(call):
        even = _even(call.problem.sizes) and _even(exchange.sizes)
        sent = _by_owner(x, exchange.dim, exchange.sizes)
        counts = counts_of(exchange.given(x))
        received = _exchange_by_nccl(call, sent, counts, None if even else counts_of(places))
        pieces = [piece.view(to.shape) for piece, to in zip(received, places, strict=True)]
        assert call.problem.dim is not None  # an all-to-all has one
        return torch.cat(pieces, call.problem.dim, out=out)
    place(_exchange(call, exchange.given(x), counts_of(places)), places)
    announce_done(call)
    return out


def reduce_scatter(call: Call, x: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    enter(call).wait()
    out = _reduce_scatter(call, x, reduction)
    return out.clone(memory_format=torch.contiguous_format) if out is x else out


def matmul_reduce_scatter(
    call: Call, x: torch.Tensor, w: Weight, reduction: Reduction
) -> torch.Tensor:
    link = enter(call)
    partial = matmul_partial(call, x, w)
    link.wait()
    return _reduce_scatter(call, partial, reduction)


def all_reduce(call: Call, x: torch.Tensor, out: torch.Tensor, reduction: Reduction) -> None:
    """``out`` may be ``x``."""
    enter(call).wait()
    _all_reduce(call, x, out, reduction)


def matmul_all_reduce(call: Call, x: torch.Tensor, w: Weight, reduction: Reduction) -> torch.Tensor:
    link = enter(call)
    partial = matmul_partial(call, x, w)
    if call.group.world == 1:
        return reduced(partial, reduction)
    link.wait()
    out = partial
    if reduction.out_dtype != partial.dtype:
        out = empty(partial.shape, reduction.out_dtype, partial.device)
    _all_reduce(call, partial, out, reduction)
    return out


all_reduce_rms_norm = behind_all_reduce(all_reduce)
matmul_all_reduce_rms_norm = behind_matmul_all_reduce(matmul_all_reduce)


def _reduce_scatter(call: Call, partial: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    problem, group = call.problem, call.group
    if group.world == 1:
        return reduced(partial, reduction)
    assert problem.dim is not None  # a reduce-scatter has one
    out = empty(shard_shape(problem, group.rank), reduction.out_dtype, partial.device)
    flat = out.view(-1)
    if _by_nccl(call):
        by_owner = _by_owner(partial, problem.dim, problem.sizes)
        _reduce_scatter_by_nccl(call, by_owner, flat, shard_counts(problem), reduction)
        return out
    shards = [shard.reshape(-1) for shard in partial.split(list(problem.sizes), problem.dim)]
    step = _step(call, partial)
    for begin in range(0, max(shard.numel() for shard in shards), step):
        received = _exchange(call, [shard[begin : begin + step] for shard in shards])
        reduce_into(flat[begin : begin + step], received, reduction, begin)
    announce_done(call)
    return out


def _all_reduce(call: Call, x: torch.Tensor, out: torch.Tensor, reduction: Reduction) -> None:
    """Each rank reduces its part of every step of the flat tensor, then the parts are gathered."""
    group = call.group
    if _by_nccl(call) and group.world > 1:
        _all_reduce_by_nccl(call, x, out, reduction)
        return
    flat, result = x.reshape(-1), out.view(-1)
    if group.world == 1:
        if x.data_ptr() != out.data_ptr():
            result.copy_(reduced(flat, reduction))
        return
    step = _step(call, x) * group.world
    for first in range(0, flat.numel(), step):
        count = min(step, flat.numel() - first)
        edges = [first + edge for edge in edges_of(count, group.world)]
        received = _exchange(call, [flat[a:b] for a, b in itertools.pairwise(edges)])
        own = result.new_empty(ceil_div(count, group.world))
        begin, end = edges[group.rank], edges[group.rank + 1]
        reduce_into(own[: end - begin], received, reduction, begin)
        result[first : first + count].copy_(_all_gather(call, own)[:count])
    announce_done(call)


# Through the host's memory, or between CPU tensors.


def _step(call: Call, partial: torch.Tensor) -> int:
    """Return the elements of a rank's shard that move at a time; all of them on a GPU."""
    if call.problem.device == "cuda":
        return max(partial.numel(), 1)
    return _STEP_BYTES // partial.element_size()


def _gather(call: Call, x: torch.Tensor) -> torch.Tensor:
    """Return x of all ranks along the problem's dim, contiguous."""
    group, problem = call.group, call.problem
    dim, sizes = problem.dim, problem.sizes
    assert dim is not None  # an all-gather has one
    largest = max(sizes)
    if x.shape[dim] < largest:  # the collective needs equal shards
        padded = x.new_zeros((*x.shape[:dim], largest, *x.shape[dim + 1 :]))
        padded.narrow(dim, 0, x.shape[dim]).copy_(x)
        x = padded
    stacked = _all_gather(call, x.reshape(-1)).view(group.world, *x.shape)
    announce_done(call)
    if dim == 0 and _even(sizes):
        return stacked.flatten(0, 1)
    shards = [stacked[r].narrow(dim, 0, size) for r, size in enumerate(sizes)]
    return torch.cat(shards, dim, out=empty(problem.shape, x.dtype, x.device))


def _all_gather(call: Call, own: torch.Tensor) -> torch.Tensor:
    """Return own [N] of all ranks [world * N]."""
    sent = own.cpu() if call.problem.device == "cuda" else own
    received = empty([call.group.world * sent.numel()], sent.dtype, sent.device)
    finish(call, _pg(call)._allgather_base(received, sent, _options(AllgatherOptions, call)))
    return received.to(own.device)


def _exchange(
    call: Call, pieces: Sequence[torch.Tensor], counts: Sequence[int] | None = None
) -> Sequence[torch.Tensor]:
    """Send piece r to rank r. Return what the ranks sent to this one, flat and in rank order:
    ``counts`` elements; by default as many as it keeps of its own."""
    received_counts = list(counts or [pieces[call.group.rank].numel()] * call.group.world)
    sent = torch.cat([piece.reshape(-1) for piece in pieces])
    device = sent.device
    if call.problem.device == "cuda":
        sent = sent.cpu()
    received = sent.new_empty(sum(received_counts))
    options, splits = _options(AllToAllOptions, call), counts_of(pieces)
    finish(call, _pg(call).alltoall_base(received, sent, received_counts, splits, options))
    return received.to(device).split(received_counts)


# By NCCL, on the current stream.


def _by_nccl(call: Call) -> bool:
    return call.problem.device == "cuda" and not call.group.by_gloo("cuda")


def _gather_by_nccl(call: Call, x: torch.Tensor, out: torch.Tensor) -> None:
    """Fill ``out`` with x of all ranks along the problem's dim."""
    problem = call.problem
    if call.group.world == 1:
        out.copy_(x)
        return
    counts = shard_counts(problem)
    flat = out.view(-1) if problem.outer == 1 else x.new_empty(out.numel())
    _all_gather_by_nccl(call, x.reshape(-1), flat, counts)
    if problem.outer != 1:
        shards = [
            shard.view(shard_shape(problem, rank)) for rank, shard in enumerate(flat.split(counts))
        ]
        assert problem.dim is not None  # an all-gather has one
        torch.cat(shards, problem.dim, out=out)


def _reduce_scatter_by_nccl(
    call: Call, x: torch.Tensor, out: torch.Tensor, counts: Sequence[int], reduction: Reduction
) -> None:
    """x flat, one shard of ``counts`` elements after the other."""
    if call.plan.numerics != VENDOR:
        reduce_into(out, _exchange_by_nccl(call, x, counts), reduction)
        return
    total = out if out.dtype == x.dtype else empty(out.shape, x.dtype, out.device)
    options = _options(ReduceScatterOptions, call)
    if _even(counts):
        _queue(_pg(call)._reduce_scatter_base(total, x, options))
    else:
        _queue(_pg(call).reduce_scatter([total], [list(x.split(list(counts)))], options))
    if not reduction.keeps(x.dtype):
        reduce_into(out, [total], reduction)


def _all_reduce_by_nccl(
    call: Call, x: torch.Tensor, out: torch.Tensor, reduction: Reduction
) -> None:
    """In rank order, each rank sums its part in its place in ``out``, and the parts are gathered in
    place. A product's partial may be overwritten."""
    if call.plan.numerics == VENDOR:
        total = x
        if not call.problem.spec.has_matmul and out is not x:
            total = out if out.dtype == x.dtype else empty(x.shape, x.dtype, x.device)
            total.copy_(x)
        _queue(_pg(call).allreduce([total], _options(AllreduceOptions, call)))
        if not reduction.keeps(total.dtype):
            reduce_into(out, [total], reduction)
        return
    flat, result, group = x.reshape(-1), out.view(-1), call.group
    part = round_up(ceil_div(flat.numel(), group.world), _PART_UNIT)
    edges = [min(flat.numel(), rank * part) for rank in range(group.world + 1)]
    counts = [end - begin for begin, end in itertools.pairwise(edges)]
    begin = edges[group.rank]
    own = result.narrow(0, begin, counts[group.rank])
    reduce_into(own, _exchange_by_nccl(call, flat, counts), reduction, begin)
    _all_gather_by_nccl(call, own, result, counts)


def _all_gather_by_nccl(
    call: Call, own: torch.Tensor, whole: torch.Tensor, counts: Sequence[int]
) -> None:
    options = _options(AllgatherOptions, call)
    if _even(counts):
        _queue(_pg(call)._allgather_base(whole, own, options))
    else:
        _queue(_pg(call).allgather([list(whole.split(list(counts)))], [own], options))


def _exchange_by_nccl(
    call: Call, x: torch.Tensor, counts: Sequence[int], received_counts: Sequence[int] | None = None
) -> Sequence[torch.Tensor]:
    """Send each rank its part of x. Return what this rank got, in rank order: by default as many
    elements from each as it keeps."""
    even = received_counts is None and _even(counts)  # alike on all ranks
    received_counts = received_counts or [counts[call.group.rank]] * call.group.world
    received = x.new_empty(sum(received_counts))
    splits = ([], []) if even else (list(received_counts), list(counts))
    _queue(_pg(call).alltoall_base(received, x, *splits, _options(AllToAllOptions, call)))
    return received.split(list(received_counts))


def _by_owner(x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    """Return the elements of the ranks' shards along a dim, one shard after the other."""
    if prod(x.shape[:dim]) == 1:
        return x.reshape(-1)
    if _even(sizes):
        return x.unflatten(dim, (len(sizes), -1)).movedim(dim, 0).reshape(-1)
    whole, shards = x.new_empty(x.numel()), x.split(list(sizes), dim)
    for to, shard in zip(whole.split(counts_of(shards)), shards, strict=True):
        to.view(shard.shape).copy_(shard)
    return whole


def _even(counts: Sequence[int]) -> bool:
    return len(set(counts)) == 1


def _pg(call: Call) -> ProcessGroup:
    return call.group.pg


def _options(cls: Any, call: Call) -> Any:
    options = cls()
    options.timeout = timedelta(seconds=call.group.timeout_on(call.problem.device))
    if _by_nccl(call):
        options.asyncOp = False  # on the current stream, as torch.distributed's own functions
    return options


def _queue(work: Any) -> None:
    """Make the stream wait, where the collective is not on it anyway."""
    if work is not None:
        work.wait()
