"""All-reduce, residual addition and RMSNorm: ``rms_norm(sum_r(x_r) + residual)``."""

from __future__ import annotations

from typing import Any

import torch

from tpkernels.groups import GroupLike, group_name
from tpkernels.ops.arguments import ReduceArguments
from tpkernels.ops.autograd import Context, Needs, norm_grads
from tpkernels.ops.registration import Op, define

SCHEMA = (
    "all_reduce_rms_norm(Tensor x, Tensor weight, str group, Tensor? residual=None, *, "
    "float eps=1e-6, str algorithm='auto') -> (Tensor, Tensor)"
)


def _save(ctx: Context, args: ReduceArguments, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(output[1], args.weight)
    ctx.eps, ctx.dtype = args.eps, args.x.dtype


def _backward(ctx: Context, needs: Needs, *grads: torch.Tensor) -> dict[str, Any]:
    """Pass the gradient of the sum to every summand, without communication (ops/autograd.py)."""
    total, weight = norm_grads(ctx, *ctx.saved_tensors, *grads)
    term = total.to(ctx.dtype)  # dtype of x and residual
    return {
        "x": term,
        "weight": weight if needs.weight else None,
        "residual": term if needs.residual else None,
    }


OP: Op[tuple[torch.Tensor, torch.Tensor]] = define(SCHEMA, save=_save, backward=_backward)


def all_reduce_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    group: GroupLike,
    *,
    residual: torch.Tensor | None = None,
    eps: float = 1e-6,
    algorithm: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum ``x`` over the ranks, add ``residual`` and apply RMSNorm to the rows.

    It equals::

        total = x.clone()
        dist.all_reduce(total, group=group)
        new_residual = total + residual
        normed = torch.nn.functional.rms_norm(new_residual, weight.shape, weight, eps)

    Args:
        x: [..., N], floating-point, with the same shape on all ranks and any strides.
        weight: [N], RMSNorm weight in the dtype of ``x`` or float32. ``weight``, ``residual`` and
            ``eps`` must be equal on all ranks.
        residual: [..., N] in the dtype of ``x``, added to the sum.
        eps: Term added to the mean of the squares.

    Returns:
        ``(normed, new_residual)``, both [..., N] in the dtype of ``x``. ``new_residual``
        accumulates in fp32 in rank order and is rounded once. Without ``residual`` it is bitwise
        identical to `all_reduce`. ``normed`` is computed from the rounded ``new_residual`` in fp32
        and rounded once. Without overflow its relative error is at most
        ``eps_dtype/2 + (N/128 + 8) * 2^-24``, with ``eps_dtype = torch.finfo(x.dtype).eps``. Both
        results are bitwise identical on all ranks and in all runs, and on CPUs for all algorithms.
        For CUDA tensors, ``numerics`` of `init` selects the order of the sum.

    ``direct`` fuses the RMSNorm: on CPUs it normalizes each row while the row is in cache, on CUDA
    tensors in the reduction kernel if N is a multiple of 8. Otherwise a separate RMSNorm follows
    the all-reduce.

    Gradient: local, as for `all_reduce`.
    """
    return OP.entry()(x, weight, group_name(group), residual, eps=eps, algorithm=algorithm)
