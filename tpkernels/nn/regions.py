"""Mappings between sharded and replicated tensors: the "regions" of Megatron-LM (Shoeybi et al.,
arXiv:1909.08053).

A replicated tensor leads to the same loss on all ranks. Its gradient is therefore the same
everywhere and counts once (docs/numerics.md). Each mapping's backward is the adjoint of its
forward under that rule. This is how `gather_from_ranks` differs from ``tpkernels.all_gather``,
whose result each rank may use in its own way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpkernels import groups
from tpkernels.common.shards import check_sizes
from tpkernels.groups import GroupLike
from tpkernels.nn.sharding import Sharding, position
from tpkernels.ops.all_gather import all_gather
from tpkernels.ops.all_reduce import all_reduce


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce(grad, ctx.group), None


def _moved(
    x: torch.Tensor, group: str, dim: int, sizes: Sequence[int], gather: bool
) -> torch.Tensor:
    """Gather the ranks' shards, or take this rank's shard."""
    if gather:
        return all_gather(x, group, dim, shard_sizes=sizes)
    rank, _ = position(group)
    return x.narrow(dim, sum(sizes[:rank]), sizes[rank]).contiguous()


class _Move(torch.autograd.Function):
    """`_moved`, whose backward does the other."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *how: Any) -> torch.Tensor:
        ctx.how = how
        return _moved(x, *how)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        group, dim, sizes, gather = ctx.how
        return _moved(grad, group, dim, sizes, not gather), None, None, None, None


def _check_dim(x: torch.Tensor, dim: int) -> None:
    if not 0 <= dim < x.dim():
        raise ValueError(f"dim is {dim}; x has {x.dim()} dims, so dim must be 0 to {x.dim() - 1}")


def copy_to_ranks(x: torch.Tensor, group: GroupLike) -> torch.Tensor:
    """Return ``x``, and sum its gradient over the ranks: Megatron-LM's "f".

    For a tensor that is the same on all ranks and that each of them uses in its own way, such as a
    replicated parameter that each rank applies to its own rows or heads.
    """
    result: torch.Tensor = _Copy.apply(x, groups.name_of(group))
    return result


def gather_from_ranks(
    x: torch.Tensor, group: GroupLike, dim: int, sizes: Sequence[int]
) -> torch.Tensor:
    """Concatenate the ranks' shards ``x``, rank r's of ``sizes[r]`` entries along ``dim``, which is
    not negative. All ranks must then use the result in the same way: the gradient of a shard is
    this rank's shard of the gradient. Raise ValueError if ``dim`` or ``sizes`` do not fit."""
    name = groups.name_of(group)
    rank, world = position(name)
    _check_dim(x, dim)
    checked = check_sizes(sizes, world)
    if checked[rank] != x.shape[dim]:
        raise ValueError(
            f"x has size {x.shape[dim]} in dim {dim}, but sizes[{rank}] of this rank is "
            f"{checked[rank]}; sizes is {checked}"
        )
    result: torch.Tensor = _Move.apply(x, name, dim, checked, True)
    return result


def split_over_ranks(
    x: torch.Tensor, group: GroupLike, dim: int, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """Return this rank's shard of ``x``, which is the same on all ranks, along ``dim``, which is
    not negative; the gradients of the shards are gathered. Rank r's shard has ``sizes[r]`` entries;
    by default they are balanced. Raise ValueError if ``dim`` or ``sizes`` do not fit."""
    name = groups.name_of(group)
    _check_dim(x, dim)
    split = Sharding.of(dim, x.shape[dim], name, f"dim {dim}", sizes)
    result: torch.Tensor = _Move.apply(x, name, dim, split.sizes, False)
    return result
