"""``sum_r(x_r) + residual`` on every rank, and its rows normalised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tpkernels import dtypes, validation
from tpkernels.call import Call
from tpkernels.groups import GroupLike, break_if_left, name_of
from tpkernels.groups.group import Group
from tpkernels.ops._library import define, define_backward
from tpkernels.ops._rms_norm import check_norm, norm_grads, norm_of
from tpkernels.ops._shortcut import shortcut
from tpkernels.ops.reduction import reduction_of, reduction_options
from tpkernels.planning.problem import Problem

SCHEMA = (
    "all_reduce_rms_norm(Tensor x, Tensor weight, str group, Tensor? residual=None, *, "
    "float eps=1e-6, str algorithm='auto') -> (Tensor, Tensor)"
)


def _problem(group: Group, given: Any) -> Problem:
    x, residual = given.x, given.residual
    dtypes.check_supported(x.dtype, "x")
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"x has shape {list(x.shape)}; it must be [..., N], N at least 1")
    validation.residual(residual, x, x.shape, (x.dtype,))
    norm = check_norm(x, given.weight, given.eps, x.shape[-1], "weight")
    return Problem(
        op="all_reduce_rms_norm",
        device=validation.device(x),
        world=group.world,
        shape=tuple(x.shape),
        dim=None,
        sizes=(),
        dtype=x.dtype,
        options=replace(reduction_options(x.dtype, x.dtype, None, residual), norm=norm),
    )


def _execute(call: Call, given: Any) -> Any:
    x = given.x
    reduction = reduction_of(x, None, None, given.residual)
    return call.function(call, x, reduction, norm_of(given.weight, given.eps))


def _fake(group: Group, given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return given.x.new_empty(given.x.shape), given.x.new_empty(given.x.shape)


def _save(ctx: Any, given: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(output[1], given.weight)
    ctx.eps, ctx.dtype = given.eps, given.x.dtype


def _backward(ctx: Any, needs: Any, *grads: torch.Tensor) -> dict[str, Any]:
    """All of it local: the gradient of the sum is that of each summand (ops/autograd.py)."""
    total, weight = norm_grads(ctx, *ctx.saved_tensors, *grads)
    term = total.to(ctx.dtype)  # which the residual has too
    return {
        "x": term,
        "weight": weight if needs.weight else None,
        "residual": term if needs.residual else None,
    }


define(SCHEMA, problem=_problem, execute=_execute, fake=_fake)
define_backward("all_reduce_rms_norm", save=_save, backward=_backward)
_run = shortcut("all_reduce_rms_norm")


def all_reduce_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    group: GroupLike,
    *,
    residual: torch.Tensor | None = None,
    eps: float = 1e-6,
    algorithm: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum ``x`` over the ranks, adds ``residual`` and normalise the rows, as one operation.

    Args:
        x: [..., N], of the same shape on all ranks; any strides.
        weight: [N], of the normalisation, in ``x``'s dtype or float32. The same on all ranks, as
            are ``residual`` and ``eps``.
        group: a ProcessGroup, a one-dimensional DeviceMesh, ``(mesh, dim)`` or a group's name.
        residual: [..., N], of ``x``'s dtype, added to the sum.
        eps: added to the mean of the squares.
        algorithm: "auto", or the name of one; `tpkernels info` lists them.

    Returns:
        ``(normed, new_residual)``, [..., N] in ``x``'s dtype. ``new_residual`` is
        ``sum_r(x_r) + residual``, in fp32, in rank order, rounded once: the bits of `all_reduce`
        where there is no residual. ``normed`` is
        ``new_residual / sqrt(mean(new_residual^2) + eps) * weight`` of each row: of the rounded
        values, in fp32, rounded once, as ``torch.nn.functional.rms_norm`` gives it. Without
        overflow it is within ``eps_dtype/2 + (N/128 + 8) * 2^-24`` of that, relatively, where
        ``eps_dtype`` is ``torch.finfo``'s. Both have the same bits on every rank and in every run,
        and on CPUs by every algorithm. On CUDA tensors ``numerics`` of `init` decides.

    `direct` normalises each row as soon as it is summed: on CPUs while it is in the cache, on CUDA
    tensors in the kernel that sums, if N is a multiple of 8. Everywhere else a normalisation
    follows the all-reduce.

    All ranks compute the same loss from the results, so its gradient is the same on all ranks and
    the backward is local. For an input that all ranks share see `all_reduce`.

    Raises:
        ValueError, TypeError: invalid arguments; nothing has been sent.
        NotImplementedError: valid but not supported: a dtype, or the requested algorithm.
        PeerLostError, CollectiveTimeoutError, CollectiveMismatchError, GroupBrokenError.
    """
    try:
        result: Any = _run(
            x, weight, name_of(group), residual=residual, eps=eps, algorithm=algorithm
        )
        return result
    except BaseException as error:
        break_if_left(group, error)
        raise
