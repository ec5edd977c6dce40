"""``rows_r(sum_r(x_r))`` along any dim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpkernels.groups import GroupLike, name_of
from tpkernels.ops.arguments import ReduceArguments
from tpkernels.ops.autograd import Context, Needs
from tpkernels.ops.registration import Op, define

SCHEMA = (
    "reduce_scatter(Tensor x, str group, int scatter_dim=0, *, ScalarType? out_dtype=None, "
    "SymInt[]? shard_sizes=None, str algorithm='auto') -> Tensor"
)


def _save(ctx: Context, given: ReduceArguments, output: torch.Tensor) -> None:
    ctx.group, ctx.dim, ctx.dtype = given.group, given.scatter_dim, given.x.dtype
    ctx.options = {"shard_sizes": given.shard_sizes, "algorithm": given.algorithm}


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
    """Sum the ranks' ``x`` and keep this rank's shard along ``scatter_dim``.

    Args:
        x: of the same shape on all ranks; any strides.
        scatter_dim: the dim that is split over the ranks.
        out_dtype: dtype of the result; default ``x``'s.
        shard_sizes: rows of each rank along ``scatter_dim``; default: all the same.

    Returns:
        The shard, summed in fp32 in rank order and rounded once; on CUDA tensors as ``numerics`` of
        `init` says. The gradient of ``x`` is the gathered gradient of all shards.
    """
    return OP.entry()(
        x,
        name_of(group),
        scatter_dim,
        out_dtype=out_dtype,
        shard_sizes=shard_sizes,
        algorithm=algorithm,
    )
