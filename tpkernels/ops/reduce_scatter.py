"""Reduce-scatter along any dim: ``rows_r(sum_r(x_r))``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpkernels.groups import GroupLike, group_name
from tpkernels.ops.arguments import ReduceArguments
from tpkernels.ops.autograd import Context, Needs
from tpkernels.ops.registration import Op, define

SCHEMA = (
    "reduce_scatter(Tensor x, str group, int scatter_dim=0, *, ScalarType? out_dtype=None, "
    "SymInt[]? shard_sizes=None, str algorithm='auto') -> Tensor"
)


def _save(ctx: Context, args: ReduceArguments, output: torch.Tensor) -> None:
    ctx.group, ctx.dim, ctx.dtype = args.group, args.scatter_dim, args.x.dtype
    ctx.options = {"shard_sizes": args.shard_sizes, "algorithm": args.algorithm}


def _backward(ctx: Context, needs: Needs, grad: torch.Tensor) -> dict[str, Any]:
    grad = grad.to(ctx.dtype)
    return {"x": torch.ops.tpkernels.all_gather.default(grad, ctx.group, ctx.dim, **ctx.options)}


OP: Op[torch.Tensor] = define(SCHEMA, save=_save, backward=_backward)


def reduce_scatter(
    x: torch.Tensor,
    group: GroupLike,
    scatter_dim: int = 0,
    *,
    out_dtype: torch.dtype | None = None,
    shard_sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    """Sum ``x`` over the ranks and return the local shard along ``scatter_dim``.

    With equal shards it equals::

        shards = [shard.contiguous() for shard in x.chunk(world_size, scatter_dim)]
        y = torch.empty_like(shards[rank])
        dist.reduce_scatter(y, shards, group=group)

    Args:
        x: Floating-point tensor with the same shape and dtype on all ranks, and any strides.
        scatter_dim: Dim that is split over the ranks.
        out_dtype: Dtype of the result. Default: the dtype of ``x``.
        shard_sizes: Rows of each rank along ``scatter_dim``. Default: all equal.

    Returns:
        The local shard of the sum. It accumulates in fp32 in rank order and is rounded once. For
        CUDA tensors, ``numerics`` of `init` selects the order.

    Gradient: the all-gather of the output gradients.
    """
    return OP.entry()(
        x,
        group_name(group),
        scatter_dim,
        out_dtype=out_dtype,
        shard_sizes=shard_sizes,
        algorithm=algorithm,
    )
