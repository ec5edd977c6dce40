"""Grouped GEMM of local experts: ``y = x @ w[group of the row]`` for rows sorted by group.

On CPUs the extension loops over the groups and multiplies each separately (csrc/calls/matmul.h).
Groups that it does not support, such as plain weights with many rows, use one ``torch.mm`` each.
GPUs use ``F.grouped_mm`` if it supports the operands, else a loop over a host copy of ``counts``.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F

from tpkernels import _C
from tpkernels.local.matmul import local_matmul
from tpkernels.local.memory import empty
from tpkernels.local.packed import stack_columns
from tpkernels.local.ranges import MATMUL, record_range
from tpkernels.ops import validation
from tpkernels.ops.autograd import Context, Needs
from tpkernels.ops.registration import Op, define_kernel, define_local

SCHEMA = "grouped_matmul(Tensor x, Tensor stack, Tensor counts) -> Tensor"
GRADIENT = "_grouped_outer_product(Tensor x, Tensor y, Tensor counts) -> Tensor"
_ALIGNMENT = 16  # bytes; row alignment that F.grouped_mm requires


def multiply_groups(x: torch.Tensor, stack: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the grouped matmul of `tpkernels.grouped_matmul`, without a gradient."""
    if x.is_cuda:
        validation.group_operands(x, stack, counts)
        return _run_on_gpu(x, stack, counts)
    # Checks cost as much as a matmul of one row, so they run only after a failure.
    try:
        if x.stride(1) != 1:
            x = x.contiguous()
        out = empty((x.shape[0], stack_columns(stack)), x.dtype, x.device)
        with record_range(MATMUL):
            remaining = _C.calls.grouped_multiply(x, stack, counts, out)
    except Exception:
        validation.group_operands(x, stack, counts)
        raise
    if remaining or not x.shape[0]:
        validation.group_operands(x, stack, counts)
        rows = group_slices(counts, x)
        for group in remaining:
            local_matmul(x[rows[group]], stack[group], out[rows[group]])
    return out


def group_slices(counts: torch.Tensor, x: torch.Tensor) -> list[slice]:
    """Return the slice of rows of each group.

    Raises ValueError if a count is negative or the counts do not add up to the rows of x. On GPUs
    they may add up to fewer rows, and slices are clipped to x.
    """
    rows: list[int] = counts.tolist()
    if min(rows, default=0) < 0 or (sum(rows) != len(x) and not x.is_cuda):
        raise ValueError(
            f"counts is {rows}, but x has {len(x)} rows; the counts must be at least 0 and add up "
            "to the rows of x"
        )
    offsets = (min(offset, len(x)) for offset in accumulate(rows, initial=0))
    return [slice(begin, end) for begin, end in pairwise(offsets)]


def group_end_offsets(counts: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the end offset of each group in x, the ``offs`` argument of ``F.grouped_mm``."""
    return counts.cumsum(0, dtype=torch.int32).clamp_(max=len(x))


def _run_on_gpu(x: torch.Tensor, stack: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    if torch_supports(x) and torch_supports(stack):
        return F.grouped_mm(x, stack, offs=group_end_offsets(counts, x))
    out = empty((x.shape[0], stack_columns(stack)), x.dtype, x.device)
    for w, rows in zip(stack, group_slices(counts, x), strict=True):
        local_matmul(x[rows], w, out[rows])
    return out


def torch_supports(x: torch.Tensor) -> bool:
    """Return True if ``F.grouped_mm`` supports an operand on a GPU."""
    short, pitch = sorted(x.stride()[-2:])
    aligned = (pitch * x.itemsize) % _ALIGNMENT == 0 and x.data_ptr() % _ALIGNMENT == 0
    return hasattr(F, "grouped_mm") and x.dtype == torch.bfloat16 and short == 1 and aligned


def add_bias(y: torch.Tensor, bias: torch.Tensor | None, counts: torch.Tensor) -> torch.Tensor:
    """Return ``y`` plus the bias row of each group, in the dtype of ``y``.

    Rows beyond the counts do not contribute to the gradient of ``bias``.
    """
    if bias is None:
        return y
    if bias.requires_grad:
        bias = F.pad(bias, (0, 0, 0, 1))
    rows = torch.arange(len(y), device=y.device)
    groups = torch.searchsorted(counts.cumsum(0), rows, right=True).clamp_(max=len(bias) - 1)
    return y + bias.to(y.dtype).index_select(0, groups)


def _outer_products(x: torch.Tensor, y: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return ``x_i^T @ y_i`` for each group, [E, K, N]. x [R, K], y [R, N]."""
    if x.is_cuda and torch_supports(x) and torch_supports(y):
        return F.grouped_mm(x.t(), y, offs=group_end_offsets(counts, x))
    out = x.new_empty(len(counts), x.shape[1], y.shape[1])
    for out_group, rows in zip(out, group_slices(counts, x), strict=True):
        if rows.start == rows.stop:
            out_group.zero_()
        else:
            local_matmul(x[rows].t(), y[rows], out_group)
    return out


def _save(ctx: Context, args: Any, output: object) -> None:
    ctx.save_for_backward(args.x, args.stack, args.counts)


def _backward(ctx: Context, needs: Needs, grad: torch.Tensor) -> dict[str, Any]:
    x, stack, counts = ctx.saved_tensors
    gradients = {}
    if needs.x:
        transposed = stack.transpose(1, 2)
        gradients["x"] = torch.ops.tpkernels.grouped_matmul.default(grad, transposed, counts)
    if needs.stack:
        outer_products = torch.ops.tpkernels._grouped_outer_product.default
        if stack.stride(1) < stack.stride(2):  # the gradient has the weight layout
            gradients["stack"] = outer_products(grad, x, counts).transpose(1, 2)
        else:
            gradients["stack"] = outer_products(x, grad, counts)
    return gradients


OP: Op[torch.Tensor] = define_local(
    SCHEMA,
    run=multiply_groups,
    fake=lambda x, stack, counts: x.new_empty((x.shape[0], stack_columns(stack))),
    save=_save,
    backward=_backward,
    autocast=True,
)
define_kernel(
    GRADIENT,
    run=_outer_products,
    fake=lambda x, y, counts: x.new_empty((counts.shape[0], x.shape[1], y.shape[1])),
)


def grouped_matmul(
    x: torch.Tensor, w: torch.Tensor, counts: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply the rows of each group by the weight of the group. Local, no communication.

    It equals::

        groups = x.split(counts.tolist())
        y = torch.cat([rows @ w[e] + bias[e] for e, rows in enumerate(groups)])

    Args:
        x: [R, K], floating-point rows sorted by group.
        w: [E, K, N] in the dtype of ``x`` with any strides, so ``weight.transpose(1, 2)`` of
            weights [E, N, K] needs no copy. On CPUs also a weight packed with `pack` (inference
            only).
        counts: [E] of int64 or int32, rows per group, at least 0, with sum R. On GPUs the sum may
            be less than R; the remaining rows of the result are undefined. GPUs read ``counts``
            without synchronization or checks if ``x`` and ``w`` are bfloat16 and their rows or
            columns are aligned to 16 bytes. Otherwise ``counts`` is copied to the host.
        bias: [E, N], floating-point. Row e is converted to the dtype of ``x`` and added to every
            row of group e.

    Returns:
        [R, N] in the dtype of ``x``, accumulated in float32. With a packed ``w`` the rows of a
        group are bitwise identical to a separate matmul of that group. With a plain ``w`` the
        rounding may depend on the position of the rows.

    Raises:
        ValueError: The shapes do not match, a count is negative, or the counts do not add up to R.
        TypeError: ``w`` and ``x`` have different dtypes.
        NotImplementedError: A dtype is not supported, or a gradient of a packed ``w`` is needed.

    Gradient: grouped matmuls for ``x`` and ``w``, row sums per group for ``bias``.
    """
    y = OP.entry()(x, w, counts)
    validation.group_bias(bias, w)
    return add_bias(y, bias, counts)
