"""Whether a product of some rows has the same bits as these rows have in the product of all rows.

The libraries that torch calls choose their kernels by shape, and kernels that sum in another order
round differently: AMD EPYC Zen 4, torch 2.13, 2026-11-22, fp32 with 1, 2 or 4 rows beside 8 or more
differs in most elements, bf16 in none.
"""

from __future__ import annotations

import functools
from typing import Literal, TypeAlias

import torch

from tpkernels.local.matmul import local_matmul
from tpkernels.local.packed import is_packed, pack

Layout: TypeAlias = Literal["rows", "columns", "packed"]

_DISTINCT = 64  # rows of x and columns of w; more of them are repetitions


def layout_of(w: torch.Tensor) -> Layout:
    """Of a weight, as `rows_are_exact` distinguishes them."""
    if is_packed(w):
        return "packed"
    return "columns" if w.stride(0) < w.stride(1) else "rows"


@functools.lru_cache(maxsize=1024)
def rows_are_exact(
    parts: tuple[int, ...],
    shape: tuple[int, int, int],
    layout: Layout,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> bool:
    """Tries it: multiplies all rows, and the first rows of each number in ``parts``.

    Args:
        shape: M, K, N of the whole product.
        layout: of w [K, N]; "columns" is that of ``linear.weight.t()``.

    The sums of the numbers it takes cancel, so that the results are rounding errors, and show any
    other order of summation.
    """
    m, k, n = shape
    with torch.device("cpu"):  # whatever the default device is
        numbers = torch.Generator().manual_seed(k)
        half = -(-k // 2)
        order = torch.randperm(2 * half, generator=numbers)[:k]
        left = torch.randn(min(m, _DISTINCT), half, generator=numbers).repeat(1, 2)[:, order]
        right = torch.randn(half, min(n, _DISTINCT), generator=numbers)
        right = torch.cat([right, -right])[order]
        x = left.to(dtype).repeat(-(-m // _DISTINCT), 1)[:m]
        w = right.to(dtype).repeat(1, -(-n // _DISTINCT))[:, :n]
        w = w.contiguous() if layout == "rows" else w.t().contiguous().t()
        w = pack(w) if layout == "packed" else w
        whole = local_matmul(x, w, torch.empty(m, n, dtype=out_dtype))
        return all(
            torch.equal(
                local_matmul(x[:rows], w, torch.empty(rows, n, dtype=out_dtype), whole_rows=m),
                whole[:rows],
            )
            for rows in parts
        )
