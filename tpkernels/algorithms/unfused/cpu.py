"""``unfused`` in the host's memory. It runs on any process group, and ``auto`` chooses it where
ranks share no memory.

Reductions move the partials with an all-to-all and sum them locally, in fp32 and in rank order.
That moves as many bytes as a reduce-scatter, and gives the same bits as every other algorithm. It
takes CUDA tensors too, where gloo moves them: through the host's memory.

    all_gather_matmul        |-- all-gather --|------ matmul ------|
    matmul_reduce_scatter    |------ matmul ------|-- all-to-all --|-- sum --|
    matmul_all_reduce        the same, then       |-- all-gather --|

A rank in another call is detected before anything is sent; see ``transport``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions

from tpkernels.algorithms.exchange import Exchange, counts_of, place
from tpkernels.algorithms.reduction import Reduction, reduce_into, reduced
from tpkernels.algorithms.rms_norm import behind_all_reduce, behind_matmul_all_reduce
from tpkernels.algorithms.shards import as_rows, matmul_partial, shard_shape
from tpkernels.call import Call
from tpkernels.integers import ceil_div
from tpkernels.local.matmul import local_matmul
from tpkernels.local.memory import empty
from tpkernels.local.product import Weight
from tpkernels.transport.point_to_point import enter
from tpkernels.transport.waits import announce_done, finish

# A reduction moves in steps of this size, so that the allocator can reuse their buffers instead of
# taking fresh pages.
_STEP_BYTES = 4 << 20


def _options(cls: Any, call: Call) -> Any:
    options = cls()
    options.timeout = timedelta(seconds=call.group.timeout_on(call.problem.device))
    return options


def _gather(call: Call, x: torch.Tensor) -> torch.Tensor:
    """x of all ranks along the problem's dim, contiguous."""
    group, problem = call.group, call.problem
    if group.world == 1:
        return x.contiguous()
    dim, sizes = problem.dim, problem.sizes
    assert dim is not None  # an all-gather has one
    largest = max(sizes)
    if x.shape[dim] < largest:  # the collective needs equal shards
        padded = x.new_zeros((*x.shape[:dim], largest, *x.shape[dim + 1 :]))
        padded.narrow(dim, 0, x.shape[dim]).copy_(x)
        x = padded
    stacked = _all_gather(call, x.reshape(-1)).view(group.world, *x.shape)
    announce_done(call)
    if dim == 0 and all(size == largest for size in sizes):
        return stacked.flatten(0, 1)
    shards = [stacked[r].narrow(dim, 0, size) for r, size in enumerate(sizes)]
    return torch.cat(shards, dim, out=empty(problem.shape, x.dtype, x.device))


def _all_gather(call: Call, own: torch.Tensor) -> torch.Tensor:
    """own [N] of all ranks [world * N]."""
    sent = own.cpu() if call.problem.device == "cuda" and call.group.by_gloo("cuda") else own
    received = empty([call.group.world * sent.numel()], sent.dtype, sent.device)
    options = _options(AllgatherOptions, call)
    finish(call, call.group.pg._allgather_base(received, sent, options))
    return received.to(own.device)


def _scatter(
    call: Call, pieces: Sequence[torch.Tensor], counts: Sequence[int] | None = None
) -> Sequence[torch.Tensor]:
    """Send piece r to rank r. Returns what the ranks sent to this one, flat and in rank order:
    ``counts`` elements; by default as many as it keeps of its own."""
    group = call.group
    received_splits = list(counts or [pieces[group.rank].numel()] * group.world)
    sent = torch.cat([piece.reshape(-1) for piece in pieces])
    device = sent.device
    if call.problem.device == "cuda" and group.by_gloo("cuda"):
        sent = sent.cpu()
    received = sent.new_empty(sum(received_splits))
    options = _options(AllToAllOptions, call)
    splits = [piece.numel() for piece in pieces]
    finish(call, group.pg.alltoall_base(received, sent, received_splits, splits, options))
    return received.to(device).split(received_splits)


def all_gather(call: Call, x: torch.Tensor) -> torch.Tensor:
    enter(call).wait()
    if call.group.world == 1:
        return empty(x.shape, x.dtype, x.device).copy_(x)
    return _gather(call, x)


def all_gather_matmul(
    call: Call,
    x: torch.Tensor,
    weights: list[Weight],
    biases: list[torch.Tensor | None],
    outs: list[torch.Tensor],
    gathered: torch.Tensor | None,
) -> None:
    enter(call).wait()
    whole = _gather(call, x)
    if gathered is not None:
        gathered.copy_(whole)
    for w, bias, out in zip(weights, biases, outs, strict=True):
        local_matmul(as_rows(whole), w, as_rows(out), bias)


def _reduce_scatter(call: Call, partial: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    problem, group = call.problem, call.group
    if group.world == 1:
        return reduced(partial, reduction)
    assert problem.dim is not None  # a reduce-scatter has one
    out = empty(shard_shape(call.problem, call.group.rank), reduction.out_dtype, partial.device)
    shards = [shard.reshape(-1) for shard in partial.split(list(problem.sizes), problem.dim)]
    flat = out.view(-1)
    step = _step(call, partial)
    for begin in range(0, max(shard.numel() for shard in shards), step):
        received = _scatter(call, [shard[begin : begin + step] for shard in shards])
        reduce_into(flat[begin : begin + step], received, reduction, begin)
    announce_done(call)
    return out


def all_to_all(call: Call, x: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    enter(call).wait()
    out = exchange.result(call, x)
    if call.group.world == 1:
        return out.copy_(x)
    places = exchange.taken(call, out)
    place(_scatter(call, exchange.given(x), counts_of(places)), places)
    announce_done(call)
    return out


def _step(call: Call, partial: torch.Tensor) -> int:
    """Elements of a rank's shard that move at a time; all of them on a GPU."""
    if call.problem.device == "cuda":
        return max(partial.numel(), 1)
    return _STEP_BYTES // partial.element_size()


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
    enter(call).wait()
    _all_reduce(call, x, out, reduction)


def _all_reduce(call: Call, x: torch.Tensor, out: torch.Tensor, reduction: Reduction) -> None:
    """Each rank reduces its part of every step of the flat tensor, then the parts are gathered."""
    group = call.group
    flat, result = x.reshape(-1), out.view(-1)
    if group.world == 1:
        if x.data_ptr() != out.data_ptr():
            result.copy_(reduced(flat, reduction))
        return
    step = _step(call, x) * group.world
    for first in range(0, flat.numel(), step):
        count = min(step, flat.numel() - first)
        part = ceil_div(count, group.world)
        edges = [first + min(count, r * part) for r in range(group.world + 1)]
        received = _scatter(call, [flat[a:b] for a, b in itertools.pairwise(edges)])
        own = result.new_empty(part)
        begin, end = edges[group.rank], edges[group.rank + 1]
        reduce_into(own[: end - begin], received, reduction, begin)
        result[first : first + count].copy_(_all_gather(call, own)[:count])
    announce_done(call)


def matmul_all_reduce(call: Call, x: torch.Tensor, w: Weight, reduction: Reduction) -> torch.Tensor:
    link = enter(call)
    partial = matmul_partial(call, x, w)
    if call.group.world == 1:
        return reduced(partial, reduction)
    link.wait()
    out = empty(partial.shape, reduction.out_dtype, partial.device)
    _all_reduce(call, partial, out, reduction)
    return out


all_reduce_rms_norm = behind_all_reduce(all_reduce)
matmul_all_reduce_rms_norm = behind_matmul_all_reduce(matmul_all_reduce)
