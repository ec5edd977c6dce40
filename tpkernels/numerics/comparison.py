"""`compare`: checks the arguments and assembles the report."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import torch

from tpkernels import dtypes
from tpkernels.numerics.report import Element, Report
from tpkernels.numerics.tiles import Pair, Scan, median
from tpkernels.shards import shard_sizes

# How one side of the matrix is cut: the number of parts, or their sizes.
Cuts: TypeAlias = int | Sequence[int]

_DEFAULT_GRID = (8, 4)


def compare(
    ref: torch.Tensor,
    out: torch.Tensor,
    atol: float | torch.Tensor,
    rtol: float,
    region_grid: tuple[Cuts, Cuts] | None = None,
) -> Report:
    """Compares a result with its reference, element by element and region by region.

    An element is above tolerance if ``|out - ref| > atol + rtol * |ref|``. It also is if either
    value is NaN or infinite and the other is not the same.

    Differences are computed in float64 on the device of ``out``, tile by tile; neither tensor is
    converted as a whole. A DTensor is gathered first, which is collective.

    Args:
        ref: the reference, of any real dtype, on any device.
        out: the result, of the same shape, of any real dtype, on any device.
        atol: absolute tolerance: a number, or a tensor of the same shape with one per element.
        rtol: relative tolerance.
        region_grid: how the matrix's rows and columns are cut, each as a number of parts (split as
            ``tpkernels.shard_sizes`` does) or as their sizes. With the ``shard_sizes`` of a
            gathered tensor, row r of the grid is rank r's shard. By default up to 8 by 4.

    Returns:
        The report; print it, or look at its fields.

    Raises:
        ValueError: the shapes differ; a tolerance is negative, infinite or NaN; or the grid does
            not fit.
        TypeError: ``ref`` or ``out`` is not a tensor.
        NotImplementedError: ``ref`` or ``out`` is complex.
    """
    reference, result = _plain("ref", ref), _plain("out", out)
    shape = tuple(reference.shape)
    if shape != tuple(result.shape):
        raise ValueError(
            f"ref has shape {list(shape)}, out {list(result.shape)}; they must be equal"
        )
    _check_tolerances(reference, atol, rtol)
    matrix = (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)
    most_rows, most_columns = _DEFAULT_GRID
    grid = region_grid or (
        min(most_rows, max(matrix[0], 1)),
        min(most_columns, max(matrix[1], 1)),
    )
    rows, columns = (_edges(*side) for side in zip(("rows", "columns"), grid, matrix, strict=True))

    bounds = atol.detach().reshape(matrix) if isinstance(atol, torch.Tensor) else float(atol)
    pair = Pair(reference.reshape(matrix), result.reshape(matrix), bounds, float(rtol))
    scan = Scan(pair)
    regions = tuple(scan.line(*band, columns) for band in pairwise(rows))
    finite = math.prod(matrix) - scan.not_finite
    if not finite:
        mean = middle = math.inf if scan.not_finite else 0.0
    else:
        mean, middle = scan.total / finite, median(pair, finite)
    return Report(
        passed=scan.above == 0,
        shape=shape,
        reference_dtype=reference.dtype,
        result_dtype=result.dtype,
        atol=bounds if isinstance(bounds, float) else None,
        rtol=float(rtol),
        max=max((region.largest for line in regions for region in line), default=0.0),
        mean=mean,
        median=middle,
        above=scan.above,
        not_finite=scan.not_finite,
        worst=None if scan.worst is None else _element(pair, scan.worst, shape),
        regions=regions,
    )


def _plain(name: str, x: Any) -> torch.Tensor:
    """``x`` as a plain tensor, without gradient or sharding."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(x).__name__}")
    if x.is_complex():
        raise NotImplementedError(
            f"{name} has dtype {dtypes.name(x.dtype)}; compare torch.view_as_real of both"
        )
    x = x.detach()
    # Slow to import, and unless it has been imported there are no DTensors.
    sharded = sys.modules.get("torch.distributed.tensor")
    if sharded is not None and isinstance(x, sharded.DTensor):
        x = x.full_tensor()
    return x


def _check_tolerances(ref: torch.Tensor, atol: float | torch.Tensor, rtol: float) -> None:
    worst = atol
    if isinstance(atol, torch.Tensor):
        if atol.shape != ref.shape:
            raise ValueError(
                f"atol has shape {list(atol.shape)}; it must be a number or have the shape of ref, "
                f"{list(ref.shape)}"
            )
        limits = torch.stack(torch.aminmax(atol.detach())) if atol.numel() else torch.zeros(1)
        worst = float(limits[0] if limits.isfinite().all() else limits[~limits.isfinite()][0])
    for name, value in {"atol": worst, "rtol": rtol}.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value}; it must be finite and not negative")


def _edges(name: str, cuts: Cuts, extent: int) -> list[int]:
    """The first index of each part of ``extent`` rows or columns, then ``extent``."""
    if not isinstance(cuts, int):
        sizes = list(cuts)
        if any(size < 0 for size in sizes) or sum(sizes) != extent:
            raise ValueError(
                f"region_grid has sizes {sizes}, {sum(sizes)} in all; they must add up to the "
                f"{extent} {name} of the matrix, and must not be negative"
            )
    elif 1 <= cuts <= max(extent, 1):
        sizes = shard_sizes(extent, cuts)
    else:
        raise ValueError(
            f"region_grid has {cuts} parts for {extent} {name} of the matrix; it may have 1 to "
            f"{max(extent, 1)}"
        )
    return list(accumulate(sizes, initial=0))


def _element(pair: Pair, at: tuple[int, int], shape: tuple[int, ...]) -> Element:
    """The element at a row and column of the matrix."""
    rest = at[0] * pair.reference.shape[1] + at[1]
    index = []
    for size in reversed(shape):
        rest, i = divmod(rest, size)
        index.append(i)
    return Element(tuple(reversed(index)), float(pair.reference[at]), float(pair.result[at]))
