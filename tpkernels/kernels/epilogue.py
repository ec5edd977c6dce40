"""What is done with an accumulator before it is stored: in parts of 64 columns.

A part is converted, and goes through shared memory, on its own. So an epilogue needs the registers
and the shared memory of one part more than the loop over K does: the loads of the next tile have
room beside it, and nothing spills, whatever dtype is stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tpkernels.kernels.words import INTERPRETED

PART = tl.constexpr(64)  # columns


@triton.jit
def column_parts(acc):
    """``acc`` as a tuple of parts of at most PART columns, from left to right."""
    if acc.shape[1] <= PART:
        return (acc,)
    else:
        halves = acc.reshape(acc.shape[0], 2, acc.shape[1] // 2).permute(0, 2, 1)
        left, right = halves.split()
        return column_parts(left) + column_parts(right)


@triton.jit
def rounded(acc, dtype: tl.constexpr):
    """``acc`` in ``dtype``, rounded to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:  # the interpreter's cast truncates
        bits = acc.to(tl.int32, bitcast=True)
        acc = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return acc.to(dtype)


@triton.jit
def epilogue(acc, bias, residual, column, N, inside):
    """``acc + bias + residual`` in fp32; ``residual`` points at the tile's elements."""
    if bias is not None:
        columns = column + tl.arange(0, acc.shape[1])
        acc += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if residual is not None:
        acc += tl.load(residual, mask=inside, other=0.0).to(tl.float32)
    return acc
