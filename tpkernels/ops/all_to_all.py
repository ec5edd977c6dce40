"""Shards along one dim for shards along another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpkernels.groups import GroupLike, name_of
from tpkernels.ops.arguments import ExchangeArguments
from tpkernels.ops.autograd import Context, Needs
from tpkernels.ops.registration import Op, define

SCHEMA = (
    "all_to_all(Tensor x, str group, int gather_dim=0, int scatter_dim=1, *, "
    "SymInt[]? gather_sizes=None, SymInt[]? scatter_sizes=None, str algorithm='auto') -> Tensor"
)


def _save(ctx: Context, given: ExchangeArguments, output: torch.Tensor) -> None:
    ctx.group = given.group
    ctx.options = {
        "gather_dim": given.scatter_dim,
        "scatter_dim": given.gather_dim,
        "gather_sizes": given.scatter_sizes,
        "scatter_sizes": given.gather_sizes,
        "algorithm": given.algorithm,
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
    """Exchange shards along ``gather_dim`` for shards along ``scatter_dim``: like an all-gather
    after which each rank keeps only its part, without receiving the rest.

    Args:
        x: this rank's shard along ``gather_dim``, all of ``scatter_dim``; any strides. On CPUs also
            integers of 32 or 64 bits.
        gather_dim: the dim that is split over the ranks before, and whole after.
        scatter_dim: the dim that is whole before, and split after.
        gather_sizes: rows of each rank along ``gather_dim``; default: all the same.
        scatter_sizes: rows of each rank along ``scatter_dim``; default: all the same.

    The gradient is exchanged back.
    """
    return OP.entry()(
        x,
        name_of(group),
        gather_dim,
        scatter_dim,
        gather_sizes=gather_sizes,
        scatter_sizes=scatter_sizes,
        algorithm=algorithm,
    )
