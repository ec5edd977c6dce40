"""Matmul, all-reduce, residual addition and RMSNorm: ``rms_norm(sum_r(x_r @ w_r) + residual)``.

The row-parallel layer without sequence parallelism, followed by the norm of the next layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpkernels.groups import GroupLike, group_name
from tpkernels.local.weight import Weight
from tpkernels.ops.arguments import ReduceArguments
from tpkernels.ops.autograd import Context, Needs, norm_grads, operand_grads, save_operands
from tpkernels.ops.registration import Op, define

SCHEMA = (
    "matmul_all_reduce_rms_norm(Tensor x, Tensor w, Tensor norm_weight, str group, "
    "Tensor? bias=None, Tensor? residual=None, *, float eps=1e-6, SymInt[]? k_sizes=None, "
    "int k_unit=64, str algorithm='auto') -> (Tensor, Tensor)"
)


def _save(ctx: Context, args: ReduceArguments, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    save_operands(ctx, args, output, output[1], args.norm_weight)
    ctx.eps = args.eps


def _backward(ctx: Context, needs: Needs, *grads: torch.Tensor) -> dict[str, Any]:
    """Pass the gradient of the sum to every partial, without communication (ops/autograd.py)."""
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
    k_sizes: Sequence[int] | None = None,
    k_unit: int = 64,
    algorithm: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply ``x`` by ``w``, sum over the ranks, add ``residual`` and apply RMSNorm to the rows.

    It equals::

        total = x @ w
        dist.all_reduce(total, group=group)
        new_residual = total + bias + residual
        normed = torch.nn.functional.rms_norm(new_residual, norm_weight.shape, norm_weight, eps)

    Args:
        x: [..., K], floating-point, with any strides. K may differ by rank.
        w: [K, N]. A tensor in the dtype of ``x`` with any strides (``linear.weight.t()`` is the
            fast layout), a packed weight (`pack`), or a `CustomMatmul`.
        norm_weight: [N], RMSNorm weight in the dtype of ``x`` or float32. ``norm_weight``,
            ``bias``, ``residual`` and ``eps`` must be equal on all ranks.
        bias: [N] in the dtype of ``x`` or float32, added once after the sum.
        residual: [..., N] in the dtype of ``x``, added after the bias.
        eps: Term added to the mean of the squares.
        k_sizes, k_unit: Sum K by a tree, as in `matmul_all_reduce`.

    Returns:
        ``(normed, new_residual)``, both [..., N] in the dtype of ``x``. ``new_residual`` is
        bitwise identical to the result of `matmul_all_reduce`. ``normed`` has the error bound of
        `all_reduce_rms_norm`.

    Gradient: local, as for `matmul_all_reduce`.
    """
    return OP.entry()(
        x,
        w,
        norm_weight,
        group_name(group),
        bias,
        residual,
        eps=eps,
        k_sizes=k_sizes,
        k_unit=k_unit,
        algorithm=algorithm,
    )
