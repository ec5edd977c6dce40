"""``rows_r(sum_r(x_r))`` along any dim."""

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
from tpkernels.ops.reduction import reduction_of, reduction_options
from tpkernels.planning.problem import Problem

SCHEMA = (
    "reduce_scatter(Tensor x, str group, int scatter_dim=0, *, ScalarType? out_dtype=None, "
    "SymInt[]? shard_sizes=None, str algorithm='auto') -> Tensor"
)


def _problem(group: Group, given: Any) -> Problem:
    x = given.x
    dtypes.check_supported(x.dtype, "x")
    dim = validation.dim(given.scatter_dim, x.dim(), "scatter_dim")
    return Problem(
        op="reduce_scatter",
        device=validation.device(x),
        world=group.world,
        shape=tuple(x.shape),
        dim=dim,
        sizes=validation.scatter_sizes(given.shard_sizes, x.shape[dim], group.world),
        dtype=x.dtype,
        options=reduction_options(x.dtype, validation.out_dtype(given.out_dtype, x)),
    )


def _execute(call: Call, given: Any) -> Any:
    return call.function(call, given.x, reduction_of(given.x, given.out_dtype))


def _fake(group: Group, given: Any) -> torch.Tensor:
    shape = validation.scattered_shape(given.x.shape, given.scatter_dim, given.shard_sizes, group)
    return given.x.new_empty(shape, dtype=given.out_dtype)


def _save(ctx: Any, given: Any, output: torch.Tensor) -> None:
    ctx.group, ctx.dim, ctx.dtype = given.group, given.scatter_dim, given.x.dtype
    ctx.shard_sizes, ctx.algorithm = given.shard_sizes, given.algorithm


def _backward(ctx: Any, needs: Any, grad: torch.Tensor) -> dict[str, Any]:
    grad_x = torch.ops.tpkernels.all_gather.default(
        grad.to(ctx.dtype),
        ctx.group,
        ctx.dim,
        shard_sizes=ctx.shard_sizes,
        algorithm=ctx.algorithm,
    )
    return {"x": grad_x}


define(SCHEMA, problem=_problem, execute=_execute, fake=_fake)
define_backward("reduce_scatter", save=_save, backward=_backward)

_run = shortcut("reduce_scatter")


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
        group: a ProcessGroup, a one-dimensional DeviceMesh, ``(mesh, dim)`` or a group's name.
        scatter_dim: the dim that is split over the ranks.
        out_dtype: dtype of the result; default ``x``'s.
        shard_sizes: rows of each rank along ``scatter_dim``; default: all the same.
        algorithm: "auto", or the name of one; `tpkernels info` lists them.

    Returns:
        The shard, summed in fp32 in rank order and rounded once; on CUDA tensors as ``numerics`` of
        `init` says. The gradient of ``x`` is the gathered gradient of all shards.

    Raises:
        ValueError, TypeError: invalid arguments; nothing has been sent.
        NotImplementedError: valid but not supported: a dtype, or the requested algorithm.
        PeerLostError, CollectiveTimeoutError, CollectiveMismatchError, GroupBrokenError.
    """
    try:
        result: Any = _run(
            x,
            name_of(group),
            scatter_dim,
            out_dtype=out_dtype,
            shard_sizes=shard_sizes,
            algorithm=algorithm,
        )
        return result
    except BaseException as error:
        break_if_left(group, error)
        raise
