"""One matmul, and a collective on shared memory that reads all peers' buffers at once.

    all_gather_matmul        publish x | wait for all | copy the shards | matmul
    matmul_reduce_scatter    matmul | publish the partial | wait for all | sum the own rows
    matmul_all_reduce        the same, of all rows (one-shot), or of an equal part, which is then
                             published and copied by the others (two-shot)
    moe_dispatch             publish tokens | wait for all | copy those that come to own experts
    moe_combine              publish rows | wait for all | sum the rows of each own token

The matmul is not split, so this is fastest when it has few rows. csrc/host/collectives.h has the
collectives, their chunks and their synchronisation. Where nothing is converted, the extension runs
the planned call by itself (`execution.bind`, csrc/calls/direct.h); the functions take every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from tpkernels import _C
from tpkernels.algorithms.parts import Products, partial_of, result_shape
from tpkernels.algorithms.reduction import Reduction, RmsNorm
from tpkernels.algorithms.routes import check_room, experts_of, filled, routing_of
from tpkernels.groups.call import Call
from tpkernels.local.memory import empty
from tpkernels.local.product import Weight
from tpkernels.local.ranges import COPY, recorded
from tpkernels.planning.op_spec import ExchangeOptions, RoutedOptions


def collective_of(call: Call) -> _C.calls.Collective:
    """Return the call's collective on shared memory, made once."""
    made: _C.calls.Collective | None = call.kept.get("collective")
    if made is None:
        made = call.kept["collective"] = _new_collective(call)
    return made


def _new_collective(call: Call) -> _C.calls.Collective:
    problem, plan, workspace, rank = call.problem, call.plan, call.workspace, call.group.rank
    spec = problem.spec
    id_of_call = workspace.channel, workspace.segments, plan.signature, plan.text
    if spec.keeps_sum:
        return _C.calls.Collective(*id_of_call, "all_reduce")
    layout = _layout(problem.shape, problem.split_dim, problem.sizes)
    if spec.routed:
        return _C.calls.Collective(
            *id_of_call, "dispatch" if spec.dispatches else "combine", layout
        )
    if not spec.exchanges:
        name = "all_gather" if spec.gathers else "reduce_scatter"
        return _C.calls.Collective(*id_of_call, name, layout)
    to = problem.options_as(ExchangeOptions)
    given = list(problem.shape)
    given[problem.split_dim] = problem.sizes[rank]
    taken = _layout(result_shape(problem, rank), problem.split_dim, problem.sizes)
    others = prod(size for d, size in enumerate(problem.shape) if d not in (to.dim, problem.dim))
    largest = others * max(problem.sizes) * max(to.sizes)  # elements of a piece
    return _C.calls.Collective(
        *id_of_call, "all_to_all", _layout(given, to.dim, to.sizes), taken, largest
    )


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
    with recorded(COPY):
        collective_of(call).run(x.contiguous(), out, bias, residual, normed, weight, eps)


def gather(call: Call, x: torch.Tensor, products: Products) -> None:
    whole = products.memory(call, x)
    _run(call, x, whole)
    products.multiply(whole)


exchange = _run


def dispatch(
    call: Call, x: torch.Tensor, routes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of this rank's experts, and how many each has. x [tokens, H], routes [tokens
    of all ranks, k]."""
    routing, rank = _routing(call, routes), call.group.rank
    count, most = routing.rows[rank], call.problem.options_as(RoutedOptions).max_rows
    rows = empty((count if most is None else most, x.shape[1]), x.dtype, x.device)
    with recorded(COPY):
        collective_of(call).run(x, rows[:count], routing=routing)
    rows[count:].zero_()
    held = experts_of(call.problem)
    return rows, torch.tensor(routing.counts[sum(held[:rank]) :][: held[rank]], dtype=torch.int64)


def combine(
    call: Call, x: torch.Tensor, routes: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> None:
    """Fill ``out`` [tokens, H] with the sums of the tokens' rows by ``weights`` [tokens, k]."""
    routing = _routing(call, routes)
    x = filled(call.problem, x, routing.rows[call.group.rank])
    with recorded(COPY):
        collective_of(call).run(x, out, routing=routing, weights=weights)


def _routing(call: Call, routes: torch.Tensor) -> _C.calls.Routing:
    routing = routing_of(call.problem, routes)
    check_room(call.problem, routing.rows)
    return routing


def reduce(
    call: Call, x: torch.Tensor, w: Weight | None, out: torch.Tensor, reduction: Reduction
) -> None:
    """``out`` may be ``x``. Peers cannot read ``x`` in place then, as it is being overwritten."""
    _run(call, partial_of(call, x, w), out, reduction)


def reduce_and_normalise(
    call: Call,
    x: torch.Tensor,
    w: Weight | None,
    out: torch.Tensor,
    reduction: Reduction,
    norm: RmsNorm,
) -> torch.Tensor:
    normed = empty(out.shape, out.dtype, out.device)
    _run(call, partial_of(call, x, w), out, reduction, normed, norm)
    return normed
