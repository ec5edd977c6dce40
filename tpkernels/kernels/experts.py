"""Products of a mixture's experts, in the kernels that bring their rows or take the results away.

Problem: that of csrc/cuda/routed.cuh. The routes of all tokens, sorted by expert, are in device
memory (`algorithms.routes.Places`), and the host knows no counts. A rank's rows belong to its
experts: segment e of the tile loop is the rows of expert e, with its own weight.

Algorithm: dispatch: a first kernel copies this rank's tokens into symmetric memory. In the second,
the first programs are fetchers. They bring the rows from the tokens' ranks, piece by piece in the
order of the experts, and the product of an expert starts when its rows are there. Gather, where
each rank has a part of all experts: tokens travel as in all_gather_matmul.py, once each, and a tile
reads its rows where they are. They are sorted by token, so it waits for the tokens from its first
to its last; rows of tiles are in the order of the rank of their last token. Scatter, likewise:
tiles are multiplied by blocks of columns, of all experts. The last programs wait for a block, sum
each token's products by weight, push the sums into this rank's slot at the token's rank, and sum
what the ranks have pushed there of the block before. Combine: every route has a slot in the buffer
of its token's rank. The tile loop's epilogue stores rows there while the next tile is multiplied. A
second kernel sums a token's slots by weight, as routed.cuh does: the same bits. A token that has a
route without a row becomes NaN.

    dispatch   fetch rows of expert 0, 1, 2, ...   combine   *0 -> tokens' ranks   *1 ->   *2 ->
               wait for 0, *0   wait for 1, *1 ...           wait for all, sum

Sync: gather: as in all_gather_matmul.py. Dispatch: likewise, with the words TILES + piece from this
rank to itself. Scatter: the word TILES + tile, column by column, from this rank to itself; behind
them a word of each block and program that sums says to all that its part of the sums is there. It
waits for programs of lower numbers, and then for those of its own number. Combine: the word TILES
of a rank says that its first kernel has ended; the second one's first program pushes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tpkernels.integers import ceil_div
from tpkernels.kernels import (
    all_gather_matmul,
    fix_cache_keys,
    matmul,
    matmul_reduce_scatter,
    sync,
    words,
)
from tpkernels.kernels.bound import BoundKernel
from tpkernels.kernels.configs import MatmulConfig
from tpkernels.symm.device import DeviceWorkspace, Prepared

_ROWS, _COLUMNS = tl.constexpr(16), tl.constexpr(256)  # that a fetcher loads at a time
_MOST_PIECES = 2048  # for each of which there is a word
_LAST = (1 << 31) - 1  # sorts rows of tiles that there are not behind the others
_BLOCKS = 8  # of columns, at most, that are summed while others are multiplied. Not measured
_TOKENS, _WEIGHED = 8, 256  # tokens and columns that a program sums at a time


@triton.jit(do_not_specialize=["rank"])
def tables_kernel(
    ends, tables, token_of, tokens, rank, most, most_tiles, BLOCK_M, experts, EXPERTS: tl.constexpr
):  # fmt: skip
    """Fill the tables of the experts' `Segments`, one behind the other. Expert e has the places
    [ends[e], ends[e + 1]); rows from ``most`` on are none. Behind them, for each row of tiles, how
    many ranks after ``rank`` its last token is, by which it may be sorted, if there are a token for
    each row, ``token_of``, and the ranks' ``tokens``. One program."""
    expert, origin = tl.arange(0, EXPERTS), tl.load(ends)
    inside = expert < experts
    begin = tl.minimum(tl.load(ends + expert, mask=inside, other=0) - origin, most)
    end = tl.minimum(tl.load(ends + expert + 1, mask=inside, other=0) - origin, most)
    count = tl.where(inside, tl.cdiv(end - begin, BLOCK_M), 0)
    upto = tl.cumsum(count, 0)
    starts, tiles, owners = tables, tables + experts + 1, tables + 2 * experts + 2
    tl.store(starts, 0)
    tl.store(starts + expert + 1, end, mask=inside)
    tl.store(tiles, 0)
    tl.store(tiles + expert + 1, upto, mask=inside)
    for i in range(0, tl.max(count, 0)):
        tl.store(owners + upto - count + i, expert, mask=i < count)
        if token_of is not None:
            first = begin + i * BLOCK_M
            last = tl.minimum(first + BLOCK_M, end) - 1
            world: tl.constexpr = tokens.number
            _, low, _ = _tokens_of(Routes(token_of, None, tokens, 1), first, i < count, world)
            _, high, _ = _tokens_of(Routes(token_of, None, tokens, 1), last, i < count, world)
            after = tl.where(
                (low < rank) & (high >= rank), world - 1, (high - rank + world) % world
            )
            tl.store(owners + most_tiles + upto - count + i, after, mask=i < count)


class Fetching(NamedTuple):
    """How programs bring the rows; known at compile time."""

    programs: int
    piece: int  # rows for which there is a word
    blocks: int  # that a program has in flight


def fetching_of(config: MatmulConfig, itemsize: int, most: int) -> Fetching:
    """Choose for ``most`` rows; the same on all ranks."""
    piece = _ROWS.value * max(1, ceil_div(most, _ROWS.value * _MOST_PIECES))
    block = _ROWS.value * _COLUMNS.value * itemsize
    programs = max(1, min(config.fetchers, ceil_div(most, piece)))
    return Fetching(programs, piece, all_gather_matmul.RING_BYTES // block)


class Routes(NamedTuple):
    """Where rows come from and go to."""

    order: Any  # the route, token * top_k + slot, of each place
    edges: Any  # the place of each rank's first row, and the end of the last's
    tokens: Any  # of the ranks, as `Segments`
    top_k: Any


@triton.jit
def _rows_here(routes, peers, most):
    """Return the place of this rank's first row, and how many rows it has, ``most`` at most."""
    first = tl.load(routes.edges + peers.rank)
    return first, tl.minimum(tl.load(routes.edges + peers.rank + 1) - first, most)


@triton.jit
def _tokens_of(routes, place, inside, world):
    """Return the routes at some places, the rank of each one's token, and that rank's first. Loops
    of Triton 3.6 lose a constexpr in a tuple of a parameter, such as ``routes.tokens.number``."""
    route = tl.load(routes.order + place, mask=inside, other=0)
    token = (route // routes.top_k).to(tl.int32)
    if routes.tokens.starts is None:
        owner = token // tl.maximum(routes.tokens.rows, 1)
        first = owner * routes.tokens.rows
    else:
        owner, first = tl.zeros_like(token), tl.zeros_like(token)
        for rank in range(1, world):
            start = tl.load(routes.tokens.starts + rank)
            owner = tl.where(token >= start, rank, owner)
            first = tl.where(token >= start, start, first)
    return route, owner, first


@triton.jit
def _fetch_rows(peers, rows, routes, K, most, lane, fetching: tl.constexpr):
    """Bring the rows; the fetchers take the pieces in turn. Rows without a route become zeros."""
    sync.wait_for_all(peers, sync.ENTERED)
    begin, count = _rows_here(routes, peers, most)
    for piece in range(lane, tl.cdiv(most, fetching.piece), fetching.programs):
        for top in range(piece * fetching.piece, (piece + 1) * fetching.piece, _ROWS):
            row = top + tl.arange(0, _ROWS)
            there = row < count
            route, owner, first = _tokens_of(routes, begin + row, there, peers.space.world)
            theirs = sync.pointer(sync.buffer_of(peers, owner), rows.dtype.element_ty)
            theirs += (route // routes.top_k - first) * K
            ours = rows + row.to(tl.int64) * K
            for left in tl.range(0, K, _COLUMNS, num_stages=fetching.blocks + 1):
                column = left + tl.arange(0, _COLUMNS)
                inside = (column < K)[None, :]
                values = tl.load(
                    theirs[:, None] + column[None, :], mask=there[:, None] & inside, other=0.0
                )
                to = ours[:, None] + column[None, :]
                tl.store(to, values, mask=(row < most)[:, None] & inside)
        sync.publish_from(peers, peers.rank, peers.rank, piece + sync.TILES)


class _Arrivals(NamedTuple):
    """The context of `_await_rows`."""

    peers: Any
    starts: Any
    block_m: Any  # from here on known at compile time
    piece: Any
    tma: Any  # whether TMA reads the rows


@triton.jit
def _await_rows(arrivals, owner, tile_m):
    """Wait for the pieces that a tile's rows are in: the `before` hook."""
    peers, PIECE = arrivals.peers, arrivals.piece
    first = tl.load(arrivals.starts + owner) + tile_m * arrivals.block_m
    end = tl.minimum(first + arrivals.block_m, tl.load(arrivals.starts + owner + 1))
    sync.wait_for_range(
        peers, peers.rank, first // PIECE + sync.TILES, tl.cdiv(end, PIECE) + sync.TILES
    )
    if arrivals.tma:
        words.fence_async_proxy()


@triton.jit(do_not_specialize=sync.SCALARS)
def dispatch_matmul_kernel(
    a, b, bias, out, rows, order, edges, tables, tokens, top_k, most, experts, N, K,
    stride_bk, stride_bn, stride_bs, workspace, rank, signature, timeout_ns, seed,
    fetching: tl.constexpr, tiling: tl.constexpr,
):  # fmt: skip
    """Bring ``rows`` [most, K] and compute ``out = round(rows @ b[expert] + bias[expert])``. ``a``
    is ``rows`` as the tile loop takes it."""
    peers = sync.join(workspace, rank, signature, timeout_ns, seed)
    sync.enter(peers)
    lane = tl.program_id(0)
    if lane < fetching.programs:
        _fetch_rows(peers, rows, Routes(order, edges, tokens, top_k), K, most, lane, fetching)
    else:
        matmul.matmul_tiles(
            matmul.Product(a, b, N, K, K, stride_bk, stride_bn, stride_bs),
            matmul.Segments(
                tables, 0, most, experts, tables + experts + 1, tables + 2 * experts + 2
            ), 0,
            lane - fetching.programs, tl.num_programs(0) - fetching.programs, _await_rows,
            _Arrivals(peers, tables, tiling.block_m, fetching.piece, tiling.a_tma),
            matmul.store_result, matmul.Result(out, bias, N, N), tiling,
        )  # fmt: skip
    if sync.finish(peers):
        sync.poison(out, tl.cast(most, tl.int64) * N)
        sync.poison(rows, tl.cast(most, tl.int64) * K)


class _TokenArrivals(NamedTuple):
    """The context of `_await_tokens`."""

    peers: Any
    token_of: Any
    tokens: Any  # of the ranks, as `Segments`
    starts: Any
    K: Any
    block_m: Any  # from here on known at compile time
    fetching: Any


@triton.jit
def _await_tokens(arrivals, owner, tile_m):
    """Wait for the pieces from a tile's first token to its last: the `before` hook."""
    peers, BLOCK_M = arrivals.peers, arrivals.block_m
    first = tl.load(arrivals.starts + owner) + tile_m * BLOCK_M
    last = tl.minimum(first + BLOCK_M, tl.load(arrivals.starts + owner + 1)) - 1
    low, high = tl.load(arrivals.token_of + first), tl.load(arrivals.token_of + last)
    for rank in range(peers.space.world):
        begin, end = matmul.segment(arrivals.tokens, rank)
        top, bottom = tl.maximum(begin, low.to(tl.int32)), tl.minimum(end, high.to(tl.int32) + 1)
        if (rank != peers.rank) & (top < bottom):
            all_gather_matmul.await_pieces(
                peers, arrivals.tokens, arrivals.K, rank, top - begin, bottom - top,
                arrivals.fetching,
            )  # fmt: skip


@triton.jit(do_not_specialize=sync.SCALARS)
def gather_matmul_kernel(
    a, b, bias, out, gathered, token_of, tables, turns, tokens, count, experts, N, K, stride_bk,
    stride_bn, stride_bs, workspace, rank, signature, timeout_ns, seed, fetching: tl.constexpr,
    tiling: tl.constexpr,
):  # fmt: skip
    """Gather the ranks' ``tokens`` into ``gathered``, and compute ``count`` rows of ``out =
    round(gathered[token_of] @ b[expert] + bias[expert])``. ``a`` is ``gathered``."""
    peers = sync.join(workspace, rank, signature, timeout_ns, seed)
    sync.enter(peers)
    lane = tl.program_id(0)
    if lane < fetching.programs:
        all_gather_matmul.fetch_rows(peers, gathered, tokens, K, lane, fetching)
    else:
        matmul.matmul_tiles(
            matmul.Product(a, b, N, K, K, stride_bk, stride_bn, stride_bs, token_of),
            matmul.Segments(
                tables, 0, 0, experts, tables + experts + 1, tables + 2 * experts + 2, turns
            ), 0,
            lane - fetching.programs, tl.num_programs(0) - fetching.programs, _await_tokens,
            _TokenArrivals(peers, token_of, tokens, tables, K, tiling.block_m, fetching),
            matmul.store_result, matmul.Result(out, bias, N, N), tiling,
        )  # fmt: skip
    if sync.finish(peers):
        sync.poison(out, tl.cast(count, tl.int64) * N)


class Reducing(NamedTuple):
    """How programs sum what the others multiply; known at compile time."""

    programs: int
    tokens: int  # that a program sums at a time
    columns: int
    top_k: int


class _Products(NamedTuple):
    """The context of `store_result`, and of `_publish_tile`."""

    out: Any
    bias: Any
    N: Any
    stride_bias: Any
    peers: Any
    tiles: Any  # as in `Segments`
    experts: Any
    block_n: Any  # known at compile time


@triton.jit
def _publish_tile(products, owner, index):
    """Tell this rank's programs that sum: the `later` hook. Words are in the order of columns."""
    tiles_n = tl.cdiv(products.N, products.block_n)
    row = tl.load(products.tiles + owner) + index // tiles_n
    word = index % tiles_n * tl.load(products.tiles + products.experts) + row
    sync.publish(products.peers, products.peers.rank, sync.TILES + word)


@triton.jit
def _tokens_at(part, left, right, count, TOKENS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the tokens, of ``count``, and columns, of [left, right), of a part of the sums, and
    what is inside."""
    parts = tl.cdiv(right - left, COLUMNS)
    token = part // parts * TOKENS + tl.arange(0, TOKENS)
    column = left + part % parts * COLUMNS + tl.arange(0, COLUMNS)
    return token, column, (token < count)[:, None] & (column < right)[None, :]


@triton.jit
def _push_sums(slots, product, weights, places, tokens, left, right, lane, reducing: tl.constexpr):
    """Sum the products of all tokens, in the columns [left, right), and push them to the tokens'
    ranks."""
    TOKENS: tl.constexpr = reducing.tokens
    COLUMNS: tl.constexpr = reducing.columns
    TOP_K: tl.constexpr = reducing.top_k
    peers, N = slots.peers, slots.N
    world = peers.space.world
    for i in range(1, world + 1):
        owner = (peers.rank + i) % world
        begin, end = matmul.segment(tokens, owner)
        slot = matmul_reduce_scatter.slot_of(slots, owner, peers.rank)
        parts = tl.cdiv(end - begin, TOKENS) * tl.cdiv(right - left, COLUMNS)
        for part in range(lane, parts, reducing.programs):
            token, column, inside = _tokens_at(part, left, right, end - begin, TOKENS, COLUMNS)
            acc = tl.zeros((TOKENS, COLUMNS), dtype=tl.float32)
            for j in tl.static_range(TOP_K):
                route, there = (begin + token).to(tl.int64) * TOP_K + j, begin + token < end
                weight = tl.load(weights + route, mask=there, other=0.0)
                row = product + tl.load(places + route, mask=there, other=0) * N
                values = tl.load(row[:, None] + column[None, :], mask=inside, other=0.0)
                acc += weight[:, None] * values.to(tl.float32)
            to = slot + token.to(tl.int64)[:, None] * N + column[None, :]
            tl.store(to, matmul.rounded(acc, slots.wire), mask=inside & peers.usable)


@triton.jit
def _sum_slots(slots, out, count, left, right, lane, WORLD: tl.constexpr, reducing: tl.constexpr):
    """Sum what the ranks have pushed of this rank's ``count`` tokens, in rank order."""
    N, buffer = slots.N, sync.buffer_of(slots.peers, slots.peers.rank)
    parts = tl.cdiv(count, reducing.tokens) * tl.cdiv(right - left, reducing.columns)
    for part in range(lane, parts, reducing.programs):
        token, column, inside = _tokens_at(
            part, left, right, count, reducing.tokens, reducing.columns
        )
        at = token.to(tl.int64)[:, None] * N + column[None, :]
        acc = matmul_reduce_scatter.sum_partials(slots, buffer, at, inside, WORLD)
        tl.store(out + at, matmul.rounded(acc, out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=sync.SCALARS)
def matmul_scatter_kernel(
    a, b, bias, product, out, weights, places, tables, tokens, experts, N, K, stride_bk, stride_bn,
    stride_bs, wide, pushed, slot_bytes, workspace, rank, signature, timeout_ns, seed,
    DTYPE: tl.constexpr, reducing: tl.constexpr, tiling: tl.constexpr,
):  # fmt: skip
    """Compute ``product = round(a @ b[expert] + bias[expert])``, and ``out``, the sums over the
    ranks of those of its rows by ``weights``. ``pushed``: the first word of what is pushed."""
    peers = sync.join(workspace, rank, signature, timeout_ns, seed)
    sync.enter(peers)
    lanes, tiles = tl.num_programs(0) - reducing.programs, tables + experts + 1
    begin, end = matmul.segment(tokens, rank)
    if tl.program_id(0) < lanes:
        matmul.matmul_tiles(
            matmul.Product(a, b, N, K, K, stride_bk, stride_bn, stride_bs),
            matmul.Segments(
                tables, 0, 0, experts, tiles, tables + 2 * experts + 2, None, wide
            ), 0, tl.program_id(0), lanes, None, None, matmul.store_result,
            _Products(product, bias, N, N, peers, tiles, experts, tiling.block_n), tiling,
            _publish_tile,
        )  # fmt: skip
    else:
        lane, rows = tl.program_id(0) - lanes, tl.load(tiles + experts)
        tiles_n = tl.cdiv(N, tiling.block_n)
        blocks = tl.cdiv(tiles_n, wide)
        for block in range(0, blocks + 1):
            if block < blocks:
                first, last = block * wide, tl.minimum((block + 1) * wide, tiles_n)
                sync.wait_for_range(
                    peers, rank, first * rows + sync.TILES, last * rows + sync.TILES
                )
                _push_sums(
                    matmul_reduce_scatter.Slots(peers, N, slot_bytes, DTYPE, False), product,
                    weights, places, tokens, first * tiling.block_n,
                    tl.minimum(last * tiling.block_n, N), lane, reducing,
                )  # fmt: skip
                sync.publish_to_all(peers, pushed + block * reducing.programs + lane)
            if block > 0:
                sync.wait_for_all(peers, pushed + (block - 1) * reducing.programs + lane)
                _sum_slots(
                    matmul_reduce_scatter.Slots(peers, N, slot_bytes, DTYPE, False), out,
                    end - begin, (block - 1) * wide * tiling.block_n,
                    tl.minimum(block * wide * tiling.block_n, N), lane, workspace.world, reducing,
                )  # fmt: skip
    if sync.finish(peers):
        sync.poison(out, tl.cast(end - begin, tl.int64) * N)


class _Slots(NamedTuple):
    """The context of `_push_rows`."""

    peers: Any
    routes: Any
    bias: Any
    N: Any
    dtype: Any  # known at compile time


@triton.jit
def _push_rows(slots, acc, tile):
    """Store the rows of a tile into their slots, wherever these are: the `after` hook."""
    peers, N = slots.peers, slots.N
    row = tile.row + tl.arange(0, acc.shape[0])
    begin = tl.load(slots.routes.edges + peers.rank)
    route, owner, first = _tokens_of(slots.routes, begin + row, row < tile.end, peers.space.world)
    slot = sync.pointer(sync.buffer_of(peers, owner), slots.dtype)
    slot += (route - first * slots.routes.top_k) * N
    bias = slots.bias
    if bias is not None:
        bias += tl.cast(tile.owner, tl.int64) * N
    parts = matmul.column_parts(acc)
    for i in tl.static_range(len(parts)):
        part = parts[i]
        column = tile.column + i * part.shape[1]
        columns = column + tl.arange(0, part.shape[1])
        inside = (row < tile.end)[:, None] & (columns < N)[None, :]
        part = matmul.rounded(matmul.epilogue(part, bias, None, column, N, inside), slots.dtype)
        tl.store(slot[:, None] + columns[None, :], part, mask=inside & peers.usable)


@triton.jit(do_not_specialize=sync.SCALARS)
def matmul_combine_kernel(
    a, b, bias, order, edges, tables, tokens, top_k, experts, N, K, stride_bk,
    stride_bn, stride_bs, workspace, rank, signature, timeout_ns, seed, DTYPE: tl.constexpr,
    tiling: tl.constexpr,
):  # fmt: skip
    """Begin a call, and push ``round(a @ b[expert] + bias[expert])`` to the tokens' ranks."""
    peers = sync.join(workspace, rank, signature, timeout_ns, seed)
    sync.enter(peers)
    matmul.matmul_tiles(
        matmul.Product(a, b, N, K, K, stride_bk, stride_bn, stride_bs),
        matmul.Segments(
            tables, 0, 0, experts, tables + experts + 1, tables + 2 * experts + 2
        ), 0, tl.program_id(0), tl.num_programs(0), None, None, _push_rows,
        _Slots(peers, Routes(order, edges, tokens, top_k), bias, N, DTYPE), tiling,
    )  # fmt: skip


@triton.jit
def _has_row(edges, place, most, world):
    """Return whether the routes at some places lead to a row of any rank."""
    found = place < 0
    for rank in range(world):
        begin, end = tl.load(edges + rank), tl.load(edges + rank + 1)
        found |= (place >= begin) & (place < tl.minimum(end, begin + most))
    return found


@triton.jit(do_not_specialize=[*sync.SCALARS, "first_route"])
def weigh_kernel(
    weights, places, edges, out, N, count, top_k, most, first_route, workspace, rank, signature,
    timeout_ns, seed, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum this rank's ``count`` tokens over their slots, once all ranks have filled these, and end
    the call."""
    peers = sync.join(workspace, rank, signature, timeout_ns, seed)
    if tl.program_id(0) == 0:
        sync.publish_to_all(peers, sync.TILES)
    sync.wait_for_all(peers, sync.TILES)
    slots = sync.pointer(sync.buffer_of(peers, rank), out.dtype.element_ty)
    parts = tl.cdiv(count, TOKENS) * tl.cdiv(N, COLUMNS)
    for part in range(tl.program_id(0), parts, tl.num_programs(0)):
        token, column, inside = _tokens_at(part, 0, N, count, TOKENS, COLUMNS)
        acc = tl.zeros((TOKENS, COLUMNS), dtype=tl.float32)
        for slot in range(top_k):
            route = token.to(tl.int64) * top_k + slot
            weight = tl.load(weights + route, mask=token < count, other=0.0)
            place = tl.load(places + first_route + route, mask=token < count, other=0)
            weight = tl.where(_has_row(edges, place, most, workspace.world), weight, float("nan"))
            row = tl.load(slots + route[:, None] * N + column[None, :], mask=inside, other=0.0)
            acc += weight[:, None] * row.to(tl.float32)
        to = out + token.to(tl.int64)[:, None] * N + column[None, :]
        tl.store(to, matmul.rounded(acc, out.dtype.element_ty), mask=inside)
    if sync.finish(peers):
        sync.poison(out, tl.cast(count, tl.int64) * N)


def _most_tiles(most: int, experts: int, block_m: int) -> int:
    return ceil_div(most, block_m) + experts


def _bind_tables(
    config: MatmulConfig,
    most: int,
    experts: int,
    tokens: matmul.Segments | None = None,
    rank: int = 0,
) -> Callable[..., torch.Tensor]:
    """Return what makes the tables from ``ends`` of `Places`; with ``tokens`` of the ranks also
    from the token of each row, and then the last table sorts the rows of tiles."""
    tiles = _most_tiles(most, experts, config.block_m)
    args = tokens, rank, most, tiles, config.block_m, experts
    fill = BoundKernel(tables_kernel, 1, (*args, triton.next_power_of_2(max(1, experts))), {})
    length = 2 * experts + 2 + (1 if tokens is None else 2) * tiles

    def run(ends: torch.Tensor, token_of: torch.Tensor | None = None) -> torch.Tensor:
        tables = torch.empty(length, dtype=torch.int32, device=ends.device)
        if token_of is not None:
            tables.fill_(_LAST)
        fill(ends, tables, token_of)
        return tables

    return run


def prepare_dispatch(
    config: MatmulConfig,
    x: torch.Tensor,
    rows: torch.Tensor,
    w: torch.Tensor,
    sizes: tuple[int, ...],
    room: int,
    top_k: int,
) -> Prepared:
    """Prepare x [sizes[rank], K], w [experts, K, N] -> rows [R, K] and out [R, N]. The launch takes
    x, rows, w, bias, out, and the order, edges and ends of `Places`.

    Args:
        room: rows that a rank has at most; the same on all ranks, as ``top_k``, routes of a token.
    """
    (experts, k, n), most = w.shape, len(rows)
    operands = config.operands(rows, w, rows.dtype, waits=True)
    fetching = fetching_of(config, x.itemsize, room)
    tables = _bind_tables(config, most, experts)
    tiles = _most_tiles(most, experts, config.block_m) * ceil_div(n, config.block_n)

    def bind(space: DeviceWorkspace, signature: int) -> Callable[..., None]:
        call, count = sync.launch_arguments(space, signature), x.numel()
        share = all_gather_matmul.bind_share(config, count, call)
        lanes = max(1, min(config.programs - fetching.programs, tiles))
        args = matmul.segments_of(space, sizes), top_k, most, experts, n, k
        args = *args, w.stride(1), w.stride(2), w.stride(0), *call, fetching
        multiply = operands.bind(dispatch_matmul_kernel, fetching.programs + lanes, args)

        def run(
            x: torch.Tensor, rows: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None,
            out: torch.Tensor, order: torch.Tensor, edges: torch.Tensor, ends: torch.Tensor,
        ) -> None:  # fmt: skip
            if count:
                share(x, None)
            multiply(rows, w, bias, out, rows, order, edges, tables(ends))

        return run

    pieces, nbytes = ceil_div(room, fetching.piece), max(sizes) * k * x.itemsize
    return Prepared(1 + pieces, nbytes, matmul.table_of(sizes), bind)


def prepare_gather(
    config: MatmulConfig,
    x: torch.Tensor,
    gathered: torch.Tensor,
    w: torch.Tensor,
    sizes: tuple[int, ...],
    count: int,
) -> Prepared:
    """Prepare x [sizes[rank], K], w [experts, K, N] -> gathered [tokens, K] and out [count, N]. The
    launch takes x, gathered, w, bias, out, the token of each row of out, and where each expert's
    rows begin, and the last's end."""
    experts, k, n = w.shape
    operands = config.operands(gathered, w, x.dtype, waits=True, by_row=True)
    fetching = all_gather_matmul.fetching_of(config, x.itemsize, max(sizes) * k, len(sizes))
    tiles = _most_tiles(count, experts, config.block_m)

    def bind(space: DeviceWorkspace, signature: int) -> Callable[..., None]:
        call, tokens = sync.launch_arguments(space, signature), matmul.segments_of(space, sizes)
        share = all_gather_matmul.bind_share(config, x.numel(), call)
        begin = sum(sizes[: space.rank])
        tables = _bind_tables(config, count, experts, tokens, space.rank)
        lanes = min(config.programs - fetching.programs, tiles * ceil_div(n, config.block_n))
        args = tokens, count, experts, n, k, w.stride(1), w.stride(2), w.stride(0), *call, fetching
        multiply = operands.bind(gather_matmul_kernel, fetching.programs + max(1, lanes), args)

        def run(
            x: torch.Tensor, gathered: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None,
            out: torch.Tensor, token_of: torch.Tensor, ends: torch.Tensor,
        ) -> None:  # fmt: skip
            if len(x):
                share(x, gathered.narrow(0, begin, len(x)))
            made = tables(ends, token_of)
            turns = made[-tiles:].argsort(stable=True)
            multiply(gathered, w, bias, out, gathered, token_of, made, turns)

        return run

    nbytes = max(sizes) * k * x.itemsize
    pieces = ceil_div(max(sizes) * k, fetching.piece)
    return Prepared(1 + pieces, nbytes, matmul.table_of(sizes), bind)


def reducing_of(config: MatmulConfig, top_k: int) -> Reducing:
    """Choose for the sums of ``top_k`` products; the same on all ranks. A thread loads up to 128
    elements before it adds any."""
    programs = max(1, min(2 * config.fetchers, config.programs // 2))
    tokens = min(4, max(1, 16 // triton.next_power_of_2(max(1, top_k)))) * config.num_warps
    return Reducing(programs, tokens, _WEIGHED, top_k)


def prepare_scatter(
    config: MatmulConfig, x: torch.Tensor, w: torch.Tensor, sizes: tuple[int, ...], top_k: int
) -> Prepared:
    """Prepare x [R, K], w [experts, K, N], weights [tokens, top_k] -> product [R, N] and out
    [sizes[rank], N]. The launch takes x, w, bias, product, out, weights, the place of each route,
    and where each expert's rows begin, and the last's end."""
    (experts, k, n), dtype = w.shape, x.dtype
    operands = config.operands(x, w, dtype, waits=True)
    options = operands.launch | {"enable_fp_fusion": False}  # products and sums are rounded each
    operands, reducing = operands._replace(launch=options), reducing_of(config, top_k)
    tables, columns = _bind_tables(config, len(x), experts), ceil_div(n, config.block_n)
    tiles = _most_tiles(len(x), experts, config.block_m) * columns
    wide, slot = ceil_div(columns, _BLOCKS), matmul_reduce_scatter.slot_bytes(max(sizes), n, dtype)
    pushed = 1 + tiles

    def bind(space: DeviceWorkspace, signature: int) -> Callable[..., None]:
        call, tokens = sync.launch_arguments(space, signature), matmul.segments_of(space, sizes)
        args = tokens, experts, n, k, w.stride(1), w.stride(2), w.stride(0), wide, pushed, slot
        args = *args, *call, matmul.TRITON_DTYPES[dtype], reducing
        lanes = max(1, min(tiles, config.programs - reducing.programs))
        multiply = operands.bind(matmul_scatter_kernel, lanes + reducing.programs, args)

        def run(
            x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, product: torch.Tensor,
            out: torch.Tensor, weights: torch.Tensor, places: torch.Tensor, ends: torch.Tensor,
        ) -> None:  # fmt: skip
            multiply(x, w, bias, product, out, weights, places, tables(ends))

        return run

    count = pushed + ceil_div(columns, wide) * reducing.programs
    return Prepared(count, len(sizes) * slot, matmul.table_of(sizes), bind)


def prepare_combine(
    config: MatmulConfig,
    x: torch.Tensor,
    w: torch.Tensor,
    sizes: tuple[int, ...],
    room: int,
    top_k: int,
) -> Prepared:
    """Prepare x [R, K], w [experts, K, N], weights [sizes[rank], top_k] -> out [sizes[rank], N].
    The launch takes x, w, bias, weights, out, the order, edges and ends of `Places`, and the place
    of each route. ``room`` and ``top_k`` as in `prepare_dispatch`."""
    (experts, k, n), dtype = w.shape, x.dtype
    operands = config.operands(x, w, dtype)
    tables = _bind_tables(config, len(x), experts)
    tiles = _most_tiles(len(x), experts, config.block_m) * ceil_div(n, config.block_n)

    def bind(space: DeviceWorkspace, signature: int) -> Callable[..., None]:
        call, tokens = sync.launch_arguments(space, signature), matmul.segments_of(space, sizes)
        args = tokens, top_k, experts, n, k, w.stride(1), w.stride(2), w.stride(0)
        args = *args, *call, matmul.TRITON_DTYPES[dtype]
        multiply = operands.bind(matmul_combine_kernel, min(tiles, config.programs), args)
        count, first = sizes[space.rank], sum(sizes[: space.rank]) * top_k
        parts = ceil_div(count, _TOKENS) * ceil_div(n, _WEIGHED)
        args = n, count, top_k, room, first, *call, _TOKENS, _WEIGHED
        # Products and sums are rounded each.
        programs = max(1, min(parts, config.programs))
        weigh = BoundKernel(weigh_kernel, programs, args, {"enable_fp_fusion": False})

        def run(
            x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, weights: torch.Tensor,
            out: torch.Tensor, order: torch.Tensor, edges: torch.Tensor, ends: torch.Tensor,
            places: torch.Tensor,
        ) -> None:  # fmt: skip
            multiply(x, w, bias, order, edges, tables(ends))
            weigh(weights, places, edges, out)

        return run

    nbytes = max(sizes) * top_k * n * x.itemsize
    return Prepared(2, nbytes, matmul.table_of(sizes), bind)


fix_cache_keys(globals())
