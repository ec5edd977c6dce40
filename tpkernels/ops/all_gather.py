"""All-gather along any dim: ``concat_r(x_r)``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpkernels.groups import GroupLike, group_name
from tpkernels.ops.arguments import GatherArguments
from tpkernels.ops.autograd import Context, Needs
from tpkernels.ops.registration import Op, define

SCHEMA = (
    "all_gather(Tensor x, str group, int gather_dim=0, *, SymInt[]? shard_sizes=None, "
    "str algorithm='auto') -> Tensor"
)


def _save(ctx: Context, args: GatherArguments, output: torch.Tensor) -> None:
    ctx.group, ctx.dim = args.group, args.gather_dim
    ctx.options = {"shard_sizes": args.shard_sizes, "algorithm": args.algorithm}


def _backward(ctx: Context, needs: Needs, grad: torch.Tensor) -> dict[str, Any]:
    return {
        "x": torch.ops.tpkernels.reduce_scatter.default(grad, ctx.group, ctx.dim, **ctx.options)
    }


OP: Op[torch.Tensor] = define(SCHEMA, save=_save, backward=_backward)


def all_gather(
    x: torch.Tensor,
    group: GroupLike,
    gather_dim: int = 0,
    *,
    shard_sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    """Concatenate the shards of all ranks along ``gather_dim``, on every rank.

    With equal shards it equals::

        shards = [torch.empty_like(x) for _ in range(world_size)]
        dist.all_gather(shards, x, group)
        gathered = torch.cat(shards, gather_dim)

    Args:
        x: Local shard with at least one dim and any strides. float16, bfloat16, float32 or
            float64; on CPUs also int32 or int64.
        gather_dim: Dim that is split over the ranks.
        shard_sizes: Rows of each rank along ``gather_dim``. Default: all ranks have as many as
            ``x``.

    Returns:
        The gathered tensor, in the dtype of ``x``.

    Gradient: the reduce-scatter of the output gradients. The loss is the sum of the losses of all
    ranks. If all ranks compute the same loss, use `tpkernels.nn.gather_from_ranks`.
    """
    return OP.entry()(
        x, group_name(group), gather_dim, shard_sizes=shard_sizes, algorithm=algorithm
    )
