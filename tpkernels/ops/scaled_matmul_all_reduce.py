"""``y = sum_r((x_r * scale_x_r) @ (w_r * scale_w_r))`` on every rank: the row-parallel layer, on
fp8 or fp4 operands."""

from __future__ import annotations

from typing import Any

import torch

from tpkernels.groups import GroupLike, break_if_left, name_of
from tpkernels.groups.group import Group
from tpkernels.ops import scaled
from tpkernels.ops._library import define, define_without_gradient
from tpkernels.ops._shortcut import shortcut
from tpkernels.planning.problem import Problem

SCHEMA = (
    "scaled_matmul_all_reduce(Tensor x, Tensor w, Tensor scale_x, Tensor scale_w, str group, "
    "Tensor? bias=None, Tensor? residual=None, *, ScalarType? out_dtype=None, "
    "ScalarType? wire_dtype=None, bool use_fast_accum=False, str algorithm='auto') -> Tensor"
)


def _problem(group: Group, given: Any) -> Problem:
    return scaled.reduction_problem("scaled_matmul_all_reduce", group, given, None)


def _fake(group: Group, given: Any) -> torch.Tensor:
    x, dtype = given.x, scaled.out_dtype(given.out_dtype)
    result: torch.Tensor = x.new_empty((*x.shape[:-1], given.w.shape[1]), dtype=dtype)
    return result


define(SCHEMA, problem=_problem, execute=scaled.execute_reduction, fake=_fake)
define_without_gradient("scaled_matmul_all_reduce", instead=scaled.NO_GRADIENT)
_run = shortcut("scaled_matmul_all_reduce")


def scaled_matmul_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
    group: GroupLike,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    algorithm: str = "auto",
) -> torch.Tensor:
    """Multiply scaled operands and sum over the ranks of ``group``, as one operation.

    Args:
        x, w, scale_x, scale_w, bias, out_dtype, wire_dtype, use_fast_accum: as in
            `scaled_matmul_reduce_scatter`. Scales are of this rank's slice of K.
        group: a ProcessGroup, a one-dimensional DeviceMesh, ``(mesh, dim)`` or a group's name.
        residual: of the result's shape and dtype, added after the bias, the same on all ranks.
        algorithm: "auto", or the name of one; "fused" has no kernel for it.

    Returns:
        ``sum_r(partial_r) + bias + residual`` [..., N] on every rank, summed as in
        `scaled_matmul_reduce_scatter`.

    Raises:
        ValueError, TypeError: invalid arguments; nothing has been sent.
        NotImplementedError: valid but not supported: a dtype, the requested algorithm, or a
            gradient.
        PeerLostError, CollectiveTimeoutError, CollectiveMismatchError, GroupBrokenError.
    """
    try:
        result: torch.Tensor = _run(
            x,
            w,
            scale_x,
            scale_w,
            name_of(group),
            bias=bias,
            residual=residual,
            out_dtype=out_dtype,
            wire_dtype=wire_dtype,
            use_fast_accum=use_fast_accum,
            algorithm=algorithm,
        )
        return result
    except BaseException as error:
        break_if_left(group, error)
        raise
