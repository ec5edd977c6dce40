"""``y = sum_r(x_r @ w_r)`` on every rank: the row-parallel layer without sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch

from tpkernels.call import Call
from tpkernels.groups import GroupLike, break_if_left, name_of
from tpkernels.groups.group import Group
from tpkernels.local.packed import fake_columns_of
from tpkernels.local.product import Weight
from tpkernels.ops._autocast import define_autocast
from tpkernels.ops._library import callable_for, define, define_backward
from tpkernels.ops._shortcut import shortcut
from tpkernels.ops.reduction import matmul_problem, operand_grads, reduction_of, save_operands
from tpkernels.planning.problem import Problem

SCHEMA = (
    "matmul_all_reduce(Tensor x, Tensor w, str group, Tensor? bias=None, Tensor? residual=None, *, "
    "ScalarType? out_dtype=None, ScalarType? wire_dtype=None, str algorithm='auto') -> Tensor"
)


def _problem(group: Group, given: Any) -> Problem:
    return matmul_problem("matmul_all_reduce", group, given, scatter_dim=None)


def _execute(call: Call, given: Any) -> Any:
    return call.function(
        call,
        given.x,
        given.w,
        reduction_of(given.x, given.out_dtype, given.bias, given.residual),
    )


def _fake(group: Group, given: Any) -> torch.Tensor:
    x = given.x
    shape = (*x.shape[:-1], fake_columns_of(given.w, x.shape[-1]))
    return x.new_empty(shape, dtype=given.out_dtype)


def _save(ctx: Any, given: Any, output: torch.Tensor) -> None:
    save_operands(ctx, given)


def _backward(ctx: Any, needs: Any, grad: torch.Tensor) -> dict[str, Any]:
    """All of it local: the gradient of the sum is that of each partial (ops/autograd.py)."""
    x, w = ctx.saved_tensors
    return operand_grads(ctx, needs, x, w, grad)


define(SCHEMA, problem=_problem, execute=_execute, fake=_fake)
define_backward("matmul_all_reduce", save=_save, backward=_backward)
define_autocast("matmul_all_reduce")
run_matmul_all_reduce = shortcut("matmul_all_reduce")  # with tensors


def matmul_all_reduce(
    x: torch.Tensor,
    w: Weight,
    group: GroupLike,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | None = None,
    algorithm: str = "auto",
) -> torch.Tensor:
    """Multiply and sum over the ranks of ``group``, as one operation.

    Args:
        x: [..., K]; any strides. K may differ by rank.
        w: [K, N]; any strides (``linear.weight.t()`` is the fast layout), packed (`pack`), or a
            `LocalProduct`.
        group: a ProcessGroup, a one-dimensional DeviceMesh, ``(mesh, dim)`` or a group's name.
        bias: [N], added once, after the sum. The same on all ranks, as is ``residual``.
        residual: [..., N], added after the bias.
        out_dtype: dtype of the result; default ``x``'s.
        wire_dtype: dtype of the communicated partials; ``x``'s (default) or float32.
        algorithm: "auto", or the name of one; `tpkernels info` lists them.

    Returns:
        ``sum_r(x_r @ w_r) + bias + residual`` [..., N]. Partials are summed in fp32 in rank order
        and rounded once: the same bits on every rank, in every run and for every algorithm. On CUDA
        tensors ``numerics`` of `init` decides.

    All ranks compute the same loss from the result, so its gradient is the same on all ranks and
    the backward is local: ``grad_x = grad @ w^T``, ``grad_w = x^T @ grad``. For an input that all
    ranks share see ``all_reduce``.

    Raises:
        ValueError, TypeError: invalid arguments; nothing has been sent.
        NotImplementedError: valid but not supported: a dtype, or the requested algorithm.
        PeerLostError, CollectiveTimeoutError, CollectiveMismatchError, GroupBrokenError.
    """
    try:
        result: Any = callable_for("matmul_all_reduce", [w], run_matmul_all_reduce)(
            x,
            w,
            name_of(group),
            bias=bias,
            residual=residual,
            out_dtype=out_dtype,
            wire_dtype=wire_dtype,
            algorithm=algorithm,
        )
        return result
    except BaseException as error:
        break_if_left(group, error)
        raise
