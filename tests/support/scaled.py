"""Operands of the ops on scaled operands, which every rank can make for all ranks.

Exact cases: numbers are -1, 0 and 1, at most `_TERMS` of a row are nonzero, and scales are powers
of two, so every partial and sum is exact in every dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tests.support.cases import Case
from tpkernels.shards import shard_sizes

GATHER, SCATTER = "all_gather_scaled_matmul", "scaled_matmul_reduce_scatter"
REDUCE = "scaled_matmul_all_reduce"
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
FP4 = torch.float4_e2m1fn_x2
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SCALES = ("tensor", "rows", "rows of x", "rows of w", "blocks", "swizzled", "fp4")

_TERMS = 13  # 4 ranks' terms of 4 halves, a bias and a residual of 16 halves: 240 in bf16's 256
_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass(frozen=True)
class Operand:
    """[..., K]: the elements, their scales, and what they are worth in float64. A weight is [N, K]
    here."""

    elements: torch.Tensor
    scale: torch.Tensor
    worth: torch.Tensor


def scaled_case(
    op: str, rows: tuple[int, ...], k: int = 64, n: tuple[int, ...] = (5,), **options: Any
) -> Case:
    """A case whose x has these dims but for the last. A gather has weights of ``n`` columns; a
    reduction has one, and a K of ``k`` on rank 0, of a block more on each further one."""
    options = {"dtype": E4M3, "scales": "tensor", **options}
    if op == GATHER:
        return Case(op=op, shape=(*rows, k), n=n, **options)
    return Case(op=op, shape=(*rows, *n), k=tuple(k + 32 * rank for rank in range(4)), **options)


def _numbers(
    case: Case, shape: tuple[int, ...], dtype: torch.dtype, *what: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements of this shape, and the numbers that they are."""
    generator = case.generator(*what)
    if case.integers:
        numbers = torch.randint(-1, 2, shape, generator=generator).float()
        if what[0] == "x":
            numbers[..., torch.randperm(shape[-1], generator=generator)[_TERMS:]] = 0
    else:
        numbers = torch.randn(shape, generator=generator)
    if case.scales != "fp4":
        elements = numbers.to(dtype)
        return elements, elements.double()
    codes = (numbers.unsqueeze(-1) - _FP4).abs().argmin(-1)
    pairs = codes.to(torch.uint8).unflatten(-1, (-1, 2))
    return (pairs[..., 0] | pairs[..., 1] << 4).view(FP4), _FP4[codes].double()


def _scale(case: Case, shape: tuple[int, ...], *what: object) -> torch.Tensor:
    """A scale for each row [..., 1], or each block of it [..., blocks], or one for all []."""
    generator = case.generator("scale", *what)
    per_row = case.scales == "rows" or case.scales == f"rows of {what[0]}"
    *rows, k = shape
    shape = (*rows, 1) if per_row else ()
    if case.scales in ("blocks", "swizzled"):
        shape = (*rows, k // 32)
    elif case.scales == "fp4":
        shape = (*rows, k // 16)
    low = 0.5 if what[0] == "x" else 1.0
    drawn = low * (1 + torch.randint(0, 2, shape, generator=generator)).float()
    if case.scales in ("blocks", "swizzled"):
        return (drawn if case.integers else drawn**3).to(E8M0)
    if not case.integers:
        drawn = torch.rand(shape, generator=generator) + low
    return drawn.to(E4M3) if case.scales == "fp4" else drawn


def operand(case: Case, shape: tuple[int, ...], dtype: torch.dtype, *what: object) -> Operand:
    elements, numbers = _numbers(case, shape, dtype, *what)
    scale = _scale(case, shape, *what)
    factor = scale.double()
    if factor.dim() and factor.shape[-1] > 1:
        factor = factor.repeat_interleave(shape[-1] // factor.shape[-1], -1)
    return Operand(elements, scale, numbers * factor)


def scaled_weight(case: Case, n: int, k: int, *what: object) -> Operand:
    return operand(case, (n, k), case.w_dtype or case.dtype, "w", *what)


def swizzled(scale: torch.Tensor) -> torch.Tensor:
    """By its definition, element by element."""
    rows, columns = scale.shape
    across = -(-columns // 4)
    out = torch.zeros(-(-rows // 128) * 128 * across * 4, dtype=torch.uint8)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    tile = row // 128 * across + column // 4
    out[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4] = scale.view(torch.uint8)
    return out.view(scale.dtype)


def scale_of_x(case: Case, scale: torch.Tensor) -> torch.Tensor:
    """The scales of x as the ops take them."""
    return swizzled(scale.flatten(0, -2)) if case.scales == "swizzled" else scale.contiguous()


def scale_of_w(case: Case, w: Operand) -> torch.Tensor:
    if case.scales == "swizzled":
        return swizzled(w.scale)
    return w.scale.t().contiguous() if w.scale.dtype == F32 and w.scale.dim() else w.scale


def uneven(total: int, world: int) -> tuple[int, ...]:
    """Rows of each rank, none on the last of several."""
    return (*shard_sizes(total, world - 1), 0) if world > 1 else (total,)
