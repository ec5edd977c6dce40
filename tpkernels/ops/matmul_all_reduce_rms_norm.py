"""``sum_r(x_r @ w_r) + bias + residual`` on every rank, and its rows normalised: the row-parallel
layer without sequence parallelism, and the norm of the next layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tpkernels.call import Call
from tpkernels.groups import GroupLike, break_if_left, name_of
from tpkernels.groups.group import Group
from tpkernels.local.packed import columns_of, fake_columns_of
from tpkernels.local.product import Weight
from tpkernels.ops._autocast import define_autocast
from tpkernels.ops._library import callable_for, define, define_backward
from tpkernels.ops._rms_norm import check_norm, norm_grads, norm_of
from tpkernels.ops._shortcut import shortcut
from tpkernels.ops.reduction import matmul_problem, operand_grads, reduction_of, save_operands
from tpkernels.planning.problem import Problem

SCHEMA = (
    "matmul_all_reduce_rms_norm(Tensor x, Tensor w, Tensor norm_weight, str group, "
    "Tensor? bias=None, Tensor? residual=None, *, float eps=1e-6, str algorithm='auto') "
    "-> (Tensor, Tensor)"
)


def _problem(group: Group, given: Any) -> Problem:
    problem = matmul_problem("matmul_all_reduce_rms_norm", group, given, scatter_dim=None)
    columns = columns_of(given.w)
    norm = check_norm(given.x, given.norm_weight, given.eps, columns, "norm_weight")
    return replace(problem, options=replace(problem.options, norm=norm))


def _execute(call: Call, given: Any) -> Any:
    reduction = reduction_of(given.x, None, given.bias, given.residual)
    norm = norm_of(given.norm_weight, given.eps)
    return call.function(call, given.x, given.w, reduction, norm)


def _fake(group: Group, given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x = given.x
    shape = (*x.shape[:-1], fake_columns_of(given.w, x.shape[-1]))
    return x.new_empty(shape), x.new_empty(shape)


def _save(ctx: Any, given: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    save_operands(ctx, given, output[1], given.norm_weight)
    ctx.eps = given.eps


def _backward(ctx: Any, needs: Any, *grads: torch.Tensor) -> dict[str, Any]:
    """All of it local: the gradient of the sum is that of each partial (ops/autograd.py)."""
    x, w, total, norm_weight = ctx.saved_tensors
    grad, weight_grad = norm_grads(ctx, total, norm_weight, *grads)
    return {
        **operand_grads(ctx, needs, x, w, grad),
        "norm_weight": weight_grad if needs.norm_weight else None,
    }


define(SCHEMA, problem=_problem, execute=_execute, fake=_fake)
define_backward("matmul_all_reduce_rms_norm", save=_save, backward=_backward)
define_autocast("matmul_all_reduce_rms_norm")
_run = shortcut("matmul_all_reduce_rms_norm")  # with tensors


def matmul_all_reduce_rms_norm(
    x: torch.Tensor,
    w: Weight,
    norm_weight: torch.Tensor,
    group: GroupLike,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    eps: float = 1e-6,
    algorithm: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`matmul_all_reduce`, and a normalisation of the rows, as one operation.

    Args:
        x: [..., K]; any strides. K may differ by rank.
        w: [K, N]; any strides (``linear.weight.t()`` is the fast layout), packed (`pack`), or a
            `LocalProduct`.
        norm_weight: [N], of the normalisation, in ``x``'s dtype or float32. The same on all ranks,
            as are ``bias``, ``residual`` and ``eps``.
        group: a ProcessGroup, a one-dimensional DeviceMesh, ``(mesh, dim)`` or a group's name.
        bias: [N], added once, after the sum.
        residual: [..., N], of ``x``'s dtype, added after the bias.
        eps: added to the mean of the squares.
        algorithm: "auto", or the name of one; `tpkernels info` lists them.

    Returns:
        ``(normed, new_residual)``, [..., N] in ``x``'s dtype. ``new_residual`` is
        ``sum_r(x_r @ w_r) + bias + residual``, the bits of `matmul_all_reduce`; ``normed`` is what
        `all_reduce_rms_norm` makes of it, with the same bound.

    All ranks compute the same loss from the results, so its gradient is the same on all ranks and
    the backward is local. For an input that all ranks share see `all_reduce`.

    Raises:
        ValueError, TypeError: invalid arguments; nothing has been sent.
        NotImplementedError: valid but not supported: a dtype, or the requested algorithm.
        PeerLostError, CollectiveTimeoutError, CollectiveMismatchError, GroupBrokenError.
    """
    try:
        result: Any = callable_for("matmul_all_reduce_rms_norm", [w], _run)(
            x,
            w,
            norm_weight,
            name_of(group),
            bias=bias,
            residual=residual,
            eps=eps,
            algorithm=algorithm,
        )
        return result
    except BaseException as error:
        break_if_left(group, error)
        raise
