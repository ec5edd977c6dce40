"""What the tests of the ops on scaled operands run: cases, and inputs that every rank can make for
all ranks.

Exact cases: numbers are -1, 0 and 1, at most `_TERMS` of a row are nonzero, and scales are powers
of two, so every partial and sum is exact in every dtype.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.support.cases import text_of
from tpkernels.shards import shard_sizes

GATHER, SCATTER = "all_gather_scaled_matmul", "scaled_matmul_reduce_scatter"
REDUCE = "scaled_matmul_all_reduce"
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
FP4 = torch.float4_e2m1fn_x2
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SCALES = ("tensor", "rows", "rows of x", "rows of w", "blocks", "swizzled", "fp4")

_TERMS = 15  # 4 ranks' terms of 4 halves, and a bias and a residual, are 256 halves in bf16
_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass(frozen=True, kw_only=True)
class ScaledCase:
    """One call, as all ranks see it."""

    op: str
    rows: tuple[int, ...]  #: all dims but the last of the gathered x, or of the unreduced sum
    k: int = 64  #: of a reduction: on rank 0, and a block more on each further one
    n: tuple[int, ...] = (5,)  #: columns of each weight; a reduction has one
    scales: str = "tensor"  #: one of SCALES
    replicated: bool = False  #: row-wise scales of the gathered x
    dim: int = 0
    sizes: tuple[int, ...] | None = None
    x_dtype: torch.dtype = E4M3
    w_dtype: torch.dtype = E4M3
    out: torch.dtype | None = None
    wire: torch.dtype | None = None
    bias: bool = False
    residual: bool = False
    return_gathered: bool = False
    layout: str = "plain"  #: of operands in memory: plain, sliced, or transposed
    exact: bool = True
    algorithm: str = "auto"

    def __str__(self) -> str:
        return text_of(self)

    def k_of(self, rank: int) -> int:
        return self.k if self.op == GATHER else self.k + 32 * rank

    def split(self, world: int) -> tuple[int, ...]:
        return self.sizes or (self.rows[self.dim] // world,) * world

    def generator(self, *what: object) -> torch.Generator:
        plain = replace(self, algorithm="auto", layout="plain", replicated=False)
        return torch.Generator().manual_seed(zlib.crc32(f"{plain} {what}".encode()))


@dataclass(frozen=True)
class Operand:
    """[rows, K]: the elements, their scales, and what they are worth in float64."""

    elements: torch.Tensor
    scale: torch.Tensor
    worth: torch.Tensor


def each(
    *cases: ScaledCase, algorithms: Sequence[str] = ("unfused", "direct", "pipelined", "ring")
) -> list[ScaledCase]:
    """The cases with exact and with random numbers, by every algorithm."""
    return [
        replace(case, exact=exact, algorithm=algorithm)
        for case in cases
        for exact in (True, False)
        for algorithm in algorithms
    ]


def _numbers(case: ScaledCase, rows: int, k: int, dtype: torch.dtype, *what: object) -> Any:
    """Elements [rows, K], and the numbers that they are."""
    generator = case.generator(*what)
    if case.exact:
        numbers = torch.randint(-1, 2, (rows, k), generator=generator).float()
        if what[0] == "x":
            numbers[:, torch.randperm(k, generator=generator)[_TERMS:]] = 0
    else:
        numbers = torch.randn(rows, k, generator=generator)
    if case.scales != "fp4":
        elements = numbers.to(dtype)
        return elements, elements.double()
    codes = (numbers.unsqueeze(-1) - _FP4).abs().argmin(-1)
    pairs = codes.to(torch.uint8).view(rows, k // 2, 2)
    return (pairs[..., 0] | pairs[..., 1] << 4).view(FP4), _FP4[codes].double()


def _scale(case: ScaledCase, rows: int, k: int, *what: object) -> torch.Tensor:
    """A scale for each row [rows, 1], or each block of it [rows, blocks], or one for all []."""
    generator = case.generator("scale", *what)
    per_row = case.scales == "rows" or case.scales == f"rows of {what[0]}"
    shape: tuple[int, ...] = (rows, 1) if per_row else ()
    if case.scales in ("blocks", "swizzled"):
        shape = (rows, k // 32)
    elif case.scales == "fp4":
        shape = (rows, k // 16)
    low = 0.5 if what[0] == "x" else 1.0
    drawn = low * (1 + torch.randint(0, 2, shape, generator=generator)).float()
    if case.scales in ("blocks", "swizzled"):
        return (drawn if case.exact else drawn**3).to(E8M0)
    if not case.exact:
        drawn = torch.rand(shape, generator=generator) + low
    return drawn.to(E4M3) if case.scales == "fp4" else drawn


def operand(case: ScaledCase, rows: int, k: int, dtype: torch.dtype, *what: object) -> Operand:
    elements, numbers = _numbers(case, rows, k, dtype, *what)
    scale = _scale(case, rows, k, *what)
    factor = scale.double()
    if factor.dim() and factor.shape[1] > 1:
        factor = factor.repeat_interleave(k // factor.shape[1], 1)
    return Operand(elements, scale, numbers * factor)


def swizzled(scale: torch.Tensor) -> torch.Tensor:
    """By its definition, element by element."""
    rows, columns = scale.shape
    across = -(-columns // 4)
    out = torch.zeros(-(-rows // 128) * 128 * across * 4, dtype=torch.uint8)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    tile = row // 128 * across + column // 4
    out[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4] = scale.view(torch.uint8)
    return out.view(scale.dtype)


def strided(case: ScaledCase, x: torch.Tensor) -> torch.Tensor:
    """A copy of elements with every second one of a wider matrix, or transposed."""
    if case.layout == "transposed":
        return x.t().contiguous().t()
    if case.layout == "sliced":
        around = torch.full((x.shape[0] + 1, 2 * x.shape[1]), 0x7F, dtype=torch.uint8)
        around[1:, ::2] = x.view(torch.uint8)
        return around[1:, ::2].view(x.dtype)
    return x.clone()


def w_scale(case: ScaledCase, w: Operand) -> torch.Tensor:
    if case.scales == "swizzled":
        return swizzled(w.scale)
    return w.scale.t().contiguous() if w.scale.dtype == F32 and w.scale.dim() else w.scale


def x_scale(case: ScaledCase, scale: torch.Tensor, lead: Sequence[int]) -> torch.Tensor:
    if case.scales == "swizzled":
        return swizzled(scale)
    return scale.view(*lead, scale.shape[1]) if scale.dim() else scale


def bias_of(case: ScaledCase, n: int, out: torch.dtype) -> torch.Tensor:
    return torch.randint(-4, 5, (n,), generator=case.generator("bias", n)).to(out)


def uneven(total: int, world: int) -> tuple[int, ...]:
    """Rows of each rank, none on the last of several."""
    return (*shard_sizes(total, world - 1), 0) if world > 1 else (total,)
