"""``y_r = rows_r(sum_r(x_r @ w_r))``: the row-parallel layer with sequence parallelism (attention
output, MLP down)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpkernels.groups import GroupLike, name_of
from tpkernels.local.product import Weight
from tpkernels.ops.arguments import ReduceArguments
from tpkernels.ops.autograd import Context, Needs, bias_grad, save_operands, split_options
from tpkernels.ops.registration import Op, define

SCHEMA = (
    "matmul_reduce_scatter(Tensor x, Tensor w, str group, int scatter_dim=0, "
    "Tensor? bias=None, Tensor? residual=None, *, ScalarType? out_dtype=None, "
    "ScalarType? wire_dtype=None, SymInt[]? shard_sizes=None, str algorithm='auto') -> Tensor"
)


def _save(ctx: Context, given: ReduceArguments, output: torch.Tensor) -> None:
    save_operands(ctx, given, output)
    ctx.group, ctx.dim = given.group, given.scatter_dim
    ctx.options = {"shard_sizes": given.shard_sizes, "algorithm": given.algorithm}


def _gathered(
    ctx: Context, grad: torch.Tensor, w: torch.Tensor | None, keep: bool
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the gradient of x, or None without ``w``, and the gathered gradient, if ``keep``, with
    at most one gather."""
    last, ops = ctx.dim == grad.dim() - 1, torch.ops.tpkernels
    options = split_options(ctx, has_matmul=w is not None, last_dim=last)
    if w is None:
        return None, ops.all_gather.default(grad, ctx.group, ctx.dim, **options)
    whole, (grad_x,) = ops.all_gather_matmul.default(
        grad, [w.t()], ctx.group, ctx.dim, return_gathered=keep, **options
    )
    return grad_x, whole


def _backward(ctx: Context, needs: Needs, grad: torch.Tensor) -> dict[str, Any]:
    x, w = ctx.saved_tensors
    grad_x, whole = None, grad
    if needs.x or needs.w or needs.bias:
        keep = needs.w or needs.bias
        grad_x, whole = _gathered(ctx, grad.to(ctx.dtype), w if needs.x else None, keep)
    return {
        "x": grad_x,
        "w": ctx.weight_grad.product(x, whole) if needs.w else None,
        "bias": bias_grad(whole, ctx.bias_dtype) if needs.bias else None,
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
    """Multiply, sum over the ranks of ``group`` and keep this rank's shard, as one operation.

    Args:
        x: [..., K]; any strides. K may differ by rank.
        w: [K, N]; any strides (``linear.weight.t()`` is the fast layout), packed (`pack`), or a
            `CustomMatmul`.
        scatter_dim: the dim of the sum [..., N] that is split over the ranks.
        bias: [N], added once, after the sum. Pass the whole bias, even if N is scattered.
        residual: of the result's shape, added after the bias.
        out_dtype: dtype of the result; default ``x``'s.
        wire_dtype: dtype of the communicated partials; ``x``'s (default) or float32.
        shard_sizes: rows of each rank along ``scatter_dim``; default: all the same.

    Returns:
        This rank's shard of ``sum_r(x_r @ w_r) + bias + residual``. Partials are summed in fp32 in
        rank order and rounded once: the same bits in every run and for every algorithm. On CUDA
        tensors ``numerics`` of `init` decides.

    The backward gathers the gradients of the shards once, for ``x`` (an ``all_gather_matmul``),
    ``w`` and ``bias``. Every rank gets the whole gradient of ``bias``.

    The argument meanings are those of ``torch.ops.symm_mem.fused_matmul_reduce_scatter``.
    """
    return OP.entry()(
        x,
        w,
        name_of(group),
        scatter_dim,
        bias,
        residual,
        out_dtype=out_dtype,
        wire_dtype=wire_dtype,
        shard_sizes=shard_sizes,
        algorithm=algorithm,
    )
