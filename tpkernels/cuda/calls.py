"""Calls of one kernel: all-reduces, the sum of partials, a barrier, a paced copy.

Sums follow the numerics contract: fp32, in rank order, then bias, then residual, one rounding. All
ways give the same bits, except ``multimem``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tpkernels import _C
from tpkernels.cuda import operands
from tpkernels.cuda.image import launch
from tpkernels.cuda.layouts import SEGMENT_UNIT, all_reduce_layout
from tpkernels.cuda.operands import epilogue, space_of
from tpkernels.dtypes import CODES
from tpkernels.integers import ceil_div, round_up
from tpkernels.planning.cost import all_reduce_way
from tpkernels.symm.device import DeviceWorkspace, Launch

WAYS = ("two_shot", "multimem", "ll", "ll_two_shot", "ll128")
_SUM_BLOCKS, _SUM_SHARE = 1024, 2048  # most blocks, and fewest elements for each; not measured
_LONGEST_COPY_S = 10.0


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
    """Compute ``out = round(sum_r(x_r) + bias + residual)`` on every rank, bias along the last dim.

    Args:
        x: contiguous, fp32, fp16 or bf16; the same shape and dtype on all ranks.
        out: of x's shape, any of the dtypes; may be x.
        bias: [x.shape[-1]], any of the dtypes.
        residual: of x's shape, any of the dtypes.
        way: ``two_shot`` (every rank sums a part and passes it on), ``ll`` (NCCL's protocol LL, no
            fences for twice the bytes; every rank sums everything), ``ll_two_shot`` (LL, and every
            rank sums a part), ``ll128`` (the same for 8/7 of the bytes; only where stores of 128
            bytes arrive whole, as over NVLink), ``auto`` (one of these, by size and by
            ``space.ll128``) or ``multimem``: the switch sums, in its own order, so the bits may
            differ from run to run.
        early: the kernel may start while the last kernel queued on the stream runs. That must be
            a product which was queued behind the workspace's previous call, on the same stream.

    Raises:
        ValueError: an argument does not fit the others, or the workspace is too small.
        NotImplementedError: no driver or GPU; a dtype; multimem without multicast memory, a GPU of
            compute capability 9.0, or with an epilogue.
    """
    operands.check_summed(space.regions.device, x=x, out=out, bias=bias, residual=residual)
    operands.check_alike(False, x=x, out=out, residual=residual)
    operands.check_bias(bias, x.shape[-1] if x.dim() else 1)
    if way == "auto":
        way = all_reduce_way(x.numel() * x.element_size(), space.world, space.ll128)
    if way not in WAYS:
        raise ValueError(f"way is {way!r}; it must be auto or one of {', '.join(WAYS)}")
    if way == "multimem":
        _check_multimem(space, out.dtype == x.dtype and bias is None and residual is None)
    sizes = x.element_size(), out.element_size()
    words = space_of(space, signature)
    begin, piece = 0, max(x.numel(), 1)
    while begin == 0 or begin < x.numel():
        count = min(piece, x.numel() - begin)
        cut = all_reduce_layout(way, count, space.world, *sizes)
        if not space.holds(cut.words, cut.nbytes):  # it goes piece by piece
            if piece <= SEGMENT_UNIT:
                raise ValueError(
                    f"the workspace has {space.words} words from each source and buffers of "
                    f"{space.buffer_bytes} bytes: too few for an all-reduce"
                )
            piece = round_up(piece // 2, SEGMENT_UNIT)
            continue
        here, there = x.data_ptr() + begin * sizes[0], out.data_ptr() + begin * sizes[1]
        after = epilogue(out.dtype, bias, residual, begin)
        call = _C.cuda.AllReduce(
            *(here, there, count, begin, CODES[x.dtype], after),
            *(cut.segment, cut.slot_bytes, cut.results_at, space.multicast),
        )
        starts_early = early and begin == 0
        launch(f"{way}_all_reduce", x.device, words, call, blocks=cut.blocks, early=starts_early)
        begin += piece


def prepare_all_reduce(
    world: int,
    x: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    early: bool = False,
    ll128: bool = False,
) -> Launch:
    """Prepare an ``all_reduce`` over ``world`` ranks that goes in one piece. ``ll128``: that of the
    workspace."""
    way = all_reduce_way(x.numel() * x.element_size(), world, ll128)
    needs = all_reduce_layout(way, x.numel(), world, x.element_size(), out.element_size())

    def run(space: DeviceWorkspace, signature: int) -> None:
        all_reduce(space, signature, x, out, bias, residual, way, early)

    return Launch(needs.words, needs.nbytes, (), run)


def _check_multimem(space: DeviceWorkspace, plain: bool) -> None:
    if not space.multicast:
        raise NotImplementedError(
            "way 'multimem' needs multicast memory, which GPUs behind an NVSwitch have; "
            "'two_shot' does not need it"
        )
    if not plain:
        raise NotImplementedError(
            "way 'multimem' takes no bias, residual or other dtype for out, as the switch sums and "
            "rounds; 'two_shot' takes them"
        )


def sum_partials(
    out: torch.Tensor,
    partials: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    begin: int = 0,
) -> None:
    """Compute ``out = round(partials[0] + partials[1] + ... + bias + residual)``, added in fp32 in
    that order. Contiguous, of one shape; ``out`` may be a partial. They start at element ``begin``
    of the whole output: element i gets ``bias[(begin + i) % len(bias)]``. Each has a dtype of its
    own but the partials, which share one."""
    if not 1 <= len(partials) <= _C.cuda.MAX_WORLD:
        raise ValueError(f"{len(partials)} partials; there must be 1 to {_C.cuda.MAX_WORLD}")
    first = partials[0]
    named = {f"partials[{i}]": partial for i, partial in enumerate(partials)}
    operands.check_summed(out.device, **named, out=out, bias=bias, residual=residual)
    operands.check_alike(True, **named)
    operands.check_alike(False, partials=first, out=out, residual=residual)
    operands.check_bias(bias)
    if begin < 0:
        raise ValueError(f"begin is {begin}; it must be at least 0")
    addresses = [partial.data_ptr() for partial in partials]
    after = epilogue(out.dtype, bias, residual)
    of_partials = addresses, CODES[first.dtype]
    call = _C.cuda.SumPartials(out.data_ptr(), *of_partials, begin, out.numel(), after)
    blocks = min(_SUM_BLOCKS, max(1, ceil_div(out.numel(), _SUM_SHARE)))
    launch("sum_of_partials", out.device, call, blocks=blocks)


def barrier(space: DeviceWorkspace, signature: int) -> None:
    """Wait for every rank's barrier: what any rank queued before its own is complete and visible
    then."""
    launch("call_barrier", space.regions.device, space_of(space, signature))


def paced_copy(
    dst: torch.Tensor, src: torch.Tensor, gb_per_s: float, latency_us: float = 0.0, sms: int = 16
) -> None:
    """Copy ``src`` to ``dst`` at the pace of a link, to model one on a single GPU: the first byte
    arrives after ``latency_us``, then ``gb_per_s`` * 1e9 bytes a second. It has ``sms`` blocks of
    1024 threads, and is slower if they cannot move as much. Contiguous, of one shape and dtype.
    """
    operands.check_contiguous(dst.device, dst=dst, src=src)
    operands.check_alike(True, dst=dst, src=src)
    for what, value, valid, allowed in (
        ("gb_per_s", gb_per_s, 0 < gb_per_s < math.inf, "above 0"),
        ("latency_us", latency_us, 0 <= latency_us < math.inf, "at least 0"),
        ("sms", sms, 1 <= sms <= 1024, "1 to 1024"),
    ):
        if not valid:
            raise ValueError(f"{what} is {value}; it must be {allowed}")
    nbytes = src.numel() * src.element_size()
    seconds = latency_us * 1e-6 + nbytes / gb_per_s * 1e-9
    if seconds > _LONGEST_COPY_S:
        raise ValueError(
            f"{nbytes} bytes at {gb_per_s:g} GB/s after {latency_us:g} us would take "
            f"{seconds:.3g} s; at most {_LONGEST_COPY_S:g} s"
        )
    call = _C.cuda.PacedCopy(
        dst.data_ptr(), src.data_ptr(), nbytes, round(latency_us * 1e3), 1 / gb_per_s
    )
    launch("paced_copy", dst.device, call, blocks=sms)
