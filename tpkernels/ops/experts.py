"""Local steps of an MoE layer.

They sort the (token, expert) assignments, gather the rows of each expert, and sum the expert
outputs per token. `tpkernels.nn.MoE` combines them with `grouped_matmul` and the communicating ops.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tpkernels.algorithms.assignments import invert_permutation, sum_weighted_rows
from tpkernels.common import dtypes
from tpkernels.local.memory import empty
from tpkernels.ops import validation
from tpkernels.ops.autograd import Context, Needs
from tpkernels.ops.grouped_matmul import grouped_matmul
from tpkernels.ops.registration import Op, define_kernel, define_local


class SortedAssignments(NamedTuple):
    """The (token, expert) assignments, sorted by expert, then by token and slot.

    Attributes:
        order: [tokens * k], permutation: index into the flattened ``topk_ids`` for each row.
        counts: [experts], rows per expert.
        topk_weights: [tokens, k], router weights.
    """

    order: torch.Tensor
    counts: torch.Tensor
    topk_weights: torch.Tensor


def sort_assignments(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int
) -> SortedAssignments:
    """Sort assignments ``topk_ids`` with weights ``topk_weights``, both [tokens, k]. Local.

    Raises ValueError if the shapes differ or an expert id is out of range. On GPUs and in compiled
    graphs the host does not check the ids: an invalid id makes the sum of its token NaN.
    """
    validation.topk(topk_ids, topk_weights, topk_ids)
    ids = topk_ids
    if ids.is_cuda or torch.compiler.is_compiling():
        ids = topk_ids.clamp(0, num_experts - 1)
        topk_weights = topk_weights.masked_fill(ids != topk_ids, torch.nan)
    experts, order = ids.flatten().sort(stable=True)
    if ids is not topk_ids:
        return SortedAssignments(
            order, _expert_offsets(experts, 0, num_experts).diff(), topk_weights
        )
    _check_ids(experts, num_experts)
    return SortedAssignments(order, torch.bincount(experts, minlength=num_experts), topk_weights)


def _expert_offsets(experts: torch.Tensor, first: int, num_local: int) -> torch.Tensor:
    """Return the offsets [num_local + 1] of experts from ``first`` on in the ascending ids."""
    ids = torch.arange(first, first + num_local + 1, dtype=experts.dtype, device=experts.device)
    return torch.searchsorted(experts, ids)


def _check_ids(experts: torch.Tensor, num_experts: int) -> None:
    """Raise ValueError if an id is out of range. ``experts`` is ascending. The host waits."""
    for expert in experts[:: max(1, len(experts) - 1)].tolist():  # smallest and largest id
        if not 0 <= expert < num_experts:
            raise ValueError(
                f"topk_ids contains expert {expert}, which is out of range; expected 0 to "
                f"{num_experts - 1}"
            )


def permute_tokens(x: torch.Tensor, assignments: SortedAssignments) -> torch.Tensor:
    """Return the rows of x [tokens, H] permuted to expert order, one row per assignment.

    Raises ValueError if x and ``assignments`` have different numbers of tokens.
    """
    if len(x) != len(assignments.topk_weights):
        raise ValueError(
            f"x has {len(x)} tokens, but topk_ids has {len(assignments.topk_weights)}; they must "
            "be equal"
        )
    return x.index_select(0, assignments.order // assignments.topk_weights.shape[1])


def reduce_by_token(rows: torch.Tensor, assignments: SortedAssignments) -> torch.Tensor:
    """Return the weighted sum of the rows of each token, in fp32 in slot order, rounded once."""
    weights = assignments.topk_weights.to(dtypes.accumulator(rows.dtype))
    inverse = invert_permutation(assignments.order).view(weights.shape)
    return _WEIGH_ROWS.entry()(rows, inverse, weights)


def _routes_of_experts(
    topk_ids: torch.Tensor, num_experts: int, first: int, num_local: int, static: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the assignments of ``num_local`` experts from ``first`` on, and their counts.

    Assignments have the order of `sort_assignments`. With ``static`` the assignments of all other
    experts follow, so the length is fixed: the host neither waits nor checks the ids.
    """
    experts, order = topk_ids.flatten().sort(stable=True)
    offsets = _expert_offsets(experts, first, num_local)
    if static:
        local_first = torch.arange(len(order), device=order.device) + offsets[0]
        return order.index_select(0, local_first % max(1, len(order))), offsets.diff()
    _check_ids(experts, num_experts)
    return order[int(offsets[0]) : int(offsets[-1])], offsets.diff()


def _fake_routes(
    topk_ids: torch.Tensor, num_experts: int, first: int, num_local: int, static: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = topk_ids.numel() if static else torch.library.get_ctx().new_dynamic_size()
    return topk_ids.new_empty(rows, dtype=torch.int64), topk_ids.new_empty(
        num_local, dtype=torch.int64
    )


define_kernel(
    "_routes_of_experts(Tensor topk_ids, int num_experts, int first, int held, bool static) -> "
    "(Tensor order, Tensor counts)",
    run=_routes_of_experts,
    fake=_fake_routes,
)


def _weigh_rows(x: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return ``sum_j(weights[:, j] * x[inverse[:, j]])``. inverse and weights [tokens, k]."""
    out = empty((len(inverse), x.shape[1]), x.dtype, x.device)
    sum_weighted_rows(x, inverse, weights, out)
    return out


def _save(ctx: Context, args: Any, output: torch.Tensor) -> None:
    ctx.save_for_backward(args.x, args.places, args.weights)


def _backward(ctx: Context, needs: Needs, grad: torch.Tensor) -> dict[str, Any]:
    x, inverse, weights = ctx.saved_tensors
    grads, token_grads = {}, grad.to(weights.dtype)[:, None]
    if needs.x:
        row_grads = (token_grads * weights[..., None]).flatten(0, 1).to(x.dtype)
        grads["x"] = torch.zeros_like(x).index_copy_(0, inverse.flatten(), row_grads)
    if needs.weights:
        grads["weights"] = (token_grads * x[inverse].to(weights.dtype)).sum(2)
    return grads


_WEIGH_ROWS: Op[torch.Tensor] = define_local(
    "weigh_rows(Tensor x, Tensor places, Tensor weights) -> Tensor",
    run=_weigh_rows,
    fake=lambda x, inverse, weights: x.new_empty(inverse.shape[0], x.shape[1]),
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
    """Return the weighted sum of ``down(activation(gate(x)) * up(x))`` over the local experts.

    x [tokens, H]. A negative id denotes an expert of a different rank and is skipped. Registered as
    ``torch.ops.tpkernels._local_experts``, so that compiled graphs do not see the number of rows.
    """
    validation.topk(topk_ids, topk_weights, x)
    experts, order = topk_ids.flatten().sort(stable=True)
    offsets = _expert_offsets(experts, 0, len(gate_up))
    _check_ids(experts[-1:].clamp(min=0), len(gate_up))
    counts, local_order = offsets.diff(), order[int(offsets[0]) :]
    rows = x.index_select(0, local_order // topk_ids.shape[1])
    gate, up = grouped_matmul(rows, gate_up, counts, gate_up_bias).chunk(2, 1)
    inner = ACTIVATIONS[activation](gate) * up
    y = grouped_matmul(inner, down, counts, down_bias)
    if len(y) < len(order):
        y = F.pad(y, (0, 0, 0, 1))
    inverse = torch.full_like(order, len(rows))  # index of the zero row, for skipped assignments
    inverse.scatter_(0, local_order, torch.arange(len(rows)))
    weights = topk_weights.to(dtypes.accumulator(x.dtype))
    return _weigh_rows(y, inverse.view(topk_ids.shape), weights)


define_kernel(
    "_local_experts(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor gate_up, Tensor down, "
    "Tensor? gate_up_bias, Tensor? down_bias, str activation) -> Tensor",
    run=local_experts,
    fake=lambda x, *_: torch.empty_like(x),
)
