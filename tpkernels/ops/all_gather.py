"""``concat_r(x_r)`` along any dim."""

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
from tpkernels.planning.problem import Problem

SCHEMA = (
    "all_gather(Tensor x, str group, int gather_dim=0, *, SymInt[]? shard_sizes=None, "
    "str algorithm='auto') -> Tensor"
)


def _prepare(
    group: Group,
    x: torch.Tensor,
    gather_dim: int,
    shard_sizes: Sequence[int] | None,
    algorithm: str,
) -> Call:
    dtypes.check_supported(x.dtype, "x")
    dim = _check.dim(gather_dim, x.dim(), "gather_dim")
    sizes = _check.gather_sizes(shard_sizes, x.shape[dim], group.rank, group.world)
    shape = list(x.shape)
    shape[dim] = sum(sizes)
    problem = Problem(
        op="all_gather",
        device=_check.device(x),
        world=group.world,
        shape=tuple(shape),
        dim=dim,
        sizes=sizes,
        dtype=x.dtype,
    )
    return plan_call(group, problem, algorithm, x.device)


def _run(
    x: torch.Tensor,
    group: str,
    gather_dim: int = 0,
    *,
    shard_sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    own = groups.get(group)
    sizes = None if shard_sizes is None else tuple(shard_sizes)
    key = ("all_gather", x.shape, x.dtype, x.device, gather_dim, sizes, algorithm)
    call = own.calls.get(key)
    if call is None:
        call = remember(own, key, _prepare(own, x, gather_dim, shard_sizes, algorithm))
    result: torch.Tensor = run(call, _execute, x)
    return result


def _execute(call: Call, x: torch.Tensor) -> Any:
    return call.function(call, x)


def _fake(
    x: torch.Tensor,
    group: str,
    gather_dim: int = 0,
    *,
    shard_sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    own = groups.get(group)
    shape = list(x.shape)
    dim = _check.dim(gather_dim, x.dim(), "gather_dim")
    shape[dim] = shape[dim] * own.world if shard_sizes is None else sum(shard_sizes)
    return x.new_empty(shape)


def _save(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: torch.Tensor) -> None:
    _, ctx.group, ctx.dim = inputs
    ctx.options = keyword_only_inputs


def _backward(ctx: Any, needs: Any, grad: torch.Tensor) -> Any:
    options = ctx.options
    grad_x = torch.ops.tpkernels.reduce_scatter.default(
        grad, ctx.group, ctx.dim, shard_sizes=options["shard_sizes"], algorithm=options["algorithm"]
    )
    return grad_x, None, None


define(SCHEMA, run=_run, fake=_fake)
define_backward("all_gather", run=_run, save=_save, backward=_backward)


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
        group: a ProcessGroup, a DeviceMesh (dimension) or a group's name.
        gather_dim: the dim that is split over the ranks.
        shard_sizes: rows of each rank along ``gather_dim`` where they are not all equal.
        algorithm: "auto", or one of "unfused", "ring", "direct".

    The gradient of ``x`` is the sum over the ranks of the gradients of its part of their results:
    each rank is taken to use the result for a part of the loss of its own.

    Raises:
        ValueError, TypeError: wrong arguments; nothing has been sent then.
        NotImplementedError: right but not supported: a dtype, or the algorithm asked for.
        PeerLostError, CollectiveTimeoutError, CollectiveMismatchError, GroupBrokenError.
    """
    result: Any = torch.ops.tpkernels.all_gather.default(
        x, groups.name_of(group), gather_dim, shard_sizes=shard_sizes, algorithm=algorithm
    )
    return result
