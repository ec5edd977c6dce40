"""``y = sum_r(x_r @ w_r)`` on every rank: the row-parallel layer without sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch

from tpkernels import groups
from tpkernels.backends import run
from tpkernels.call import Call
from tpkernels.groups import GroupLike
from tpkernels.groups.group import Group
from tpkernels.ops import _check
from tpkernels.ops._autograd import WeightGrad, bias_grad, matmul
from tpkernels.ops._library import define, define_autocast, define_backward, plan_call, remember
from tpkernels.ops._reduction import describe, reduction_of
from tpkernels.planning.problem import Problem

SCHEMA = (
    "matmul_all_reduce(Tensor x, Tensor w, str group, Tensor? bias=None, Tensor? residual=None, *, "
    "ScalarType? out_dtype=None, ScalarType? wire_dtype=None, str algorithm='auto') -> Tensor"
)


def _prepare(
    group: Group,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    wire_dtype: torch.dtype | None,
    algorithm: str,
) -> Call:
    _check.matrix_input(x)
    _check.weight(w, x, x.shape[-1], "w")
    shape = (*x.shape[:-1], w.shape[1])
    out = _check.out_dtype(out_dtype, x)
    _check.bias(bias, x, w.shape[1])
    _check.residual(residual, x, shape, out)
    wire = _check.wire_dtype(wire_dtype, x)
    problem = Problem(
        op="matmul_all_reduce",
        device=_check.device(x),
        world=group.world,
        shape=shape,
        dim=None,
        sizes=(),
        dtype=wire,
        options=describe(x.dtype, out, bias, residual),
    )
    return plan_call(group, problem, algorithm, x.device)


def _run(
    x: torch.Tensor,
    w: torch.Tensor,
    group: str,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    own = groups.get(group)
    key = (
        "matmul_all_reduce",
        x.shape,
        x.dtype,
        x.device,
        w.shape,
        w.dtype,
        w.device,
        bias is not None and (bias.shape, bias.dtype, bias.device),
        residual is not None and (residual.shape, residual.dtype, residual.device),
        out_dtype,
        wire_dtype,
        algorithm,
    )
    call = own.calls.get(key)
    if call is None:
        call = _prepare(own, x, w, bias, residual, out_dtype, wire_dtype, algorithm)
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
    return call.function(call, x, w, reduction_of(x, out_dtype, bias, residual))


def _fake(
    x: torch.Tensor,
    w: torch.Tensor,
    group: str,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    groups.get(group)
    return x.new_empty((*x.shape[:-1], w.shape[1]), dtype=out_dtype)


def _save(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: torch.Tensor) -> None:
    x, w, _, bias, residual = inputs
    ctx.save_for_backward(x if w.requires_grad else None, w if x.requires_grad else None)
    ctx.dtype, ctx.weight_grad = x.dtype, WeightGrad.of(w)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.residual_dtype = None if residual is None else residual.dtype


def _backward(ctx: Any, needs: Any, grad: torch.Tensor) -> Any:
    """All of it local: the gradient of the sum is that of each partial (ops/_autograd.py)."""
    x, w = ctx.saved_tensors
    need_x, need_w, _, need_bias, need_residual = needs
    factor = grad.to(ctx.dtype)
    return (
        matmul(factor, w.t()) if need_x else None,
        ctx.weight_grad.product(x, factor) if need_w else None,
        None,
        bias_grad(grad, ctx.bias_dtype) if need_bias else None,
        grad.to(ctx.residual_dtype) if need_residual else None,
    )


define(SCHEMA, run=_run, fake=_fake)
define_backward("matmul_all_reduce", run=_run, save=_save, backward=_backward)
define_autocast("matmul_all_reduce")


def matmul_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    group: GroupLike,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    """Multiplies and sums the products over the ranks of ``group``, as one operation.

    Args:
        x: [..., K]; any strides. K may differ by rank.
        w: [K, N]; any strides (``linear.weight.t()`` is the fast layout).
        group: a ProcessGroup, a DeviceMesh (dimension) or a group's name.
        bias: [N], added once, after the sum. The same on all ranks, as is ``residual``.
        residual: [..., N], added after the bias.
        out_dtype: dtype of the result; default ``x``'s.
        wire_dtype: dtype that partial products travel in; ``x``'s (default) or float32.
        algorithm: "auto", or one of "unfused", "ring", "direct", "pipelined".

    Returns:
        ``sum_r(x_r @ w_r) + bias + residual`` [..., N]. Partials are summed in fp32 in the order of
        the ranks and rounded once: the same bits on every rank, in every run, for every algorithm.

    Its gradient is taken to be the same on all ranks, since all compute the same loss from it. The
    backward is local then: ``grad_x = grad @ w^T``, ``grad_w = x^T @ grad``; see ``all_reduce`` for
    an input that all ranks share.

    Raises:
        ValueError, TypeError: wrong arguments; nothing has been sent then.
        NotImplementedError: right but not supported: a dtype, or the algorithm asked for.
        PeerLostError, CollectiveTimeoutError, CollectiveMismatchError, GroupBrokenError.
    """
    result: Any = torch.ops.tpkernels.matmul_all_reduce.default(
        x,
        w,
        groups.name_of(group),
        bias=bias,
        residual=residual,
        out_dtype=out_dtype,
        wire_dtype=wire_dtype,
        algorithm=algorithm,
    )
    return result
