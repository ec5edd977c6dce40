"""``y_r = rows_r(sum_r(x_r @ w_r))``: the row-parallel layer with sequence parallelism (attention
out, down)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpkernels import groups
from tpkernels.backends import run
from tpkernels.call import Call
from tpkernels.groups import GroupLike
from tpkernels.groups.group import Group
from tpkernels.ops import _check
from tpkernels.ops._autograd import WeightGrad, algorithm_like, bias_grad
from tpkernels.ops._library import define, define_autocast, define_backward, plan_call, remember
from tpkernels.ops._reduction import describe, reduction_of
from tpkernels.planning.problem import Problem

SCHEMA = (
    "matmul_reduce_scatter(Tensor x, Tensor w, str group, int scatter_dim=0, "
    "Tensor? bias=None, Tensor? residual=None, *, ScalarType? out_dtype=None, "
    "ScalarType? wire_dtype=None, SymInt[]? shard_sizes=None, str algorithm='auto') -> Tensor"
)


def _prepare(
    group: Group,
    x: torch.Tensor,
    w: torch.Tensor,
    scatter_dim: int,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    wire_dtype: torch.dtype | None,
    shard_sizes: Sequence[int] | None,
    algorithm: str,
) -> Call:
    _check.matrix_input(x)
    dim = _check.dim(scatter_dim, x.dim(), "scatter_dim")
    _check.weight(w, x, x.shape[-1], "w")
    shape = [*x.shape[:-1], w.shape[1]]
    sizes = _check.scatter_sizes(shard_sizes, shape[dim], group.world)
    out = _check.out_dtype(out_dtype, x)
    _check.bias(bias, x, w.shape[1])
    shard = [*shape[:dim], sizes[group.rank], *shape[dim + 1 :]]
    _check.residual(residual, x, shard, out)
    wire = _check.wire_dtype(wire_dtype, x)
    problem = Problem(
        op="matmul_reduce_scatter",
        device=_check.device(x),
        world=group.world,
        shape=tuple(shape),
        dim=dim,
        sizes=sizes,
        dtype=wire,
        options=describe(x.dtype, out, bias, residual),
    )
    return plan_call(group, problem, algorithm, x.device)


def _run(
    x: torch.Tensor,
    w: torch.Tensor,
    group: str,
    scatter_dim: int = 0,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | None = None,
    shard_sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    own = groups.get(group)
    key = (
        "matmul_reduce_scatter",
        x.shape,
        x.dtype,
        x.device,
        w.shape,
        w.dtype,
        w.device,
        scatter_dim,
        bias is not None and (bias.shape, bias.dtype, bias.device),
        residual is not None and (residual.shape, residual.dtype, residual.device),
        out_dtype,
        wire_dtype,
        None if shard_sizes is None else tuple(shard_sizes),
        algorithm,
    )
    call = own.calls.get(key)
    if call is None:
        call = _prepare(
            own,
            x,
            w,
            scatter_dim,
            bias,
            residual,
            out_dtype,
            wire_dtype,
            shard_sizes,
            algorithm,
        )
        remember(own, key, call)
    result: torch.Tensor = run(call, _execute, x, w, out_dtype, bias, residual)
    return result


def _execute(
    call: Call,
    x: torch.Tensor,
    w: torch.Tensor,
    out_dtype: torch.dtype | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> Any:
    if bias is not None and call.problem.dim == x.dim() - 1:
        sizes, rank = call.problem.sizes, call.group.rank
        bias = bias.narrow(0, sum(sizes[:rank]), sizes[rank])
    return call.function(call, x, w, reduction_of(x, out_dtype, bias, residual))


def _fake(
    x: torch.Tensor,
    w: torch.Tensor,
    group: str,
    scatter_dim: int = 0,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | None = None,
    shard_sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    own = groups.get(group)
    shape = [*x.shape[:-1], w.shape[1]]
    dim = _check.dim(scatter_dim, x.dim(), "scatter_dim")
    shape[dim] = shape[dim] // own.world if shard_sizes is None else shard_sizes[own.rank]
    return x.new_empty(shape, dtype=out_dtype)


def _save(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: torch.Tensor) -> None:
    x, w, ctx.group, ctx.dim, bias, residual = inputs
    ctx.save_for_backward(x if w.requires_grad else None, w if x.requires_grad else None)
    ctx.dtype, ctx.weight_grad, ctx.options = x.dtype, WeightGrad.of(w), keyword_only_inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.residual_dtype = None if residual is None else residual.dtype


def _gathered(ctx: Any, grad: torch.Tensor, w: torch.Tensor | None, keep: bool) -> Any:
    """(the gradient of x, or None without ``w``; the gathered gradient, if kept or needed): one
    gather at the most."""
    sizes, forward = ctx.options["shard_sizes"], ctx.options["algorithm"]
    last = ctx.dim == grad.dim() - 1
    if w is not None:
        whole, (grad_x,) = torch.ops.tpkernels.all_gather_matmul.default(
            grad,
            [w.t()],
            ctx.group,
            ctx.dim,
            return_gathered=keep,
            shard_sizes=sizes,
            algorithm=algorithm_like(forward, has_matmul=True, last_dim=last),
        )
        return grad_x, whole
    whole = torch.ops.tpkernels.all_gather.default(
        grad,
        ctx.group,
        ctx.dim,
        shard_sizes=sizes,
        algorithm=algorithm_like(forward, has_matmul=False, last_dim=last),
    )
    return None, whole


def _backward(ctx: Any, needs: Any, grad: torch.Tensor) -> Any:
    x, w = ctx.saved_tensors
    need_x, need_w, _, _, need_bias, need_residual = needs
    grad_x, whole = None, grad
    if need_x or need_w or need_bias:
        keep = need_w or need_bias
        grad_x, whole = _gathered(ctx, grad.to(ctx.dtype), w if need_x else None, keep)
    return (
        grad_x,
        ctx.weight_grad.product(x, whole) if need_w else None,
        None,
        None,
        bias_grad(whole, ctx.bias_dtype) if need_bias else None,
        grad.to(ctx.residual_dtype) if need_residual else None,
    )


define(SCHEMA, run=_run, fake=_fake)
define_backward("matmul_reduce_scatter", run=_run, save=_save, backward=_backward)
define_autocast("matmul_reduce_scatter")


def matmul_reduce_scatter(
    x: torch.Tensor,
    w: torch.Tensor,
    group: GroupLike,
    scatter_dim: int = 0,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | None = None,
    shard_sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    """Multiplies, sums the products over the ranks of ``group`` and keeps this rank's shard, as one
    operation.

    Args:
        x: [..., K]; any strides. K may differ by rank.
        w: [K, N]; any strides (``linear.weight.t()`` is the fast layout).
        group: a ProcessGroup, a DeviceMesh (dimension) or a group's name.
        scatter_dim: the dim of the product [..., N] that is split over the ranks.
        bias: [N], added once, after the sum; the whole bias also where N is scattered.
        residual: of the result's shape, added after the bias.
        out_dtype: dtype of the result; default ``x``'s.
        wire_dtype: dtype that partial products travel in; ``x``'s (default) or float32.
        shard_sizes: rows of each rank along ``scatter_dim`` where they are not all equal.
        algorithm: "auto", or one of "unfused", "ring", "direct", "pipelined".

    Returns:
        This rank's shard of ``sum_r(x_r @ w_r) + bias + residual``. Partials are summed in fp32 in
        the order of the ranks and rounded once: the same bits in every run, for every algorithm.

    The backward gathers the gradients of the shards once, for ``x`` (an ``all_gather_matmul``),
    ``w`` and ``bias``, whose whole gradient every rank gets.

    Raises:
        ValueError, TypeError: wrong arguments; nothing has been sent then.
        NotImplementedError: right but not supported: a dtype, or the algorithm asked for.
        PeerLostError, CollectiveTimeoutError, CollectiveMismatchError, GroupBrokenError.

    The argument meanings are those of ``torch.ops.symm_mem.fused_matmul_reduce_scatter``.
    """
    result: Any = torch.ops.tpkernels.matmul_reduce_scatter.default(
        x,
        w,
        groups.name_of(group),
        scatter_dim,
        bias=bias,
        residual=residual,
        out_dtype=out_dtype,
        wire_dtype=wire_dtype,
        shard_sizes=shard_sizes,
        algorithm=algorithm,
    )
    return result
