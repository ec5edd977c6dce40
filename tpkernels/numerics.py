"""Compare a result with its reference, element by element and region by region::

    print(tpkernels.numerics.compare(expected, y, atol=1e-2, rtol=1.6e-2, region_grid=(sizes, 4)))

`compare` views a tensor as a matrix: all dims except the last are flattened. It splits the matrix
into a grid of regions, so that a wrong shard is visible.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch

from tpkernels.common import dtypes
from tpkernels.common.shards import shard_sizes

__all__ = ["Element", "Region", "Report", "compare"]

# Split of the rows or columns: the number of regions, or their sizes.
Cuts: TypeAlias = int | Sequence[int]

_DEFAULT_GRID = (8, 4)
_LARGEST = torch.finfo(torch.float64).max


@dataclass(frozen=True)
class Element:
    """An element of both tensors."""

    index: tuple[int, ...]
    reference: float  #: value in the reference
    result: float  #: value in the result


@dataclass(frozen=True)
class Region:
    """A block of the matrix. It is empty for the shard of a rank without rows."""

    rows: tuple[int, int]  #: [begin, end)
    columns: tuple[int, int]  #: [begin, end)
    fraction: float  #: fraction of elements above tolerance, 0 to 1
    largest: float  #: largest difference

    @property
    def empty(self) -> bool:
        """Return whether the region has no elements."""
        return self.rows[0] == self.rows[1] or self.columns[0] == self.columns[1]


@dataclass(frozen=True)
class Report:
    """The result of `compare`. Differences are absolute and in float64.

    If exactly one value is NaN, or the values differ and at least one is infinite, the difference
    is infinite. Such an element is above any tolerance. For an empty tensor, all numbers are 0.
    """

    passed: bool  #: whether all elements are within tolerance
    shape: tuple[int, ...]
    reference_dtype: torch.dtype
    result_dtype: torch.dtype
    atol: float | None  #: absolute tolerance; None for a tensor of tolerances
    rtol: float
    max: float  #: largest difference
    mean: float  #: mean of the finite differences; infinite if no difference is finite
    median: float  #: median of the finite differences; infinite if no difference is finite
    above: int  #: number of elements above tolerance
    not_finite: int  #: number of infinite differences
    worst: Element | None  #: the element with the largest (difference - tolerance)
    regions: tuple[tuple[Region, ...], ...]  #: ``regions[i][j]``: row i, column j of the grid

    @property
    def fraction(self) -> float:
        """Return the fraction of elements above tolerance, 0 to 1."""
        return self.above / max(1, math.prod(self.shape))

    def __str__(self) -> str:
        atol = "per element" if self.atol is None else f"{self.atol:g}"
        lines = [
            f"{'PASS' if self.passed else 'FAIL'}: {list(self.shape)}, "
            f"{dtypes.name(self.result_dtype)} against {dtypes.name(self.reference_dtype)}, "
            f"atol {atol}, rtol {self.rtol:g}",
            f"difference: max {self.max:.3g}, mean {self.mean:.3g}, median {self.median:.3g}",
            f"above tolerance: {self.above} of {math.prod(self.shape)} elements "
            f"({_percent(self.fraction)})",
        ]
        if self.not_finite:
            lines[-1] += f", {self.not_finite} of them NaN or infinite in one tensor only"
        if self.worst is not None:
            lines.append(
                f"worst: {list(self.worst.index)} is {self.worst.result:.6g}, "
                f"expected {self.worst.reference:.6g}"
            )
        lines.append("regions: fraction above tolerance, largest difference")
        cells = [["", *("{}:{}".format(*region.columns) for region in self.regions[0])]]
        for i, line in enumerate(self.regions):
            cells.append([f"{i}  {line[0].rows[0]}:{line[0].rows[1]}", *map(_cell, line)])
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for row in cells:
            lines.append("  " + "  ".join(map(str.rjust, row, widths)))
        return "\n".join(lines)


def compare(
    ref: torch.Tensor,
    out: torch.Tensor,
    atol: float | torch.Tensor,
    rtol: float,
    region_grid: tuple[Cuts, Cuts] | None = None,
) -> Report:
    """Compare a result with its reference, element by element and region by region.

    An element is above tolerance if ``|out - ref| > atol + rtol * |ref|``. It is also above
    tolerance if exactly one value is NaN, or if the values differ and at least one is infinite.

    Differences are computed in float64 on the device of ``out``. A DTensor is gathered first
    (collective).

    Args:
        ref: the reference, any real dtype, any device.
        out: the result, same shape as ``ref``, any real dtype, any device.
        atol: absolute tolerance: a number, or a tensor with the shape of ``ref``.
        rtol: relative tolerance.
        region_grid: split of the rows and of the columns. Each is a number of regions (split like
            ``tpkernels.shard_sizes``) or a sequence of sizes. With the ``shard_sizes`` of a
            gathered tensor, row r of the grid is the shard of rank r. Default: up to 8 by 4.

    Returns:
        The report. Print it, or read its fields.

    Raises:
        ValueError: the shapes differ, a tolerance is negative, infinite or NaN, or the grid does
            not fit.
        TypeError: ``ref`` or ``out`` is not a tensor.
        NotImplementedError: ``ref`` or ``out`` is complex.
    """
    reference, result = _plain("ref", ref), _plain("out", out)
    shape = tuple(reference.shape)
    if shape != tuple(result.shape):
        raise ValueError(
            f"ref has shape {list(shape)} but out has shape {list(result.shape)}; they must be "
            "equal"
        )
    _check_tolerances(reference, atol, rtol)
    extents = (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)
    grid = region_grid or tuple(
        min(limit, max(extent, 1)) for limit, extent in zip(_DEFAULT_GRID, extents, strict=True)
    )
    rows, columns = (
        _region_offsets(*side) for side in zip(("rows", "columns"), grid, extents, strict=True)
    )

    expected = reference.to(device=result.device, dtype=torch.float64).reshape(extents)
    actual = result.double().reshape(extents)
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    difference = (actual - expected).abs_().nan_to_num_(nan=math.inf, posinf=math.inf)
    difference.masked_fill_(same, 0.0)
    bound = (
        atol.detach().to(difference).reshape(extents) if isinstance(atol, torch.Tensor) else atol
    )
    # An infinite reference gives an infinite or NaN tolerance. It is clamped to a finite value, so
    # that an infinite difference exceeds it.
    tolerance = (rtol * expected.abs() + bound).nan_to_num_(nan=_LARGEST, posinf=_LARGEST)
    excess = difference - tolerance
    above, finite = excess > 0, difference[difference.isfinite()]

    def region(top: int, bottom: int, left: int, right: int) -> Region:
        block = slice(top, bottom), slice(left, right)
        count = (bottom - top) * (right - left)
        return Region(
            (top, bottom),
            (left, right),
            fraction=int(above[block].sum()) / count if count else 0.0,
            largest=float(difference[block].max()) if count else 0.0,
        )

    worst = None
    if difference.numel():
        position = torch.unravel_index(excess.argmax(), extents)
        index = torch.unravel_index(excess.argmax(), shape) if shape else ()
        worst = Element(tuple(map(int, index)), float(expected[position]), float(actual[position]))
    no_mean = math.inf if difference.numel() else 0.0
    return Report(
        passed=not above.any(),
        shape=shape,
        reference_dtype=reference.dtype,
        result_dtype=result.dtype,
        atol=None if isinstance(atol, torch.Tensor) else float(atol),
        rtol=float(rtol),
        max=float(difference.max()) if difference.numel() else 0.0,
        mean=float(finite.mean()) if finite.numel() else no_mean,
        median=float(finite.median()) if finite.numel() else no_mean,
        above=int(above.sum()),
        not_finite=difference.numel() - finite.numel(),
        worst=worst,
        regions=tuple(
            tuple(region(*band, *edges) for edges in pairwise(columns)) for band in pairwise(rows)
        ),
    )


def _plain(name: str, x: object) -> torch.Tensor:
    """Return ``x`` as a plain tensor, detached and unsharded."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(x).__name__}")
    if x.is_complex():
        raise NotImplementedError(
            f"{name} has dtype {dtypes.name(x.dtype)}, which is complex; pass torch.view_as_real "
            "of both tensors"
        )
    plain = x.detach()
    # The import is slow. If the module is not loaded yet, no DTensor exists.
    sharded = sys.modules.get("torch.distributed.tensor")
    if sharded is not None and isinstance(plain, sharded.DTensor):
        plain = plain.full_tensor()
    return plain


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


def _region_offsets(name: str, cuts: Cuts, extent: int) -> list[int]:
    """Return the offsets of the regions along ``extent`` rows or columns, then ``extent``."""
    if not isinstance(cuts, int):
        sizes = list(cuts)
        if any(size < 0 for size in sizes) or sum(sizes) != extent:
            raise ValueError(
                f"region_grid has the sizes {sizes}, which add up to {sum(sizes)}; they must add "
                f"up to the {extent} {name} of the matrix and must not be negative"
            )
    elif 1 <= cuts <= max(extent, 1):
        sizes = shard_sizes(extent, cuts)
    else:
        raise ValueError(
            f"region_grid splits the {extent} {name} of the matrix into {cuts} regions; the number "
            f"of regions must be 1 to {max(extent, 1)}"
        )
    return list(accumulate(sizes, initial=0))


def _cell(region: Region) -> str:
    if region.empty:
        return "-"
    mark = "!" if region.fraction else ""
    return f"{mark}{_percent(region.fraction)} {region.largest:.1e}"


def _percent(fraction: float) -> str:
    """Format a percentage. Only exact values are shown as 0 % or 100 %."""
    if fraction in (0, 1):
        return f"{fraction:.0%}"
    return f"{min(max(fraction, 0.001), 0.999):.1%}"
