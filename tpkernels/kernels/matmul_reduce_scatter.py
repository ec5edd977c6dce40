"""``y_r = rows_r(sum_r(x_r @ w_r))`` in one kernel: tiles go to their owner as they are done.

Problem: rank r is to have the sum of all ranks' partials of rows [starts[r], starts[r+1]).

Algorithm: the tile loop starts with the rows of rank+1 and ends with the own. Its epilogue stores
each tile, rounded to the wire's dtype, into this rank's slot in the owner's buffer. Then the
program sums its tiles of the own rows over the slots: in fp32, in rank order, with bias, residual
and one rounding.

Sync: the word TILES + tile from rank s says that slot s holds that tile. Every rank gives a tile to
the program of the same number, so a program waits for its namesakes only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tpkernels.kernels.configs import MatmulConfig
from tpkernels.kernels.matmul import (
    contiguous_rows,
    epilogue,
    matmul_tiles,
    position,
    rounded,
    segment,
    tile_at,
    tiles_before,
)
from tpkernels.kernels.sync import (
    TILES,
    buffer_of,
    enter,
    finish,
    join,
    pointer,
    poison,
    publish,
    wait_for,
)
from tpkernels.symm.device import DeviceWorkspace


@triton.jit
def push_tile(context, acc, owner, tile, row, column, begin, end):
    """The `after` hook: this rank's partial goes into its slot at the owner."""
    push(
        context[0], acc, owner, tile, row - begin, column, end - begin, context[1], context[2],
        context[3], context[4],
    )  # fmt: skip


@triton.jit
def push(
    peers,
    acc,
    to,
    tile,
    row,
    column,
    row_end,
    N,
    slot_bytes,
    WIRE: tl.constexpr,
    CHAOS: tl.constexpr,
):
    """Stores a tile into this rank's slot at ``to``, and tells it so."""
    corner, offsets, inside = tile_at(row, column, row_end, N, N, acc.shape[0], acc.shape[1])
    slot = slot_of(peers, to, peers.rank, slot_bytes, WIRE)
    tl.store(slot + corner + offsets, rounded(acc, WIRE), mask=inside & peers.usable)
    publish(peers, to, TILES + tile, CHAOS)


@triton.jit
def slot_of(peers, rank, source, slot_bytes, WIRE: tl.constexpr):
    """Where the partials from ``source`` are in the buffer of ``rank``."""
    return pointer(buffer_of(peers, rank) + tl.cast(source, tl.int64) * slot_bytes, WIRE)


@triton.jit
def await_partials(peers, tile, WORLD: tl.constexpr, CHAOS: tl.constexpr):
    """Returns when all ranks have pushed a tile to this one."""
    for source in range(WORLD):
        wait_for(peers, source, TILES + tile, CHAOS)


@triton.jit
def sum_partials(peers, at, inside, slot_bytes, WIRE: tl.constexpr, WORLD: tl.constexpr):
    """The sum of the slots' elements ``at``, in rank order."""
    acc = tl.zeros(inside.shape, dtype=tl.float32)
    for source in range(WORLD):
        slot = slot_of(peers, peers.rank, source, slot_bytes, WIRE)
        acc += tl.load(slot + at, mask=inside, other=0.0).to(tl.float32)
    return acc


@triton.jit
def first_tile(before, lane, lanes):
    """The first tile that is ``lane``'s of a segment that ``before`` tiles precede."""
    return (lane + lanes - before % lanes) % lanes


@triton.jit
def sum_tiles(
    peers,
    starts,
    M,
    N,
    own,
    out,
    out_row,
    bias,
    residual,
    slot_bytes,
    lane,
    lanes,
    on_stored: tl.constexpr,
    on_stored_context,
    WIRE: tl.constexpr,
    SEGMENTS: tl.constexpr,
    WORLD: tl.constexpr,
    CHAOS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    SUM_M: tl.constexpr,
):
    """Sums the program's tiles of the segment ``own`` into ``out``, whose row ``out_row`` is the
    segment's first. The hook `on_stored(context, result, at, inside, tile, last)` gets what was
    stored: SUM_M rows of a tile at a time, until the last of them."""
    begin, end = segment(starts, M, own, SEGMENTS)
    before = tiles_before(starts, M, N, own, SEGMENTS, BLOCK_M, BLOCK_N)
    count = tl.cdiv(end - begin, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in range(first_tile(before, lane, lanes), count, lanes):
        tile_m, tile_n = position(tile, end - begin, N, BLOCK_M, BLOCK_N, GROUP_M)
        await_partials(peers, tile, WORLD, CHAOS)
        for top in range(0, BLOCK_M, SUM_M):
            row, column = tile_m * BLOCK_M + top, tile_n * BLOCK_N
            corner, offsets, inside = tile_at(row, column, end - begin, N, N, SUM_M, BLOCK_N)
            acc = sum_partials(peers, corner + offsets, inside, slot_bytes, WIRE, WORLD)
            at = tl.cast(out_row, tl.int64) * N + corner + offsets
            more = None if residual is None else residual + at
            acc = epilogue(acc, bias, more, column, N, inside)
            result = rounded(acc, out.dtype.element_ty)
            tl.store(out + at, result, mask=inside)
            if on_stored is not None:
                on_stored(on_stored_context, result, at, inside, tile, top + SUM_M >= BLOCK_M)


@triton.jit(do_not_specialize=["rank", "signature", "timeout_ns", "seed"])
def matmul_reduce_scatter_kernel(
    a,
    b,
    bias,
    residual,
    out,
    starts,
    M,
    N,
    K,
    stride_am,
    stride_bk,
    stride_bn,
    slot_bytes,
    regions,
    state,
    control,
    rank,
    signature,
    timeout_ns,
    words,
    buffers_at,
    buffer_stride,
    seed,
    WIRE: tl.constexpr,
    WORLD: tl.constexpr,
    CHAOS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SUM_M: tl.constexpr,
    A_TMA: tl.constexpr,
    B_TMA: tl.constexpr,
):
    """``out`` = this rank's rows of ``round(sum_r(a_r @ b_r) + bias + residual)``."""
    peers = join(
        regions, state, control, rank, signature, timeout_ns, words, buffers_at, buffer_stride,
        seed, WORLD,
    )  # fmt: skip
    enter(peers, CHAOS)
    lane, lanes = tl.program_id(0), tl.num_programs(0)
    matmul_tiles(
        a, b, starts, M, N, K, stride_am, stride_bk, stride_bn, (rank + 1) % WORLD, lane, lanes,
        None, None, push_tile, (peers, N, slot_bytes, WIRE, CHAOS), WORLD,
        BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, A_TMA, B_TMA,
    )  # fmt: skip
    sum_tiles(
        peers, starts, M, N, rank, out, 0, bias, residual, slot_bytes, lane, lanes, None, None,
        WIRE, WORLD, WORLD, CHAOS, BLOCK_M, BLOCK_N, GROUP_M, SUM_M,
    )  # fmt: skip
    if finish(peers, CHAOS):
        begin, end = segment(starts, M, rank, WORLD)
        poison(out, tl.cast(end - begin, tl.int64) * N)


TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
_ALIGNMENT = 256  # bytes, of a slot


def slot_bytes(rows: int, n: int, wire: torch.dtype) -> int:
    """Bytes of one rank's slot for ``rows`` rows."""
    return triton.cdiv(rows * n * wire.itemsize, _ALIGNMENT) * _ALIGNMENT


def matmul_reduce_scatter(
    space: DeviceWorkspace,
    signature: int,
    config: MatmulConfig,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    sizes: tuple[int, ...],
    wire: torch.dtype,
) -> None:
    """x [M, K], w [K, N] -> out [sizes[rank], N]; residual like out."""
    x, (m, k), n = contiguous_rows(x), x.shape, w.shape[1]
    matmul_reduce_scatter_kernel[(max(min(config.tiles(sizes, n), config.programs), 1),)](
        x, w, bias, residual, out, space.starts(sizes), m, n, k, x.stride(0), *w.stride(),
        slot_bytes(max(sizes), n, wire), **space.arguments(signature), WIRE=TRITON_DTYPES[wire],
        SUM_M=config.sum_m, **config.constants(x, w), **config.launch(),
    )  # fmt: skip


def requirements(
    config: MatmulConfig, sizes: tuple[int, ...], n: int, wire: torch.dtype
) -> tuple[int, int]:
    """(words from one source, bytes of a buffer) that a call needs."""
    return 1 + config.tiles([max(sizes)], n), len(sizes) * slot_bytes(max(sizes), n, wire)
