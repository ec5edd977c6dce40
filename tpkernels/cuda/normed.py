"""All-reduces whose rows are normalised in the same launch, and the normalisation alone.

The sum has the bits of ``all_reduce``. The rows that are normalised are those of the rounded sum;
their bits depend on the row alone, not on the way or on how blocks share it (cuda/rms_norm.cuh).
"""

from __future__ import annotations

import functools

import torch

from tpkernels import _C
from tpkernels.cuda import low_latency
from tpkernels.cuda.calls import WAYS, BufferLayout
from tpkernels.cuda.checks import (
    DTYPES,
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

_VECTOR, _THREADS = 8, 256  # kVector, kRowThreads of csrc/cuda
_PACK_BYTES = 16
# Most blocks, as of other calls, and most of them for a row. Not measured.
_BLOCKS, _CLUSTER = 64, 4
_CLUSTERS_SINCE = 90  # compute capability
_SLOT_ALIGNMENT = 256
_WAYS = ("low_latency", "low_latency_two_shot", "one_shot", "two_shot")


def normalises(dtype: torch.dtype, columns: int) -> bool:
    """Return whether the kernels take rows of this dtype and length."""
    return dtype in DTYPES and columns % _VECTOR == 0


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
    """``total = round(sum_r(x_r) + bias + residual)`` on every rank, and its rows
    ``normed = round(total / sqrt(mean(total^2) + eps) * weight)``, in fp32.

    Args:
        x: [..., N], contiguous, fp32, fp16 or bf16, N a multiple of 8.
        total, normed: like x; ``total`` may be x.
        weight: [N], bias: [N], residual: like x, each of any of the dtypes.
        way, early: as for ``all_reduce``, but not ``multimem`` or ``whole_lines``.

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
    needs = _layout(way, rows, columns, world, x_bytes, cluster)

    def run(space: DeviceWorkspace, signature: int) -> None:
        check_contiguous(space.regions.device, x=x, bias=bias, residual=residual)
        _check_rows(x, weight, total=total, normed=normed)
        check_dtypes(bias=bias, residual=residual)
        check_alike(False, x=x, residual=residual)
        check_bias(bias, columns)
        if not space.holds(needs.words, needs.nbytes):
            raise ValueError(
                f"the workspace has {space.words} words from each source and buffers of "
                f"{space.buffer_bytes} bytes; this call needs {needs.words} and {needs.nbytes}"
            )
        given, scale = _aligned(x), _aligned(weight)
        more = None if residual is None else _aligned(residual)
        device, stream = device_and_stream(x.device)
        kernels(device).normed_all_reduce(
            stream,
            space_of(space, signature),
            WAYS.index(way),
            needs.blocks,
            cluster,
            early,
            given.data_ptr(),
            total.data_ptr(),
            x.numel(),
            CODES[x.dtype],
            epilogue(x.dtype, bias, more),
            needs.segment,
            needs.slot_bytes,
            needs.results_at,
            _norm(normed, scale, eps),
        )

    return Launch(needs.words, needs.nbytes, (), run)


def rms_norm(rows: torch.Tensor, normed: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """``normed = round(rows / sqrt(mean(rows^2) + eps) * weight)``: the bits that a
    ``normed_all_reduce`` makes of its sum, and the same arguments."""
    _check_rows(rows, weight, normed=normed)
    device, stream = device_and_stream(rows.device)
    count, columns = _matrix(rows)
    cluster = _cluster(count, columns, rows.device)
    given, scale = _aligned(rows), _aligned(weight)
    kernels(device).rms_norm(
        stream,
        cluster * min(max(count, 1), _MOST_ROWS),
        cluster,
        given.data_ptr(),
        rows.numel(),
        CODES[rows.dtype],
        _norm(normed, scale, eps),
    )


_MOST_ROWS = 1024  # at a time, of a normalisation alone, which has the GPU to itself


def _way(rows: int, row_bytes: int, world: int) -> str:
    """In two hops a rank has whole rows."""
    return all_reduce_way(
        rows * row_bytes, world, False, split=world * ceil_div(rows, world) * row_bytes
    )


def _matrix(x: torch.Tensor) -> tuple[int, int]:
    """Rows and columns."""
    columns = x.shape[-1] if x.dim() else 0
    if columns < 1 or columns % _VECTOR:
        raise NotImplementedError(
            f"rows have {columns} elements; the kernels that normalise take multiples of {_VECTOR}"
        )
    return x.numel() // columns, columns


def _check_rows(x: torch.Tensor, weight: torch.Tensor, **outs: torch.Tensor) -> None:
    check_contiguous(x.device, x=x, weight=weight, **outs)
    check_dtypes(x=x, weight=weight)
    check_alike(True, x=x, **outs)
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight has shape {list(weight.shape)}; it must be [{x.shape[-1]}]")
    for what, out in outs.items():
        if out.data_ptr() % _PACK_BYTES:
            raise ValueError(f"{what} is not aligned to {_PACK_BYTES} bytes; pass a new tensor")


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy where it does not begin at a multiple of 16 bytes. Which of the two is no
    matter of the other ranks."""
    return x if x.data_ptr() % _PACK_BYTES == 0 else x.clone()


@functools.cache
def _capability(device: int) -> int:
    return _C.cuda.compute_capability(device)


def _cluster(rows: int, columns: int, device: torch.device) -> int:
    """Blocks that share a row: as many as leave each of their threads a vector."""
    cluster = 1
    if _capability(device_and_stream(device)[0]) < _CLUSTERS_SINCE:
        return cluster
    while (
        cluster < _CLUSTER
        and 2 * cluster * rows <= _BLOCKS
        and cluster * _THREADS * _VECTOR < columns
    ):
        cluster *= 2
    return cluster


def _layout(
    way: str, rows: int, columns: int, world: int, x_bytes: int, cluster: int
) -> BufferLayout:
    """As ``calls.layout``, but whole rows."""
    segment = rows if way in ("low_latency", "one_shot") else ceil_div(rows, world)
    blocks = cluster * max(1, min(_BLOCKS // cluster, segment if way == "two_shot" else rows))
    count = rows * columns
    if way in ("low_latency", "low_latency_two_shot"):
        hops = 1 if way == "low_latency" else 2
        words = low_latency.words(*[segment * columns * x_bytes] * hops)
        return BufferLayout(blocks, segment * columns, 0, 0, 0, words)
    slot = round_up(segment * columns * x_bytes, _SLOT_ALIGNMENT)
    results = round_up(count * x_bytes, _SLOT_ALIGNMENT) if way == "two_shot" else 0
    return BufferLayout(
        blocks,
        segment * columns,
        slot,
        world * slot,
        world * slot + results,
        1 + blocks * (2 if way == "two_shot" else 1),
    )


def _norm(normed: torch.Tensor, weight: torch.Tensor, eps: float) -> _C.cuda.RmsNorm:
    return _C.cuda.RmsNorm(
        normed.data_ptr(), weight.data_ptr(), weight.numel(), CODES[weight.dtype], eps
    )
