"""What the ops that sum partials share: checks, the epilogue, what their backward keeps."""

from __future__ import annotations

from typing import Any

import torch

from tpkernels import dtypes
from tpkernels.algorithms.reduction import Reduction
from tpkernels.groups.group import Group
from tpkernels.local.packed import columns_of
from tpkernels.ops import _check
from tpkernels.ops._autograd import WeightGrad
from tpkernels.planning.problem import Problem


def matmul_problem(
    op: str, group: Group, given: Any, scatter_dim: int | None, sizes: Any = None
) -> Problem:
    """Checks the arguments of an op that multiplies and sums over the ranks.

    Args:
        scatter_dim: the dim of the sum [..., N] of which each rank keeps its shard; None: all.
        sizes: rows of each rank along it, where they are not all equal.
    """
    x, w = given.x, given.w
    _check.matrix_input(x)
    dim = None if scatter_dim is None else _check.dim(scatter_dim, x.dim(), "scatter_dim")
    _check.weight(w, x, x.shape[-1], "w")
    columns = columns_of(w)
    shape, kept = [*x.shape[:-1], columns], [*x.shape[:-1], columns]
    sizes = () if dim is None else _check.scatter_sizes(sizes, shape[dim], group.world)
    if dim is not None:
        kept[dim] = sizes[group.rank]
    out_dtype = _check.out_dtype(given.out_dtype, x)
    _check.bias(given.bias, x, columns)
    _check.residual(given.residual, x, kept, out_dtype)
    wire_dtype = _check.wire_dtype(given.wire_dtype, x)
    by_columns = dim == x.dim() - 1
    _check.whole(w, x, wire_dtype, given.algorithm, "w", by_columns=by_columns)
    return Problem(
        op=op,
        device=_check.device(x),
        world=group.world,
        shape=tuple(shape),
        dim=dim,
        sizes=sizes,
        dtype=wire_dtype,
        options=describe(x.dtype, out_dtype, given.bias, given.residual)
        + _check.product_options([w], x),
    )


def save_operands(ctx: Any, given: Any) -> None:
    """Keeps for the backward what a product with an epilogue needs, of the op's arguments."""
    x, w, bias, residual = given.x, given.w, given.bias, given.residual
    ctx.save_for_backward(x if w.requires_grad else None, w if x.requires_grad else None)
    ctx.dtype, ctx.weight_grad = x.dtype, WeightGrad.of(w)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.residual_dtype = None if residual is None else residual.dtype


def describe(
    x_dtype: torch.dtype,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> tuple[str, ...]:
    """The options that must be the same on all ranks, as text for the call's signature."""
    options = [f"x {dtypes.name(x_dtype)}", f"out {dtypes.name(out_dtype)}"]
    if bias is not None:
        options.append("bias")
    if residual is not None:
        options.append("residual")
    return tuple(options)


def reduction_of(
    x: torch.Tensor,
    out_dtype: torch.dtype | None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> Reduction:
    """The epilogue of a checked call. The kernels of GPUs read a bias of any dtype."""
    if bias is not None:
        bias = bias.contiguous() if x.is_cuda else bias.to(dtypes.accumulator(x.dtype)).contiguous()
    if residual is not None:
        residual = residual.contiguous()
    return Reduction(out_dtype or x.dtype, bias, residual)
