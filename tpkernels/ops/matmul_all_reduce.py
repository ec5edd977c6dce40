"""``y = sum_r(x_r @ w_r)`` on every rank: the row-parallel layer without sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch

from tpkernels.groups import GroupLike, name_of
from tpkernels.local.product import Weight
from tpkernels.ops.autograd import Context, Needs, operand_grads, save_operands
from tpkernels.ops.registration import Op, define

SCHEMA = (
    "matmul_all_reduce(Tensor x, Tensor w, str group, Tensor? bias=None, Tensor? residual=None, *, "
    "ScalarType? out_dtype=None, ScalarType? wire_dtype=None, str algorithm='auto') -> Tensor"
)


def _backward(ctx: Context, needs: Needs, grad: torch.Tensor) -> dict[str, Any]:
    """All of it local: the gradient of the sum is that of each partial (ops/autograd.py)."""
    x, w = ctx.saved_tensors
    return operand_grads(ctx, needs, x, w, grad)


OP: Op[torch.Tensor] = define(SCHEMA, save=save_operands, backward=_backward, autocast=True)


def matmul_all_reduce(
    x: torch.Tensor,
    w: Weight,
    group: GroupLike,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    """Multiply and sum over the ranks of ``group``, as one operation.

    Args:
        x, w, out_dtype, wire_dtype: as in `matmul_reduce_scatter`.
        bias: [N], added once, after the sum. The same on all ranks, as is ``residual``.
        residual: [..., N], added after the bias.

    Returns:
        ``sum_r(x_r @ w_r) + bias + residual`` [..., N] on every rank, summed as in
        `matmul_reduce_scatter`: the same bits on every rank, too.

    All ranks compute the same loss from the result, so its gradient is the same on all ranks and
    the backward is local: ``grad_x = grad @ w^T``, ``grad_w = x^T @ grad``. For an input that all
    ranks share see ``all_reduce``.
    """
    return OP.entry()(
        x,
        w,
        name_of(group),
        bias,
        residual,
        out_dtype=out_dtype,
        wire_dtype=wire_dtype,
        algorithm=algorithm,
    )
