"""All-gather and reduce-scatter of rows, each in one launch: every rank pushes to all others.

``way`` is ``ll`` (NCCL's protocol LL), ``one_shot``, or ``auto``: one of these, by size. A push of
few bytes should take less time than starting copy engines (``copies.py``). Not measured.
"""

from __future__ import annotations

import torch

from tpkernels import _C
from tpkernels.cuda import operands
from tpkernels.cuda.image import launch
from tpkernels.cuda.layouts import LANE, LL_BYTES, PACK_BYTES, Layout, shards_layout
from tpkernels.dtypes import CODES
from tpkernels.symm.device import DeviceWorkspace, Launch

Sizes = tuple[int, ...]


def prepare_all_gather(
    x: torch.Tensor, out: torch.Tensor, sizes: Sizes, way: str = "auto"
) -> Launch:
    """Prepare ``out = concat_r(x_r)``. Contiguous, fp32, fp16 or bf16: x [sizes[rank], row], out
    [sum(sizes), row].

    Raises:
        ValueError: an unknown way.

    The launch raises:
        ValueError: an argument does not fit the others, or the workspace is too small.
        NotImplementedError: no driver or GPU; a dtype.
    """
    way, needs = _cut(x, sizes, way, PACK_BYTES)

    def run(space: DeviceWorkspace, signature: int) -> None:
        _check(space, needs, sizes, x, out, sizes[space.rank], sum(sizes))
        if out.dtype != x.dtype:
            raise ValueError(f"out is {out.dtype}, x {x.dtype}; they must have the same dtype")
        after = operands.epilogue(x.dtype)
        _launch(f"{way}_all_gather", space, signature, needs, sizes, x, out, after)

    return Launch(needs.words, needs.nbytes, sizes, run)


def prepare_reduce_scatter(
    x: torch.Tensor,
    out: torch.Tensor,
    sizes: Sizes,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    way: str = "auto",
) -> Launch:
    """Prepare ``out = round(rows_rank(sum_r(x_r)) + bias + residual)``, added in fp32 in the order
    of the ranks. Contiguous, fp32, fp16 or bf16: x [sum(sizes), row], out and residual
    [sizes[rank], row], each with a dtype of its own; bias [row]. It and the launch raise what
    ``prepare_all_gather`` and its launch do."""
    way, needs = _cut(x, sizes, way, LANE * x.element_size())

    def run(space: DeviceWorkspace, signature: int) -> None:
        _check(space, needs, sizes, x, out, sum(sizes), sizes[space.rank])
        operands.check_summed(x.device, bias=bias, residual=residual)
        operands.check_bias(bias, x.shape[1])
        if residual is not None and residual.shape != out.shape:
            raise ValueError(f"residual is {list(residual.shape)}; it must be {list(out.shape)}")
        after = operands.epilogue(out.dtype, bias, residual)
        _launch(f"{way}_reduce_scatter", space, signature, needs, sizes, x, out, after)

    return Launch(needs.words, needs.nbytes, sizes, run)


def _cut(x: torch.Tensor, sizes: Sizes, way: str, lane_bytes: int) -> tuple[str, Layout]:
    """Return the way, and the layout for it; ``lane_bytes``: what a thread takes at a time by
    LL."""
    if way not in ("auto", "one_shot", "ll"):
        raise ValueError(f"way is {way!r}; it must be auto, one_shot or ll")
    row_bytes = x.shape[1] * x.element_size() if x.dim() == 2 else 0  # `_check` refuses others
    if way == "auto":
        way = "ll" if sum(sizes) * row_bytes <= LL_BYTES else "one_shot"
    return way, shards_layout(way, max(sizes) * row_bytes, len(sizes), lane_bytes)


def _check(
    space: DeviceWorkspace,
    needs: Layout,
    sizes: Sizes,
    x: torch.Tensor,
    out: torch.Tensor,
    x_rows: int,
    out_rows: int,
) -> None:
    operands.check_summed(space.regions.device, x=x, out=out)
    if len(sizes) != space.world or x.dim() != 2:
        raise ValueError(f"sizes {list(sizes)} for {space.world} ranks, x {list(x.shape)}")
    row = x.shape[1]
    if x.shape != (x_rows, row) or out.shape != (out_rows, row):
        raise ValueError(
            f"x is {list(x.shape)}, out {list(out.shape)}; with sizes {list(sizes)} rank "
            f"{space.rank} has {[x_rows, row]} and {[out_rows, row]}"
        )
    operands.check_room(space, needs.words, needs.nbytes)


def _launch(
    kernel: str,
    space: DeviceWorkspace,
    signature: int,
    needs: Layout,
    sizes: Sizes,
    x: torch.Tensor,
    out: torch.Tensor,
    after: _C.cuda.Epilogue,
) -> None:
    addresses = x.data_ptr(), out.data_ptr(), space.starts(sizes).data_ptr()
    call = _C.cuda.Shards(*addresses, x.shape[1], CODES[x.dtype], needs.slot_bytes, after)
    launch(kernel, x.device, operands.space_of(space, signature), call, blocks=needs.blocks)
