"""``unfused`` on CUDA tensors: the collectives of the process group, straight into the result.

Gathers        one all-gather. Uneven shards go as a list, which NCCL sends as one group of
               broadcasts: no padding travels.
Reductions     with numerics "vendor" one reduce-scatter or all-reduce of the process group, and one
               launch behind it for bias, residual and another dtype. With "ordered" an all-to-all,
               or for an all-reduce that and an all-gather, and one launch that sums.

All-to-alls    one all-to-all, between copies of the pieces and to their places.

The shards of a dim with others before it do not lie together: they are copied, in one launch if
they are even. Gloo cannot do all this with CUDA tensors; it takes the way through the host.
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

from tpkernels.algorithms.exchange import Exchange, counts_of
from tpkernels.algorithms.reduction import Reduction, reduce_into, reduced
from tpkernels.algorithms.rms_norm import behind_all_reduce, behind_matmul_all_reduce
from tpkernels.algorithms.shards import as_rows, matmul_partial, shard_counts, shard_shape
from tpkernels.algorithms.unfused import cpu as through_host
from tpkernels.call import Call
from tpkernels.integers import ceil_div, round_up
from tpkernels.local.matmul import local_matmul
from tpkernels.local.memory import empty
from tpkernels.local.product import Weight
from tpkernels.planning.problem import VENDOR

_PART_UNIT = 8  # elements of a rank's part of an all-reduce: the kernel loads 8 at a time


def all_gather(call: Call, x: torch.Tensor) -> torch.Tensor:
    out = empty(call.problem.shape, x.dtype, x.device)
    _gather_into(call, x, out)
    return out


def all_gather_matmul(
    call: Call,
    x: torch.Tensor,
    weights: list[Weight],
    biases: list[torch.Tensor | None],
    outs: list[torch.Tensor],
    gathered: torch.Tensor | None,
) -> None:
    if gathered is None and call.group.world == 1:
        whole = x
    else:
        whole = empty(call.problem.shape, x.dtype, x.device) if gathered is None else gathered
        _gather_into(call, x, whole)
    for w, bias, out in zip(weights, biases, outs, strict=True):
        local_matmul(as_rows(whole), w, as_rows(out), bias)


def all_to_all(call: Call, x: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    if call.group.world == 1 or call.group.by_gloo("cuda"):
        return through_host.all_to_all(call, x, exchange)
    out = exchange.result(call, x)
    given, places = counts_of(exchange.given(x)), exchange.taken(call, out)
    sent = _by_owner(x, exchange.dim, exchange.sizes)
    even = _even(call.problem.sizes) and _even(exchange.sizes)
    received = _exchanged(call, sent, given, None if even else counts_of(places))
    pieces = [piece.view(to.shape) for piece, to in zip(received, places, strict=True)]
    assert call.problem.dim is not None  # an all-to-all has one
    return torch.cat(pieces, call.problem.dim, out=out)


def reduce_scatter(call: Call, x: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    out = _reduce_scatter(call, x, reduction)
    return out.clone(memory_format=torch.contiguous_format) if out is x else out


def matmul_reduce_scatter(
    call: Call, x: torch.Tensor, w: Weight, reduction: Reduction
) -> torch.Tensor:
    return _reduce_scatter(call, matmul_partial(call, x, w), reduction)


def all_reduce(call: Call, x: torch.Tensor, out: torch.Tensor, reduction: Reduction) -> None:
    """``out`` may be ``x``."""
    if call.group.world == 1 or call.group.by_gloo("cuda"):
        through_host.all_reduce(call, x, out, reduction)
    elif call.plan.numerics != VENDOR:
        _ordered_all_reduce(call, x, out, reduction)
    else:
        total = out if out.dtype == x.dtype else empty(x.shape, x.dtype, x.device)
        if total is not x:
            total.copy_(x)
        _finish(_pg(call).allreduce([total], _options(AllreduceOptions, call)))
        if not reduction.keeps(total.dtype):
            reduce_into(out, [total], reduction)


def matmul_all_reduce(call: Call, x: torch.Tensor, w: Weight, reduction: Reduction) -> torch.Tensor:
    partial = matmul_partial(call, x, w)
    if call.group.world == 1:
        return reduced(partial, reduction)
    out = partial
    if reduction.out_dtype != partial.dtype:
        out = empty(partial.shape, reduction.out_dtype, partial.device)
    if call.group.by_gloo("cuda"):
        through_host.all_reduce(call, partial, out, reduction)
    elif call.plan.numerics != VENDOR:
        _ordered_all_reduce(call, partial, out, reduction)
    else:
        _finish(_pg(call).allreduce([partial], _options(AllreduceOptions, call)))
        if not reduction.keeps(partial.dtype):
            reduce_into(out, [partial], reduction)
    return out


all_reduce_rms_norm = behind_all_reduce(all_reduce)
matmul_all_reduce_rms_norm = behind_matmul_all_reduce(matmul_all_reduce)


def _reduce_scatter(call: Call, partial: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    group, problem = call.group, call.problem
    if group.world == 1:
        return reduced(partial, reduction)
    if group.by_gloo("cuda"):
        return through_host.reduce_scatter(call, partial, reduction)
    out = empty(shard_shape(problem, group.rank), reduction.out_dtype, partial.device)
    own, counts = out.view(-1), shard_counts(problem)
    assert problem.dim is not None  # a reduce-scatter has one
    by_owner = _by_owner(partial, problem.dim, problem.sizes)
    if call.plan.numerics != VENDOR:
        reduce_into(own, _exchanged(call, by_owner, counts), reduction)
        return out
    total = own if out.dtype == partial.dtype else empty(own.shape, partial.dtype, own.device)
    options = _options(ReduceScatterOptions, call)
    if _even(counts):
        _finish(_pg(call)._reduce_scatter_base(total, by_owner, options))
    else:
        _finish(_pg(call).reduce_scatter([total], [list(by_owner.split(counts))], options))
    if not reduction.keeps(partial.dtype):
        reduce_into(own, [total], reduction)
    return out


def _ordered_all_reduce(
    call: Call, x: torch.Tensor, out: torch.Tensor, reduction: Reduction
) -> None:
    """Each rank sums its part in its place in ``out``, then the parts are gathered in place."""
    flat, result = x.reshape(-1), out.view(-1)
    part = round_up(ceil_div(flat.numel(), call.group.world), _PART_UNIT)
    edges = [min(flat.numel(), rank * part) for rank in range(call.group.world + 1)]
    counts = [end - begin for begin, end in itertools.pairwise(edges)]
    begin, end = edges[call.group.rank : call.group.rank + 2]
    own = result.narrow(0, begin, end - begin)
    reduce_into(own, _exchanged(call, flat, counts), reduction, begin)
    _all_gather(call, own, result, counts)


def _gather_into(call: Call, x: torch.Tensor, out: torch.Tensor) -> None:
    """x of all ranks along the problem's dim."""
    problem = call.problem
    if call.group.world == 1:
        out.copy_(x)
        return
    if call.group.by_gloo("cuda"):
        out.copy_(through_host.all_gather(call, x))
        return
    counts = shard_counts(problem)
    flat = out.view(-1) if problem.outer == 1 else x.new_empty(out.numel())
    _all_gather(call, x.reshape(-1), flat, counts)
    if problem.outer != 1:
        shards = [
            shard.view(shard_shape(problem, rank)) for rank, shard in enumerate(flat.split(counts))
        ]
        assert problem.dim is not None  # an all-gather has one
        torch.cat(shards, problem.dim, out=out)


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


def _all_gather(call: Call, own: torch.Tensor, whole: torch.Tensor, counts: Sequence[int]) -> None:
    pg, options = _pg(call), _options(AllgatherOptions, call)
    if _even(counts):
        _finish(pg._allgather_base(whole, own, options))
    else:
        _finish(pg.allgather([list(whole.split(list(counts)))], [own], options))


def _exchanged(
    call: Call, x: torch.Tensor, counts: Sequence[int], received_counts: Sequence[int] | None = None
) -> Sequence[torch.Tensor]:
    """Send each rank its part of x. Return what this rank got, in rank order: by default as many
    elements from each as it keeps."""
    even = received_counts is None and _even(counts)  # alike on all ranks
    received_counts = received_counts or [counts[call.group.rank]] * call.group.world
    received = x.new_empty(sum(received_counts))
    splits = ([], []) if even else (list(received_counts), list(counts))
    _finish(_pg(call).alltoall_base(received, x, *splits, _options(AllToAllOptions, call)))
    return received.split(list(received_counts))


def _pg(call: Call) -> ProcessGroup:
    return call.group.pg


def _options(cls: Any, call: Call) -> Any:
    options = cls()
    options.timeout = timedelta(seconds=call.group.timeout_on(call.problem.device))
    options.asyncOp = False  # on the current stream, as torch.distributed's own functions
    return options


def _finish(work: Any) -> None:
    """The stream waits, where the collective is not on it anyway."""
    if work is not None:
        work.wait()
