"""``y = x @ w[group of the row]`` for rows that are sorted by group: the products of a mixture's
experts on one rank.

On CPUs the extension goes through the groups and computes each as the product of that group alone
(csrc/calls/product.h). What it leaves to torch, such as plain weights with many rows, is one
``torch.mm`` per group. On GPUs it is torch's grouped product where that takes the operands,
otherwise a loop over a copy of ``counts`` on the host.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F

from tpkernels import _C
from tpkernels.local.matmul import local_matmul
from tpkernels.local.memory import empty
from tpkernels.local.packed import columns_of_stack
from tpkernels.local.ranges import MATMUL, recorded
from tpkernels.ops import validation
from tpkernels.ops.autograd import Context, Needs
from tpkernels.ops.registration import Op, define_kernel, define_local

SCHEMA = "grouped_matmul(Tensor x, Tensor stack, Tensor counts) -> Tensor"
GRADIENT = "_grouped_outer_product(Tensor x, Tensor y, Tensor counts) -> Tensor"
_ALIGNMENT = 16  # bytes, of the rows that torch's grouped product takes


def multiply_groups(x: torch.Tensor, stack: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the product that `tpkernels.grouped_matmul` describes, without a gradient."""
    if x.is_cuda:
        validation.group_operands(x, stack, counts)
        return _run_on_gpu(x, stack, counts)
    # Checks take as long as a product of one row; only one that fails is looked into.
    try:
        if x.stride(1) != 1:
            x = x.contiguous()
        out = empty((x.shape[0], columns_of_stack(stack)), x.dtype, x.device)
        with recorded(MATMUL):
            left = _C.calls.grouped_multiply(x, stack, counts, out)
    except Exception:
        validation.group_operands(x, stack, counts)
        raise
    if left or not x.shape[0]:
        validation.group_operands(x, stack, counts)
        rows = ranges_of(counts, x)
        for group in left:
            local_matmul(x[rows[group]], stack[group], out[rows[group]])
    return out


def ranges_of(counts: torch.Tensor, x: torch.Tensor) -> list[slice]:
    """Return the rows of x of each group. ``ValueError`` if it has others; on a GPU the counted
    rows may end before x, and those beyond it are none."""
    rows: list[int] = counts.tolist()
    if min(rows, default=0) < 0 or (sum(rows) != len(x) and not x.is_cuda):
        raise ValueError(
            f"counts is {rows}, but x has {len(x)} rows; the counts must be at least 0 and add up "
            "to the rows of x"
        )
    edges = (min(edge, len(x)) for edge in accumulate(rows, initial=0))
    return [slice(begin, end) for begin, end in pairwise(edges)]


def ends_of(counts: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return where the rows of each group end in x, as torch's grouped product takes it."""
    return counts.cumsum(0, dtype=torch.int32).clamp_(max=len(x))


def _run_on_gpu(x: torch.Tensor, stack: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    if torch_takes(x) and torch_takes(stack):
        return F.grouped_mm(x, stack, offs=ends_of(counts, x))
    out = empty((x.shape[0], columns_of_stack(stack)), x.dtype, x.device)
    for w, rows in zip(stack, ranges_of(counts, x), strict=True):
        local_matmul(x[rows], w, out[rows])
    return out


def torch_takes(x: torch.Tensor) -> bool:
    """Return whether torch's grouped product takes an operand on a GPU."""
    short, pitch = sorted(x.stride()[-2:])
    aligned = (pitch * x.itemsize) % _ALIGNMENT == 0 and x.data_ptr() % _ALIGNMENT == 0
    return hasattr(F, "grouped_mm") and x.dtype == torch.bfloat16 and short == 1 and aligned


def add_bias(
    product: torch.Tensor, bias: torch.Tensor | None, counts: torch.Tensor
) -> torch.Tensor:
    """Return the rows of each group plus the group's row of ``bias``, in their dtype. Rows that are
    not counted have no part in its gradient."""
    if bias is None:
        return product
    if bias.requires_grad:
        bias = F.pad(bias, (0, 0, 0, 1))
    numbers = torch.arange(len(product), device=product.device)
    groups = torch.searchsorted(counts.cumsum(0), numbers, right=True).clamp_(max=len(bias) - 1)
    return product + bias.to(product.dtype).index_select(0, groups)


def _outer_products(x: torch.Tensor, y: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return ``x_i^T @ y_i`` of the rows of each group, [E, K, N]; x [R, K], y [R, N]."""
    if x.is_cuda and torch_takes(x) and torch_takes(y):
        return F.grouped_mm(x.t(), y, offs=ends_of(counts, x))
    out = x.new_empty(len(counts), x.shape[1], y.shape[1])
    for product, rows in zip(out, ranges_of(counts, x), strict=True):
        if rows.start == rows.stop:
            product.zero_()
        else:
            local_matmul(x[rows].t(), y[rows], product)
    return out


def _save(ctx: Context, given: Any, output: object) -> None:
    ctx.save_for_backward(given.x, given.stack, given.counts)


def _backward(ctx: Context, needs: Needs, grad: torch.Tensor) -> dict[str, Any]:
    x, stack, counts = ctx.saved_tensors
    gradients = {}
    if needs.x:
        transposed = stack.transpose(1, 2)
        gradients["x"] = torch.ops.tpkernels.grouped_matmul.default(grad, transposed, counts)
    if needs.stack:
        outer_products = torch.ops.tpkernels._grouped_outer_product.default
        if stack.stride(1) < stack.stride(2):  # the gradient is laid out as the weight is
            gradients["stack"] = outer_products(grad, x, counts).transpose(1, 2)
        else:
            gradients["stack"] = outer_products(x, grad, counts)
    return gradients


OP: Op[torch.Tensor] = define_local(
    SCHEMA,
    run=multiply_groups,
    fake=lambda x, stack, counts: x.new_empty((x.shape[0], columns_of_stack(stack))),
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
    """Multiply the rows of each group by the group's own weight. Local: no rank communicates.

    Args:
        x: [R, K], rows sorted by group.
        w: [E, K, N] of x's dtype and any strides, so that ``weight.transpose(1, 2)`` of weights [E,
            N, K] passes without a copy; or on CPUs what `pack` makes of it, which has no gradient.
        counts: [E] of int64 or int32, the rows of each group, which add up to R; 0 is allowed. On
            GPUs they may add up to less, and the rest of the result is undefined. GPUs read them
            without a synchronisation or a check where x and w are bfloat16 with rows or columns of
            whole 16 bytes, and copy them to the host otherwise.
        bias: [E, N], of which each row of the product gets its group's, in x's dtype.

    Returns:
        [R, N] in x's dtype. Sums are in float32. With a packed w a group's rows have the bits of
        the product of that group alone; with a plain one torch may round by where rows lie.

    Raises:
        ValueError: shapes do not fit, a count is negative, or they do not add up to R.
        TypeError: w has another dtype than x.
        NotImplementedError: a dtype is not supported, or a gradient of a packed w is needed.
    """
    product = OP.entry()(x, w, counts)
    validation.group_bias(bias, w)
    return add_bias(product, bias, counts)
