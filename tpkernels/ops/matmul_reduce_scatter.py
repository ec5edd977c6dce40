"""Matmul and reduce-scatter: ``y_r = rows_r(sum_r(x_r @ w_r))``.

The row-parallel layer with sequence parallelism (attention output, MLP down projection).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpkernels.groups import GroupLike, group_name
from tpkernels.local.weight import Weight
from tpkernels.ops.arguments import ReduceArguments
from tpkernels.ops.autograd import Context, Needs, backward_options, bias_grad, save_operands
from tpkernels.ops.registration import Op, define

SCHEMA = (
    "matmul_reduce_scatter(Tensor x, Tensor w, str group, int scatter_dim=0, "
    "Tensor? bias=None, Tensor? residual=None, *, ScalarType? out_dtype=None, "
    "ScalarType? wire_dtype=None, SymInt[]? shard_sizes=None, str algorithm='auto') -> Tensor"
)


def _save(ctx: Context, args: ReduceArguments, output: torch.Tensor) -> None:
    save_operands(ctx, args, output)
    ctx.group, ctx.dim = args.group, args.scatter_dim
    ctx.options = {"shard_sizes": args.shard_sizes, "algorithm": args.algorithm}


def _gather_grad(
    ctx: Context, grad: torch.Tensor, w: torch.Tensor | None, keep: bool
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the gradient of x (None without ``w``) and, if ``keep``, the gathered gradient.

    Gathers at most once.
    """
    last, ops = ctx.dim == grad.dim() - 1, torch.ops.tpkernels
    options = backward_options(ctx, has_matmul=w is not None, last_dim=last)
    if w is None:
        return None, ops.all_gather.default(grad, ctx.group, ctx.dim, **options)
    gathered, (grad_x,) = ops.all_gather_matmul.default(
        grad, [w.t()], ctx.group, ctx.dim, return_gathered=keep, **options
    )
    return grad_x, gathered


def _backward(ctx: Context, needs: Needs, grad: torch.Tensor) -> dict[str, Any]:
    x, w = ctx.saved_tensors
    grad_x, gathered = None, grad
    if needs.x or needs.w or needs.bias:
        keep = needs.w or needs.bias
        grad_x, gathered = _gather_grad(ctx, grad.to(ctx.dtype), w if needs.x else None, keep)
    return {
        "x": grad_x,
        "w": ctx.weight_grad.compute(x, gathered) if needs.w else None,
        "bias": bias_grad(gathered, ctx.bias_dtype) if needs.bias else None,
        "residual": grad.to(ctx.residual_dtype) if needs.residual else None,
    }


OP: Op[torch.Tensor] = define(SCHEMA, save=_save, backward=_backward, autocast=True)


def matmul_reduce_scatter(
    x: torch.Tensor,
    w: Weight,
    group: GroupLike,
    scatter_dim: int = 0,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | None = None,
    shard_sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    """Multiply ``x`` by ``w``, sum over the ranks and return the local shard of the sum.

    Overlaps the matmul with the reduce-scatter. With equal shards and ``scatter_dim=0`` it
    equals::

        partial = (x @ w).to(wire_dtype)
        total = partial.new_empty(partial.shape[0] // world_size, *partial.shape[1:])
        dist.reduce_scatter_tensor(total, partial, group=group)
        y = (total + bias + residual).to(out_dtype)

    Args:
        x: [..., K], floating-point, with any strides. K may differ by rank.
        w: [K, N]. A tensor in the dtype of ``x`` with any strides (``linear.weight.t()`` is the
            fast layout), a packed weight (`pack`), or a `CustomMatmul`.
        scatter_dim: Dim of the sum [..., N] that is split over the ranks.
        bias: [N] in the dtype of ``x`` or float32, added once after the sum. Pass the full bias,
            even if N is split.
        residual: Local shard with the shape of the result, in the dtype of ``x`` or the result,
            added after the bias.
        out_dtype: Dtype of the result. Default: the dtype of ``x``.
        wire_dtype: Dtype of the communicated partial sums: the dtype of ``x`` (default) or
            float32.
        shard_sizes: Rows of each rank along ``scatter_dim``. Default: all equal.

    Returns:
        The local shard of ``sum_r(x_r @ w_r) + bias + residual``. Partial sums accumulate in fp32
        in rank order and are rounded once. On CPUs the result is bitwise identical in all runs and
        for all algorithms. For CUDA tensors, ``numerics`` of `init` selects the order.

    Gradient: the backward gathers ``grad`` once, for ``grad @ w^T`` (an ``all_gather_matmul``),
    ``x^T @ grad`` and the bias. Every rank gets the full gradient of ``bias``.

    The arguments match ``torch.ops.symm_mem.fused_matmul_reduce_scatter``.
    """
    return OP.entry()(
        x,
        w,
        group_name(group),
        scatter_dim,
        bias,
        residual,
        out_dtype=out_dtype,
        wire_dtype=wire_dtype,
        shard_sizes=shard_sizes,
        algorithm=algorithm,
    )
