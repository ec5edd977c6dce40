"""Where a tensor goes from "each rank has its part" to "all have the whole" and back: Megatron's
region mappings.

Whose gradient it is (docs/numerics.md): of what all ranks have alike they all compute the same
loss, so its gradient is the same everywhere and counts once. Each mapping is the adjoint of its
forward under that rule. `gather_from_ranks` therefore differs from ``tpkernels.all_gather``, behind
which each rank makes something else of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpkernels import groups
from tpkernels.groups import GroupLike
from tpkernels.nn.split import Split, position
from tpkernels.ops.all_gather import all_gather
from tpkernels.ops.all_reduce import all_reduce
from tpkernels.shards import check_sizes


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return all_reduce(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: str, dim: int, sizes: Sequence[int]
    ) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return all_gather(x, group, dim, shard_sizes=sizes)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _own_part(grad, ctx.group, ctx.dim, ctx.sizes), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: str, dim: int, sizes: Sequence[int]
    ) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return _own_part(x, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return all_gather(grad, ctx.group, ctx.dim, shard_sizes=ctx.sizes), None, None, None


def _own_part(x: torch.Tensor, group: str, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    rank, _ = position(group)
    return x.narrow(dim, sum(sizes[:rank]), sizes[rank]).contiguous()


def check_dim(x: torch.Tensor, dim: int) -> None:
    if not 0 <= dim < x.dim():
        raise ValueError(f"dim is {dim}; x has {x.dim()} dims, counted from 0")


def copy_to_ranks(x: torch.Tensor, group: GroupLike) -> torch.Tensor:
    """``x`` itself, which all ranks have alike and each now uses for something of its own; its
    gradient is summed over the ranks (Megatron's "f").

    It is also what a replicated parameter needs that each rank applies to its own rows or heads.
    """
    result: torch.Tensor = _Copy.apply(x, groups.name_of(group))
    return result


def gather_from_ranks(
    x: torch.Tensor, group: GroupLike, dim: int, sizes: Sequence[int]
) -> torch.Tensor:
    """The ranks' parts of ``dim`` (``sizes[r]`` of rank r) as one tensor, which all ranks use alike
    from here on; the gradient of a part is its part of the gradient.

    Raises:
        ValueError: ``dim`` is none of x's, or ``sizes`` do not fit the group or this rank's part.
    """
    name = groups.name_of(group)
    rank, world = position(name)
    check_dim(x, dim)
    checked = check_sizes(sizes, world)
    if checked[rank] != x.shape[dim]:
        raise ValueError(f"rank {rank} has {x.shape[dim]} of dim {dim}, and sizes say {checked}")
    result: torch.Tensor = _Gather.apply(x, name, dim, checked)
    return result


def split_over_ranks(
    x: torch.Tensor, group: GroupLike, dim: int, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """This rank's part of ``dim`` of what all ranks have alike (``sizes[r]`` for rank r; balanced
    by default); the gradients of the parts are gathered.

    Raises:
        ValueError: ``dim`` is none of x's, or ``sizes`` do not fit the group or add up to it.
    """
    name = groups.name_of(group)
    check_dim(x, dim)
    split = Split.of(dim, x.shape[dim], sizes, *position(name), f"dim {dim}")
    result: torch.Tensor = _Split.apply(x, name, dim, split.sizes)
    return result
