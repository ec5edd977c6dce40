"""``concat_r(x_r)`` along any dim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpkernels import dtypes, validation
from tpkernels.call import Call
from tpkernels.groups import GroupLike, break_if_left, name_of
from tpkernels.groups.group import Group
from tpkernels.ops._library import define, define_backward
from tpkernels.ops._shortcut import shortcut
from tpkernels.planning.problem import Problem

SCHEMA = (
    "all_gather(Tensor x, str group, int gather_dim=0, *, SymInt[]? shard_sizes=None, "
    "str algorithm='auto') -> Tensor"
)


def _problem(group: Group, given: Any) -> Problem:
    x = given.x
    dtypes.check_supported(x.dtype, "x")
    dim = validation.dim(given.gather_dim, x.dim(), "gather_dim")
    sizes = validation.gather_sizes(given.shard_sizes, x.shape[dim], group.rank, group.world)
    return Problem(
        op="all_gather",
        device=validation.device(x),
        world=group.world,
        shape=(*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :]),
        dim=dim,
        sizes=sizes,
        dtype=x.dtype,
    )


def _execute(call: Call, given: Any) -> Any:
    return call.function(call, given.x)


def _fake(group: Group, given: Any) -> torch.Tensor:
    shape = validation.gathered_shape(given.x.shape, given.gather_dim, given.shard_sizes, group)
    return given.x.new_empty(shape)


def _save(ctx: Any, given: Any, output: torch.Tensor) -> None:
    ctx.group, ctx.dim = given.group, given.gather_dim
    ctx.shard_sizes, ctx.algorithm = given.shard_sizes, given.algorithm


def _backward(ctx: Any, needs: Any, grad: torch.Tensor) -> dict[str, Any]:
    grad_x = torch.ops.tpkernels.reduce_scatter.default(
        grad, ctx.group, ctx.dim, shard_sizes=ctx.shard_sizes, algorithm=ctx.algorithm
    )
    return {"x": grad_x}


define(SCHEMA, problem=_problem, execute=_execute, fake=_fake)
define_backward("all_gather", save=_save, backward=_backward)

_run = shortcut("all_gather")


def all_gather(
    x: torch.Tensor,
    group: GroupLike,
    gather_dim: int = 0,
    *,
    shard_sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    """Concatenates the ranks' ``x`` along ``gather_dim``, on every rank.

    Args:
        x: this rank's shard, of any shape with at least one dim; any strides.
        group: a ProcessGroup, a one-dimensional DeviceMesh, ``(mesh, dim)`` or a group's name.
        gather_dim: the dim that is split over the ranks.
        shard_sizes: rows of each rank along ``gather_dim``; default: all the same.
        algorithm: "auto", or the name of one; `tpkernels info` lists them.

    The gradient of ``x`` is the sum over the ranks of the gradients of its part of their results:
    the loss is the sum of what the ranks compute from theirs.

    Raises:
        ValueError, TypeError: invalid arguments; nothing has been sent.
        NotImplementedError: valid but not supported: a dtype, or the requested algorithm.
        PeerLostError, CollectiveTimeoutError, CollectiveMismatchError, GroupBrokenError.
    """
    try:
        result: Any = _run(
            x, name_of(group), gather_dim, shard_sizes=shard_sizes, algorithm=algorithm
        )
        return result
    except BaseException as error:
        break_if_left(group, error)
        raise
