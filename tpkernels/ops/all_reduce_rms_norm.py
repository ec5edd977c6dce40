"""``sum_r(x_r) + residual`` on every rank, and its rows normalised."""

from __future__ import annotations

from typing import Any

import torch

from tpkernels.groups import GroupLike, name_of
from tpkernels.ops.arguments import ReduceArguments
from tpkernels.ops.autograd import Context, Needs, norm_grads
from tpkernels.ops.registration import Op, define

SCHEMA = (
    "all_reduce_rms_norm(Tensor x, Tensor weight, str group, Tensor? residual=None, *, "
    "float eps=1e-6, str algorithm='auto') -> (Tensor, Tensor)"
)


def _save(ctx: Context, given: ReduceArguments, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(output[1], given.weight)
    ctx.eps, ctx.dtype = given.eps, given.x.dtype


def _backward(ctx: Context, needs: Needs, *grads: torch.Tensor) -> dict[str, Any]:
    """All of it local: the gradient of the sum is that of each summand (ops/autograd.py)."""
    total, weight = norm_grads(ctx, *ctx.saved_tensors, *grads)
    term = total.to(ctx.dtype)  # which the residual has too
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
    """Sum ``x`` over the ranks, add ``residual`` and normalise the rows, as one operation.

    Args:
        x: [..., N], of the same shape on all ranks; any strides.
        weight: [N], of the normalisation, in ``x``'s dtype or float32. The same on all ranks, as
            are ``residual`` and ``eps``.
        residual: [..., N], of ``x``'s dtype, added to the sum.
        eps: added to the mean of the squares.

    Returns:
        ``(normed, new_residual)``, [..., N] in ``x``'s dtype. ``new_residual`` is
        ``sum_r(x_r) + residual``, in fp32, in rank order, rounded once: the bits of `all_reduce`
        where there is no residual. ``normed`` is
        ``new_residual / sqrt(mean(new_residual^2) + eps) * weight`` of each row: of the rounded
        values, in fp32, rounded once, as ``torch.nn.functional.rms_norm`` gives it. Without
        overflow it is within ``eps_dtype/2 + (N/128 + 8) * 2^-24`` of that, relatively, where
        ``eps_dtype`` is ``torch.finfo``'s. Both have the same bits on every rank and in every run,
        and on CPUs by every algorithm. On CUDA tensors ``numerics`` of `init` decides.

    `direct` normalises each row as soon as it is summed: on CPUs while it is in the cache, on CUDA
    tensors in the kernel that sums, if N is a multiple of 8. Everywhere else a normalisation
    follows the all-reduce.

    The backward is local: see `all_reduce`.
    """
    return OP.entry()(x, weight, name_of(group), residual, eps=eps, algorithm=algorithm)
