"""``y = concat_r(x_r) @ w`` in one kernel: the local rows are multiplied while peer rows arrive.

Problem: rank r holds rows [starts[r], starts[r+1]) of x. Every rank needs all rows, in `gathered`.

Algorithm for small inputs: a first kernel copies the local rows into symmetric memory, for the
peers, and into `gathered`. In the second kernel, the first programs are copy programs: they copy
the rows of the peers into `gathered`, chunk by chunk. The remaining programs run the tile loop: the
local rows first, then the rows of rank+1, ... as they arrive.

Algorithm for large inputs: copy engines copy the rows of the peers, chunk by chunk. Such a call has
several launches (cuda/copies.py), and the tile loop is one of them; see algorithms/fused.py.

Copy programs: the rows of each peer are divided into chunks of a fixed number of elements,
independent of K. The copy programs process the chunks of rank+1, rank+2, ... round-robin, so
several programs work on one tile row. Each program copies blocks through a ring in shared memory
and stores the oldest block while the remaining blocks are in flight. Triton lowers the loads of the
pipelined loop to `cp.async`.

Sync: ENTERED of a peer means that its rows are in its buffer, because the copy is an earlier kernel
of the same stream. A copy program waits for ENTERED and copies a chunk. Then it stores signal
TILES + chunk in the region of its own rank, as if the owner of the rows had sent it. A tile waits
until its rows have arrived. With copy programs it awaits the signals of all chunks that contain its
rows. With copy engines it awaits flag owner * chunks + chunk, which a copy stream sets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tpkernels.common.integers import ceil_div
from tpkernels.kernels import matmul, signals, sync
from tpkernels.kernels.bound import BoundKernel
from tpkernels.kernels.configs import MatmulConfig
from tpkernels.symm import device
from tpkernels.symm.device import DeviceWorkspace, PreparedCall

# Bytes in flight per copy program, and elements per load. Not measured. If a read from a peer lasts
# 1 us, 16 copy programs with 8 KiB in flight reach at most 130 GB/s. 12 copy programs with 64 KiB
# exceed the bandwidth of NVLink.
RING_BYTES, BLOCK = 64 << 10, 4096
_FLAGS_OFFSET = tl.constexpr(device.FLAGS_OFFSET)
_COPY_BLOCK = 4096  # elements per iteration of `copy_elements`
# Bytes per copy-engine chunk, and multiprocessors reserved for the one-warp kernels that wait for
# peers. Not measured.
_CHUNK_BYTES, _FREE_MULTIPROCESSORS = 4 << 20, 1


@triton.jit
def copy_elements(src, dst, count, worker, num_workers, BLOCK: tl.constexpr):
    """Copy ``count`` elements. Program ``worker`` copies every ``num_workers``-th block."""
    for begin in range(worker * BLOCK, count, num_workers * BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        tl.store(dst + offsets, tl.load(src + offsets, mask=offsets < count), mask=offsets < count)


@triton.jit(do_not_specialize=["rank"])
def shard_kernel(x, gathered, count, workspace, rank, BLOCK: tl.constexpr):
    """Copy the local rows into the shared buffer (for the peers) and into ``gathered``."""
    shared = sync.pointer(sync.next_buffer(workspace, rank), x.dtype.element_ty)
    worker, num_workers = tl.program_id(0), tl.num_programs(0)
    if sync.failed(workspace.state):
        count = 0
    copy_elements(x, shared, count, worker, num_workers, BLOCK)
    copy_elements(x, gathered, count, worker, num_workers, BLOCK)


class CopyPlan(NamedTuple):
    """Compile-time plan of the copy programs."""

    programs: int
    chunk: int  # elements per signal, counted from the first element of a peer
    block: int  # elements per load
    blocks: int  # blocks in flight per program


NO_COPIES = CopyPlan(0, 1, 1, 1)


def plan_copies(config: MatmulConfig, itemsize: int, max_elements: int, world: int) -> CopyPlan:
    """Choose the copy plan for shards of at most ``max_elements``. Identical on all ranks."""
    chunk, blocks = config.chunk_bytes // itemsize, RING_BYTES // (BLOCK * itemsize)
    programs = min(config.copy_programs, (world - 1) * ceil_div(max_elements, chunk))
    return CopyPlan(programs, chunk, BLOCK, blocks)


@triton.jit
def _count_chunks(rows, K, copy_plan: tl.constexpr):
    """Count the chunks that begin in the first ``rows`` rows of a peer."""
    return tl.cdiv(tl.cast(rows, tl.int64) * K, copy_plan.chunk).to(tl.int32)


@triton.jit
def _copy_chunk(src, dst, count, copy_plan: tl.constexpr):
    """Copy ``count`` elements from an aligned buffer address. Loads read full vectors even if
    ``count`` or ``dst`` is unaligned. The last vector stays inside the buffer, because the buffer
    size is a multiple of 256 bytes."""
    VECTOR: tl.constexpr = 16
    readable = tl.cdiv(count, VECTOR) * VECTOR
    for begin in tl.range(0, readable, copy_plan.block, num_stages=copy_plan.blocks + 1):
        offsets = begin + tl.arange(0, copy_plan.block)
        tl.store(
            dst + offsets, tl.load(src + offsets, mask=offsets < readable), mask=offsets < count
        )


@triton.jit
def gather_rows(peers, gathered, segments, K, worker, copy_plan: tl.constexpr):
    """Copy the rows of the peers. The copy programs process the chunks round-robin."""
    CHUNK: tl.constexpr = copy_plan.chunk
    num_workers: tl.constexpr = copy_plan.programs
    world = peers.workspace.world
    next_chunk = worker
    for i in range(1, world):
        owner = (peers.rank + i) % world
        begin, end = matmul.segment_rows(segments, owner)
        count = tl.cast(end - begin, tl.int64) * K
        num_chunks = _count_chunks(end - begin, K, copy_plan)
        if next_chunk < num_chunks:
            sync.wait_for(peers, owner, sync.ENTERED)
        peer_rows = sync.pointer(sync.buffer_address(peers, owner), gathered.dtype.element_ty)
        local_rows = gathered + tl.cast(begin, tl.int64) * K
        for chunk in range(next_chunk, num_chunks, num_workers):
            first = tl.cast(chunk, tl.int64) * CHUNK
            elements = tl.minimum(count - first, CHUNK).to(tl.int32)
            _copy_chunk(peer_rows + first, local_rows + first, elements, copy_plan)
            sync.publish_from(peers, peers.rank, owner, sync.TILES + chunk)
        next_chunk += (
            tl.cdiv(tl.maximum(num_chunks - next_chunk, 0), num_workers) * num_workers - num_chunks
        )


class _RowArrivals(NamedTuple):
    """Context of the `_await_rows` prologue."""

    peers: sync.Peers
    segments: matmul.RowSegments
    K: tl.tensor
    chunk_tiles: tl.tensor  # tile rows per copy-engine chunk
    chunks: tl.tensor  # max copy-engine chunks per rank
    block_m: tl.constexpr
    copy_plan: tl.constexpr
    tma: tl.constexpr  # whether TMA reads the rows


@triton.jit
def _await_rows(arrivals, owner, tile_m):
    """Prologue: wait for the rows of a tile."""
    peers, K = arrivals.peers, arrivals.K
    if owner != peers.rank:
        if arrivals.copy_plan.programs == 0:
            flag = owner * arrivals.chunks + tile_m // arrivals.chunk_tiles
            flag_set = tl.full((), 1, tl.int64)
            sync.await_value(
                peers, owner, peers.workspace.state + _FLAGS_OFFSET + flag, flag_set, flag
            )
        else:
            begin, end = matmul.segment_rows(arrivals.segments, owner)
            row = tile_m * arrivals.block_m
            rows = tl.minimum(row + arrivals.block_m, end - begin)
            last = _count_chunks(rows, K, arrivals.copy_plan)
            first = (tl.cast(row, tl.int64) * K // arrivals.copy_plan.chunk).to(tl.int32)
            sync.wait_for_range(peers, owner, first + sync.TILES, last + sync.TILES)
        if arrivals.tma:
            signals.fence_async_proxy()


# Chunk sizes differ between eager calls and captures (`prepare_with_copy_engines`), but a capture
# must run the kernel that an eager call has compiled. They are therefore not specialized.
@triton.jit(do_not_specialize=[*sync.SCALARS, "chunk_tiles", "chunks"])
def all_gather_matmul_kernel(
    a, b, bias, out, gathered, segments, N, K, stride_bk, stride_bn, workspace, rank, signature,
    timeout_ns, seed, chunk_tiles, chunks, MULTI_LAUNCH: tl.constexpr, copy_plan: tl.constexpr,
    tiling: tl.constexpr,
):  # fmt: skip
    """Gather x [M, K] into ``gathered`` and compute ``out = round(x @ b + bias)``.

    ``a`` is ``gathered`` as an operand of the tile loop. With MULTI_LAUNCH, separate launches begin
    and end the call and gather the rows."""
    peers = sync.join(workspace, rank, signature, timeout_ns, seed)
    if not MULTI_LAUNCH:
        sync.enter(peers)
    worker = tl.program_id(0)
    if worker < copy_plan.programs:
        gather_rows(peers, gathered, segments, K, worker, copy_plan)
    else:
        matmul.matmul_tiles(
            matmul.MatmulOperands(a, b, N, K, K, stride_bk, stride_bn), segments, rank,
            worker - copy_plan.programs, tl.num_programs(0) - copy_plan.programs,
            _await_rows,
            _RowArrivals(
                peers, segments, K, chunk_tiles, chunks, tiling.block_m, copy_plan, tiling.a_tma
            ),
            matmul.store_result, matmul.Result(out, bias, N), tiling,
        )  # fmt: skip
    if not MULTI_LAUNCH:  # noqa: SIM102 - a condition known at compile time and one that is not
        if sync.finish(peers):
            sync.poison(out, tl.cast(segments.M, tl.int64) * N)
            sync.poison(gathered, tl.cast(segments.M, tl.int64) * K)  # later matmuls read gathered


def prepare(
    config: MatmulConfig,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    gathered: torch.Tensor,
    out_dtype: torch.dtype,
    sizes: tuple[int, ...],
) -> PreparedCall:
    """Prepare the gather of x [sizes[rank], K] and the matmuls with ``weights`` [K, N_i].

    The outputs are outs [M, N_i] and gathered [M, K], where M is the sum of ``sizes``. The launch
    arguments are (x, weights, biases, outs, gathered). The kernel of the first weight gathers; the
    remaining matmuls are plain."""
    (rows, k), w = x.shape, weights[0]
    operand_plan = config.plan_operands(gathered, w, out_dtype, waits=True)
    copy_plan = plan_copies(config, x.itemsize, max(sizes) * k, len(sizes))
    run_remaining = bind_remaining_matmuls(config, gathered, weights[1:], out_dtype)

    def bind(workspace: DeviceWorkspace, signature: int) -> Callable[..., None]:
        begin, arguments = sum(sizes[: workspace.rank]), sync.launch_arguments(workspace, signature)
        programs = min(config.programs, ceil_div(rows * k, _COPY_BLOCK))
        shard = rows * k, *arguments[:2], _COPY_BLOCK
        copy_shard = BoundKernel(shard_kernel, programs, shard, {})
        num_workers = min(config.programs - copy_plan.programs, config.tiles(sizes, w.shape[1]))
        programs, segments = (
            copy_plan.programs + max(num_workers, 1),
            matmul.make_segments(workspace, sizes),
        )
        args = segments, w.shape[1], k, *w.stride(), *arguments, 1, 1, False, copy_plan
        multiply = operand_plan.bind(all_gather_matmul_kernel, programs, args)

        def run(
            x: torch.Tensor,
            weights: list[torch.Tensor],
            biases: list[torch.Tensor | None],
            outs: list[torch.Tensor],
            gathered: torch.Tensor,
        ) -> None:
            if rows:
                copy_shard(x, gathered.narrow(0, begin, rows))
            multiply(gathered, weights[0], biases[0], outs[0], gathered)
            if len(weights) > 1:
                run_remaining(gathered, weights[1:], biases[1:], outs[1:])

        return run

    elements = max(sizes) * k
    num_chunks = ceil_div(elements, copy_plan.chunk)
    return PreparedCall(1 + num_chunks, elements * x.itemsize, matmul.table_sizes(sizes), bind)


def bind_remaining_matmuls(
    config: MatmulConfig,
    gathered: torch.Tensor,
    weights: list[torch.Tensor],
    out_dtype: torch.dtype,
) -> Callable[..., None]:
    """Return a function that launches the matmuls with the remaining weights, after all rows have
    arrived. Its arguments are (gathered, weights, biases, outs)."""
    matmuls = [matmul.bind_matmul(config, gathered, w, out_dtype) for w in weights]

    def run(gathered: torch.Tensor, *lists: Sequence[torch.Tensor | None]) -> None:
        for run_matmul, w, bias, out in zip(matmuls, *lists, strict=True):
            run_matmul(gathered, w, bias, out)

    return run


class CopyEngineLaunch(NamedTuple):
    """Matmul launch of a call in which copy engines gather the rows. Flag ``owner * chunks + i``
    signals that chunk i of rank ``owner`` has arrived."""

    prepared: PreparedCall
    chunk_rows: int
    chunks: int  # max chunks per rank


def prepare_with_copy_engines(
    config: MatmulConfig,
    w: torch.Tensor,
    gathered: torch.Tensor,
    out_dtype: torch.dtype,
    sizes: tuple[int, ...],
    by_kernels: bool = False,
) -> CopyEngineLaunch:
    """Prepare ``out = round(gathered @ w + bias)`` while copies fill ``gathered`` [M, K].

    The launch arguments are (gathered, w, bias, out). Each rank sends three signals: ENTERED, "data
    in memory" and "end of the call". If kernels set the flags (``by_kernels``), chunks are twice as
    large."""
    k = gathered.shape[1]
    row_bytes = k * gathered.itemsize
    tiles = ceil_div(max(sizes), config.block_m)
    chunk_tiles = max(
        1,
        _CHUNK_BYTES * (2 if by_kernels else 1) // (config.block_m * row_bytes),
        ceil_div(tiles, device.MAX_FLAGS // len(sizes)),
    )
    chunks = ceil_div(tiles, chunk_tiles)
    operand_plan = config.plan_operands(gathered, w, out_dtype, waits=True)

    def bind(workspace: DeviceWorkspace, signature: int) -> Callable[..., None]:
        num_workers = min(config.programs - _FREE_MULTIPROCESSORS, config.tiles(sizes, w.shape[1]))
        args = matmul.make_segments(workspace, sizes), w.shape[1], k, *w.stride()
        call = sync.launch_arguments(workspace, signature)
        args = *args, *call, chunk_tiles, chunks, True, NO_COPIES
        multiply = operand_plan.bind(all_gather_matmul_kernel, num_workers, args)

        def run(gathered: torch.Tensor, w: torch.Tensor, *tensors: torch.Tensor | None) -> None:
            multiply(gathered, w, *tensors, gathered)

        return run

    nbytes = ceil_div(max(sizes) * row_bytes, 2)
    prepared = PreparedCall(3, nbytes, matmul.table_sizes(sizes), bind)
    return CopyEngineLaunch(prepared, chunk_tiles * config.block_m, chunks)
