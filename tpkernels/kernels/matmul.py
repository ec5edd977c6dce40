"""The matrix product, and the one tile loop that all fused kernels are made of.

Problem: ``y = a @ b`` with fp32 accumulation, where the rows of ``a`` (and of y) belong to ranks:
segment r is rows [starts[r], starts[r+1]). Tiles never cross a segment's end.

Algorithm: persistent programs. Tiles are numbered segment by segment, in groups of GROUP_M rows of
tiles within one, so that programs that run together share tiles of a and b in L2. Program `lane`
has the tiles that are `lane` modulo `lanes`, the same on all ranks, and starts with the segment
`lead`.

Hooks: `before(context, owner, tile_m)` runs before the loads of a tile and may wait for its rows;
`after(context, acc, owner, tile, row, column, begin, end)` takes the fp32 accumulator, where `tile`
counts within the segment of rows [begin, end). Without hooks this is a matmul.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tpkernels.kernels.configs import MatmulConfig, choose
from tpkernels.kernels.sync import INTERPRETED


@triton.jit
def segment(starts, M, owner, WORLD: tl.constexpr):
    """First row of a segment, and its last row + 1."""
    if WORLD == 1:
        return 0, M
    else:
        return tl.load(starts + owner), tl.load(starts + owner + 1)


@triton.jit
def tiles_before(
    starts, M, N, owner, WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Tiles of all segments before that of ``owner``; of all, if that is WORLD."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    count = 0
    for r in tl.static_range(WORLD):
        begin, end = segment(starts, M, r, WORLD)
        count += tl.where(r < owner, tl.cdiv(end - begin, BLOCK_M) * tiles_n, 0)
    return count


@triton.jit
def owner_of(starts, M, N, tile, WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The segment that a tile is in."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    owner = 0
    count = 0
    for r in tl.static_range(WORLD):
        begin, end = segment(starts, M, r, WORLD)
        count += tl.cdiv(end - begin, BLOCK_M) * tiles_n
        owner += tl.where(tile >= count, 1, 0)
    return owner


@triton.jit
def position(tile, rows, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Where a tile is in a segment of ``rows`` rows: (tile row, tile column)."""
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = tile // (GROUP_M * tiles_n) * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    return first + within % height, within // height


@triton.jit
def tile_at(row, column, row_end, N, stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile of a matrix of N columns: (offset of its corner, offsets within it, which are inside).
    Only the corner needs 64 bits."""
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    inside = (row + rows < row_end)[:, None] & (column + columns < N)[None, :]
    return row.to(tl.int64) * stride + column, rows[:, None] * stride + columns[None, :], inside


@triton.jit
def matmul_tiles(
    a,
    b,
    starts,
    M,
    N,
    K,
    stride_am,
    stride_bk,
    stride_bn,
    lead,
    lane,
    lanes,
    before: tl.constexpr,
    before_context,
    after: tl.constexpr,
    after_context,
    WORLD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    A_TMA: tl.constexpr,
    B_TMA: tl.constexpr,  # "no", "k" or "n": the dim that is contiguous
):
    """The tile loop. a [M, K] has contiguous rows; b [K, N] has any strides."""
    if A_TMA:
        a_tiles = tl.make_tensor_descriptor(a, [M, K], [stride_am, 1], [BLOCK_M, BLOCK_K])
    if B_TMA == "k":
        b_tiles = tl.make_tensor_descriptor(b, [N, K], [stride_bn, 1], [BLOCK_N, BLOCK_K])
    if B_TMA == "n":
        b_tiles = tl.make_tensor_descriptor(b, [K, N], [stride_bk, 1], [BLOCK_K, BLOCK_N])
    total = tiles_before(starts, M, N, WORLD, WORLD, BLOCK_M, BLOCK_N)
    count = tl.cdiv(tl.maximum(total - lane, 0), lanes)
    first = tiles_before(starts, M, N, lead, WORLD, BLOCK_M, BLOCK_N)
    skipped = tl.cdiv(tl.maximum(first - lane, 0), lanes)
    for i in range(count):
        tile = lane + (skipped + i) % count * lanes
        owner = owner_of(starts, M, N, tile, WORLD, BLOCK_M, BLOCK_N)
        local = tile - tiles_before(starts, M, N, owner, WORLD, BLOCK_M, BLOCK_N)
        begin, end = segment(starts, M, owner, WORLD)
        tile_m, tile_n = position(local, end - begin, N, BLOCK_M, BLOCK_N, GROUP_M)
        row, column = begin + tile_m * BLOCK_M, tile_n * BLOCK_N
        corner, x_offsets, x_rows = tile_at(row, 0, end, 1, stride_am, BLOCK_M, 1)
        columns = column + tl.arange(0, BLOCK_N)
        if before is not None:
            before(before_context, owner, tile_m)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            depth = k + tl.arange(0, BLOCK_K)
            if A_TMA:
                x = a_tiles.load([row, k])
            else:
                x = tl.load(
                    a + corner + x_offsets + depth[None, :],
                    mask=x_rows & (depth < K)[None, :],
                    other=0.0,
                )
            if B_TMA == "k":
                y = b_tiles.load([column, k]).T
            elif B_TMA == "n":
                y = b_tiles.load([k, column])
            else:
                y = tl.load(
                    b
                    + depth.to(tl.int64)[:, None] * stride_bk
                    + columns.to(tl.int64)[None, :] * stride_bn,
                    mask=(depth < K)[:, None] & (columns < N)[None, :],
                    other=0.0,
                )
            if INTERPRETED:  # whose dot takes bf16 for integers
                x, y = x.to(tl.float32), y.to(tl.float32)
            acc = tl.dot(x, y, acc, input_precision="ieee")
        after(after_context, acc, owner, local, row, column, begin, end)


@triton.jit
def rounded(acc, dtype: tl.constexpr):
    """``acc`` in ``dtype``, to the nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:  # whose cast cuts off
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


@triton.jit
def store_result(context, acc, owner, tile, row, column, begin, end):
    """The `after` hook where a tile is the result: the bias, and one rounding."""
    out, bias, N = context
    corner, offsets, inside = tile_at(row, column, end, N, N, acc.shape[0], acc.shape[1])
    acc = epilogue(acc, bias, None, column, N, inside)
    tl.store(out + corner + offsets, rounded(acc, out.dtype.element_ty), mask=inside)


@triton.jit
def matmul_kernel(
    a,
    b,
    bias,
    out,
    M,
    N,
    K,
    stride_am,
    stride_bk,
    stride_bn,
    before: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    A_TMA: tl.constexpr,
    B_TMA: tl.constexpr,
):
    """``out = round(a @ b + bias)``."""
    matmul_tiles(
        a, b, None, M, N, K, stride_am, stride_bk, stride_bn, 0, tl.program_id(0),
        tl.num_programs(0), before, None, store_result, (out, bias, N), 1,
        BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, A_TMA, B_TMA,
    )  # fmt: skip


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    out: torch.Tensor | None = None,
    config: MatmulConfig | None = None,
) -> torch.Tensor:
    """``round(a @ b + bias)``, accumulated in fp32. a [M, K], b [K, N] of any strides -> [M, N]."""
    a = contiguous_rows(a)
    (m, k), n = a.shape, b.shape[1]
    if out is None:
        out = torch.empty(m, n, dtype=out_dtype or a.dtype, device=a.device)
    if m == 0:
        return out
    config = config or choose(a.device, a.dtype, m)
    matmul_kernel[(min(config.tiles([m], n), config.programs),)](
        a, b, bias, out, m, n, k, a.stride(0), *b.stride(), None,
        **config.constants(a, b), **config.launch(),
    )  # fmt: skip
    return out


def contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    """x [M, K], copied if its rows are not contiguous."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
