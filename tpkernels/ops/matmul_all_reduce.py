"""Matmul and all-reduce: ``y = sum_r(x_r @ w_r)`` on every rank.

The row-parallel layer without sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpkernels.groups import GroupLike, group_name
from tpkernels.local.weight import Weight
from tpkernels.ops.autograd import Context, Needs, operand_grads, save_operands
from tpkernels.ops.registration import Op, define

SCHEMA = (
    "matmul_all_reduce(Tensor x, Tensor w, str group, Tensor? bias=None, Tensor? residual=None, *, "
    "ScalarType? out_dtype=None, ScalarType? wire_dtype=None, SymInt[]? k_sizes=None, "
    "int k_unit=64, str algorithm='auto') -> Tensor"
)


def _backward(ctx: Context, needs: Needs, grad: torch.Tensor) -> dict[str, Any]:
    """Pass the gradient of the sum to every partial, without communication (ops/autograd.py)."""
    x, w = ctx.saved_tensors
    return operand_grads(ctx, needs, x, w, grad)


OP: Op[torch.Tensor] = define(SCHEMA, save=save_operands, backward=_backward, autocast=True)


def matmul_all_reduce(
    x: torch.Tensor,
    w: Weight,
    group: GroupLike,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | None = None,
    k_sizes: Sequence[int] | None = None,
    k_unit: int = 64,
    algorithm: str = "auto",
) -> torch.Tensor:
    """Multiply ``x`` by ``w`` and return the sum over the ranks on every rank.

    Overlaps the matmul with the all-reduce. It equals::

        total = (x @ w).to(wire_dtype)
        dist.all_reduce(total, group=group)
        y = (total + bias + residual).to(out_dtype)

    Args:
        x: [..., K], floating-point, with any strides. K may differ by rank.
        w: [K, N]. A tensor in the dtype of ``x`` with any strides (``linear.weight.t()`` is the
            fast layout), a packed weight (`pack`), or a `CustomMatmul`.
        bias: [N] in the dtype of ``x`` or float32, added once after the sum. ``bias`` and
            ``residual`` must be equal on all ranks.
        residual: [..., N] in the dtype of ``x`` or the result, added after the bias.
        out_dtype: Dtype of the result. Default: the dtype of ``x``.
        wire_dtype: Dtype of the communicated partial sums: the dtype of ``x`` (default) or
            float32.
        k_sizes: K of each rank, multiples of ``k_unit`` except the last. The sum is then
            bitwise identical for any split of K (`docs/numerics.md`). ``w`` must be packed. The
            default on groups with ``numerics="invariant"`` is that all ranks have the same K.
        k_unit: Elements of K that are summed in order, before these sums are added by a tree.

    Returns:
        ``sum_r(x_r @ w_r) + bias + residual``, [..., N], bitwise identical on all ranks. Partial
        sums accumulate as in `matmul_reduce_scatter`.

    Gradient: local, ``grad @ w^T`` for ``x`` and ``x^T @ grad`` for ``w``. All ranks are
    assumed to compute the same loss from the result. See `all_reduce` for inputs that all ranks
    share.
    """
    return OP.entry()(
        x,
        w,
        group_name(group),
        bias,
        residual,
        out_dtype=out_dtype,
        wire_dtype=wire_dtype,
        k_sizes=k_sizes,
        k_unit=k_unit,
        algorithm=algorithm,
    )
