"""All-gather and reduce-scatter of rows, each in one launch: every rank pushes to all others.

``way`` is ``low_latency`` (``low_latency.py``), ``one_shot``, or ``auto``: one of these, by size. A
push of few bytes should take less time than starting copy engines (``copies.py``). Not measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tpkernels.cuda import low_latency
from tpkernels.cuda.checks import (
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
from tpkernels.symm.device import DeviceWorkspace, Launch

# Most blocks of a call, and fewest bytes of a shard for each; the same on all ranks. Not measured.
_BLOCKS, _BLOCK_BYTES = 64, 8 << 10
_ALIGNMENT = 256  # bytes, of a slot
_LANE = 8  # elements that a thread sums at a time; csrc/cuda/reduce.cuh
_PACK_BYTES = 16  # that a thread copies at a time; csrc/cuda/lines.cuh


def prepare_all_gather(
    x: torch.Tensor, out: torch.Tensor, sizes: tuple[int, ...], way: str = "auto"
) -> Launch:
    """``out = concat_r(x_r)``. Contiguous, fp32, fp16 or bf16: x [sizes[rank], row], out
    [sum(sizes), row].

    Raises:
        ValueError: an unknown way.

    The launch raises:
        ValueError: an argument does not fit the others, or the workspace is too small.
        NotImplementedError: no driver or GPU; a dtype.
    """
    cut = _cut(x, sizes, way, _PACK_BYTES)

    def run(space: DeviceWorkspace, signature: int) -> None:
        _check(space, cut, x, out, sizes[space.rank], sum(sizes))
        if out.dtype != x.dtype:
            raise ValueError(f"out is {out.dtype}, x {x.dtype}; they must have the same dtype")
        device, _ = device_and_stream(x.device)
        after = epilogue(x.dtype, None, None)
        loaded = kernels(device)
        kernel = loaded.low_latency_gather if cut.low_latency else loaded.gather
        _launch(kernel, space, signature, cut, x, out, after)

    return Launch(cut.words, cut.buffer_bytes, sizes, run)


def prepare_reduce_scatter(
    x: torch.Tensor,
    out: torch.Tensor,
    sizes: tuple[int, ...],
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    way: str = "auto",
) -> Launch:
    """``out = round(rows_rank(sum_r(x_r)) + bias + residual)``, added in fp32 in the order of the
    ranks. Contiguous, fp32, fp16 or bf16: x [sum(sizes), row], out and residual [sizes[rank], row],
    each with a dtype of its own; bias [row]. It and the launch raise what ``prepare_all_gather``
    and its launch do."""
    cut = _cut(x, sizes, way, _LANE * x.element_size())

    def run(space: DeviceWorkspace, signature: int) -> None:
        _check(space, cut, x, out, sum(sizes), sizes[space.rank])
        check_contiguous(x.device, bias=bias, residual=residual)
        check_dtypes(bias=bias, residual=residual)
        check_bias(bias, x.shape[1])
        if residual is not None and residual.shape != out.shape:
            raise ValueError(f"residual is {list(residual.shape)}; it must be {list(out.shape)}")
        device, _ = device_and_stream(x.device)
        after = epilogue(out.dtype, bias, residual)
        loaded = kernels(device)
        kernel = loaded.low_latency_scatter if cut.low_latency else loaded.scatter
        _launch(kernel, space, signature, cut, x, out, after)

    return Launch(cut.words, cut.buffer_bytes, sizes, run)


def all_gather(
    space: DeviceWorkspace,
    signature: int,
    x: torch.Tensor,
    out: torch.Tensor,
    sizes: tuple[int, ...],
    way: str = "auto",
) -> None:
    """The launch of ``prepare_all_gather``."""
    prepare_all_gather(x, out, sizes, way).run(space, signature)


def reduce_scatter(
    space: DeviceWorkspace,
    signature: int,
    x: torch.Tensor,
    out: torch.Tensor,
    sizes: tuple[int, ...],
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    way: str = "auto",
) -> None:
    """The launch of ``prepare_reduce_scatter``."""
    prepare_reduce_scatter(x, out, sizes, bias, residual, way).run(space, signature)


@dataclass(frozen=True)
class _Cut:
    """How the kernels are cut for shards of ``sizes`` rows."""

    sizes: tuple[int, ...]
    low_latency: bool
    blocks: int
    words: int
    slot_bytes: int

    @property
    def buffer_bytes(self) -> int:
        return len(self.sizes) * self.slot_bytes


def _cut(x: torch.Tensor, sizes: tuple[int, ...], way: str, lane_bytes: int) -> _Cut:
    """``lane_bytes``: what a thread of a low-latency kernel takes at a time."""
    if way not in ("auto", "one_shot", "low_latency"):
        raise ValueError(f"way is {way!r}; it must be auto, one_shot or low_latency")
    row_bytes = x.shape[1] * x.element_size() if x.dim() == 2 else 0  # `_check` refuses others
    shard_bytes = max(sizes) * row_bytes
    if way == "low_latency" or (way == "auto" and low_latency.takes(sum(sizes) * row_bytes)):
        blocks = low_latency.blocks(shard_bytes, lane_bytes)
        return _Cut(sizes, True, blocks, low_latency.words(shard_bytes), 0)
    blocks = min(_BLOCKS, max(1, ceil_div(shard_bytes, _BLOCK_BYTES)))
    return _Cut(sizes, False, blocks, 1 + blocks, round_up(shard_bytes, _ALIGNMENT))


def _check(
    space: DeviceWorkspace,
    cut: _Cut,
    x: torch.Tensor,
    out: torch.Tensor,
    x_rows: int,
    out_rows: int,
) -> None:
    sizes = cut.sizes
    check_contiguous(space.regions.device, x=x, out=out)
    check_dtypes(x=x, out=out)
    if len(sizes) != space.world or x.dim() != 2:
        raise ValueError(f"sizes {list(sizes)} for {space.world} ranks, x {list(x.shape)}")
    row = x.shape[1]
    if x.shape != (x_rows, row) or out.shape != (out_rows, row):
        raise ValueError(
            f"x is {list(x.shape)}, out {list(out.shape)}; with sizes {list(sizes)} rank "
            f"{space.rank} has {[x_rows, row]} and {[out_rows, row]}"
        )
    if not space.holds(cut.words, cut.buffer_bytes):
        raise ValueError(
            f"the workspace has {space.words} words from each source and buffers of "
            f"{space.buffer_bytes} bytes; this call needs {cut.words} and {cut.buffer_bytes}"
        )


def _launch(
    kernel: Callable[..., None],
    space: DeviceWorkspace,
    signature: int,
    cut: _Cut,
    x: torch.Tensor,
    out: torch.Tensor,
    after: Any,
) -> None:
    kernel(
        device_and_stream(x.device)[1],
        space_of(space, signature),
        cut.blocks,
        x.data_ptr(),
        out.data_ptr(),
        space.starts(cut.sizes).data_ptr(),
        x.shape[1],
        CODES[x.dtype],
        cut.slot_bytes,
        after,
    )
