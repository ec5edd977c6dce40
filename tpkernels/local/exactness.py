"""Check whether a chunked matmul is bitwise identical to the unsplit matmul.

GEMM libraries select kernels by shape, and kernels with different summation orders round
differently. On an Intel Xeon with AMX, torch 2.13, 2026-11-23, a chunk of 128 of 1000 rows differs
in fp32 with K=1000 and N=256, and a chunk of 512 of 2048 rows in bf16 with K=4096 and N=300. No
chunk size is safe.
"""

from __future__ import annotations

import functools

import torch

from tpkernels.local.matmul import local_matmul, weight_layout
from tpkernels.local.packed import pack
from tpkernels.local.weight import CustomMatmul, Weight

_SCALE = 64.0
_DISTINCT = 64  # distinct rows of x and columns of w; the rest are repetitions


def is_chunking_exact(
    w: Weight,
    chunk_shapes: frozenset[tuple[int, int]],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    bias: torch.dtype | None = None,
) -> bool:
    """Return True if all chunk matmuls by ``w`` are bitwise identical to the unsplit matmul.

    A `CustomMatmul` guarantees this. A scaled weight is not split, because each chunk would
    convert the weight again.

    Args:
        chunk_shapes: (rows, columns) of the chunk matmuls.
        shape: M, K, N of the unsplit matmul.
        bias: dtype of the bias.
    """
    if not isinstance(w, torch.Tensor):
        return isinstance(w, CustomMatmul)
    if chunk_shapes == {(shape[0], shape[2])}:
        return True
    threads = torch.get_num_threads()
    return probe_chunks(chunk_shapes, shape, weight_layout(w), dtype, out_dtype, bias, threads)


@functools.lru_cache(maxsize=1024)
def probe_chunks(
    chunk_shapes: frozenset[tuple[int, int]],
    shape: tuple[int, int, int],
    layout: str,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    threads: int,
) -> bool:
    """Run the unsplit matmul and chunks of each shape on test data, and compare the results.

    Args:
        chunk_shapes: (rows, columns) of the chunk matmuls.
        shape: M, K, N of the unsplit matmul.
        layout: result of `weight_layout` for w [K, N].
        threads: number of torch threads; libraries partition the work by it.

    The terms of each sum cancel, except for one small term if K is odd. So the results are
    rounding errors and reveal any different summation order. The values are large enough that
    the errors are not lost in fp16. Rows and columns repeat, so one chunk represents all chunks
    of its shape.
    """
    m, k, n = shape
    with torch.no_grad(), torch.device("cpu"):  # ignore the default device
        generator = torch.Generator().manual_seed(k)
        half = -(-k // 2)
        shuffled = torch.randperm(2 * half, generator=generator)
        order = shuffled[:k]
        left = _SCALE * torch.randn(min(m, _DISTINCT), half, generator=generator)
        left = left.repeat(1, 2)[:, order]
        left[:, torch.isin(order, (shuffled[k:] + half) % (2 * half))] *= 2**-16
        right = _SCALE * torch.randn(half, min(n, _DISTINCT), generator=generator)
        right = torch.cat([right, -right])[order]
        x = left.to(dtype).repeat(-(-m // _DISTINCT), 1)[:m]
        w = right.to(dtype).repeat(1, -(-n // _DISTINCT))[:, :n]
        w = w.contiguous() if layout == "rows" else w.t().contiguous().t()
        if layout in ("packed", "int8"):
            w = pack(w, torch.int8 if layout == "int8" else None)
        bias = None if bias_dtype is None else torch.zeros(n, dtype=bias_dtype)
        full = local_matmul(x, w, torch.empty(m, n, dtype=out_dtype), bias)

        def is_exact(rows: int, columns: int) -> bool:
            w_chunk = w if columns == n else w[:, :columns]
            out = torch.empty(rows, columns, dtype=out_dtype)
            local_matmul(x[:rows], w_chunk, out, bias, full_rows=m, full_columns=n)
            return torch.equal(out, full[:rows, :columns])

        repeated = torch.equal(full[_DISTINCT:], full[: max(0, m - _DISTINCT)])
        repeated &= torch.equal(full[:, _DISTINCT:], full[:, : max(0, n - _DISTINCT)])
        return repeated and all(is_exact(*chunk_shape) for chunk_shape in sorted(chunk_shapes))
