"""``sum_r(x_r @ w_r) + bias + residual`` on every rank, and its rows normalised: the row-parallel
layer without sequence parallelism, and the norm of the next layer."""

from __future__ import annotations

from typing import Any

import torch

from tpkernels.groups import GroupLike, name_of
from tpkernels.local.product import Weight
from tpkernels.ops.arguments import ReduceArguments
from tpkernels.ops.autograd import Context, Needs, norm_grads, operand_grads, save_operands
from tpkernels.ops.registration import Op, define

SCHEMA = (
    "matmul_all_reduce_rms_norm(Tensor x, Tensor w, Tensor norm_weight, str group, "
    "Tensor? bias=None, Tensor? residual=None, *, float eps=1e-6, str algorithm='auto') "
    "-> (Tensor, Tensor)"
)


def _save(ctx: Context, given: ReduceArguments, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    save_operands(ctx, given, output, output[1], given.norm_weight)
    ctx.eps = given.eps


def _backward(ctx: Context, needs: Needs, *grads: torch.Tensor) -> dict[str, Any]:
    """All of it local: the gradient of the sum is that of each partial (ops/autograd.py)."""
    x, w, total, norm_weight = ctx.saved_tensors
    grad, weight_grad = norm_grads(ctx, total, norm_weight, *grads)
    return {
        **operand_grads(ctx, needs, x, w, grad),
        "norm_weight": weight_grad if needs.norm_weight else None,
    }


OP: Op[tuple[torch.Tensor, torch.Tensor]] = define(
    SCHEMA, save=_save, backward=_backward, autocast=True
)


def matmul_all_reduce_rms_norm(
    x: torch.Tensor,
    w: Weight,
    norm_weight: torch.Tensor,
    group: GroupLike,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    eps: float = 1e-6,
    algorithm: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`matmul_all_reduce`, and a normalisation of the rows, as one operation.

    Args:
        x, w, bias: as in `matmul_all_reduce`.
        norm_weight: [N], of the normalisation, in ``x``'s dtype or float32. The same on all ranks,
            as are ``bias``, ``residual`` and ``eps``.
        residual: [..., N], of ``x``'s dtype, added after the bias.
        eps: added to the mean of the squares.

    Returns:
        ``(normed, new_residual)``, [..., N] in ``x``'s dtype. ``new_residual`` is
        ``sum_r(x_r @ w_r) + bias + residual``, the bits of `matmul_all_reduce`; ``normed`` is what
        `all_reduce_rms_norm` makes of it, with the same bound.

    The backward is local: see `all_reduce`.
    """
    return OP.entry()(
        x, w, norm_weight, name_of(group), bias, residual, eps=eps, algorithm=algorithm
    )
