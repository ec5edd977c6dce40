"""Weights in panels of 64 columns, whose products read memory in order (csrc/host/product.h).

A packed weight [K, N] is an ordinary dense tensor of three dims, [N, K / g, g], with a weight's
N * K elements in another order: g, 1 in float32 and 2 in 16 bits, are as many elements of a column
as fill 4 bytes. An odd K has no whole number of such groups in 16 bits, where the shape is
[N, 1, K].

Each panel is [K / g, columns, g] in memory: the last one has N % 64 columns, if that is not 0, and
an odd K of 16 bits ends in a row of single elements. Nothing is padded. So the same panels serve
vectors of any length, and the tiles of AMX.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TypeGuard

import torch

from tpkernels import _C, dtypes
from tpkernels.local.product import Weight

_GROUP_BYTES = 4


@functools.cache
def native(dtype: torch.dtype) -> bool:
    """Return whether torch multiplies ``dtype`` at full speed on this processor."""
    if dtype in (torch.float32, torch.float64):
        return True
    probe = {
        torch.bfloat16: "_is_mkldnn_bf16_supported",
        torch.float16: "_is_mkldnn_fp16_supported",
    }.get(dtype)
    if probe is None:
        return False
    try:
        return bool(getattr(torch.ops.mkldnn, probe)())
    except (AttributeError, RuntimeError):  # torch built without oneDNN
        return False


def pack(w: torch.Tensor) -> torch.Tensor:
    """Return a copy of a weight that the ops take in place of it on CPUs, for inference.

    Products read it faster than the plain one, with any number of rows; in float16 only with
    dozens.

    Args:
        w: [K, N] of float32, bfloat16 or float16; any strides.

    Returns:
        A dense tensor of three dims, [N, K / g, g] (see `tpkernels.local.packed`), and ``w``'s
        dtype, whose order of elements only the ops and `unpack` know: it can be copied and saved,
        but neither sliced nor converted. An op that gets it raises where its gradient would be
        needed.

    Raises:
        ValueError: ``w`` is no matrix, is empty, or is packed already.
        NotImplementedError: ``w`` is not on a CPU, or float64.
    """
    check_packable(w, "w")
    packed = w.new_empty(_packed_shape(w.shape[0], w.shape[1], w.dtype), requires_grad=False)
    for part, of_w in _parts(packed, w.detach()):
        part.copy_(of_w)
    return packed


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Return the weight [K, N] that was packed, to the bit, with contiguous columns.

    Raises:
        ValueError: ``packed`` is not what `pack` returns.
    """
    check_packed(packed, "packed")
    n, k = len(packed), rows_of(packed)
    w = torch.empty_strided((k, n), (1, k), dtype=packed.dtype, device=packed.device)
    for part, of_w in _parts(packed.detach(), w):
        of_w.copy_(part)
    return w


def _packed_shape(k: int, n: int, dtype: torch.dtype) -> tuple[int, int, int]:
    group = _GROUP_BYTES // dtype.itemsize
    return (n, 1, k) if k % group else (n, k // group, group)


def _parts(packed: torch.Tensor, w: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield views of both that hold the same elements in the same shape: [groups, elements of a
    group, panels, columns of a panel]. w [K, N]."""
    k, n = w.shape
    group = _GROUP_BYTES // w.dtype.itemsize
    whole, last = divmod(n, _C.calls.PANEL_COLUMNS)
    for panels, columns, begin in ((whole, _C.calls.PANEL_COLUMNS, 0), (1, last, n - last)):
        for rows, size, row in ((k - k % group, group, 0), (k % group, 1, k - k % group)):
            if panels * columns * rows == 0:
                continue
            part = packed.as_strided(
                (rows // size, size, panels, columns),
                (columns * size, 1, columns * k, size),
                packed.storage_offset() + begin * k + row * columns,
            )
            of_w = w[row : row + rows, begin : begin + panels * columns]
            yield part, of_w.unflatten(0, (-1, size)).unflatten(2, (panels, columns))


def better_packed(dtype: torch.dtype) -> bool:
    """Return whether inference with any number of rows is served best by the packed weight, if one
    of both is to be kept. It is not in float16, which is converted on the way: 1 to 8 rows take 1.4
    to 2.1 times as long as with the plain one (AMD EPYC Zen 4, 2026-11-25)."""
    return dtype in (torch.float32, torch.bfloat16)


def check_packable(w: torch.Tensor, what: str) -> None:
    """Raise what `pack` raises for a weight, which the message calls ``what``."""
    if is_packed(w):
        raise ValueError(f"{what} of shape {list(w.shape)} is packed already")
    if w.dim() != 2 or 0 in w.shape:
        raise ValueError(f"{what} has shape {list(w.shape)}; only a matrix [K, N] can be packed")
    if w.device.type != "cpu" or w.layout != torch.strided:
        raise NotImplementedError(
            f"{what} is a {w.layout} tensor on {w.device}; only dense CPU weights can be packed"
        )
    dtypes.check_supported(w.dtype, what)
    if w.dtype == torch.float64:
        raise NotImplementedError(f"{what} is float64; use the plain weight, or pack it in float32")


def is_packed(w: Weight) -> TypeGuard[torch.Tensor]:
    """Return whether a weight has the dims of a packed one."""
    return isinstance(w, torch.Tensor) and w.dim() == 3


def check_packed(w: torch.Tensor, what: str) -> None:
    """Check that a tensor, which the message calls ``what``, may be what `pack` returned."""
    k, n = rows_of(w) if w.dim() == 3 else 0, w.shape[0] if w.dim() else 0
    if w.dim() != 3 or tuple(w.shape) != _packed_shape(k, n, w.dtype) or not w.is_contiguous():
        raise ValueError(
            f"{what} of {dtypes.name(w.dtype)}, shape {list(w.shape)} and strides "
            f"{list(w.stride())} is neither a matrix nor what tpkernels.pack returns; pack the "
            "weight in its dtype, and neither slice nor convert the result"
        )


def rows_of(w: Weight) -> int:
    """Return K of a weight."""
    return w.shape[1] * w.shape[2] if is_packed(w) else w.shape[0]


def columns_of(w: Weight) -> int:
    """Return N of a weight."""
    return w.shape[0] if is_packed(w) else w.shape[1]
