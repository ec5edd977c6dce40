"""All-reduces whose rows are normalised in the same launch, and the normalisation alone.

The sum has the bits of ``all_reduce``. The rows that are normalised are those of the rounded sum;
their bits depend on the row alone, not on the way or on how blocks share it (cuda/rms_norm.cuh).
"""

from __future__ import annotations

import functools

import torch

from tpkernels import _C
from tpkernels.cuda import operands
from tpkernels.cuda.image import device_and_stream, launch
from tpkernels.cuda.layouts import LANE, MOST_BLOCKS, PACK_BYTES, rows_layout
from tpkernels.dtypes import CODES
from tpkernels.integers import ceil_div
from tpkernels.planning.cost import all_reduce_way
from tpkernels.symm.device import DeviceWorkspace, Launch

_THREADS = 256  # kRowThreads of csrc/cuda
_CLUSTER, _CLUSTERS_SINCE = 4, 90  # most blocks of a row (not measured); compute capability
_MOST_ROWS = 1024  # at a time, of a normalisation alone, which has the GPU to itself
_WAYS = ("ll", "ll_two_shot", "two_shot")


def normalises(dtype: torch.dtype, columns: int) -> bool:
    """Return whether the kernels take rows of this dtype and length."""
    return dtype in operands.DTYPES and columns % LANE == 0


def prepare_normed_all_reduce(
    world: int,
    x: torch.Tensor,
    total: torch.Tensor,
    normed: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    way: str = "auto",
    early: bool = False,
) -> Launch:
    """Prepare ``total = round(sum_r(x_r) + bias + residual)`` on every rank, and its rows
    ``normed = round(total / sqrt(mean(total^2) + eps) * weight)``, in fp32.

    Args:
        x: [..., N], contiguous, fp32, fp16 or bf16, N a multiple of 8.
        total, normed: like x; ``total`` may be x.
        weight: [N], bias: [N], residual: like x, each of any of the dtypes.
        way, early: as for ``all_reduce``, but not ``multimem`` or ``ll128``.

    Raises:
        ValueError: an unknown way.

    The launch raises:
        ValueError: an argument does not fit the others, or the workspace is too small.
        NotImplementedError: no driver or GPU; a dtype; rows of another length.
    """
    if way not in ("auto", *_WAYS):
        raise ValueError(f"way is {way!r}; it must be auto, {', '.join(_WAYS[:-1])} or {_WAYS[-1]}")
    rows, columns = _matrix(x)
    x_bytes = x.element_size()
    if way == "auto":
        way = _way(rows, columns * x_bytes, world)
    cluster = _cluster(ceil_div(rows, world) if way == "two_shot" else rows, columns, x.device)
    needs = rows_layout(way, rows, columns, world, x_bytes, cluster)

    def run(space: DeviceWorkspace, signature: int) -> None:
        operands.check_summed(space.regions.device, x=x, bias=bias, residual=residual)
        _check_rows(x, weight, total=total, normed=normed)
        operands.check_alike(False, x=x, residual=residual)
        operands.check_bias(bias, columns)
        operands.check_room(space, needs.words, needs.nbytes)
        aligned_x, scale = _aligned(x), _aligned(weight)
        aligned_residual = None if residual is None else _aligned(residual)
        after = operands.epilogue(x.dtype, bias, aligned_residual)
        call = _C.cuda.AllReduce(
            *(aligned_x.data_ptr(), total.data_ptr(), x.numel(), 0, CODES[x.dtype], after),
            *(needs.segment, needs.slot_bytes, needs.results_at, 0),
        )
        arguments = operands.space_of(space, signature), call, _norm(normed, scale, eps)
        shape = {"blocks": needs.blocks, "cluster": cluster, "early": early}
        launch(f"{way}_all_reduce_rms_norm", x.device, *arguments, **shape)

    return Launch(needs.words, needs.nbytes, (), run)


def rms_norm(rows: torch.Tensor, normed: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Compute ``normed = round(rows / sqrt(mean(rows^2) + eps) * weight)``: the bits that a
    ``normed_all_reduce`` makes of its sum, and the same arguments."""
    _check_rows(rows, weight, normed=normed)
    count, columns = _matrix(rows)
    cluster = _cluster(count, columns, rows.device)
    aligned_rows, scale = _aligned(rows), _aligned(weight)
    call = _C.cuda.Rows(aligned_rows.data_ptr(), rows.numel(), CODES[rows.dtype])
    blocks = cluster * min(max(count, 1), _MOST_ROWS)
    norm = _norm(normed, scale, eps)
    launch("rms_norm_of_rows", rows.device, call, norm, blocks=blocks, cluster=cluster)


def _way(rows: int, row_bytes: int, world: int) -> str:
    """Return the way of ``auto``. In two hops a rank has whole rows."""
    return all_reduce_way(
        rows * row_bytes, world, False, split=world * ceil_div(rows, world) * row_bytes
    )


def _matrix(x: torch.Tensor) -> tuple[int, int]:
    """Return the numbers of rows and columns."""
    columns = x.shape[-1] if x.dim() else 0
    if columns < 1 or columns % LANE:
        raise NotImplementedError(
            f"rows have {columns} elements; the kernels that normalise take multiples of {LANE}"
        )
    return x.numel() // columns, columns


def _check_rows(x: torch.Tensor, weight: torch.Tensor, **outs: torch.Tensor) -> None:
    operands.check_contiguous(x.device, **outs)
    operands.check_summed(x.device, x=x, weight=weight)
    operands.check_alike(True, x=x, **outs)
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight has shape {list(weight.shape)}; it must be [{x.shape[-1]}]")
    for what, out in outs.items():
        if out.data_ptr() % PACK_BYTES:
            raise ValueError(f"{what} is not aligned to {PACK_BYTES} bytes; pass a new tensor")


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy where it does not begin at a multiple of 16 bytes. Ranks may differ."""
    return x if x.data_ptr() % PACK_BYTES == 0 else x.clone()


@functools.cache
def _capability(device: int) -> int:
    return _C.cuda.compute_capability(device)


def _cluster(rows: int, columns: int, device: torch.device) -> int:
    """Return the blocks that share a row: as many as leave each of their threads a vector."""
    able, cluster = _capability(device_and_stream(device)[0]) >= _CLUSTERS_SINCE, 1
    most = min(_CLUSTER, MOST_BLOCKS // max(rows, 1)) if able else 1
    while 2 * cluster <= most and cluster * _THREADS * LANE < columns:
        cluster *= 2
    return cluster


def _norm(normed: torch.Tensor, weight: torch.Tensor, eps: float) -> _C.cuda.RmsNorm:
    return _C.cuda.RmsNorm(
        normed.data_ptr(), weight.data_ptr(), weight.numel(), CODES[weight.dtype], eps
    )
