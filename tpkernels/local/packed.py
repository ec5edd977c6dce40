"""Packed weights: panels of 64 columns that a matmul reads in memory order (csrc/host/matmul.h).

A packed weight [K, N] is a dense tensor of three dims, [N, K / g, g], with the N * K elements in a
different order. g is the number of elements of a column that fill 4 bytes: 1 for float32, 2 for
16-bit dtypes. For a 16-bit dtype with odd K the shape is [N, 1, K].

Each panel is [K / g, columns, g] in memory. If N % 64 is not 0, the last panel has N % 64 columns.
For a 16-bit dtype with odd K, a panel ends in a row of single elements. Panels have no padding, so
vectors of any length and AMX tiles read the same format.

An int8 weight is a tensor [N, K / group, group + 4] of int8. Each panel is [K / group, 1 + group /
4, columns, 4] in memory. For each group of K it stores the float32 scales of the columns, then
their elements, four of K at a time. An element is an integer times its scale.

A stack of weights [E, K, N] for grouped matmuls is packed into a tensor of four dims.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import TypeGuard

import torch

from tpkernels import _C
from tpkernels.common import dtypes
from tpkernels.local.weight import Weight
from tpkernels.torch_private import onednn_supports

_GROUP_BYTES = 4
_SCALE_GROUPS = (128, 64, 32, 16, 8, 4)  # elements of K; the first that divides K is used
_MAX_INT8 = 127.0
_COLUMNS_PER_STEP = 16 * _C.calls.PANEL_COLUMNS  # columns converted per iteration


@functools.cache
def is_native(dtype: torch.dtype) -> bool:
    """Return True if torch multiplies ``dtype`` at full speed on this processor."""
    return dtype in (torch.float32, torch.float64) or onednn_supports(dtype)


def pack(w: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a packed copy of a weight for inference on CPUs. The ops accept it as the weight.

    Matmuls read it faster than the plain weight, with any number of rows.

    Args:
        w: [K, N] of float32, bfloat16 or float16, or a stack [E, K, N] for `grouped_matmul`; any
            strides.
        dtype: dtype of the copy: ``w.dtype`` (default) or int8, at half the size of bfloat16. In
            int8 each column has one scale per 128 elements, or per smaller group if 128 does not
            divide K. Rows of x are quantised in groups of that size: `docs/numerics.md` gives
            the error. x may have any of the three dtypes.

    Returns:
        A dense tensor of three dims (see `tpkernels.local.packed`), or four for a stack. Only
        the ops and `unpack` can interpret it. It can be copied and saved, but not sliced or
        converted. An op raises an error if the gradient of the weight is required.

    Raises:
        ValueError: ``w`` is neither a matrix nor a stack, is empty, or is already packed; for
            int8: it has NaN or infinite elements.
        NotImplementedError: ``w`` is not on a CPU, or is float64; for int8: K is not divisible
            by 4.
        TypeError: ``dtype`` is neither ``w.dtype`` nor int8.
    """
    return pack_shard(w, dtype, w.shape[-2] if w.dim() > 1 else 0)


def pack_shard(w: torch.Tensor, dtype: torch.dtype | None, k: int) -> torch.Tensor:
    """Pack some of the ``k`` rows of a weight or stack. Raises the errors of `pack`.

    In int8, the scale groups are as large as in the full weight.
    """
    check_packable(w, "w", dtype)
    if w.dim() > 2:
        stack = w.new_empty(0)
        for i, matrix in enumerate(w):
            packed = pack_shard(matrix, dtype, k)
            if i == 0:
                stack = packed.new_empty(len(w), *packed.shape)
            stack[i] = packed
        return stack
    if dtype == torch.int8:
        check_finite(w.t(), "w")
        return _pack_int8(w.detach(), scale_group(k, "w"))
    packed = w.new_empty(_packed_shape(w.shape[0], w.shape[1], w.dtype), requires_grad=False)
    for packed_view, w_view in _matching_views(packed, w.detach()):
        packed_view.copy_(w_view)
    return packed


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Return the weight [K, N], or stack [E, K, N], of a packed tensor, with contiguous columns.

    Elements are bitwise identical to the weight that was packed. For int8 the result is the float32
    weight that matmuls use.

    Raises:
        ValueError: ``packed`` is not a result of `pack`.
    """
    if is_packed_stack(packed) and len(packed):
        matrices = torch.stack([unpack(matrix).t() for matrix in packed])
        return matrices.transpose(1, 2)
    check_packed(packed, "packed")
    n, k = len(packed), weight_rows(packed)
    if packed.dtype == torch.int8:
        w = torch.empty(n, k, device=packed.device).t()
        for columns, scales, elements in _int8_views(packed.detach()):
            w[:, columns].copy_((elements * scales[:, None, None]).flatten(0, 2).flatten(1))
        return w
    w = torch.empty_strided((k, n), (1, k), dtype=packed.dtype, device=packed.device)
    for packed_view, w_view in _matching_views(packed.detach(), w):
        w_view.copy_(packed_view)
    return w


def scale_group(k: int, name: str, sizes: Sequence[int] = ()) -> int:
    """Return the number of elements per int8 scale, or 1 if int8 does not support ``k``.

    It does not depend on the number of ranks.

    Args:
        k: rows of the unsplit weight.
        name: name of the weight for the error message.
        sizes: rows of each rank, if the weight is split.

    Raises:
        ValueError: a group is split between ranks.
    """
    group = next((size for size in _SCALE_GROUPS if k % size == 0), 1)
    if any(size % group for size in sizes):
        raise ValueError(
            f"{name} has K={k}, split into {list(sizes)}, but an int8 weight has one scale per "
            f"{group} elements of K; split K at multiples of {group}, as "
            'tpkernels.parallelize(..., pack="int8") does'
        )
    return group


def _pack_int8(w: torch.Tensor, group: int) -> torch.Tensor:
    k, n = w.shape
    packed = w.new_empty(n, k // group, group + _GROUP_BYTES, dtype=torch.int8)
    for columns, scales, elements in _int8_views(packed):
        groups = w[:, columns].float().reshape(elements.shape)
        largest = groups.abs().amax((1, 2))
        scales.copy_(largest / _MAX_INT8)
        # True division: torch computes number / tensor as number * (1 / tensor).
        factors = (torch.full_like(largest, _MAX_INT8) / largest).where(
            largest > torch.finfo(torch.float32).tiny, 0
        )
        elements.copy_((groups * factors[:, None, None]).round())
    return packed


def pack_integers(integers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the packed int8 weight with the given elements and scales.

    Args:
        integers: [K, N] of int8.
        scales: [K / group, N] of float32; ``group`` is a multiple of 4.
    """
    (k, n), groups = integers.shape, len(scales)
    packed = integers.new_empty(n, groups, k // groups + _GROUP_BYTES)
    for columns, packed_scales, elements in _int8_views(packed):
        packed_scales.copy_(scales[:, columns].reshape(packed_scales.shape))
        elements.copy_(integers[:, columns].reshape(elements.shape))
    return packed


def _int8_views(packed: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield column ranges, with views of their scales and elements.

    Scales are [groups, panels, columns of a panel], elements are [groups, group / 4, 4, panels,
    columns of a panel].
    """
    n, groups, size = packed.shape
    rows = size // _GROUP_BYTES  # rows of a group in a panel: scales first, then elements
    last = n - n % _C.calls.PANEL_COLUMNS
    for begin, end in [*itertools.pairwise([*range(0, last, _COLUMNS_PER_STEP), last]), (last, n)]:
        if begin == end:
            continue
        columns = min(_C.calls.PANEL_COLUMNS, end - begin)
        panels = packed[begin:end].view(-1, groups, rows, columns, _GROUP_BYTES)
        scales = panels[:, :, 0].view(torch.float32).squeeze(-1).transpose(0, 1)
        elements = panels[:, :, 1:].permute(1, 2, 4, 0, 3)
        yield slice(begin, end), scales, elements


def _packed_shape(k: int, n: int, dtype: torch.dtype) -> tuple[int, int, int]:
    group = _GROUP_BYTES // dtype.itemsize
    return (n, 1, k) if k % group else (n, k // group, group)


def _matching_views(
    packed: torch.Tensor, w: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield views of ``packed`` and of w [K, N] that hold equal elements in equal shapes.

    The shape is [groups, elements of a group, panels, columns of a panel].
    """
    k, n = w.shape
    group = _GROUP_BYTES // w.dtype.itemsize
    full_panels, last_columns = divmod(n, _C.calls.PANEL_COLUMNS)
    for panels, columns, begin in (
        (full_panels, _C.calls.PANEL_COLUMNS, 0),
        (1, last_columns, n - last_columns),
    ):
        for rows, size, row in ((k - k % group, group, 0), (k % group, 1, k - k % group)):
            if panels * columns * rows == 0:
                continue
            packed_view = packed.as_strided(
                (rows // size, size, panels, columns),
                (columns * size, 1, columns * k, size),
                packed.storage_offset() + begin * k + row * columns,
            )
            w_view = w[row : row + rows, begin : begin + panels * columns]
            yield packed_view, w_view.unflatten(0, (-1, size)).unflatten(2, (panels, columns))


def check_packable(w: torch.Tensor, name: str, dtype: torch.dtype | None = None) -> None:
    """Raise the errors of `pack` for a weight. ``name``: name of the weight in messages."""
    if dtype not in (None, w.dtype, torch.int8):
        dtype_name = dtypes.name(w.dtype)
        raise TypeError(
            f"{name} is {dtype_name}; it can be packed in {dtype_name} or int8, not in "
            f"{dtypes.name(dtype)}"
        )
    if is_packed_stack(w) or (is_packed(w) and w.is_contiguous() and _has_packed_shape(w)):
        raise ValueError(f"{name} of shape {list(w.shape)} is already packed")
    if w.dim() not in (2, 3) or 0 in w.shape:
        raise ValueError(
            f"{name} has shape {list(w.shape)}; it must be a matrix [K, N] or a stack of matrices "
            "[E, K, N], with all sizes at least 1"
        )
    if w.device.type != "cpu" or w.layout != torch.strided:
        raise NotImplementedError(
            f"{name} is a {w.layout} tensor on {w.device}; only dense CPU weights can be packed"
        )
    dtypes.check_supported(w.dtype, name)
    if w.dtype == torch.float64:
        raise NotImplementedError(
            f"{name} is float64, which cannot be packed; use the unpacked weight, or convert it to "
            "float32 before packing"
        )
    if dtype == torch.int8 and w.shape[-2] % _SCALE_GROUPS[-1]:
        raise NotImplementedError(
            f"{name} has shape {list(w.shape)}; for int8, K must be a multiple of "
            f"{_SCALE_GROUPS[-1]}"
        )


def check_finite(w: torch.Tensor, name: str) -> None:
    """Raise ValueError if a contiguous matrix has values that int8 cannot represent.

    ``name``: name of the matrix in the message.
    """
    if not all(bound.isfinite() for bound in w.detach().aminmax()):  # NaN propagates
        raise ValueError(f"{name} has NaN or infinite elements, which int8 cannot represent")


def is_packed(w: Weight) -> TypeGuard[torch.Tensor]:
    """Return True if a weight has the dims of a packed weight."""
    return isinstance(w, torch.Tensor) and w.dim() == 3


def is_packed_stack(w: Weight) -> TypeGuard[torch.Tensor]:
    """Return True if a stack of weights has the dims of a packed stack."""
    return isinstance(w, torch.Tensor) and w.dim() == 4


def check_packed(w: torch.Tensor, name: str) -> None:
    """Raise ValueError if a tensor cannot be a result of `pack`."""
    if not (is_packed(w) and _has_packed_shape(w) and w.is_contiguous()):
        raise ValueError(
            f"{name} of {dtypes.name(w.dtype)}, shape {list(w.shape)} and strides "
            f"{list(w.stride())} is neither a matrix nor a result of tpkernels.pack; slice or "
            "convert the weight before packing it, not after"
        )


def _has_packed_shape(w: torch.Tensor) -> bool:
    if w.dtype == torch.int8:
        return w.shape[2] > _GROUP_BYTES and w.shape[2] % _GROUP_BYTES == 0
    if w.dtype.itemsize > _GROUP_BYTES:
        return False
    return tuple(w.shape) == _packed_shape(weight_rows(w), len(w), w.dtype)


def weight_rows(w: Weight) -> int:
    """Return K of a weight."""
    if not is_packed(w):
        return w.shape[0]
    return w.shape[1] * (w.shape[2] - (_GROUP_BYTES if w.dtype == torch.int8 else 0))


def weight_columns(w: Weight) -> int:
    """Return N of a weight."""
    return w.shape[0] if is_packed(w) else w.shape[1]


def stack_columns(stack: torch.Tensor) -> int:
    """Return N of a stack of weights."""
    return stack.shape[1] if is_packed_stack(stack) else stack.shape[-1]
