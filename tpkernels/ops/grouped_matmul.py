"""``y = x @ w[group of the row]`` for rows that are sorted by group: the products of a mixture's
experts on one rank.

How they are computed: grouped_products.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tpkernels.local.matmul import local_matmul
from tpkernels.ops.grouped_products import (
    add_bias,
    check_bias,
    columns_of_stack,
    ends_of,
    multiply_groups,
    ranges_of,
    torch_takes,
)
from tpkernels.ops.registration import define_local
from tpkernels.ops.shortcut import is_plain

SCHEMA = "grouped_matmul(Tensor x, Tensor stack, Tensor counts) -> Tensor"
GRADIENT = "_grouped_outer_product(Tensor x, Tensor y, Tensor counts) -> Tensor"


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


def _save(ctx: Any, given: Any, output: Any) -> None:
    ctx.save_for_backward(given.x, given.stack, given.counts)


def _backward(ctx: Any, needs: Any, grad: torch.Tensor) -> dict[str, Any]:
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


define_local(
    SCHEMA,
    run=multiply_groups,
    fake=lambda x, stack, counts: x.new_empty((x.shape[0], columns_of_stack(stack))),
    save=_save,
    backward=_backward,
    autocast=True,
)
define_local(
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
    product: torch.Tensor
    if is_plain(x, w, counts):
        product = multiply_groups(x, w, counts)
    else:
        product = torch.ops.tpkernels.grouped_matmul.default(x, w, counts)
    check_bias(bias, w)
    return add_bias(product, bias, counts)
