"""``concat_r(x_r)`` along any dim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpkernels.groups import GroupLike, name_of
from tpkernels.ops.arguments import GatherArguments
from tpkernels.ops.autograd import Context, Needs
from tpkernels.ops.registration import Op, define

SCHEMA = (
    "all_gather(Tensor x, str group, int gather_dim=0, *, SymInt[]? shard_sizes=None, "
    "str algorithm='auto') -> Tensor"
)


def _save(ctx: Context, given: GatherArguments, output: torch.Tensor) -> None:
    ctx.group, ctx.dim = given.group, given.gather_dim
    ctx.options = {"shard_sizes": given.shard_sizes, "algorithm": given.algorithm}


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
    """Concatenate the ranks' ``x`` along ``gather_dim``, on every rank.

    Args:
        x: this rank's shard, of any shape with at least one dim; any strides. On CPUs also integers
            of 32 or 64 bits.
        gather_dim: the dim that is split over the ranks.
        shard_sizes: rows of each rank along ``gather_dim``; default: all the same.

    The gradient of ``x`` is the sum over the ranks of the gradients of its part of their results:
    the loss is the sum of what the ranks compute from theirs.
    """
    return OP.entry()(x, name_of(group), gather_dim, shard_sizes=shard_sizes, algorithm=algorithm)
