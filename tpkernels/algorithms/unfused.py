"""The plain way: a ``torch.distributed`` collective, then the matmul, or the other way round.

    all_gather_matmul        |-- all-gather --|------ matmul ------|
    matmul_reduce_scatter    |------ matmul ------|-- all-to-all --|-- sum --|
    matmul_all_reduce        the same, then       |-- all-gather --|

It runs on any process group, and ``auto`` chooses it where ranks share no memory. A rank in another
call is detected before anything is sent; see ``point_to_point``.

Reductions move the partials with an all-to-all and sum them locally, in fp32 and in rank order.
That moves as many bytes as a reduce-scatter, and gives the same bits as every other algorithm.

On CUDA tensors the collectives of NCCL go straight into the result:

Gathers        one all-gather. Uneven shards go as a list, which NCCL sends as one group of
               broadcasts: no padding travels.
Reductions     with numerics "vendor" one reduce-scatter or all-reduce of the process group, and one
               launch behind it for bias, residual and another dtype; with "ordered" one launch sums
All-to-alls    one all-to-all, between copies of the pieces and to their places. Of routed tokens,
               whose counts the host must know: on CUDA tensors it waits for them, but not on
               one rank with max_rows, where a token with a route to no expert becomes NaN.

The shards of a dim with others before it do not lie together: they are copied, in one launch if
they are even. Gloo cannot do all this with CUDA tensors; they go through the host's memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

import torch
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    ProcessGroup,
    ReduceScatterOptions,
    Work,
)

from tpkernels.algorithms.parts import Products, as_rows, new_partial, pieces_of, shard_counts
from tpkernels.algorithms.point_to_point import enter
from tpkernels.algorithms.rank_order import by_owner, join
from tpkernels.algorithms.reduction import Reduction, reduce_into
from tpkernels.algorithms.routes import RowExchange, filled, weigh_rows
from tpkernels.algorithms.waits import announce_done, finish
from tpkernels.common.integers import ceil_div, round_up
from tpkernels.groups.call import Call
from tpkernels.local.matmul import local_matmul
from tpkernels.local.memory import empty
from tpkernels.local.product import Weight
from tpkernels.planning.op_spec import ExchangeOptions, RoutedOptions
from tpkernels.planning.problem import VENDOR
from tpkernels.torch_private import all_gather_single, reduce_scatter_single

# A reduction on the host moves in steps of this size, so that the allocator can reuse their buffers
# instead of taking fresh pages.
_STEP_BYTES = 4 << 20
GroupOptions = TypeVar(
    "GroupOptions", AllgatherOptions, AllreduceOptions, AllToAllOptions, ReduceScatterOptions
)
_PART_UNIT = 8  # elements of a rank's part of an all-reduce: the kernel on GPUs loads 8 at a time


def gather(call: Call, x: torch.Tensor, products: Products) -> None:
    enter(call).wait()
    if call.group.world == 1 and products.gathered is None:
        whole = x if call.problem.device == "cuda" else x.contiguous()
    else:
        whole = products.memory(call, x)
        _gather(call, x, whole)
    products.multiply(whole)


def exchange(call: Call, x: torch.Tensor, out: torch.Tensor) -> None:
    enter(call).wait()
    problem = call.problem
    if call.group.world == 1:
        out.copy_(x)
        return
    (pieces, places), to = pieces_of(problem, x, out), problem.options_as(ExchangeOptions)
    even = _even(problem.sizes) and _even(to.sizes)
    counts = [piece.numel() for piece in pieces]
    received_counts = None if even else [place.numel() for place in places]
    received = _exchange(call, by_owner(x, to.dim, to.sizes), counts, received_counts)
    announce_done(call)
    shaped = [piece.view(place.shape) for piece, place in zip(received, places, strict=True)]
    torch.cat(shaped, problem.split_dim, out=out)


def dispatch(
    call: Call, x: torch.Tensor, routes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of this rank's experts, and how many each has. x [tokens, H], routes [tokens
    of all ranks, k]."""
    found = RowExchange.of(call.problem, call.group.rank, routes)
    enter(call).wait()
    leaving = x.index_select(0, found.leaving // routes.shape[1])
    rows = _exchange_rows(call, leaving, found.left, found.arrived)
    most, count = call.problem.options_as(RoutedOptions).max_rows, sum(found.arrived)
    if most is None:
        return rows.index_select(0, found.order), found.counts
    padded = rows.new_zeros(most, x.shape[1])
    torch.index_select(rows, 0, found.order, out=padded[:count])
    return padded, found.counts


def combine(
    call: Call, x: torch.Tensor, routes: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> None:
    """Fill ``out`` [tokens, H] with the sums of the tokens' rows by ``weights`` [tokens, k]."""
    found = RowExchange.of(call.problem, call.group.rank, routes)
    x = filled(call.problem, x, sum(found.arrived))
    if found.nowhere is not None:
        weights = weights.masked_fill(found.nowhere.view(weights.shape), torch.nan)
    enter(call).wait()
    back = _exchange_rows(
        call, torch.empty_like(x).index_copy_(0, found.order, x), found.arrived, found.left
    )
    weigh_rows(back, found.leaving.argsort().view(weights.shape), weights, out)


def _exchange_rows(
    call: Call, x: torch.Tensor, sent: list[int], received: list[int]
) -> torch.Tensor:
    """Send each rank its rows of x; return those of all ranks, in rank order."""
    if call.group.world == 1:
        return x
    width = x.shape[1]
    counts, received_counts = ([rows * width for rows in each] for each in (sent, received))
    rows = _all_to_all(call, x.view(-1), counts, received_counts, even=False).view(-1, width)
    announce_done(call)
    return rows


def reduce(
    call: Call, x: torch.Tensor, w: Weight | None, out: torch.Tensor, reduction: Reduction
) -> None:
    """``out`` may be ``x``."""
    link, problem = enter(call), call.problem
    in_place = out.dtype == problem.dtype and (problem.spec.keeps_sum or problem.world == 1)
    partial = x
    if w is not None:
        partial = out if in_place else new_partial(call, x, w)
        local_matmul(as_rows(x), w, as_rows(partial))
    link.wait()
    if problem.world == 1:
        if not reduction.keeps(partial.dtype):
            reduce_into(out, [partial.contiguous()], reduction)
        elif partial is not out:
            out.copy_(partial)
    elif problem.spec.scatters:
        _reduce_scatter(call, partial, out, reduction)
    else:
        if w is None and out is not x and _sums_by_nccl(call):
            partial = out if in_place else empty(x.shape, x.dtype, x.device)
            partial.copy_(x)
        _all_reduce(call, partial, out, reduction)


def _gather(call: Call, x: torch.Tensor, out: torch.Tensor) -> None:
    """Fill ``out`` with x of all ranks along the problem's dim."""
    problem = call.problem
    if call.group.world == 1:
        out.copy_(x)
        return
    flat = out.view(-1) if problem.outer == 1 else empty([out.numel()], x.dtype, x.device)
    _all_gather(call, x.contiguous().view(-1), flat, shard_counts(problem))
    announce_done(call)
    if problem.outer != 1:
        join(flat, out, problem.split_dim, problem.sizes)


def _reduce_scatter(
    call: Call, partial: torch.Tensor, out: torch.Tensor, reduction: Reduction
) -> None:
    problem = call.problem
    own, counts = out.view(-1), shard_counts(problem)
    flat = by_owner(partial, problem.split_dim, problem.sizes)
    if _sums_by_nccl(call):
        total = own if out.dtype == flat.dtype else empty(own.shape, flat.dtype, own.device)
        options = _options(ReduceScatterOptions, call)
        if _even(counts):
            _wait(call, reduce_scatter_single(_pg(call), total, flat, options))
        else:
            _wait(call, _pg(call).reduce_scatter([total], [list(flat.split(counts))], options))
        if not reduction.keeps(flat.dtype):
            reduce_into(own, [total], reduction)
        return
    step = _step(call, flat)
    for begin in range(0, max(counts), step):
        sent, lengths = flat, counts
        if max(counts) > step:
            pieces = [shard[begin : begin + step] for shard in flat.split(counts)]
            sent, lengths = torch.cat(pieces), [piece.numel() for piece in pieces]
        received = _exchange(call, sent, lengths)
        reduce_into(own[begin : begin + step], received, reduction, begin)
    announce_done(call)


def _all_reduce(call: Call, x: torch.Tensor, out: torch.Tensor, reduction: Reduction) -> None:
    """Sum each rank's part of every step in its place in ``out``, then gather the parts in place.
    ``out`` may be x. NCCL overwrites x."""
    group, flat, result = call.group, x.contiguous().view(-1), out.view(-1)
    if _sums_by_nccl(call):
        _wait(call, _pg(call).allreduce([x], _options(AllreduceOptions, call)))
        if not reduction.keeps(x.dtype):
            reduce_into(out, [x], reduction)
        return
    step = _step(call, x) * group.world
    for first in range(0, flat.numel(), step):
        count = min(step, flat.numel() - first)
        part = round_up(ceil_div(count, group.world), _PART_UNIT)
        edges = [first + min(count, rank * part) for rank in range(group.world + 1)]
        counts = [end - begin for begin, end in itertools.pairwise(edges)]
        begin = edges[group.rank]
        own = result[begin : begin + counts[group.rank]]
        received = _exchange(call, flat[first : first + count], counts)
        reduce_into(own, received, reduction, begin)
        _all_gather(call, own, result[first : first + count], counts)
    announce_done(call)


def _step(call: Call, partial: torch.Tensor) -> int:
    """Return the elements of a rank's shard that move at a time; all of them on a GPU."""
    if call.problem.device == "cuda":
        return max(partial.numel(), 1)
    return _STEP_BYTES // partial.element_size()


def _all_gather(call: Call, own: torch.Tensor, whole: torch.Tensor, counts: list[int]) -> None:
    """Fill ``whole``, flat, with all ranks' ``own``, of which one may be a part of it."""
    options, largest = _options(AllgatherOptions, call), max(counts)
    on_host = call.problem.device == "cuda" and not _by_nccl(call)
    if _even(counts) and not on_host:
        _wait(call, all_gather_single(_pg(call), whole, own, options))
    elif _by_nccl(call):
        _wait(call, _pg(call).allgather([list(whole.split(counts))], [own], options))
    else:  # gloo gathers as much from each
        sent = own.new_zeros(largest, device="cpu")
        sent[: own.numel()].copy_(own)
        received = sent.new_empty(len(counts) * largest)
        _wait(call, all_gather_single(_pg(call), received, sent, options))
        parts = received.view(len(counts), largest)
        for part, to in zip(parts, whole.split(counts), strict=True):
            to.copy_(part[: to.numel()])


def _exchange(
    call: Call, x: torch.Tensor, counts: list[int], received_counts: list[int] | None = None
) -> Sequence[torch.Tensor]:
    """Send each rank its part of x. Return what this rank got, in rank order: by default as many
    elements from each as it keeps."""
    kept = received_counts or [counts[call.group.rank]] * call.group.world
    even = received_counts is None and _even(counts)  # alike on all ranks
    return _all_to_all(call, x, counts, kept, even).split(kept)


def _all_to_all(
    call: Call, x: torch.Tensor, counts: list[int], received_counts: list[int], even: bool
) -> torch.Tensor:
    on_host = call.problem.device == "cuda" and not _by_nccl(call)
    sent = x.cpu() if on_host else x
    received = empty([sum(received_counts)], sent.dtype, sent.device)
    splits: tuple[list[int], list[int]] = ([], []) if even else (received_counts, counts)
    options = _options(AllToAllOptions, call)
    _wait(call, _pg(call).alltoall_base(received, sent, *splits, options))
    return received.to(x.device)


def _even(counts: Sequence[int]) -> bool:
    return len(set(counts)) == 1


def _by_nccl(call: Call) -> bool:
    return call.problem.device == "cuda" and not call.group.uses_gloo("cuda")


def _sums_by_nccl(call: Call) -> bool:
    return _by_nccl(call) and call.plan.numerics == VENDOR


def _pg(call: Call) -> ProcessGroup:
    return call.group.pg


def _options(cls: type[GroupOptions], call: Call) -> GroupOptions:
    options = cls()
    options.timeout = timedelta(seconds=call.group.timeout_on(call.problem.device))
    if _by_nccl(call):
        options.asyncOp = False  # on the current stream, as torch.distributed's own functions
    return options


def _wait(call: Call, work: Work | None) -> None:
    """Wait for a work, on GPUs with the stream. NCCL returns none for what is on it anyway."""
    if work is not None:
        finish(call, work)
