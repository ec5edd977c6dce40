"""What the ops on scaled operands share: checks, and packed rows. `local.scaled` has the forms of
scales."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch

from tpkernels.common import dtypes
from tpkernels.common.integers import ceil_div
from tpkernels.local.scaled import (
    BLOCK,
    FP4,
    FP8,
    TILE_ROWS,
    Packing,
    ScaledMatrix,
    ScaledWeight,
    Scaling,
    block_of,
    numbers_in,
    scaling_of,
    swizzled_numel,
)
from tpkernels.planning.problem import Problem

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NO_GRADIENT = (
    "call it under torch.no_grad(), or keep the operands in a wider dtype and use the op without "
    "scales"
)


def check_input(x: torch.Tensor) -> None:
    """Check x [..., K] of a dtype that has scales."""
    _among(x.dtype, (*FP8, FP4), "x has dtype")
    if x.dim() < 2 or x.shape[-1] < 1:
        raise ValueError(f"x must have at least 2 dims [..., K] with K >= 1, not {list(x.shape)}")


def check_scale(
    scale: torch.Tensor,
    x: torch.Tensor,
    lead: Sequence[int],
    dim: int | None,
    sizes: Sequence[int],
) -> None:
    """Check the scales of x. Row-wise ones may be those of the gathered x, too. Swizzled ones must
    be whole tiles on every rank, so that those of all ranks, one after the other, are those of the
    gathered x.

    Args:
        lead: the leading dims of the gathered x.
        dim: the one that is gathered, of which the ranks have ``sizes``; None: none is.
    """
    rows = [[*x.shape[:-1], 1], [*lead, 1]]
    _scale(scale, x, "scale_x", rows, x.shape[:-1], numbers_in(x.dtype, x.shape[-1]))
    if dim is None or scaling_of(scale) is not Scaling.BLOCK or scale.dim() != 1:
        return
    others = prod(lead[:dim]) * prod(lead[dim + 1 :])
    for rank, size in enumerate(sizes):
        if size * others % TILE_ROWS:
            raise NotImplementedError(
                f"x has {size * others} rows on rank {rank} and swizzled scales, whose tiles have "
                f"{TILE_ROWS} rows; give each rank a multiple of {TILE_ROWS}, or pass plain scales"
            )


def check_rows(x: torch.Tensor, scale: torch.Tensor) -> None:
    """Check fp8 rows of experts [R, K] and their scales, which are row-wise or those of blocks."""
    _among(x.dtype, FP8, "x with scales has dtype")
    if x.dim() != 2 or x.shape[1] < 1:
        raise ValueError(f"x has shape {list(x.shape)}; it must be [rows, K], K at least 1")
    rows, k = x.shape
    allowed = [[rows, 1], *([[rows, k // BLOCK]] if k % BLOCK == 0 else [])]
    _float32(scale, "scale_x", allowed)


def check_stack(
    stack: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, scale_x: torch.Tensor
) -> bool:
    """Check fp8 weights of experts [E, K, N] and their scales, next to rows that have been checked;
    return whether the scales are those of blocks."""
    _among(stack.dtype, FP8, "w has dtype")
    if stack.dim() != 3 or stack.shape[1] != x.shape[1] or stack.shape[2] < 1:
        raise ValueError(
            f"w has shape {list(stack.shape)}, but x of shape {list(x.shape)} needs "
            f"[E, {x.shape[1]}, N]"
        )
    (experts, k, n), per_row = stack.shape, scale_x.shape[1]
    row_wise, blocks = [experts, 1, n], [experts, k // BLOCK, ceil_div(n, BLOCK)]
    fits = (row_wise, per_row == 1), (blocks, per_row * BLOCK == k)
    _float32(scale, "scale_w", [shape for shape, right in fits if right])
    return list(scale.shape) != row_wise


def _float32(scale: torch.Tensor, what: str, allowed: Sequence[list[int]]) -> None:
    if scale.dtype != torch.float32:
        raise TypeError(f"{what} is {dtypes.name(scale.dtype)}; it must be float32")
    if list(scale.shape) not in allowed:
        shapes = " or ".join(map(str, allowed))
        raise ValueError(f"{what} has shape {list(scale.shape)}; it must be {shapes}")


def check_weight(
    w: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, scale_x: torch.Tensor, what: str
) -> None:
    """w [K, N] and its scales, next to an x that has been checked."""
    _among(w.dtype, (*FP8, FP4), f"{what} has dtype")
    if w.dim() != 2 or w.shape[0] != x.shape[-1] or w.shape[1] < 1:
        raise ValueError(
            f"{what} has shape {list(w.shape)}, but x of shape {list(x.shape)} needs "
            f"[{x.shape[-1]}, N]"
        )
    if (w.dtype == FP4) != (x.dtype == FP4):
        raise TypeError(
            f"{what} is {dtypes.name(w.dtype)} and x is {dtypes.name(x.dtype)}; both must be fp8, "
            "or both fp4"
        )
    k, scale_name = numbers_in(w.dtype, w.shape[0]), f"the scale of {what}"
    _scale(scale, w, scale_name, [[1, w.shape[1]]], w.shape[1:], k)
    kinds = scaling_of(scale_x), scaling_of(scale)
    if kinds[0] is not kinds[1] and Scaling.BLOCK in kinds:
        raise ValueError(
            f"scale_x is {kinds[0].value} and {scale_name} {kinds[1].value}; block-wise scales do "
            "not mix with others"
        )


def _scale(
    scale: torch.Tensor,
    of: torch.Tensor,
    what: str,
    row_shapes: Sequence[Sequence[int]],
    lead: Sequence[int],
    k: int,
) -> None:
    """Scales of an operand that has ``lead`` rows (of a weight: columns) of ``k`` numbers."""
    block, block_dtype = block_of(of.dtype)
    shape = list(scale.shape)
    allowed = (block_dtype,) if of.dtype == FP4 else (torch.float32, block_dtype)
    if scale.dtype not in allowed:
        names = " or ".join(map(dtypes.name, allowed))
        raise TypeError(f"{what} is {dtypes.name(scale.dtype)}; it must be {names}")
    if scale.dtype == torch.float32:
        if shape not in ([], [1], *map(list, row_shapes)):
            rows = " or ".join(dict.fromkeys(str(list(each)) for each in row_shapes))
            raise ValueError(
                f"{what} has shape {shape}; it must be [] or [1] (tensor-wise) or {rows} (row-wise)"
            )
        return
    if k % block:
        raise ValueError(f"{what} has a scale for every {block} of K, which is {k}: no multiple")
    each = [*lead, k // block]
    flat = swizzled_numel(prod(lead), k // block)
    if shape not in (each, [flat]):
        raise ValueError(
            f"{what} has shape {shape}; it must be {each}, or [{flat}] where it is swizzled"
        )


def out_dtype(value: torch.dtype | None) -> torch.dtype:
    """Return the dtype of the result, bfloat16 by default."""
    return _among(value or torch.bfloat16, OUT_DTYPES, "out_dtype is")


def wire_dtype(value: torch.dtype | None, result: torch.dtype) -> torch.dtype:
    """Return the dtype that partials travel in: the result's, or float32."""
    return _among(value or result, (result, torch.float32), "wire_dtype is")


def _among(value: torch.dtype, allowed: Sequence[torch.dtype], what: str) -> torch.dtype:
    if value not in allowed:
        names = ", ".join(dict.fromkeys(map(dtypes.name, allowed)))
        raise NotImplementedError(f"{what} {dtypes.name(value)}; supported: {names}")
    return value


def not_last(dim: int, shape: Sequence[int], what: str, but: str) -> None:
    """Refuse to split the last dim, along which scales are shared."""
    if dim == len(shape) - 1:
        raise NotImplementedError(f"{what} is {dim}, the last of {list(shape)}; {but}")


def own_scale(scale: torch.Tensor, problem: Problem, rank: int) -> torch.Tensor:
    """Return the scales of this rank's shard, of its own or of those of the gathered x."""
    gathered = [*problem.shape[:-1], 1]
    if scaling_of(scale) is Scaling.ROW and list(scale.shape) == gathered:
        assert problem.dim is not None  # a gather has one
        return scale.narrow(problem.dim, sum(problem.sizes[:rank]), problem.sizes[rank])
    return scale


class Rows(NamedTuple):
    """An x as the algorithms move and multiply it: packed rows, and the weights that do so."""

    packed: torch.Tensor
    weights: list[ScaledWeight]
    packing: Packing

    @classmethod
    def of(
        cls,
        x: torch.Tensor,
        scale: torch.Tensor,
        weights: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor],
        fast_accum: bool,
    ) -> Rows:
        packing = Packing.of(x, scale)
        made = [
            ScaledWeight(
                ScaledMatrix(w, _as_scalar(scale_w)), packing, _as_scalar(scale), fast_accum
            )
            for w, scale_w in zip(weights, scales, strict=True)
        ]
        return cls(packing.pack(x, scale), made, packing)


def _as_scalar(scale: torch.Tensor) -> torch.Tensor:
    return scale.reshape(()) if scaling_of(scale) is Scaling.TENSOR else scale
