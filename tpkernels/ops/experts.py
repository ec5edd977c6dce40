"""The local steps of a mixture's experts: sort the assignments of tokens to experts, gather the
rows of each expert, and sum the experts' outputs per token.

`tpkernels.nn.MoE` composes them with `grouped_matmul` and the ops that communicate.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tpkernels.algorithms.routes import places_of, weigh_rows
from tpkernels.common import dtypes
from tpkernels.local.memory import empty
from tpkernels.ops import validation
from tpkernels.ops.autograd import Context, Needs
from tpkernels.ops.grouped_matmul import grouped_matmul
from tpkernels.ops.registration import Op, define_kernel, define_local


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
            raise ValueError(
                f"topk_ids contains expert {expert}, which is out of range; expected 0 to "
                f"{num_experts - 1}"
            )


def rows_by_expert(x: torch.Tensor, routing: SortedRoutes) -> torch.Tensor:
    """Return the rows of tokens x [tokens, H], one for each route, in the order of ``routing``.
    Raise ValueError if x has another number of tokens."""
    if len(x) != len(routing.topk_weights):
        raise ValueError(
            f"x has {len(x)} tokens, but topk_ids has {len(routing.topk_weights)}; they must be "
            "equal"
        )
    return x.index_select(0, routing.order // routing.topk_weights.shape[1])


def sum_routes(rows: torch.Tensor, routing: SortedRoutes) -> torch.Tensor:
    """Return the sum of each token's rows by weight, in fp32 in the order of k, rounded once."""
    weights = routing.topk_weights.to(dtypes.accumulator(rows.dtype))
    places = places_of(routing.order).view(weights.shape)
    return _WEIGH_ROWS.entry()(rows, places, weights)


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


define_kernel(
    "_routes_of_experts(Tensor topk_ids, int num_experts, int first, int held, bool static) -> "
    "(Tensor order, Tensor counts)",
    run=_routes_of_experts,
    fake=_routes_like,
)


def _weigh(x: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    out = empty((len(places), x.shape[1]), x.dtype, x.device)
    weigh_rows(x, places, weights, out)
    return out


def _save(ctx: Context, given: Any, output: torch.Tensor) -> None:
    ctx.save_for_backward(given.x, given.places, given.weights)


def _backward(ctx: Context, needs: Needs, grad: torch.Tensor) -> dict[str, Any]:
    x, places, weights = ctx.saved_tensors
    found, wide = {}, grad.to(weights.dtype)[:, None]
    if needs.x:
        by_route = (wide * weights[..., None]).flatten(0, 1).to(x.dtype)
        found["x"] = torch.zeros_like(x).index_copy_(0, places.flatten(), by_route)
    if needs.weights:
        found["weights"] = (wide * x[places].to(weights.dtype)).sum(2)
    return found


_WEIGH_ROWS: Op[torch.Tensor] = define_local(
    "weigh_rows(Tensor x, Tensor places, Tensor weights) -> Tensor",
    run=_weigh,
    fake=lambda x, places, weights: x.new_empty(places.shape[0], x.shape[1]),
    save=_save,
    backward=_backward,
)


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


define_kernel(
    "_local_experts(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor gate_up, Tensor down, "
    "Tensor? gate_up_bias, Tensor? down_bias, str activation) -> Tensor",
    run=local_experts,
    fake=lambda x, *_: torch.empty_like(x),
)
