"""Experts of a mixture on several ranks.

Tensor-parallel: each rank has some of the width of every expert, and all tokens' routes.

    all_gather_grouped_matmul       tokens of all ranks, sorted by expert, times w[expert]
    grouped_matmul_reduce_scatter   rows times w[expert], summed per token and over the ranks
    grouped_matmul_all_reduce       the same for tokens that all ranks have

Expert-parallel: each rank has some of the experts, and the tokens that are routed to them.

    dispatch_grouped_matmul         tokens of all ranks for own experts, times w[expert]
    grouped_matmul_combine          rows times w[expert], back at the tokens' ranks and summed

They compose the ops of these names. On GPUs all but `grouped_matmul_all_reduce` are one call each
where no gradient is recorded, in which "fused" multiplies while rows travel. On CPUs the last two
would not pay: AMD EPYC Zen 5, torch 2.13, 2026-11-26, 2 ranks, 64 and 2048 tokens of
benchmarks/moe.py, in turns: a first product that gathers each expert's rows just before it
multiplies them takes 1.07 and 1.00 of the time, and a layer whose second writes into a symmetric
tensor, of which the combine copies nothing, 1.00 and 1.00.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tpkernels import dtypes, groups, validation
from tpkernels.algorithms.routes import places_of, weigh_rows
from tpkernels.groups import GroupLike, name_of
from tpkernels.local.memory import empty
from tpkernels.ops.all_gather import all_gather
from tpkernels.ops.all_reduce import all_reduce
from tpkernels.ops.grouped_matmul import grouped_matmul
from tpkernels.ops.grouped_products import (
    as_many_rows,
    check_bias,
    check_held,
    check_operands,
    counted_rows,
)
from tpkernels.ops.moe_combine import moe_combine
from tpkernels.ops.moe_dispatch import Handle, gather_routes, moe_dispatch
from tpkernels.ops.reduce_scatter import reduce_scatter
from tpkernels.ops.registration import define, define_local
from tpkernels.shards import shard_sizes as balanced_sizes


class SortedRoutes(NamedTuple):
    """The routes of tokens to experts, sorted by expert, and within one by token and place.

    Attributes:
        order: [tokens * k], the route of each row.
        counts: [experts], the rows of each.
        topk_weights: [tokens, k].
    """

    order: torch.Tensor
    counts: torch.Tensor
    topk_weights: torch.Tensor


def route(topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int) -> SortedRoutes:
    """Sort the routes of tokens, ``topk_ids`` and ``topk_weights`` [tokens, k]. Local. Raise
    ValueError if the shapes differ or an expert is none of ``num_experts``; on GPUs and in compiled
    graphs, where no host looks, the token's sum becomes NaN."""
    validation.topk(topk_ids, topk_weights, topk_ids)
    ids = topk_ids
    if ids.is_cuda or torch.compiler.is_compiling():
        ids = topk_ids.clamp(0, num_experts - 1)
        topk_weights = topk_weights.masked_fill(ids != topk_ids, torch.nan)
    experts, order = ids.flatten().sort(stable=True)
    if ids is not topk_ids:
        return SortedRoutes(order, _edges(experts, 0, num_experts).diff(), topk_weights)
    _check_ids(experts, num_experts)
    return SortedRoutes(order, torch.bincount(experts, minlength=num_experts), topk_weights)


def _edges(experts: torch.Tensor, first: int, held: int) -> torch.Tensor:
    """Return where each of ``held`` experts from the ``first`` on begins among ascending ones, and
    the last's end."""
    numbers = torch.arange(first, first + held + 1, dtype=experts.dtype, device=experts.device)
    return torch.searchsorted(experts, numbers)


def _check_ids(experts: torch.Tensor, num_experts: int) -> None:
    """Raise ValueError if one of ascending ids is none of ``num_experts``. The host waits."""
    for expert in experts[:: max(1, len(experts) - 1)].tolist():  # the first and the last
        if not 0 <= expert < num_experts:
            raise ValueError(f"topk_ids has {expert}; experts are 0 to {num_experts - 1}")


def rows_by_expert(x: torch.Tensor, routing: SortedRoutes) -> torch.Tensor:
    """Return the rows of tokens x [tokens, H], one for each route, in the order of ``routing``.
    Raise ValueError if x has another number of tokens."""
    if len(x) != len(routing.topk_weights):
        raise ValueError(f"x has {len(x)} tokens and topk_ids {len(routing.topk_weights)}")
    return x.index_select(0, routing.order // routing.topk_weights.shape[1])


def sum_routes(rows: torch.Tensor, routing: SortedRoutes) -> torch.Tensor:
    """Return the sum of each token's rows by weight, in fp32 in the order of k, rounded once."""
    weights = routing.topk_weights.to(dtypes.accumulator(rows.dtype))
    places = places_of(routing.order).view(weights.shape)
    y: torch.Tensor = torch.ops.tpkernels._weigh_rows.default(rows, places, weights)
    return y


def _routes_of_experts(
    topk_ids: torch.Tensor, num_experts: int, first: int, held: int, static: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the routes to ``held`` experts from the ``first`` on, in the order of `route`, and
    how many each has. The others follow if their number shall be ``static``: no host waits, or
    looks for experts that there are not."""
    experts, order = topk_ids.flatten().sort(stable=True)
    edges = _edges(experts, first, held)
    if static:
        own_first = torch.arange(len(order), device=order.device) + edges[0]
        return order.index_select(0, own_first % max(1, len(order))), edges.diff()
    _check_ids(experts, num_experts)
    return order[int(edges[0]) : int(edges[-1])], edges.diff()


def _routes_like(
    topk_ids: torch.Tensor, num_experts: int, first: int, held: int, static: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = topk_ids.numel() if static else torch.library.get_ctx().new_dynamic_size()
    return topk_ids.new_empty(rows, dtype=torch.int64), topk_ids.new_empty(held, dtype=torch.int64)


define_local(
    "_routes_of_experts(Tensor topk_ids, int num_experts, int first, int held, bool static) -> "
    "(Tensor order, Tensor counts)",
    run=_routes_of_experts,
    fake=_routes_like,
)


def _weigh(x: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    out = empty((len(places), x.shape[1]), x.dtype, x.device)
    weigh_rows(x, places, weights, out)
    return out


def _save(ctx: Any, given: Any, output: torch.Tensor) -> None:
    ctx.save_for_backward(given.x, given.places, given.weights)


def _backward(ctx: Any, needs: Any, grad: torch.Tensor) -> dict[str, Any]:
    x, places, weights = ctx.saved_tensors
    found, wide = {}, grad.to(weights.dtype)[:, None]
    if needs.x:
        by_route = (wide * weights[..., None]).flatten(0, 1).to(x.dtype)
        found["x"] = torch.zeros_like(x).index_copy_(0, places.flatten(), by_route)
    if needs.weights:
        found["weights"] = (wide * x[places].to(weights.dtype)).sum(2)
    return found


define_local(
    "_weigh_rows(Tensor x, Tensor places, Tensor weights) -> Tensor",
    run=_weigh,
    fake=lambda x, places, weights: x.new_empty(places.shape[0], x.shape[1]),
    save=_save,
    backward=_backward,
)


def _check_weight(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Check that tokens can be multiplied, before they travel."""
    if not torch.is_autocast_enabled(x.device.type):  # which casts either
        check_operands(x, w)
    check_bias(bias, w)


def all_gather_grouped_matmul(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w: torch.Tensor,
    group: GroupLike,
    *,
    bias: torch.Tensor | None = None,
    shard_sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> tuple[torch.Tensor, SortedRoutes]:
    """Gather the ranks' tokens and multiply them by the experts that a router chose for them.

    Args:
        x: [tokens, K], this rank's.
        topk_ids, topk_weights: [tokens, k], int64 or int32, and floating-point.
        w, bias: [experts, K, N] and [experts, N], as `grouped_matmul` takes them: this rank's
            columns of all experts.
        shard_sizes: tokens of each rank; default: all the same.
        algorithm: of the gather; "fused" multiplies meanwhile.

    Returns:
        The product [tokens of all ranks * k, N], by expert, and the `SortedRoutes` for
        `grouped_matmul_reduce_scatter`.
    """
    _check_weight(x, w, bias)
    options: dict[str, Any] = {"shard_sizes": shard_sizes, "algorithm": algorithm}
    in_one_call = _in_one_call(algorithm, x)
    ids = gather_routes(x, topk_ids, topk_weights, name_of(group), shard_sizes)
    weights = all_gather(topk_weights, group, shard_sizes=shard_sizes)
    routing = route(ids, weights, len(w))
    if in_one_call:
        product: torch.Tensor = _interruptible(
            group, _run_gather, x, w, bias, *routing[:2], name_of(group), **options
        )
        return product, routing
    rows = rows_by_expert(all_gather(x, group, **options), routing)
    return grouped_matmul(rows, w, routing.counts, bias), routing


def grouped_matmul_reduce_scatter(
    x: torch.Tensor,
    w: torch.Tensor,
    routing: SortedRoutes,
    group: GroupLike,
    *,
    bias: torch.Tensor | None = None,
    shard_sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    """Multiply rows by their expert, sum each token's by weight and over the ranks, and return this
    rank's tokens.

    Args:
        x: [tokens of all ranks * k, K], by expert as `all_gather_grouped_matmul` returns it.
        w: [experts, K, N]: this rank's rows of all experts.
        bias: [experts, N], zero where another rank adds it.
        shard_sizes: tokens of each rank; default: all the same.
        algorithm: of the sum over the ranks; "fused" multiplies meanwhile.

    Returns:
        [tokens, N] in x's dtype. A rank sums a token's products in fp32 in the order of k and
        rounds once; the ranks' sums are those of `reduce_scatter`.
    """
    options: dict[str, Any] = {"shard_sizes": shard_sizes, "algorithm": algorithm}
    if _in_one_call(algorithm, x):
        y: torch.Tensor = _interruptible(
            group, _run_scatter, x, w, bias, *routing, name_of(group), **options
        )
        return y
    partial = sum_routes(grouped_matmul(x, w, routing.counts, bias), routing)
    return reduce_scatter(partial, group, **options)


def grouped_matmul_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    routing: SortedRoutes,
    group: GroupLike,
    *,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do what `grouped_matmul_reduce_scatter` does for tokens that all ranks have, and return them
    all. ``routing`` and rows are those of ``route`` and ``rows_by_expert`` of this module."""
    return all_reduce(sum_routes(grouped_matmul(x, w, routing.counts, bias), routing), group)


_NO_GRADIENT = "call the function of this name in tpkernels, which has them"
_run_gather = define(
    "all_gather_grouped_matmul(Tensor x, Tensor w, Tensor? bias, Tensor order, Tensor counts, "
    "str group, *, SymInt[]? shard_sizes=None, str algorithm='auto') -> Tensor",
    record="all_gather",
    no_gradient=_NO_GRADIENT,
)
_run_scatter = define(
    "grouped_matmul_reduce_scatter(Tensor x, Tensor w, Tensor? bias, Tensor order, Tensor counts, "
    "Tensor topk_weights, str group, *, SymInt[]? shard_sizes=None, str algorithm='auto') -> "
    "Tensor",
    record="reduce_scatter",
    no_gradient=_NO_GRADIENT,
)
_run_dispatch = define(
    "dispatch_grouped_matmul(Tensor x, Tensor routes, Tensor w, Tensor? bias, int num_experts, "
    "str group, *, SymInt[]? shard_sizes=None, SymInt? max_rows=None, str algorithm='auto') -> "
    "(Tensor rows, Tensor counts, Tensor product)",
    record="moe_dispatch",
    no_gradient=_NO_GRADIENT,
)
_run_combine = define(
    "grouped_matmul_combine(Tensor x, Tensor w, Tensor? bias, Tensor counts, Tensor topk_weights, "
    "Tensor routes, int num_experts, str group, *, SymInt[]? shard_sizes=None, "
    "SymInt? max_rows=None, str algorithm='auto') -> Tensor",
    record="moe_combine",
    no_gradient=_NO_GRADIENT,
)


def _in_one_call(algorithm: str, x: torch.Tensor) -> bool:
    """Return whether a product and what moves its rows are one call, the same on all ranks; see the
    head of this file."""
    plain = not (torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type))
    if algorithm == "fused" and not plain:
        raise NotImplementedError(
            "algorithm 'fused' of experts has no gradient, and casts nothing: call it under "
            "torch.no_grad() and without autocast, or pass another algorithm"
        )
    return plain and (x.is_cuda or algorithm != "auto")


def _interruptible(group: GroupLike, run: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run an op; break the group if that is interrupted."""
    try:
        return run(*args, **options)
    except BaseException as error:
        groups.break_if_interrupted(group, error)
        raise


def dispatch_grouped_matmul(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w: torch.Tensor,
    num_experts: int,
    group: GroupLike,
    *,
    bias: torch.Tensor | None = None,
    shard_sizes: Sequence[int] | None = None,
    max_rows: int | None = None,
    algorithm: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, Handle]:
    """Bring tokens to the ranks of their experts, as `moe_dispatch` does, and multiply them.

    Args:
        x: [tokens, K], this rank's.
        topk_ids, topk_weights: [tokens, k], int64 or int32, and floating-point.
        w, bias: [experts of this rank, K, N] and [experts of this rank, N], as `grouped_matmul`
            takes them.
        num_experts: of all ranks, which hold ``tpkernels.shard_sizes(num_experts, world)``.
        shard_sizes: tokens of each rank; default: all the same.
        max_rows: as `moe_dispatch` takes it; products without a row are undefined.

    Returns:
        The product [R, N] of the rows that `moe_dispatch` returns, their ``counts``, and the
        handle for `grouped_matmul_combine`.
    """
    _check_weight(x, w, bias)
    name = name_of(group)
    if not torch.compiler.is_compiling():
        members = groups.get(name)
        held = balanced_sizes(num_experts, members.world)[members.rank]
        check_held(w, num_experts, held, members.rank, members.world)
    options: dict[str, Any] = {"shard_sizes": shard_sizes, "max_rows": max_rows}
    if not _in_one_call(algorithm, x):
        rows, counts, handle = moe_dispatch(
            x, topk_ids, topk_weights, num_experts, group, algorithm=algorithm, **options
        )
        used = counted_rows(rows, counts, max_rows)
        return as_many_rows(grouped_matmul(used, w, counts, bias), rows), counts, handle
    routes = gather_routes(x, topk_ids, topk_weights, name, shard_sizes)
    _, counts, product = _interruptible(
        name, _run_dispatch, x, routes, w, bias, num_experts, name, algorithm=algorithm, **options
    )
    handle = Handle(routes, topk_weights, num_experts, counts, name, shard_sizes, max_rows, None)
    return product, counts, handle


def grouped_matmul_combine(
    x: torch.Tensor,
    w: torch.Tensor,
    handle: Handle,
    *,
    bias: torch.Tensor | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    """Multiply rows by their expert, and do with the products what `moe_combine` does.

    Args:
        x: [R, K], by expert as `dispatch_grouped_matmul` returns them.
        w, bias: [experts of this rank, K, N] and [experts of this rank, N].
        handle: of that dispatch.

    Returns:
        [tokens, N] of this rank's tokens, in x's dtype. Products are rounded to it, by "fused" with
        their bias, otherwise before and after it.
    """
    if not _in_one_call(algorithm, x):
        used = counted_rows(x, handle.counts, handle.max_rows)
        product = as_many_rows(grouped_matmul(used, w, handle.counts, bias), x)
        return moe_combine(product, handle, algorithm=algorithm)
    y: torch.Tensor = _interruptible(
        *(handle.group, _run_combine, x, w, bias, handle.counts, handle.topk_weights),
        *(handle.routes, handle.num_experts, handle.group),
        shard_sizes=handle.shard_sizes,
        max_rows=handle.max_rows,
        algorithm=algorithm,
    )
    return y


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def local_experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: str,
) -> torch.Tensor:
    """Return what the experts of this rank add to tokens x [tokens, H]: ``down(activation(gate(x))
    * up(x))``, summed by weight. A negative id is of another rank's expert, and adds nothing. Also
    ``torch.ops.tpkernels._local_experts``, of which no compiled graph sees the number of rows."""
    validation.topk(topk_ids, topk_weights, x)
    experts, order = topk_ids.flatten().sort(stable=True)
    edges = _edges(experts, 0, len(gate_up))
    _check_ids(experts[-1:].clamp(min=0), len(gate_up))
    counts, routes = edges.diff(), order[int(edges[0]) :]
    rows = x.index_select(0, routes // topk_ids.shape[1])
    gate, up = grouped_matmul(rows, gate_up, counts, gate_up_bias).chunk(2, 1)
    inner = ACTIVATIONS[activation](gate) * up
    y = grouped_matmul(inner, down, counts, down_bias)
    if len(y) < len(order):
        y = F.pad(y, (0, 0, 0, 1))
    places = torch.full_like(order, len(rows))  # the row of zeros, of other ranks' experts
    places.scatter_(0, routes, torch.arange(len(rows)))
    weights = topk_weights.to(dtypes.accumulator(x.dtype))
    return _weigh(y, places.view(topk_ids.shape), weights)


define_local(
    "_local_experts(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor gate_up, Tensor down, "
    "Tensor? gate_up_bias, Tensor? down_bias, str activation) -> Tensor",
    run=local_experts,
    fake=lambda x, *_: torch.empty_like(x),
)
