"""Column-parallel layer without sequence parallelism: ``y_i = x @ w_i`` with a replicated x.

Each rank holds a slice of the columns of w. The forward is local. In the backward each rank
computes a partial gradient of x, and ``matmul_all_reduce`` sums the partials. This is the Megatron
operator "f" (identity forward, all-reduce backward), fused with the preceding matmul.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpkernels import _C, groups
from tpkernels.algorithms.chunks import as_rows
from tpkernels.groups import GroupLike
from tpkernels.local.matmul import allocating_matmul
from tpkernels.local.packed import weight_columns
from tpkernels.ops import validation
from tpkernels.ops.autograd import ColumnGrads, Context, Needs
from tpkernels.ops.execution import materialize
from tpkernels.ops.registration import Op, bias_list, define_local

SCHEMA = "column_matmul(Tensor x, Tensor[] weights, str group, Tensor[]? biases=None) -> Tensor[]"


def _run(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    group: str,
    biases: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    validation.tensors({"x": x, "weights": weights, "biases": biases})
    validation.matrix_input(x)
    validation.weights(weights, biases, x, x.shape[-1])
    outs = []
    for i, w in enumerate(weights):
        bias = None if biases is None else materialize(biases[i])
        outs.append(allocating_matmul(as_rows(x), w, bias).view(*x.shape[:-1], weight_columns(w)))
    return outs


def _fake(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    group: str,
    biases: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    groups.get(group)
    return [x.new_empty((*x.shape[:-1], weight_columns(w))) for w in weights]


def _save(ctx: Context, args: Any, output: object) -> None:
    ctx.group = args.group
    ctx.column_grads = ColumnGrads(ctx, args.x, args.weights, args.biases, args.x)


def _backward(
    ctx: Context, needs: Needs, grad_outs: Sequence[torch.Tensor | None]
) -> dict[str, Any]:
    x, *weights = ctx.saved_tensors
    grad_operands = ctx.column_grads.grad_operands(grad_outs, weights) if needs.x else None
    grad_x = None
    if grad_operands is not None:
        grad_x = torch.ops.tpkernels.matmul_all_reduce.default(*grad_operands, ctx.group)
    return {"x": grad_x, **ctx.column_grads.compute_weight_grads(needs, grad_outs, lambda: x)}


OP: Op[list[torch.Tensor]] = define_local(
    SCHEMA,
    run=_C.calls.make_columns_kernel(_run),
    fake=_fake,
    save=_save,
    backward=_backward,
    autocast=True,
)


def column_matmul(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    group: GroupLike,
    biases: Sequence[torch.Tensor | None] | None,
) -> list[torch.Tensor]:
    """Return ``x @ w_i + bias_i`` for the local weights [K, N_i].

    x [..., K] must be equal on all ranks of ``group``. The backward sums the gradient of x over the
    group. Raises the errors of the public ops.
    """
    return OP.entry()(x, list(weights), groups.group_name(group), bias_list(x, biases))
