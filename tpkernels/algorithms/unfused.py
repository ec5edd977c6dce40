"""``unfused``: a ``torch.distributed`` collective, then the matmul, or vice versa.

    all_gather_matmul        |-- all-gather --|------ matmul ------|
    matmul_reduce_scatter    |------ matmul ------|-- all-to-all --|-- sum --|
    matmul_all_reduce        |------ matmul ------|-- all-to-all --|-- sum --|-- all-gather --|

It runs on any process group. ``auto`` selects it if the ranks share no memory. A rank in a
different call is detected before data is sent; see ``point_to_point``.

Reductions exchange the partial sums with an all-to-all and add them locally, in fp32 and in rank
order. This moves as many bytes as a reduce-scatter, and all algorithms give bitwise identical
results.

On CUDA tensors the NCCL collectives write directly to the result:

Gathers        One all-gather. Uneven shards are passed as a list, and NCCL sends them as one group
               of broadcasts, without padding.
Reductions     With numerics "vendor" one reduce-scatter or all-reduce of the process group, then
               one launch for bias, residual and dtype conversion. With "ordered" an all-to-all,
               then one launch that adds the partial sums.
All-to-alls    One all-to-all, with a copy of the slices before and after it. For routed tokens the
               host needs the counts: on CUDA tensors it waits for them, except on a single rank
               with max_rows, where a token with an invalid expert id becomes NaN.

If dims precede the split dim, shards are not contiguous. They are copied, in one launch if they are
even. Gloo does not support all of these collectives on CUDA tensors, so CUDA tensors are copied to
host memory.
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

from tpkernels.algorithms.assignments import TokenExchange, assigned_rows, sum_weighted_rows
from tpkernels.algorithms.chunks import (
    GatherOutputs,
    as_rows,
    exchange_slices,
    new_partial,
    shard_counts,
)
from tpkernels.algorithms.point_to_point import enter
from tpkernels.algorithms.rank_order import from_rank_order, to_rank_order
from tpkernels.algorithms.reduction import Reduction, reduce_into
from tpkernels.algorithms.waits import finish, signal_done
from tpkernels.common.integers import ceil_div, round_up
from tpkernels.groups.call import Call
from tpkernels.local.matmul import local_matmul
from tpkernels.local.memory import empty
from tpkernels.local.weight import Weight
from tpkernels.planning.op_spec import ExchangeOptions, RoutedOptions
from tpkernels.planning.problem import VENDOR
from tpkernels.torch_private import all_gather_single, reduce_scatter_single

# Chunk size of reductions on the host. Small chunks let the allocator reuse buffers instead of
# mapping new pages.
_CHUNK_BYTES = 4 << 20
GroupOptions = TypeVar(
    "GroupOptions", AllgatherOptions, AllreduceOptions, AllToAllOptions, ReduceScatterOptions
)
_SLICE_ALIGNMENT = 8  # elements; all-reduce slices are multiples: GPU kernels load 8 at a time


def gather(call: Call, x: torch.Tensor, outputs: GatherOutputs) -> None:
    enter(call).wait()
    if call.group.world == 1 and outputs.gathered is None:
        gathered = x if call.problem.device == "cuda" else x.contiguous()
    else:
        gathered = outputs.gather_buffer(call, x)
        _gather(call, x, gathered)
    outputs.multiply(gathered)


def exchange(call: Call, x: torch.Tensor, out: torch.Tensor) -> None:
    enter(call).wait()
    problem = call.problem
    if call.group.world == 1:
        out.copy_(x)
        return
    (send_slices, recv_slices), options = (
        exchange_slices(problem, x, out),
        problem.options_as(ExchangeOptions),
    )
    even = _is_even(problem.sizes) and _is_even(options.sizes)
    counts = [send_slice.numel() for send_slice in send_slices]
    recv_counts = None if even else [recv_slice.numel() for recv_slice in recv_slices]
    received = _exchange(call, to_rank_order(x, options.dim, options.sizes), counts, recv_counts)
    signal_done(call)
    shaped = [
        flat.view(recv_slice.shape) for flat, recv_slice in zip(received, recv_slices, strict=True)
    ]
    torch.cat(shaped, problem.split_dim, out=out)


def dispatch(
    call: Call, x: torch.Tensor, topk_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of the local experts, and the number of rows per expert.

    Args:
        x: [tokens, H].
        topk_ids: [tokens of all ranks, k].
    """
    token_exchange = TokenExchange.plan(call.problem, call.group.rank, topk_ids)
    enter(call).wait()
    send_rows = x.index_select(0, token_exchange.send_order // topk_ids.shape[1])
    rows = _exchange_rows(call, send_rows, token_exchange.send_counts, token_exchange.recv_counts)
    max_rows, count = (
        call.problem.options_as(RoutedOptions).max_rows,
        sum(token_exchange.recv_counts),
    )
    if max_rows is None:
        return rows.index_select(0, token_exchange.expert_order), token_exchange.expert_counts
    padded = rows.new_zeros(max_rows, x.shape[1])
    torch.index_select(rows, 0, token_exchange.expert_order, out=padded[:count])
    return padded, token_exchange.expert_counts


def combine(
    call: Call, x: torch.Tensor, topk_ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> None:
    """Fill ``out`` [tokens, H] with the sums of expert outputs times ``weights`` [tokens, k]."""
    token_exchange = TokenExchange.plan(call.problem, call.group.rank, topk_ids)
    x = assigned_rows(call.problem, x, sum(token_exchange.recv_counts))
    if token_exchange.invalid is not None:
        weights = weights.masked_fill(token_exchange.invalid.view(weights.shape), torch.nan)
    enter(call).wait()
    returned = _exchange_rows(
        call,
        torch.empty_like(x).index_copy_(0, token_exchange.expert_order, x),
        token_exchange.recv_counts,
        token_exchange.send_counts,
    )
    sum_weighted_rows(
        returned, token_exchange.send_order.argsort().view(weights.shape), weights, out
    )


def _exchange_rows(
    call: Call, x: torch.Tensor, sent: list[int], received: list[int]
) -> torch.Tensor:
    """Send each rank its rows of x. Return the received rows in rank order."""
    if call.group.world == 1:
        return x
    width = x.shape[1]
    counts, recv_counts = ([rows * width for rows in row_counts] for row_counts in (sent, received))
    rows = _all_to_all(call, x.view(-1), counts, recv_counts, even=False).view(-1, width)
    signal_done(call)
    return rows


def reduce(
    call: Call, x: torch.Tensor, w: Weight | None, out: torch.Tensor, reduction: Reduction
) -> None:
    """``out`` may be ``x``."""
    links, problem = enter(call), call.problem
    in_place = out.dtype == problem.dtype and (problem.spec.keeps_sum or problem.world == 1)
    partial = x
    if w is not None:
        partial = out if in_place else new_partial(call, x, w)
        local_matmul(as_rows(x), w, as_rows(partial))
    links.wait()
    if problem.world == 1:
        if not reduction.is_identity(partial.dtype):
            reduce_into(out, [partial.contiguous()], reduction)
        elif partial is not out:
            out.copy_(partial)
    elif problem.spec.scatters:
        _reduce_scatter(call, partial, out, reduction)
    else:
        if w is None and out is not x and _reduces_by_nccl(call):
            partial = out if in_place else empty(x.shape, x.dtype, x.device)
            partial.copy_(x)
        _all_reduce(call, partial, out, reduction)


def _gather(call: Call, x: torch.Tensor, out: torch.Tensor) -> None:
    """Fill ``out`` with the x of all ranks, along the split dim."""
    problem = call.problem
    if call.group.world == 1:
        out.copy_(x)
        return
    flat = out.view(-1) if problem.outer == 1 else empty([out.numel()], x.dtype, x.device)
    _all_gather(call, x.contiguous().view(-1), flat, shard_counts(problem))
    signal_done(call)
    if problem.outer != 1:
        from_rank_order(flat, out, problem.split_dim, problem.sizes)


def _reduce_scatter(
    call: Call, partial: torch.Tensor, out: torch.Tensor, reduction: Reduction
) -> None:
    problem = call.problem
    local_out, counts = out.view(-1), shard_counts(problem)
    flat = to_rank_order(partial, problem.split_dim, problem.sizes)
    if _reduces_by_nccl(call):
        total = (
            local_out
            if out.dtype == flat.dtype
            else empty(local_out.shape, flat.dtype, local_out.device)
        )
        options = _options(ReduceScatterOptions, call)
        if _is_even(counts):
            _wait(call, reduce_scatter_single(_pg(call), total, flat, options))
        else:
            _wait(call, _pg(call).reduce_scatter([total], [list(flat.split(counts))], options))
        if not reduction.is_identity(flat.dtype):
            reduce_into(local_out, [total], reduction)
        return
    step = _chunk_numel(call, flat)
    for begin in range(0, max(counts), step):
        sent, lengths = flat, counts
        if max(counts) > step:
            chunks = [shard[begin : begin + step] for shard in flat.split(counts)]
            sent, lengths = torch.cat(chunks), [chunk.numel() for chunk in chunks]
        received = _exchange(call, sent, lengths)
        reduce_into(local_out[begin : begin + step], received, reduction, begin)
    signal_done(call)


def _all_reduce(call: Call, x: torch.Tensor, out: torch.Tensor, reduction: Reduction) -> None:
    """Sum one slice of each chunk into ``out`` on its owner, then gather the slices in place.

    ``out`` may be x. NCCL overwrites x.
    """
    group, flat, result = call.group, x.contiguous().view(-1), out.view(-1)
    if _reduces_by_nccl(call):
        _wait(call, _pg(call).allreduce([x], _options(AllreduceOptions, call)))
        if not reduction.is_identity(x.dtype):
            reduce_into(out, [x], reduction)
        return
    step = _chunk_numel(call, x) * group.world
    for chunk_begin in range(0, flat.numel(), step):
        count = min(step, flat.numel() - chunk_begin)
        slice_numel = round_up(ceil_div(count, group.world), _SLICE_ALIGNMENT)
        offsets = [chunk_begin + min(count, rank * slice_numel) for rank in range(group.world + 1)]
        counts = [end - begin for begin, end in itertools.pairwise(offsets)]
        begin = offsets[group.rank]
        local_out = result[begin : begin + counts[group.rank]]
        received = _exchange(call, flat[chunk_begin : chunk_begin + count], counts)
        reduce_into(local_out, received, reduction, begin)
        _all_gather(call, local_out, result[chunk_begin : chunk_begin + count], counts)
    signal_done(call)


def _chunk_numel(call: Call, partial: torch.Tensor) -> int:
    """Return the number of elements of a shard per chunk. On a GPU a chunk is the full shard."""
    if call.problem.device == "cuda":
        return max(partial.numel(), 1)
    return _CHUNK_BYTES // partial.element_size()


def _all_gather(call: Call, shard: torch.Tensor, gathered: torch.Tensor, counts: list[int]) -> None:
    """Fill the flat tensor ``gathered`` with the shards of all ranks.

    ``shard`` may be a view of ``gathered``.
    """
    options, largest = _options(AllgatherOptions, call), max(counts)
    on_host = call.problem.device == "cuda" and not _uses_nccl(call)
    if _is_even(counts) and not on_host:
        _wait(call, all_gather_single(_pg(call), gathered, shard, options))
    elif _uses_nccl(call):
        _wait(call, _pg(call).allgather([list(gathered.split(counts))], [shard], options))
    else:  # gloo requires equal sizes
        sent = shard.new_zeros(largest, device="cpu")
        sent[: shard.numel()].copy_(shard)
        received = sent.new_empty(len(counts) * largest)
        _wait(call, all_gather_single(_pg(call), received, sent, options))
        padded = received.view(len(counts), largest)
        for padded_shard, dst in zip(padded, gathered.split(counts), strict=True):
            dst.copy_(padded_shard[: dst.numel()])


def _exchange(
    call: Call, x: torch.Tensor, counts: list[int], recv_counts: list[int] | None = None
) -> Sequence[torch.Tensor]:
    """Send each rank its slice of x. Return the received slices in rank order.

    By default, all received slices have the size of the local slice.
    """
    result_counts = recv_counts or [counts[call.group.rank]] * call.group.world
    even = recv_counts is None and _is_even(counts)  # equal on all ranks
    return _all_to_all(call, x, counts, result_counts, even).split(result_counts)


def _all_to_all(
    call: Call, x: torch.Tensor, counts: list[int], recv_counts: list[int], even: bool
) -> torch.Tensor:
    on_host = call.problem.device == "cuda" and not _uses_nccl(call)
    sent = x.cpu() if on_host else x
    received = empty([sum(recv_counts)], sent.dtype, sent.device)
    splits: tuple[list[int], list[int]] = ([], []) if even else (recv_counts, counts)
    options = _options(AllToAllOptions, call)
    _wait(call, _pg(call).alltoall_base(received, sent, *splits, options))
    return received.to(x.device)


def _is_even(counts: Sequence[int]) -> bool:
    return len(set(counts)) == 1


def _uses_nccl(call: Call) -> bool:
    return call.problem.device == "cuda" and not call.group.uses_gloo("cuda")


def _reduces_by_nccl(call: Call) -> bool:
    return _uses_nccl(call) and call.plan.numerics == VENDOR


def _pg(call: Call) -> ProcessGroup:
    return call.group.collectives_on(call.problem.device)


def _options(cls: type[GroupOptions], call: Call) -> GroupOptions:
    options = cls()
    options.timeout = timedelta(seconds=call.group.timeout_on(call.problem.device))
    if _uses_nccl(call):
        options.asyncOp = False  # run on the current stream, like torch.distributed functions
    return options


def _wait(call: Call, work: Work | None) -> None:
    """Wait for a work; on GPUs the stream waits. NCCL returns None if the stream already waits."""
    if work is not None:
        finish(call, work)
