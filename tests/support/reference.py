"""What the correctness tests run on: inputs that every rank can make for all ranks, and the results
and bounds of `tpkernels.ops.reference` for them.

Integers are so small that every partial and result is exact: no error at all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch

from tests.support.cases import Case
from tpkernels.ops import reference
from tpkernels.ops.reference import Expected

# The largest magnitude up to which a dtype holds every integer.
_EXACT = {torch.float64: 2**53, torch.float32: 2**24, torch.float16: 2**11, torch.bfloat16: 2**8}
NORM_EPS = 0.03  # so large that it shows

_Cached = TypeVar("_Cached", bound=Callable[..., Any])


def _by_values(function: _Cached) -> _Cached:
    """Keep what was made of a case for others with the same values, such as other algorithms.
    Callers must copy it before they change it."""
    kept = functools.lru_cache(maxsize=8)(function)
    return cast(_Cached, functools.wraps(function)(lambda case, *of: kept(case.values(), *of)))


# Inputs. Those of rank r are made from the case and r alone, so any rank can make them. Factors are
# tensors, or `Operand`s if the case is one of scaled operands.


def _limit(case: Case) -> int:
    return min(_EXACT[case.dtype], _EXACT[case.wire], _EXACT[case.out])


def draw(
    case: Case, shape: tuple[int, ...], dtype: torch.dtype, top: int, *what: object
) -> torch.Tensor:
    """Normally distributed, or integers of -top to top."""
    generator = case.generator(*what)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if case.integers:
        return torch.randint(-top, top + 1, shape, generator=generator, dtype=wide).to(dtype)
    return torch.randn(shape, generator=generator, dtype=wide).to(dtype)


def _factor(case: Case, shape: tuple[int, ...], terms: int, *what: object) -> torch.Tensor:
    """x of a product. If integers: -1, 0 and 1, at most ``terms`` of a row nonzero, so that no sum
    of products with such integers is larger than that."""
    factor = draw(case, shape, case.dtype, 1, *what)
    if case.integers and shape[-1] > terms:
        order = torch.randperm(shape[-1], generator=case.generator("order", *what))
        factor[..., order[terms:]] = 0
    return factor


# Operands with scales.

BLOCKS = {"blocks": 32, "swizzled": 32, "fp4": 16}  # elements of K that share a scale
SCALES = ("tensor", "rows", "rows of x", "rows of w", *BLOCKS)
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
FP4 = torch.float4_e2m1fn_x2
NUMBERS_OF_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
_TERMS = 13  # 4 ranks' terms of 4 halves, a bias and a residual of 16 halves: 240 in bf16's 256


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
    if "all_gather" in op:
        return Case(op=op, shape=(*rows, k), n=n, **options)
    return Case(op=op, shape=(*rows, *n), k=tuple(k + 32 * rank for rank in range(4)), **options)


def _scale(case: Case, shape: tuple[int, ...], *what: object) -> torch.Tensor:
    """A scale for each row [..., 1], or each block of it [..., blocks], or one for all []. Powers
    of two if the case is exact."""
    generator = case.generator("scale", *what)
    *rows, k = shape
    per_row = case.scales in ("rows", f"rows of {what[0]}")
    shape = (*rows, 1) if per_row else ()
    if case.scales in BLOCKS:
        shape = (*rows, k // BLOCKS[case.scales])
    low, dtype = 0.5 if what[0] == "x" else 1.0, E4M3 if case.scales == "fp4" else torch.float32
    drawn = low * (1 + torch.randint(0, 2, shape, generator=generator)).float()
    if case.scales in ("blocks", "swizzled"):
        return (drawn if case.integers else drawn**3).to(E8M0)
    if not case.integers:
        drawn = torch.rand(shape, generator=generator) + low
    return drawn.to(dtype)


def operand(case: Case, shape: tuple[int, ...], dtype: torch.dtype, *what: object) -> Operand:
    """Rows of exact cases have few terms, so that partials and sums are exact in every dtype."""
    wide = replace(case, dtype=torch.float32)
    numbers = _factor(wide, shape, _TERMS if what[0] == "x" else shape[-1], *what)
    elements = numbers.to(E4M3 if case.scales == "fp4" else dtype)
    worth = elements.double()
    if case.scales == "fp4":
        codes = (numbers.unsqueeze(-1) - NUMBERS_OF_FP4).abs().argmin(-1)
        pairs = codes.to(torch.uint8).unflatten(-1, (-1, 2))
        elements = (pairs[..., 0] | pairs[..., 1] << 4).view(FP4)
        worth = NUMBERS_OF_FP4[codes].double()
    scale = _scale(case, shape, *what)
    factor = scale.double()
    if factor.dim() and factor.shape[-1] > 1:
        factor = factor.repeat_interleave(shape[-1] // factor.shape[-1], -1)
    return Operand(elements, scale, worth * factor)


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
    return w.scale.t().contiguous() if w.scale.dtype == torch.float32 and w.scale.dim() else w.scale


# What ranks pass.


@_by_values
def gathered_x(case: Case) -> Any:
    """x of all ranks, concatenated."""
    if case.scales:
        return operand(case, case.shape, case.dtype, "x")
    if case.n:
        return _factor(case, case.shape, _limit(case) - 16, "x")
    return draw(case, case.shape, case.dtype, 100, "x")


@_by_values
def column_weights(case: Case, rank: int) -> list[tuple[Any, torch.Tensor | None]]:
    """(weight, bias) pairs of a rank of an all-gather matmul."""
    pairs: list[tuple[Any, torch.Tensor | None]] = []
    for i, n in enumerate(case.n):
        columns = n + rank * case.n_by_rank
        w: Any
        if case.scales:
            w = scaled_weight(case, columns, case.shape[-1], rank, i)
        else:
            w = draw(case, (case.shape[-1], columns), case.dtype, 1, "w", rank, i)
        dtype = case.biases[i % len(case.biases)] if case.biases else None
        bias = None if dtype is None else draw(case, (columns,), dtype, 8, "b", rank, i)
        pairs.append((w, bias))
    return pairs


@_by_values
def partial_factors(case: Case, rank: int, world: int) -> tuple[Any, Any]:
    """(x, w) of a rank of a reduction; w is None if there is no product."""
    if not case.k:
        return draw(case, case.shape, case.dtype, 8, "x", rank), None
    k = case.k[rank % len(case.k)]
    if case.scales:
        x = operand(case, (*case.shape[:-1], k), case.dtype, "x", rank)
        return x, scaled_weight(case, case.shape[-1], k, rank)
    x = _factor(case, (*case.shape[:-1], k), (_limit(case) - 16) // world, "x", rank)
    return x, draw(case, (k, case.shape[-1]), case.dtype, 1, "w", rank)


def reduction_bias(case: Case) -> torch.Tensor | None:
    """The same on all ranks."""
    if not case.biases or case.biases[0] is None:
        return None
    return draw(case.values(), case.shape[-1:], case.biases[0], 8, "bias")


def reduction_residual(case: Case) -> torch.Tensor | None:
    """Of the whole unscattered output."""
    if case.residual is None:
        return None
    return draw(case.values(), case.shape, case.residual, 8, "residual")


def norm_weight(case: Case) -> torch.Tensor:
    """The same on all ranks."""
    return draw(case.values(), case.shape[-1:], case.norm or case.dtype, 8, "norm")


# Results.


@_by_values
def _gathered_products(case: Case, rank: int) -> list[Expected]:
    x, products = gathered_x(case), []
    for w, bias in column_weights(case, rank):
        terms, scaled = [_term(x, w)], bool(case.scales)
        products.append(
            reference.summed(
                terms,
                [bias],
                dtype=case.dtype,
                out=case.out,
                integers=case.integers,
                unfused=not scaled,
                roundings=4 * scaled,
            )
        )
    return products


@_by_values
def _reduced(case: Case, world: int) -> Expected:
    return reference.summed(
        (_term(*partial_factors(case, rank, world)) for rank in range(world)),
        [reduction_bias(case), reduction_residual(case)],
        dtype=case.dtype,
        out=case.out,
        wire=case.wire,
        integers=case.integers,
        unfused=not case.scales,
        roundings=4 if case.scales else 0,  # each factor has a scale, whose product is rounded
    )


def _term(x: Any, w: Any) -> reference.Term:
    return (x.worth, w.worth.t()) if isinstance(x, Operand) else (x, w)


def expected(case: Case, rank: int, world: int) -> list[Expected]:
    """What a rank gets, in the order in which the op returns it."""
    if "all_gather" in case.op:
        x = gathered_x(case)
        # Scaled elements are compared by bytes.
        gathered = reference.moved(x.elements.view(torch.uint8) if case.scales else x)
        results = [gathered] if case.return_gathered or not case.n else []
        return results + _gathered_products(case, rank)
    sum_ = _reduced(case, world)
    if case.scattered:
        exact, bound = (case.shard(part, rank, world) for part in (sum_.exact, sum_.bound))
        return [Expected(exact, bound, sum_.dtype)]
    return [sum_]


def normalised(case: Case, total: torch.Tensor) -> Expected:
    """What an op is to make of the rows of its sum."""
    return reference.rms_norm(total, norm_weight(case), NORM_EPS)
