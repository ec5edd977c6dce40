"""``direct`` on CPUs: one matmul, and a collective that reads the shared buffers of all peers.

    all_gather_matmul        publish x | wait for all | copy the shards | matmul
    matmul_reduce_scatter    matmul | publish the partial | wait for all | sum the local rows
    matmul_all_reduce        matmul | publish the partial | wait for all | sum all rows (one-shot)
                             or a slice, then publish it and copy the peer slices (two-shot)
    moe_dispatch             publish tokens | wait for all | copy the tokens of local experts
    moe_combine              publish rows | wait for all | sum the rows of each local token

The matmul is not split, so this algorithm is fastest with few rows. csrc/host/collectives.h
implements the collectives, their chunks and their synchronization. If no dtype is converted, C++
runs the planned call (`execution.bind`, csrc/calls/direct.h). These functions accept every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from tpkernels import _C
from tpkernels.algorithms.assignments import (
    assigned_rows,
    check_capacity,
    experts_per_rank,
    make_routing,
)
from tpkernels.algorithms.chunks import GatherOutputs, compute_partial, result_shape
from tpkernels.algorithms.reduction import Reduction, RmsNorm
from tpkernels.groups.call import Call
from tpkernels.local.memory import empty
from tpkernels.local.ranges import COPY, record_range
from tpkernels.local.weight import Weight
from tpkernels.planning.op_spec import ExchangeOptions, RoutedOptions


def get_collective(call: Call) -> _C.calls.Collective:
    """Return the shared-memory collective of the call. It is created once."""
    collective: _C.calls.Collective | None = call.cache.get("collective")
    if collective is None:
        collective = call.cache["collective"] = _new_collective(call)
    return collective


def _new_collective(call: Call) -> _C.calls.Collective:
    problem, plan, workspace, rank = call.problem, call.plan, call.workspace, call.group.rank
    spec = problem.spec
    call_args = workspace.channel, workspace.segments, plan.signature, plan.description
    if spec.keeps_sum:
        return _C.calls.Collective(*call_args, "all_reduce", tree=_get_tree(call))
    layout = _layout(problem.shape, problem.split_dim, problem.sizes)
    if spec.routed:
        return _C.calls.Collective(*call_args, "dispatch" if spec.dispatches else "combine", layout)
    if not spec.exchanges:
        name = "all_gather" if spec.gathers else "reduce_scatter"
        return _C.calls.Collective(*call_args, name, layout)
    options = problem.options_as(ExchangeOptions)
    input_shape = list(problem.shape)
    input_shape[problem.split_dim] = problem.sizes[rank]
    output_layout = _layout(result_shape(problem, rank), problem.split_dim, problem.sizes)
    other_dims_numel = prod(
        size for d, size in enumerate(problem.shape) if d not in (options.dim, problem.dim)
    )
    max_slice_numel = other_dims_numel * max(problem.sizes) * max(options.sizes)
    return _C.calls.Collective(
        *call_args,
        "all_to_all",
        _layout(input_shape, options.dim, options.sizes),
        output_layout,
        max_slice_numel,
    )


def _get_tree(call: Call) -> _C.calls.SumTree | None:
    """Return the tree of the sums over K, or None if partial sums are reduced."""
    units = call.problem.sum_units
    if units is not None and "tree" not in call.cache:
        call.cache["tree"] = _C.calls.SumTree(units.k_sizes, units.size, call.group.rank)
    return call.cache.get("tree")


def _layout(shape: Sequence[int], dim: int, sizes: tuple[int, ...]) -> _C.host.ShardLayout:
    return _C.host.ShardLayout(prod(shape[:dim]), prod(shape[dim + 1 :]), sizes)


def _run(
    call: Call,
    x: torch.Tensor,
    out: torch.Tensor,
    reduction: Reduction | None = None,
    normed: torch.Tensor | None = None,
    norm: RmsNorm | None = None,
) -> None:
    bias, residual = (None, None) if reduction is None else (reduction.bias, reduction.residual)
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    with record_range(COPY):
        get_collective(call).run(x.contiguous(), out, bias, residual, normed, weight, eps)


def gather(call: Call, x: torch.Tensor, outputs: GatherOutputs) -> None:
    gathered = outputs.gather_buffer(call, x)
    _run(call, x, gathered)
    outputs.multiply(gathered)


exchange = _run


def dispatch(
    call: Call, x: torch.Tensor, topk_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of the local experts, and the number of rows per expert.

    Args:
        x: [tokens, H].
        topk_ids: [tokens of all ranks, k].
    """
    routing, rank = _routing(call, topk_ids), call.group.rank
    count, max_rows = routing.rows[rank], call.problem.options_as(RoutedOptions).max_rows
    rows = empty((count if max_rows is None else max_rows, x.shape[1]), x.dtype, x.device)
    with record_range(COPY):
        get_collective(call).run(x, rows[:count], routing=routing)
    rows[count:].zero_()
    rank_experts = experts_per_rank(call.problem)
    return rows, torch.tensor(
        routing.counts[sum(rank_experts[:rank]) :][: rank_experts[rank]], dtype=torch.int64
    )


def combine(
    call: Call, x: torch.Tensor, topk_ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> None:
    """Fill ``out`` [tokens, H] with the sums of expert outputs times ``weights`` [tokens, k]."""
    routing = _routing(call, topk_ids)
    x = assigned_rows(call.problem, x, routing.rows[call.group.rank])
    with record_range(COPY):
        get_collective(call).run(x, out, routing=routing, weights=weights)


def _routing(call: Call, topk_ids: torch.Tensor) -> _C.calls.Routing:
    routing = make_routing(call.problem, topk_ids)
    check_capacity(call.problem, routing.rows)
    return routing


def _compute_partial(call: Call, x: torch.Tensor, w: Weight | None) -> torch.Tensor:
    """Return the local partial sums, or their nodes if they are summed by a tree."""
    tree = _get_tree(call)
    if tree is None:
        return compute_partial(call, x, w)
    assert isinstance(w, torch.Tensor)  # checked by validation.py
    return _C.calls.multiply_nodes(x.contiguous(), w, tree)


def reduce(
    call: Call, x: torch.Tensor, w: Weight | None, out: torch.Tensor, reduction: Reduction
) -> None:
    """``out`` may be ``x``. Peers then do not read ``x`` in place, because it is overwritten."""
    _run(call, _compute_partial(call, x, w), out, reduction)


def reduce_and_normalise(
    call: Call,
    x: torch.Tensor,
    w: Weight | None,
    out: torch.Tensor,
    reduction: Reduction,
    norm: RmsNorm,
) -> torch.Tensor:
    normed = empty(out.shape, out.dtype, out.device)
    _run(call, _compute_partial(call, x, w), out, reduction, normed, norm)
    return normed
