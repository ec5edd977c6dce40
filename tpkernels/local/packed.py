"""Weights in panels of 64 columns, whose products read memory in order (csrc/host/product.h).

A packed weight [K, N] is an ordinary dense tensor of three dims, [N, K / g, g], with a weight's
N * K elements in another order: g, 1 in float32 and 2 in 16 bits, are as many elements of a column
as fill 4 bytes. An odd K has no whole number of such groups in 16 bits, where the shape is
[N, 1, K].

Each panel is [K / g, columns, g] in memory: the last one has N % 64 columns, if that is not 0, and
an odd K of 16 bits ends in a row of single elements. Nothing is padded. So the same panels serve
vectors of any length, and the tiles of AMX.

A weight of 8 bits is a tensor [N, K / group, group + 4] of int8, where each panel is [K / group,
1 + group / 4, columns, 4] in memory: of each group of K the columns' scales in float32, and then
their elements, four of K at a time, which are integers times the scale.

A stack of weights [E, K, N], as grouped products take, is packed into a tensor of four dims.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import TypeGuard

import torch

from tpkernels import _C
from tpkernels.common import dtypes
from tpkernels.local.product import Weight
from tpkernels.torch_private import onednn_supports

_GROUP_BYTES = 4
_SCALE_GROUPS = (128, 64, 32, 16, 8, 4)  # of K; the first that divides it is taken
_LARGEST = 127.0
_COLUMNS_AT_A_TIME = 16 * _C.calls.PANEL_COLUMNS  # that are converted at a time


@functools.cache
def native(dtype: torch.dtype) -> bool:
    """Return whether torch multiplies ``dtype`` at full speed on this processor."""
    return dtype in (torch.float32, torch.float64) or onednn_supports(dtype)


def pack(w: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a copy of a weight that the ops take in place of it on CPUs, for inference.

    Products read it faster than the plain one, with any number of rows.

    Args:
        w: [K, N] of float32, bfloat16 or float16, or a stack [E, K, N] of such for
            `grouped_matmul`; any strides.
        dtype: of the copy: ``w``'s (default), or int8, in half of bfloat16's bytes. Each column
            then has a scale for every 128 elements, or fewer where 128 does not divide K, and rows
            of x are quantised in the same groups: `docs/numerics.md` gives the error. It multiplies
            rows of any of the three dtypes.

    Returns:
        A dense tensor of three dims (see `tpkernels.local.packed`), or four for a stack, whose
        order of elements only the ops and `unpack` know: it can be copied and saved, but neither
        sliced nor converted. An op that gets it raises where its gradient would be needed.

    Raises:
        ValueError: ``w`` is neither a matrix nor a stack, is empty, or is packed already; in int8
            also: it has NaN or infinite elements.
        NotImplementedError: ``w`` is not on a CPU, or float64; in int8 also: K is no multiple of 4.
        TypeError: ``dtype`` is another one.
    """
    return pack_shard(w, dtype, w.shape[-2] if w.dim() > 1 else 0)


def pack_shard(w: torch.Tensor, dtype: torch.dtype | None, k: int) -> torch.Tensor:
    """Return what `pack` does, of some of the ``k`` rows of a weight or stack: in int8 with scales
    for as many elements as if ``w`` had them all. Raise what `pack` raises."""
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
    for part, of_w in _parts(packed, w.detach()):
        part.copy_(of_w)
    return packed


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Return the weight [K, N], or stack [E, K, N], that was packed, to the bit, with contiguous
    columns; of int8 what products take for it, in float32.

    Raises:
        ValueError: ``packed`` is not what `pack` returns.
    """
    if is_packed_stack(packed) and len(packed):
        matrices = torch.stack([unpack(matrix).t() for matrix in packed])
        return matrices.transpose(1, 2)
    check_packed(packed, "packed")
    n, k = len(packed), rows_of(packed)
    if packed.dtype == torch.int8:
        w = torch.empty(n, k, device=packed.device).t()
        for columns, scales, elements in _int8_parts(packed.detach()):
            w[:, columns].copy_((elements * scales[:, None, None]).flatten(0, 2).flatten(1))
        return w
    w = torch.empty_strided((k, n), (1, k), dtype=packed.dtype, device=packed.device)
    for part, of_w in _parts(packed.detach(), w):
        of_w.copy_(part)
    return w


def scale_group(k: int, what: str, sizes: Sequence[int] = ()) -> int:
    """Return how many of ``k`` elements have one scale in int8, on any number of ranks, or 1 if
    int8 does not take ``k``. ``sizes`` are the elements of each rank, if they are split. Raise
    ValueError, which calls the weight ``what``, if a rank would have a part of a group."""
    group = next((size for size in _SCALE_GROUPS if k % size == 0), 1)
    if any(size % group for size in sizes):
        raise ValueError(
            f"{what} has K={k}, split into {list(sizes)}, but an int8 weight has one scale per "
            f"{group} elements of K; split K at multiples of {group}, as "
            'tpkernels.parallelize(..., pack="int8") does'
        )
    return group


def _pack_int8(w: torch.Tensor, group: int) -> torch.Tensor:
    k, n = w.shape
    packed = w.new_empty(n, k // group, group + _GROUP_BYTES, dtype=torch.int8)
    for columns, scales, elements in _int8_parts(packed):
        groups = w[:, columns].float().reshape(elements.shape)
        largest = groups.abs().amax((1, 2))
        scales.copy_(largest / _LARGEST)
        # Divided: a number over a tensor is that times the tensor's reciprocal.
        factors = (torch.full_like(largest, _LARGEST) / largest).where(
            largest > torch.finfo(torch.float32).tiny, 0
        )
        elements.copy_((groups * factors[:, None, None]).round())
    return packed


def pack_integers(integers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the packed weight with these elements and scales.

    Args:
        integers: [K, N] of int8.
        scales: [K / group, N] of float32; ``group`` is a multiple of 4.
    """
    (k, n), groups = integers.shape, len(scales)
    packed = integers.new_empty(n, groups, k // groups + _GROUP_BYTES)
    for columns, of_scales, elements in _int8_parts(packed):
        of_scales.copy_(scales[:, columns].reshape(of_scales.shape))
        elements.copy_(integers[:, columns].reshape(elements.shape))
    return packed


def _int8_parts(packed: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield some columns, and views of their scales, [groups, panels, columns of a panel], and
    elements, [groups, group / 4, 4, panels, columns of a panel]."""
    n, groups, size = packed.shape
    rows = size // _GROUP_BYTES  # of a group in a panel: its scales' and its elements'
    last = n - n % _C.calls.PANEL_COLUMNS
    for begin, end in [*itertools.pairwise([*range(0, last, _COLUMNS_AT_A_TIME), last]), (last, n)]:
        if begin == end:
            continue
        columns = min(_C.calls.PANEL_COLUMNS, end - begin)
        part = packed[begin:end].view(-1, groups, rows, columns, _GROUP_BYTES)
        scales = part[:, :, 0].view(torch.float32).squeeze(-1).transpose(0, 1)
        elements = part[:, :, 1:].permute(1, 2, 4, 0, 3)
        yield slice(begin, end), scales, elements


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


def check_packable(w: torch.Tensor, what: str, dtype: torch.dtype | None = None) -> None:
    """Raise what `pack` raises for a weight, which the message calls ``what``."""
    if dtype not in (None, w.dtype, torch.int8):
        name = dtypes.name(w.dtype)
        raise TypeError(
            f"{what} is {name}; it can be packed in {name} or int8, not in {dtypes.name(dtype)}"
        )
    if is_packed_stack(w) or (is_packed(w) and w.is_contiguous() and _has_packed_shape(w)):
        raise ValueError(f"{what} of shape {list(w.shape)} is already packed")
    if w.dim() not in (2, 3) or 0 in w.shape:
        raise ValueError(
            f"{what} has shape {list(w.shape)}; it must be a matrix [K, N] or a stack of matrices "
            "[E, K, N], with all sizes at least 1"
        )
    if w.device.type != "cpu" or w.layout != torch.strided:
        raise NotImplementedError(
            f"{what} is a {w.layout} tensor on {w.device}; only dense CPU weights can be packed"
        )
    dtypes.check_supported(w.dtype, what)
    if w.dtype == torch.float64:
        raise NotImplementedError(
            f"{what} is float64, which cannot be packed; use the unpacked weight, or convert it to "
            "float32 before packing"
        )
    if dtype == torch.int8 and w.shape[-2] % _SCALE_GROUPS[-1]:
        raise NotImplementedError(
            f"{what} has shape {list(w.shape)}; for int8, K must be a multiple of "
            f"{_SCALE_GROUPS[-1]}"
        )


def check_finite(w: torch.Tensor, what: str) -> None:
    """Raise ValueError if a contiguous matrix, which the message calls ``what``, cannot be packed
    in int8."""
    if not all(bound.isfinite() for bound in w.detach().aminmax()):  # both are NaN if one is
        raise ValueError(f"{what} has NaN or infinite elements, which int8 cannot represent")


def is_packed(w: Weight) -> TypeGuard[torch.Tensor]:
    """Return whether a weight has the dims of a packed one."""
    return isinstance(w, torch.Tensor) and w.dim() == 3


def is_packed_stack(w: Weight) -> TypeGuard[torch.Tensor]:
    """Return whether a stack of weights has the dims of a packed one."""
    return isinstance(w, torch.Tensor) and w.dim() == 4


def check_packed(w: torch.Tensor, what: str) -> None:
    """Check that a tensor, which the message calls ``what``, may be what `pack` returned."""
    if not (is_packed(w) and _has_packed_shape(w) and w.is_contiguous()):
        raise ValueError(
            f"{what} of {dtypes.name(w.dtype)}, shape {list(w.shape)} and strides "
            f"{list(w.stride())} is neither a matrix nor a result of tpkernels.pack; slice or "
            "convert the weight before packing it, not after"
        )


def _has_packed_shape(w: torch.Tensor) -> bool:
    if w.dtype == torch.int8:
        return w.shape[2] > _GROUP_BYTES and w.shape[2] % _GROUP_BYTES == 0
    if w.dtype.itemsize > _GROUP_BYTES:
        return False
    return tuple(w.shape) == _packed_shape(rows_of(w), len(w), w.dtype)


def rows_of(w: Weight) -> int:
    """Return K of a weight."""
    if not is_packed(w):
        return w.shape[0]
    return w.shape[1] * (w.shape[2] - (_GROUP_BYTES if w.dtype == torch.int8 else 0))


def columns_of(w: Weight) -> int:
    """Return N of a weight."""
    return w.shape[0] if is_packed(w) else w.shape[1]


def columns_of_stack(stack: torch.Tensor) -> int:
    """Return N of a stack of weights."""
    return stack.shape[1] if is_packed_stack(stack) else stack.shape[-1]
