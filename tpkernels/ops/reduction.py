"""What the ops that sum partials share: checks, the epilogue, what their backward keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tpkernels import dtypes, validation
from tpkernels.algorithms.reduction import Reduction
from tpkernels.groups.group import Group
from tpkernels.local.packed import columns_of
from tpkernels.op_spec import Options
from tpkernels.ops.autograd import WeightGrad, bias_grad, matmul
from tpkernels.planning.problem import Problem


def matmul_problem(
    op: str, group: Group, given: Any, scatter_dim: int | None, sizes: Any = None
) -> Problem:
    """Check the arguments of an op that multiplies and sum over the ranks.

    Args:
        scatter_dim: the dim of the sum [..., N] of which each rank keeps its shard; None: all.
        sizes: rows of each rank along it, where they are not all equal.
    """
    x, w = given.x, given.w
    validation.matrix_input(x)
    dim = None if scatter_dim is None else validation.dim(scatter_dim, x.dim(), "scatter_dim")
    validation.weight(w, x, x.shape[-1], "w")
    columns = columns_of(w)
    shape, sizes, kept = shapes_of(x, columns, dim, sizes, group)
    out_dtype = validation.out_dtype(getattr(given, "out_dtype", None), x)
    validation.bias(given.bias, x, columns)
    validation.residual(given.residual, x, kept, (x.dtype, out_dtype))
    wire_dtype = validation.wire_dtype(getattr(given, "wire_dtype", None), x.dtype)
    by_columns = dim == x.dim() - 1
    validation.whole(w, x, wire_dtype, given.algorithm, "w", by_columns=by_columns)
    return Problem(
        op=op,
        device=validation.device(x),
        world=group.world,
        shape=shape,
        dim=dim,
        sizes=sizes,
        dtype=wire_dtype,
        options=replace(
            reduction_options(x.dtype, out_dtype, given.bias, given.residual),
            local_product=validation.has_local_product([w], x),
        ),
    )


def shapes_of(
    x: torch.Tensor, columns: int, dim: int | None, sizes: Any, group: Group
) -> tuple[tuple[int, ...], tuple[int, ...], list[int]]:
    """Return the shape of the sum; the rows of each rank along ``dim``, which are ``sizes`` where
    these are given, and none if all ranks keep the sum; the shape of what this rank keeps."""
    shape = kept = [*x.shape[:-1], columns]
    if dim is None:
        return tuple(shape), (), kept
    sizes, kept = validation.scatter_sizes(sizes, shape[dim], group.world), list(shape)
    kept[dim] = sizes[group.rank]
    return tuple(shape), sizes, kept


def save_operands(ctx: Any, given: Any, *more: torch.Tensor) -> None:
    """Keep for the backward what a product with an epilogue needs, of the op's arguments, and
    ``more``."""
    x, w, bias, residual = given.x, given.w, given.bias, given.residual
    ctx.save_for_backward(x if w.requires_grad else None, w if x.requires_grad else None, *more)
    ctx.dtype, ctx.weight_grad = x.dtype, WeightGrad.of(w)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.residual_dtype = None if residual is None else residual.dtype


def operand_grads(
    ctx: Any, needs: Any, x: torch.Tensor, w: torch.Tensor, grad: torch.Tensor
) -> dict[str, torch.Tensor | None]:
    """Return the gradients of what an all-reduce of a product was made of, given that of the
    sum."""
    factor = grad.to(ctx.dtype)
    return {
        "x": matmul(factor, w.t()) if needs.x else None,
        "w": ctx.weight_grad.product(x, factor) if needs.w else None,
        "bias": bias_grad(grad, ctx.bias_dtype) if needs.bias else None,
        "residual": grad.to(ctx.residual_dtype) if needs.residual else None,
    }


def reduction_options(
    x_dtype: torch.dtype,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> Options:
    """Return what the ranks of a reduction must agree on."""
    return Options(
        x_dtype=x_dtype,
        out_dtype=out_dtype,
        bias=bias is not None,
        residual=residual is not None,
    )


def reduction_of(
    x: torch.Tensor,
    out_dtype: torch.dtype | None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> Reduction:
    """Return the epilogue of a checked call. The kernels of GPUs read a bias of any dtype."""
    if bias is not None:
        bias = bias.contiguous() if x.is_cuda else bias.to(dtypes.accumulator(x.dtype)).contiguous()
    if residual is not None:
        residual = residual.contiguous()
    return Reduction(out_dtype or x.dtype, bias, residual)
