"""All-to-all: exchange shards along one dim for shards along a second dim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpkernels.groups import GroupLike, group_name
from tpkernels.ops.arguments import ExchangeArguments
from tpkernels.ops.autograd import Context, Needs
from tpkernels.ops.registration import Op, define

SCHEMA = (
    "all_to_all(Tensor x, str group, int gather_dim=0, int scatter_dim=1, *, "
    "SymInt[]? gather_sizes=None, SymInt[]? scatter_sizes=None, str algorithm='auto') -> Tensor"
)


def _save(ctx: Context, args: ExchangeArguments, output: torch.Tensor) -> None:
    ctx.group = args.group
    ctx.options = {
        "gather_dim": args.scatter_dim,
        "scatter_dim": args.gather_dim,
        "gather_sizes": args.scatter_sizes,
        "scatter_sizes": args.gather_sizes,
        "algorithm": args.algorithm,
    }


def _backward(ctx: Context, needs: Needs, grad: torch.Tensor) -> dict[str, Any]:
    return {"x": torch.ops.tpkernels.all_to_all.default(grad, ctx.group, **ctx.options)}


OP: Op[torch.Tensor] = define(SCHEMA, save=_save, backward=_backward)


def all_to_all(
    x: torch.Tensor,
    group: GroupLike,
    gather_dim: int = 0,
    scatter_dim: int = 1,
    *,
    gather_sizes: Sequence[int] | None = None,
    scatter_sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    """Exchange shards along ``gather_dim`` for shards along ``scatter_dim``.

    With equal shards it equals::

        inputs = [shard.contiguous() for shard in x.chunk(world_size, scatter_dim)]
        outputs = [torch.empty_like(shard) for shard in inputs]
        dist.all_to_all(outputs, inputs, group)
        y = torch.cat(outputs, gather_dim)

    Args:
        x: Local shard along ``gather_dim``, unsharded along ``scatter_dim``, with any strides.
            float16, bfloat16, float32 or float64; on CPUs also int32 or int64.
        gather_dim: Dim that is split over the ranks in ``x`` and unsharded in the result.
        scatter_dim: Dim that is unsharded in ``x`` and split over the ranks in the result.
        gather_sizes: Rows of each rank along ``gather_dim``. Default: all ranks have as many as
            ``x``.
        scatter_sizes: Rows of each rank along ``scatter_dim``. Default: all equal.

    Returns:
        The local shard along ``scatter_dim``, gathered along ``gather_dim``, in the dtype of ``x``.

    Gradient: an all-to-all in the opposite direction.
    """
    return OP.entry()(
        x,
        group_name(group),
        gather_dim,
        scatter_dim,
        gather_sizes=gather_sizes,
        scatter_sizes=scatter_sizes,
        algorithm=algorithm,
    )
