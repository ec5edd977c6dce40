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

from tpkernels import groups, validation
from tpkernels.algorithms.parts import as_rows
from tpkernels.groups import GroupLike
from tpkernels.local.matmul import new_product
from tpkernels.local.packed import columns_of, fake_columns_of
from tpkernels.ops._autocast import define_autocast
from tpkernels.ops._library import bias_list, define_backward, define_local
from tpkernels.ops._shortcut import is_plain
from tpkernels.ops.autograd import WeightGrad, bias_grads

SCHEMA = "_column_matmul(Tensor x, Tensor[] weights, str group, Tensor[]? biases=None) -> Tensor[]"


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
        bias = biases[i] if biases is not None and biases[i].numel() else None
        outs.append(new_product(as_rows(x), w, bias).view(*x.shape[:-1], columns_of(w)))
    return outs


def _fake(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    group: str,
    biases: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    groups.get(group)
    return [x.new_empty((*x.shape[:-1], fake_columns_of(w, x.shape[-1]))) for w in weights]


def _save(ctx: Any, given: Any, output: Any) -> None:
    x, weights, biases = given.x, given.weights, given.biases
    ctx.group, ctx.dtype = given.group, x.dtype
    kept = x if any(w.requires_grad for w in weights) else None
    ctx.save_for_backward(kept, *(weights if x.requires_grad else ()))
    ctx.weight_grads = [WeightGrad.of(w) for w in weights]
    ctx.bias_dtypes = None if biases is None else [b.dtype for b in biases]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, needs: Any, grad_outs: Sequence[torch.Tensor | None]) -> dict[str, Any]:
    x, *weights = ctx.saved_tensors
    grads = [None if grad is None else grad.to(ctx.dtype) for grad in grad_outs]
    grad_x = None
    pairs = [(g, w) for g, w in zip(grads, weights, strict=False) if g is not None]
    if needs.x and pairs:
        one = len(pairs) == 1
        grad = pairs[0][0] if one else torch.cat([g for g, _ in pairs], -1)
        back = pairs[0][1].t() if one else torch.cat([w.t() for _, w in pairs])
        grad_x = torch.ops.tpkernels.matmul_all_reduce.default(grad, back, ctx.group)
    grad_weights = [
        ctx.weight_grads[i].product(x, g) if needs.weights[i] and g is not None else None
        for i, g in enumerate(grads)
    ]
    grad_biases = bias_grads(grad_outs, needs.biases, ctx.bias_dtypes)
    return {"x": grad_x, "weights": grad_weights, "biases": grad_biases}


define_local(SCHEMA, run=_run, fake=_fake)
define_backward("_column_matmul", save=_save, backward=_backward)
define_autocast("_column_matmul")


def column_matmul(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    group: GroupLike,
    biases: Sequence[torch.Tensor | None] | None,
) -> list[torch.Tensor]:
    """``x @ w_i + bias_i`` for weights [K, N_i] of this rank, x [..., K] being the same on all
    ranks of ``group``, over which the gradient of x is summed. Raises what the ops raise."""
    given = list(weights), groups.name_of(group), bias_list(x, biases)
    if is_plain(x, *given):
        return _run(x, *given)
    outs: list[torch.Tensor] = torch.ops.tpkernels._column_matmul.default(x, *given)
    return outs
