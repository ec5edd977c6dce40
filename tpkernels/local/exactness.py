"""Whether products of parts of the rows or columns have the bits of the whole product.

The libraries that torch calls choose their kernels by shape, and kernels that sum in another order
round differently: Intel Xeon with AMX, torch 2.13, 2026-11-23, 128 of 1000 rows of fp32 with K=1000
and N=256 differ, and 512 of 2048 rows of bf16 with K=4096 and N=300. No number of rows is safe.
"""

from __future__ import annotations

import functools

import torch

from tpkernels.local.matmul import layout_of, local_matmul
from tpkernels.local.packed import pack
from tpkernels.local.product import CustomMatmul, Weight

_LARGE = 64.0
_DISTINCT = 64  # rows of x and columns of w; more of them are repetitions


def multiplies_parts_exactly(
    w: Weight,
    parts: frozenset[tuple[int, int]],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    bias: torch.dtype | None = None,
) -> bool:
    """Return whether products by ``w`` of all ``parts``, given as (rows, columns), have the bits of
    the whole product, whose ``shape`` is M, K, N. A caller's product promises it; a scaled one is
    not split, because each part would convert the weight again."""
    if not isinstance(w, torch.Tensor):
        return isinstance(w, CustomMatmul)
    if parts == {(shape[0], shape[2])}:
        return True
    threads = torch.get_num_threads()
    return parts_are_exact(parts, shape, layout_of(w), dtype, out_dtype, bias, threads)


@functools.lru_cache(maxsize=1024)
def parts_are_exact(
    parts: frozenset[tuple[int, int]],
    shape: tuple[int, int, int],
    layout: str,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    threads: int,
) -> bool:
    """Try it: multiply all, and parts of each number of rows and columns.

    Args:
        shape: M, K, N of the whole product.
        layout: of w [K, N], as `layout_of` returns it.
        threads: of torch; the libraries divide the work by it.

    The sums of the numbers it takes cancel, but for a small one where K is odd, so that the results
    are rounding errors, and show any other order of summation; the numbers are so large that these
    are not lost in fp16. Rows and columns repeat, so that one part speaks for all.
    """
    m, k, n = shape
    with torch.no_grad(), torch.device("cpu"):  # whatever the default device is
        numbers = torch.Generator().manual_seed(k)
        half = -(-k // 2)
        mixed = torch.randperm(2 * half, generator=numbers)
        order = mixed[:k]
        left = _LARGE * torch.randn(min(m, _DISTINCT), half, generator=numbers)
        left = left.repeat(1, 2)[:, order]
        left[:, torch.isin(order, (mixed[k:] + half) % (2 * half))] *= 2**-16
        right = _LARGE * torch.randn(half, min(n, _DISTINCT), generator=numbers)
        right = torch.cat([right, -right])[order]
        x = left.to(dtype).repeat(-(-m // _DISTINCT), 1)[:m]
        w = right.to(dtype).repeat(1, -(-n // _DISTINCT))[:, :n]
        w = w.contiguous() if layout == "rows" else w.t().contiguous().t()
        if layout in ("packed", "int8"):
            w = pack(w, torch.int8 if layout == "int8" else None)
        bias = None if bias_dtype is None else torch.zeros(n, dtype=bias_dtype)
        whole = local_matmul(x, w, torch.empty(m, n, dtype=out_dtype), bias)

        def is_exact(rows: int, columns: int) -> bool:
            some = w if columns == n else w[:, :columns]
            out = torch.empty(rows, columns, dtype=out_dtype)
            local_matmul(x[:rows], some, out, bias, whole_rows=m, whole_columns=n)
            return torch.equal(out, whole[:rows, :columns])

        repeated = torch.equal(whole[_DISTINCT:], whole[: max(0, m - _DISTINCT)])
        repeated &= torch.equal(whole[:, _DISTINCT:], whole[:, : max(0, n - _DISTINCT)])
        return repeated and all(is_exact(*part) for part in sorted(parts))
