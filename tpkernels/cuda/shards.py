"""All-gather and reduce-scatter of rows, each in one launch: every rank pushes to all others.

Few bytes are pushed faster than copy engines are started (``copies.py``); none of it is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

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
from tpkernels.symm.device import DeviceWorkspace

# Blocks of a call, and bytes of a shard that each is to have at least; alike on all ranks. Not
# measured.
_BLOCKS, _BLOCK_BYTES = 64, 8 << 10
_ALIGNMENT = 256  # bytes, of a slot


def requirements(sizes: Sequence[int], row_bytes: int) -> tuple[int, int]:
    """(words from one source, bytes of a buffer) that a call needs."""
    return 1 + _blocks(sizes, row_bytes), len(sizes) * _slot_bytes(sizes, row_bytes)


def all_gather(
    space: DeviceWorkspace,
    signature: int,
    x: torch.Tensor,
    out: torch.Tensor,
    sizes: tuple[int, ...],
) -> None:
    """``out = concat_r(x_r)``. Contiguous, fp32, fp16 or bf16: x [sizes[rank], row], out
    [sum(sizes), row].

    Raises:
        ValueError: an argument does not fit the others, or the workspace is too small.
        NotImplementedError: no driver or GPU; a dtype.
    """
    _check(space, sizes, x, out, sizes[space.rank], sum(sizes))
    if out.dtype != x.dtype:
        raise ValueError(f"out is {out.dtype}, x {x.dtype}; they must be alike")
    device, _ = device_and_stream(x.device)
    _launch(kernels(device).gather, space, signature, x, out, sizes, epilogue(x.dtype, None, None))


def reduce_scatter(
    space: DeviceWorkspace,
    signature: int,
    x: torch.Tensor,
    out: torch.Tensor,
    sizes: tuple[int, ...],
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> None:
    """``out = round(rows_rank(sum_r(x_r)) + bias + residual)``, added in fp32 in the order of the
    ranks. Contiguous, fp32, fp16 or bf16: x [sum(sizes), row], out and residual [sizes[rank], row],
    of dtypes of their own; bias fp32 [row]. Raises as ``all_gather`` does."""
    _check(space, sizes, x, out, sum(sizes), sizes[space.rank])
    check_contiguous(x.device, bias=bias, residual=residual)
    check_dtypes(residual=residual)
    check_bias(bias, x.shape[1])
    if residual is not None and residual.shape != out.shape:
        raise ValueError(f"residual is {list(residual.shape)}; it must be {list(out.shape)}")
    device, _ = device_and_stream(x.device)
    after = epilogue(out.dtype, bias, residual)
    _launch(kernels(device).scatter, space, signature, x, out, sizes, after)


def _check(
    space: DeviceWorkspace,
    sizes: tuple[int, ...],
    x: torch.Tensor,
    out: torch.Tensor,
    x_rows: int,
    out_rows: int,
) -> None:
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
    words, nbytes = requirements(sizes, row * x.element_size())
    if not space.holds(words, nbytes):
        raise ValueError(
            f"the workspace has {space.words} words from each source and buffers of "
            f"{space.buffer_bytes} bytes; this call needs {words} and {nbytes}"
        )


def _launch(
    kernel: Callable[..., None],
    space: DeviceWorkspace,
    signature: int,
    x: torch.Tensor,
    out: torch.Tensor,
    sizes: tuple[int, ...],
    after: Any,
) -> None:
    row = x.shape[1]
    row_bytes = row * x.element_size()
    kernel(
        device_and_stream(x.device)[1],
        space_of(space, signature),
        _blocks(sizes, row_bytes),
        x.data_ptr(),
        out.data_ptr(),
        space.starts(sizes).data_ptr(),
        row,
        CODES[x.dtype],
        _slot_bytes(sizes, row_bytes),
        after,
    )


def _blocks(sizes: Sequence[int], row_bytes: int) -> int:
    return min(_BLOCKS, max(1, -(-max(sizes) * row_bytes // _BLOCK_BYTES)))


def _slot_bytes(sizes: Sequence[int], row_bytes: int) -> int:
    return -(-max(sizes) * row_bytes // _ALIGNMENT) * _ALIGNMENT
