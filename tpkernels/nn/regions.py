"""Conversions between sharded and replicated tensors.

These are the "regions" of Megatron-LM (Shoeybi et al., arXiv:1909.08053).

A replicated tensor leads to the same loss on all ranks. Its gradient is therefore identical on all
ranks and counts once (docs/numerics.md). Under that rule, each backward is the adjoint of its
forward. `gather_from_ranks` thereby differs from ``tpkernels.all_gather``: each rank may use the
result of ``tpkernels.all_gather`` differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpkernels import groups
from tpkernels.common.shards import check_sizes
from tpkernels.groups import GroupLike
from tpkernels.nn.sharding import Sharding, rank_and_world
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


def _gather_or_slice(
    x: torch.Tensor, group: str, dim: int, sizes: Sequence[int], gather: bool
) -> torch.Tensor:
    """Gather the shards of all ranks, or return the local shard."""
    if gather:
        return all_gather(x, group, dim, shard_sizes=sizes)
    rank, _ = rank_and_world(group)
    return x.narrow(dim, sum(sizes[:rank]), sizes[rank]).contiguous()


class _GatherOrSlice(torch.autograd.Function):
    """`_gather_or_slice` with the opposite operation as its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *args: Any) -> torch.Tensor:
        ctx.args = args
        return _gather_or_slice(x, *args)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        group, dim, sizes, gather = ctx.args
        return _gather_or_slice(grad, group, dim, sizes, not gather), None, None, None, None


def _check_dim(x: torch.Tensor, dim: int) -> None:
    if not 0 <= dim < x.dim():
        raise ValueError(f"dim is {dim}; x has {x.dim()} dims, so dim must be 0 to {x.dim() - 1}")


def copy_to_ranks(x: torch.Tensor, group: GroupLike) -> torch.Tensor:
    """Return ``x``. The backward sums its gradient over the ranks. This is "f" of Megatron-LM.

    Use it for a tensor that is identical on all ranks and that each rank uses differently, such as
    a replicated parameter that each rank applies to the local rows or heads.

    Args:
        x: a replicated tensor.
        group: see `tpkernels.nn`.
    """
    result: torch.Tensor = _Copy.apply(x, groups.group_name(group))
    return result


def gather_from_ranks(
    x: torch.Tensor, group: GroupLike, dim: int, sizes: Sequence[int]
) -> torch.Tensor:
    """Concatenate the shards of all ranks along ``dim``.

    All ranks must use the result identically: the gradient of ``x`` is the local shard of the
    gradient of the result.

    Args:
        x: the local shard, with ``sizes[rank]`` entries along ``dim``.
        group: see `tpkernels.nn`.
        dim: a nonnegative dim.
        sizes: number of entries of each rank.

    Raises:
        ValueError: ``dim`` is out of range, or ``sizes`` does not match ``x`` or the group.
    """
    name = groups.group_name(group)
    rank, world = rank_and_world(name)
    _check_dim(x, dim)
    checked = check_sizes(sizes, world)
    if checked[rank] != x.shape[dim]:
        raise ValueError(
            f"x has size {x.shape[dim]} in dim {dim}, but sizes[{rank}] of this rank is "
            f"{checked[rank]}; sizes is {checked}"
        )
    result: torch.Tensor = _GatherOrSlice.apply(x, name, dim, checked, True)
    return result


def split_over_ranks(
    x: torch.Tensor, group: GroupLike, dim: int, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """Return the local shard of a replicated tensor along ``dim``.

    The backward gathers the gradients of the shards.

    Args:
        x: a tensor that is identical on all ranks.
        group: see `tpkernels.nn`.
        dim: a nonnegative dim.
        sizes: number of entries of each rank; by default balanced.

    Raises:
        ValueError: ``dim`` is out of range, or ``sizes`` does not match ``x`` or the group.
    """
    name = groups.group_name(group)
    _check_dim(x, dim)
    sharding = Sharding.of(dim, x.shape[dim], name, f"dim {dim}", sizes)
    result: torch.Tensor = _GatherOrSlice.apply(x, name, dim, sharding.sizes, False)
    return result
