"""``y_i = x @ w_i`` where all ranks have the same x and each has its own columns of w: the
column-parallel layer without sequence parallelism.

The forward is local. In the backward each rank has a partial gradient of x, from its columns, and
one ``matmul_all_reduce`` sums them: Megatron's "f" (identity forward, all-reduce backward), fused
with the matmul before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpkernels import _C, groups
from tpkernels.algorithms.parts import as_rows
from tpkernels.groups import GroupLike
from tpkernels.local.matmul import new_product
from tpkernels.local.packed import columns_of
from tpkernels.ops import validation
from tpkernels.ops.autograd import ColumnGrads, Context, Needs
from tpkernels.ops.execution import materialized
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
        bias = None if biases is None else materialized(biases[i])
        outs.append(new_product(as_rows(x), w, bias).view(*x.shape[:-1], columns_of(w)))
    return outs


def _fake(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    group: str,
    biases: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    groups.get(group)
    return [x.new_empty((*x.shape[:-1], columns_of(w))) for w in weights]


def _save(ctx: Context, given: Any, output: object) -> None:
    ctx.group = given.group
    ctx.columns = ColumnGrads(ctx, given.x, given.weights, given.biases, given.x)


def _backward(
    ctx: Context, needs: Needs, grad_outs: Sequence[torch.Tensor | None]
) -> dict[str, Any]:
    x, *weights = ctx.saved_tensors
    factors = ctx.columns.factors(grad_outs, weights) if needs.x else None
    grad_x = None
    if factors is not None:
        grad_x = torch.ops.tpkernels.matmul_all_reduce.default(*factors, ctx.group)
    return {"x": grad_x, **ctx.columns.of_weights(needs, grad_outs, lambda: x)}


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
    """``x @ w_i + bias_i`` for weights [K, N_i] of this rank, x [..., K] being the same on all
    ranks of ``group``, over which the gradient of x is summed. Raises what the ops raise."""
    return OP.entry()(x, list(weights), groups.name_of(group), bias_list(x, biases))
