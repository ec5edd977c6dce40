"""``rows_r(sum_r(x_r))`` along any dim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpkernels import dtypes, groups
from tpkernels.backends import run
from tpkernels.call import Call
from tpkernels.groups import GroupLike
from tpkernels.groups.group import Group
from tpkernels.ops import _check
from tpkernels.ops._library import define, define_backward, plan_call, remember
from tpkernels.ops._reduction import describe, reduction_of
from tpkernels.planning.problem import Problem

SCHEMA = (
    "reduce_scatter(Tensor x, str group, int scatter_dim=0, *, ScalarType? out_dtype=None, "
    "SymInt[]? shard_sizes=None, str algorithm='auto') -> Tensor"
)


def _prepare(
    group: Group,
    x: torch.Tensor,
    scatter_dim: int,
    out_dtype: torch.dtype | None,
    shard_sizes: Sequence[int] | None,
    algorithm: str,
) -> Call:
    dtypes.check_supported(x.dtype, "x")
    dim = _check.dim(scatter_dim, x.dim(), "scatter_dim")
    sizes = _check.scatter_sizes(shard_sizes, x.shape[dim], group.world)
    problem = Problem(
        op="reduce_scatter",
        device=_check.device(x),
        world=group.world,
        shape=tuple(x.shape),
        dim=dim,
        sizes=sizes,
        dtype=x.dtype,
        options=describe(x.dtype, _check.out_dtype(out_dtype, x)),
    )
    return plan_call(group, problem, algorithm, x.device)


def _run(
    x: torch.Tensor,
    group: str,
    scatter_dim: int = 0,
    *,
    out_dtype: torch.dtype | None = None,
    shard_sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    own = groups.get(group)
    sizes = None if shard_sizes is None else tuple(shard_sizes)
    key = ("reduce_scatter", x.shape, x.dtype, x.device, scatter_dim, out_dtype, sizes, algorithm)
    call = own.calls.get(key)
    if call is None:
        call = _prepare(own, x, scatter_dim, out_dtype, shard_sizes, algorithm)
        remember(own, key, call)
    result: torch.Tensor = run(call, _execute, x, out_dtype)
    return result


def _execute(call: Call, x: torch.Tensor, out_dtype: torch.dtype | None) -> Any:
    return call.function(call, x, reduction_of(x, out_dtype))


def _fake(
    x: torch.Tensor,
    group: str,
    scatter_dim: int = 0,
    *,
    out_dtype: torch.dtype | None = None,
    shard_sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    own = groups.get(group)
    shape = list(x.shape)
    dim = _check.dim(scatter_dim, x.dim(), "scatter_dim")
    shape[dim] = shape[dim] // own.world if shard_sizes is None else shard_sizes[own.rank]
    return x.new_empty(shape, dtype=out_dtype)


def _save(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: torch.Tensor) -> None:
    x, ctx.group, ctx.dim = inputs
    ctx.dtype, ctx.options = x.dtype, keyword_only_inputs


def _backward(ctx: Any, needs: Any, grad: torch.Tensor) -> Any:
    grad_x = torch.ops.tpkernels.all_gather.default(
        grad.to(ctx.dtype),
        ctx.group,
        ctx.dim,
        shard_sizes=ctx.options["shard_sizes"],
        algorithm=ctx.options["algorithm"],
    )
    return grad_x, None, None


define(SCHEMA, run=_run, fake=_fake)
define_backward("reduce_scatter", run=_run, save=_save, backward=_backward)


def reduce_scatter(
    x: torch.Tensor,
    group: GroupLike,
    scatter_dim: int = 0,
    *,
    out_dtype: torch.dtype | None = None,
    shard_sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    """Sums the ranks' ``x`` and keeps this rank's shard along ``scatter_dim``.

    Args:
        x: of the same shape on all ranks; any strides.
        group: a ProcessGroup, a DeviceMesh (dimension) or a group's name.
        scatter_dim: the dim that is split over the ranks.
        out_dtype: dtype of the result; default ``x``'s.
        shard_sizes: rows of each rank along ``scatter_dim`` where they are not all equal.
        algorithm: "auto", or one of "unfused", "ring", "direct".

    Returns:
        The shard, summed in fp32 in the order of the ranks and rounded once. The gradient of ``x``
        is that of all shards, gathered.

    Raises:
        ValueError, TypeError: wrong arguments; nothing has been sent then.
        NotImplementedError: right but not supported: a dtype, or the algorithm asked for.
        PeerLostError, CollectiveTimeoutError, CollectiveMismatchError, GroupBrokenError.
    """
    result: Any = torch.ops.tpkernels.reduce_scatter.default(
        x,
        groups.name_of(group),
        scatter_dim,
        out_dtype=out_dtype,
        shard_sizes=shard_sizes,
        algorithm=algorithm,
    )
    return result
