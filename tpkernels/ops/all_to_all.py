"""Shards along one dim for shards along another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpkernels import dtypes, validation
from tpkernels.algorithms.pieces import Exchange
from tpkernels.call import Call
from tpkernels.groups import GroupLike, break_if_left, name_of
from tpkernels.groups.group import Group
from tpkernels.op_spec import Options
from tpkernels.ops._library import define, define_backward
from tpkernels.ops._shortcut import shortcut
from tpkernels.planning.problem import Problem

SCHEMA = (
    "all_to_all(Tensor x, str group, int gather_dim=0, int scatter_dim=1, *, "
    "SymInt[]? gather_sizes=None, SymInt[]? scatter_sizes=None, str algorithm='auto') -> Tensor"
)


def _problem(group: Group, given: Any) -> Problem:
    x, world = given.x, group.world
    dtypes.check_supported(x.dtype, "x")
    dim = validation.dim(given.gather_dim, x.dim(), "gather_dim")
    scattered = validation.dim(given.scatter_dim, x.dim(), "scatter_dim")
    if dim == scattered:
        raise ValueError(f"gather_dim and scatter_dim are both {dim}; they must differ")
    sizes = validation.gather_sizes(
        given.gather_sizes, x.shape[dim], group.rank, world, "gather_sizes"
    )
    scatter_sizes = validation.scatter_sizes(
        given.scatter_sizes, x.shape[scattered], world, "scatter_sizes"
    )
    return Problem(
        op="all_to_all",
        device=validation.device(x),
        world=world,
        shape=(*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :]),
        dim=dim,
        sizes=sizes,
        dtype=x.dtype,
        options=Options(scattered=(scattered, tuple(scatter_sizes))),
    )


def _execute(call: Call, given: Any) -> Any:
    return call.function(call, given.x, Exchange.of(given, call.group.world))


def _fake(group: Group, given: Any) -> torch.Tensor:
    shape = validation.gathered_shape(given.x.shape, given.gather_dim, given.gather_sizes, group)
    shape = validation.scattered_shape(shape, given.scatter_dim, given.scatter_sizes, group)
    return given.x.new_empty(shape)


def _save(ctx: Any, given: Any, output: torch.Tensor) -> None:
    ctx.group, ctx.algorithm = given.group, given.algorithm
    ctx.gather_dim, ctx.gather_sizes = given.gather_dim, given.gather_sizes
    ctx.scatter_dim, ctx.scatter_sizes = given.scatter_dim, given.scatter_sizes


def _backward(ctx: Any, needs: Any, grad: torch.Tensor) -> dict[str, Any]:
    grad_x = torch.ops.tpkernels.all_to_all.default(
        grad,
        ctx.group,
        ctx.scatter_dim,
        ctx.gather_dim,
        gather_sizes=ctx.scatter_sizes,
        scatter_sizes=ctx.gather_sizes,
        algorithm=ctx.algorithm,
    )
    return {"x": grad_x}


define(SCHEMA, problem=_problem, execute=_execute, fake=_fake)
define_backward("all_to_all", save=_save, backward=_backward)

_run = shortcut("all_to_all")


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
    """Exchanges shards along ``gather_dim`` for shards along ``scatter_dim``: like an all-gather
    after which each rank keeps only its part, without receiving the rest.

    Args:
        x: this rank's shard along ``gather_dim``, all of ``scatter_dim``; any strides.
        group: a ProcessGroup, a one-dimensional DeviceMesh, ``(mesh, dim)`` or a group's name.
        gather_dim: the dim that is split over the ranks before, and whole after.
        scatter_dim: the dim that is whole before, and split after.
        gather_sizes: rows of each rank along ``gather_dim``; default: all the same.
        scatter_sizes: rows of each rank along ``scatter_dim``; default: all the same.
        algorithm: "auto", or the name of one; `tpkernels info` lists them.

    The gradient is exchanged back.

    Raises:
        ValueError, TypeError: invalid arguments; nothing has been sent.
        NotImplementedError: valid but not supported: a dtype, or the requested algorithm.
        PeerLostError, CollectiveTimeoutError, CollectiveMismatchError, GroupBrokenError.
    """
    try:
        result: Any = _run(
            x,
            name_of(group),
            gather_dim,
            scatter_dim,
            gather_sizes=gather_sizes,
            scatter_sizes=scatter_sizes,
            algorithm=algorithm,
        )
        return result
    except BaseException as error:
        break_if_left(group, error)
        raise
