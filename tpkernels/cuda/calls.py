"""Calls of one kernel: all-reduces, the sum of partials, a barrier, a paced copy.

Sums follow the numerics contract: fp32, in rank order, then bias, then residual, one rounding. All
ways give the same bits, except ``multimem``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tpkernels import _C
from tpkernels.cuda import low_latency
from tpkernels.cuda.checks import (
    check_alike,
    check_bias,
    check_contiguous,
    check_dtypes,
    device_and_stream,
    epilogue,
    space_of,
)
from tpkernels.cuda.image import kernels
from tpkernels.dtypes import CODES
from tpkernels.integers import ceil_div, round_up
from tpkernels.planning.cost import all_reduce_way
from tpkernels.symm.device import DeviceWorkspace, Launch

# The codes of csrc/cuda/kernels.h.
WAYS = ("one_shot", "two_shot", "multimem", "low_latency", "low_latency_two_shot", "whole_lines")

# Most blocks of an all-reduce, and fewest elements for each. The same on all ranks, and few, since
# blocks take SMs from a matmul. Not measured.
_REDUCE_BLOCKS, _REDUCE_SHARD = 64, 4096
_SUM_BLOCKS, _SUM_SHARE = 1024, 2048
_LONGEST_COPY_S = 10.0
_SLOT_ALIGNMENT = 256
_SEGMENT_UNIT = 64  # elements; csrc/cuda/all_reduce.cuh
_LANE = 8  # elements that a thread sums at a time; csrc/cuda/reduce.cuh


@dataclass(frozen=True)
class BufferLayout:
    """Where an all-reduce keeps its data in a buffer."""

    blocks: int
    segment: int  # elements that a rank reduces
    slot_bytes: int
    results_at: int
    nbytes: int
    words: int


def layout(way: str, count: int, world: int, x_bytes: int, out_bytes: int) -> BufferLayout:
    """Return the layout for ``count`` elements of ``x_bytes`` each, which become ``out_bytes``
    each."""
    if way == "low_latency":
        blocks = low_latency.blocks(count * x_bytes, _LANE * x_bytes)
        return BufferLayout(blocks, count, 0, 0, 0, low_latency.words(count * x_bytes))
    if way == "low_latency_two_shot":
        segment = round_up(ceil_div(count, world), _SEGMENT_UNIT)
        blocks = low_latency.blocks(segment * x_bytes, _LANE * x_bytes)
        words = low_latency.words(segment * x_bytes, segment * out_bytes)
        return BufferLayout(blocks, segment, 0, 0, 0, words)
    if way == "whole_lines":
        segment = round_up(ceil_div(count, world), _SEGMENT_UNIT)
        words = low_latency.line_words(segment, x_bytes, out_bytes)
        return BufferLayout(low_latency.line_blocks(segment), segment, 0, 0, 0, words)
    blocks = min(_REDUCE_BLOCKS, max(1, ceil_div(count, _REDUCE_SHARD)))
    segment = count if way == "one_shot" else round_up(ceil_div(count, world), _SEGMENT_UNIT)
    slot = 0 if way == "multimem" else round_up(segment * x_bytes, _SLOT_ALIGNMENT)
    results = round_up(count * out_bytes, _SLOT_ALIGNMENT)  # multimem: all of x, summed in place
    return BufferLayout(
        blocks,
        segment,
        slot,
        world * slot,
        world * slot + (0 if way == "one_shot" else results),
        1 + blocks * (1 if way == "one_shot" else 2),
    )


def all_reduce(
    space: DeviceWorkspace,
    signature: int,
    x: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    way: str = "auto",
    early: bool = False,
) -> None:
    """``out = round(sum_r(x_r) + bias + residual)`` on every rank, bias along the last dim.

    Args:
        x: contiguous, fp32, fp16 or bf16; the same shape and dtype on all ranks.
        out: of x's shape, any of the dtypes; may be x.
        bias: [x.shape[-1]], any of the dtypes.
        residual: of x's shape, any of the dtypes.
        way: ``one_shot`` (every rank sums everything), ``two_shot`` (every rank sums a part),
            ``low_latency`` and ``low_latency_two_shot`` (the same without fences, for twice the
            bytes), ``whole_lines`` (the last for 8/7 of the bytes; only where stores of 128 bytes
            arrive whole, as over NVLink), ``auto`` (any but the first, by size and by
            ``space.whole_lines``) or ``multimem``: the switch sums, in its own order, so the bits
            may differ from run to run.
        early: the kernel may start while the last kernel queued on the stream runs. That must be
            a product which was queued behind the workspace's previous call, on the same stream.

    Raises:
        ValueError: an argument does not fit the others, or the workspace is too small.
        NotImplementedError: no driver or GPU; a dtype; multimem without multicast memory, a GPU of
            compute capability 9.0, or with an epilogue.
    """
    check_contiguous(space.regions.device, x=x, out=out, bias=bias, residual=residual)
    check_dtypes(x=x, out=out, bias=bias, residual=residual)
    check_alike(False, x=x, out=out, residual=residual)
    check_bias(bias, _columns(x))
    if way == "auto":
        way = all_reduce_way(x.numel() * x.element_size(), space.world, space.whole_lines)
    if way not in WAYS:
        raise ValueError(f"way is {way!r}; it must be auto or one of {', '.join(WAYS)}")
    if way == "multimem":
        _check_multimem(space, x, out, bias, residual)
    sizes = x.element_size(), out.element_size()
    piece = _largest_piece(space, way, x.numel(), *sizes)
    device, stream = device_and_stream(x.device)
    loaded, words = kernels(device), space_of(space, signature)
    for begin in range(0, max(x.numel(), 1), piece):
        count = min(piece, x.numel() - begin)
        plan = layout(way, count, space.world, *sizes)
        loaded.all_reduce(
            stream,
            words,
            WAYS.index(way),
            plan.blocks,
            early and begin == 0,
            x.data_ptr() + begin * sizes[0],
            out.data_ptr() + begin * sizes[1],
            count,
            begin,
            CODES[x.dtype],
            epilogue(out.dtype, bias, residual, begin),
            plan.segment,
            plan.slot_bytes,
            plan.results_at,
            space.multicast,
        )


def prepare_all_reduce(
    world: int,
    x: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    early: bool = False,
    whole_lines: bool = False,
) -> Launch:
    """An ``all_reduce`` over ``world`` ranks that goes in one piece. ``whole_lines``: that of the
    workspace."""
    way = all_reduce_way(x.numel() * x.element_size(), world, whole_lines)
    needs = layout(way, x.numel(), world, x.element_size(), out.element_size())

    def run(space: DeviceWorkspace, signature: int) -> None:
        all_reduce(space, signature, x, out, bias, residual, way, early)

    return Launch(needs.words, needs.nbytes, (), run)


def _columns(x: torch.Tensor) -> int:
    return x.shape[-1] if x.dim() else 1


def _check_multimem(
    space: DeviceWorkspace,
    x: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> None:
    if not space.multicast:
        raise NotImplementedError(
            "way 'multimem' needs multicast memory, which GPUs behind an NVSwitch have; "
            "'one_shot' and 'two_shot' do not need it"
        )
    if out.dtype != x.dtype or bias is not None or residual is not None:
        raise NotImplementedError(
            "way 'multimem' takes no bias, residual or other dtype for out, as the switch sums and "
            "rounds; 'one_shot' and 'two_shot' take them"
        )


def _largest_piece(
    space: DeviceWorkspace, way: str, count: int, x_bytes: int, out_bytes: int
) -> int:
    """Return the most elements that fit the workspace in one call; larger tensors run piece by
    piece."""
    piece = max(count, 1)
    while not _fits(space, layout(way, piece, space.world, x_bytes, out_bytes)):
        if piece <= _SEGMENT_UNIT:
            raise ValueError(
                f"the workspace has {space.words} words from each source and buffers of "
                f"{space.buffer_bytes} bytes: too few for an all-reduce"
            )
        piece = round_up(piece // 2, _SEGMENT_UNIT)
    return piece


def _fits(space: DeviceWorkspace, needed: BufferLayout) -> bool:
    return space.holds(needed.words, needed.nbytes)


def sum_partials(
    out: torch.Tensor,
    partials: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    begin: int = 0,
) -> None:
    """``out = round(partials[0] + partials[1] + ... + bias + residual)``, added in fp32 in that
    order. Contiguous, of one shape; ``out`` may be a partial. They start at element ``begin`` of
    the whole output: element i gets ``bias[(begin + i) % len(bias)]``. Each has a dtype of its own
    but the partials, which share one."""
    if not 1 <= len(partials) <= _C.cuda.MAX_WORLD:
        raise ValueError(f"{len(partials)} partials; there must be 1 to {_C.cuda.MAX_WORLD}")
    first = partials[0]
    given = {f"partials[{i}]": partial for i, partial in enumerate(partials)}
    check_contiguous(out.device, **given, out=out, bias=bias, residual=residual)
    check_dtypes(**given, out=out, bias=bias, residual=residual)
    check_alike(True, **given)
    check_alike(False, partials=first, out=out, residual=residual)
    check_bias(bias)
    if begin < 0:
        raise ValueError(f"begin is {begin}; it must be at least 0")
    device, stream = device_and_stream(out.device)
    kernels(device).sum_partials(
        stream,
        min(_SUM_BLOCKS, max(1, ceil_div(out.numel(), _SUM_SHARE))),
        out.data_ptr(),
        [partial.data_ptr() for partial in partials],
        CODES[first.dtype],
        begin,
        out.numel(),
        epilogue(out.dtype, bias, residual),
    )


def barrier(space: DeviceWorkspace, signature: int) -> None:
    """When it ends, everything that any rank queued before its own barrier is complete and
    visible."""
    device, stream = device_and_stream(space.regions.device)
    kernels(device).barrier(stream, space_of(space, signature))


def paced_copy(
    dst: torch.Tensor, src: torch.Tensor, gb_per_s: float, latency_us: float = 0.0, sms: int = 16
) -> None:
    """Copy ``src`` to ``dst`` at the pace of a link, to model one on a single GPU: the first byte
    arrives after ``latency_us``, then ``gb_per_s`` * 1e9 bytes a second. It has ``sms`` blocks of
    1024 threads, and is slower if they cannot move as much. Contiguous, of one shape and dtype.
    """
    check_contiguous(dst.device, dst=dst, src=src)
    check_alike(True, dst=dst, src=src)
    if not (gb_per_s > 0 and math.isfinite(gb_per_s)):
        raise ValueError(f"gb_per_s is {gb_per_s}; it must be above 0")
    if not (latency_us >= 0 and math.isfinite(latency_us)):
        raise ValueError(f"latency_us is {latency_us}; it must be at least 0")
    if not 1 <= sms <= 1024:
        raise ValueError(f"sms is {sms}; it must be 1 to 1024")
    nbytes = src.numel() * src.element_size()
    seconds = latency_us * 1e-6 + nbytes / gb_per_s * 1e-9
    if seconds > _LONGEST_COPY_S:
        raise ValueError(
            f"{nbytes} bytes at {gb_per_s:g} GB/s after {latency_us:g} us would take "
            f"{seconds:.3g} s; at most {_LONGEST_COPY_S:g} s"
        )
    device, stream = device_and_stream(dst.device)
    kernels(device).paced_copy(
        stream, sms, dst.data_ptr(), src.data_ptr(), nbytes, round(latency_us * 1e3), 1 / gb_per_s
    )
