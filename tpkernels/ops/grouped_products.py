"""Products of rows that are sorted by group, each group with a weight of its own.

On CPUs the extension goes through the groups and computes each as the product of that group alone
(csrc/calls/product.h). What it leaves to torch, such as plain weights with many rows, is one
``torch.mm`` per group. On GPUs it is torch's grouped product where that takes the operands,
otherwise a loop over a copy of ``counts`` on the host.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F

from tpkernels import _C, dtypes, validation
from tpkernels.local.matmul import local_matmul
from tpkernels.local.memory import empty
from tpkernels.local.packed import is_packed_stack
from tpkernels.local.ranges import MATMUL, recorded

_ALIGNMENT = 16  # bytes, of the rows that torch's grouped product takes


def columns_of_stack(stack: torch.Tensor) -> int:
    """Return the columns of a stack of weights, which may be packed."""
    return stack.shape[1] if is_packed_stack(stack) else stack.shape[-1]


def multiply_groups(x: torch.Tensor, stack: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the product that `tpkernels.grouped_matmul` describes, without a gradient."""
    if x.is_cuda:
        _check(x, stack, counts)
        return _run_on_gpu(x, stack, counts)
    # Checks take as long as a product of one row; only one that fails is looked into.
    try:
        if x.stride(1) != 1:
            x = x.contiguous()
        out = empty((x.shape[0], columns_of_stack(stack)), x.dtype, x.device)
        with recorded(MATMUL):
            left = _C.calls.grouped_multiply(x, stack, counts, out)
    except Exception:
        _check(x, stack, counts)
        raise
    if left or not x.shape[0]:
        _check(x, stack, counts)
        rows = ranges_of(counts, x)
        for group in left:
            local_matmul(x[rows[group]], stack[group], out[rows[group]])
    return out


def _check(x: torch.Tensor, stack: torch.Tensor, counts: torch.Tensor) -> None:
    """Raise for operands that do not fit. The values of ``counts`` are not looked at."""
    check_operands(x, stack)
    check_counts(counts, x, stack)


def check_counts(counts: torch.Tensor, x: torch.Tensor, stack: torch.Tensor) -> None:
    """Raise if ``counts`` are not those of a stack's groups, whatever their values."""
    validation.tensors({"x": x, "counts": counts})
    integers = counts.dtype in (torch.int32, torch.int64)
    if tuple(counts.shape) != (len(stack),) or not integers:
        raise ValueError(
            f"counts is {counts.dtype} of shape {list(counts.shape)}; w has {len(stack)} groups, "
            f"so it must be int32 or int64 of shape [{len(stack)}]"
        )


def check_operands(x: torch.Tensor, stack: torch.Tensor) -> None:
    """Raise for rows and a stack of weights that do not fit."""
    validation.tensors({"x": x, "w": stack})
    validation.matrix_input(x)
    if x.dim() != 2:
        raise ValueError(f"x has shape {list(x.shape)}; grouped_matmul takes rows [R, K]")
    if stack.dim() not in (3, 4) or (is_packed_stack(stack) and not stack.is_contiguous()):
        raise ValueError(
            f"w has shape {list(stack.shape)} and strides {list(stack.stride())}; it must be a "
            "stack [E, K, N], or what tpkernels.pack makes of one"
        )
    if len(stack):
        validation.weight(stack[0], x, x.shape[1], "w[0]")


def check_bias(bias: torch.Tensor | None, stack: torch.Tensor) -> None:
    """Raise for a bias that does not fit a stack of weights."""
    if bias is None:
        return
    shape = [len(stack), columns_of_stack(stack)]
    if list(bias.shape) != shape:
        raise ValueError(f"bias has shape {list(bias.shape)}; it must be {shape}, a row per group")
    validation.tensors({"w": stack, "bias": bias})
    if not bias.is_floating_point():
        raise TypeError(f"bias is {dtypes.name(bias.dtype)}; it must be floating-point")


def ranges_of(counts: torch.Tensor, x: torch.Tensor) -> list[slice]:
    """Return the rows of x of each group. ``ValueError`` if it has others; on a GPU the counted
    rows may end before x, and those beyond it are none."""
    rows: list[int] = counts.tolist()
    if min(rows, default=0) < 0 or (sum(rows) != len(x) and not x.is_cuda):
        raise ValueError(f"counts is {rows}, but x has {len(x)} rows")
    edges = (min(edge, len(x)) for edge in accumulate(rows, initial=0))
    return [slice(begin, end) for begin, end in pairwise(edges)]


def ends_of(counts: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return where the rows of each group end in x, as torch's grouped product takes it."""
    return counts.cumsum(0, dtype=torch.int32).clamp_(max=len(x))


def check_held(stack: torch.Tensor, num_experts: int, held: int, rank: int, world: int) -> None:
    """Raise if a stack of weights is not that of the experts that a rank holds."""
    if len(stack) != held:
        raise ValueError(
            f"w has {len(stack)} experts; rank {rank} of {world} holds {held} of {num_experts}"
        )


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


def multiply_rows(
    x: torch.Tensor,
    stack: torch.Tensor,
    counts: torch.Tensor,
    bias: torch.Tensor | None,
    max_rows: int | None,
) -> torch.Tensor:
    """Return the products of rows, ``max_rows`` or those that are counted, with their bias, in
    contiguous memory. Those of rows that are not counted are undefined."""
    used = counted_rows(x, counts, max_rows)
    product = add_bias(multiply_groups(used, stack, counts), bias, counts)
    return as_many_rows(product, x).contiguous()


def counted_rows(x: torch.Tensor, counts: torch.Tensor, max_rows: int | None) -> torch.Tensor:
    """Return what is multiplied of ``max_rows`` rows: on CPUs those that are counted, on GPUs all,
    so that no host waits. Without ``max_rows`` all are counted."""
    return x if x.is_cuda or max_rows is None else x[: int(counts.sum())]


def as_many_rows(product: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the product of the first rows of x, with a row of zeros for each of the others."""
    missing = len(x) - len(product)
    return F.pad(product, (0, 0, 0, missing)) if missing else product
