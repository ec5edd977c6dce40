"""Inputs of the correctness tests, and the expected results with their error bounds.

Every rank can create the inputs of all ranks. Results and bounds follow from
`tpkernels.ops.reference`. Integer inputs are so small that every partial sum and result is exact.
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
NORM_EPS = 0.03  # large enough to affect the results

_Cached = TypeVar("_Cached", bound=Callable[..., Any])


def _cache_by_values(function: _Cached) -> _Cached:
    """Cache results by the values of a case, so that, for example, algorithms share them.

    Callers must copy a result before they change it.
    """
    cached = functools.lru_cache(maxsize=8)(function)
    return cast(
        _Cached, functools.wraps(function)(lambda case, *args: cached(case.values(), *args))
    )


# Inputs of rank r depend only on the case and r, so every rank can create them. Operands are
# tensors, or `Operand`s in cases with scales.


def _limit(case: Case) -> int:
    return min(_EXACT[case.dtype], _EXACT[case.wire], _EXACT[case.out])


def draw(
    case: Case, shape: tuple[int, ...], dtype: torch.dtype, max_value: int, *seed_key: object
) -> torch.Tensor:
    """Draw a normally distributed tensor, or integers from -max_value to max_value."""
    generator = case.generator(*seed_key)
    draw_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    if case.integers:
        return torch.randint(
            -max_value, max_value + 1, shape, generator=generator, dtype=draw_dtype
        ).to(dtype)
    return torch.randn(shape, generator=generator, dtype=draw_dtype).to(dtype)


def _draw_x(
    case: Case, shape: tuple[int, ...], max_nonzero: int, *seed_key: object
) -> torch.Tensor:
    """Draw x of a matmul.

    Integers are -1, 0 and 1, and at most ``max_nonzero`` elements of a row are nonzero. So no sum
    of products with weights of -1, 0 and 1 exceeds ``max_nonzero``.
    """
    x = draw(case, shape, case.dtype, 1, *seed_key)
    if case.integers and shape[-1] > max_nonzero:
        permutation = torch.randperm(shape[-1], generator=case.generator("order", *seed_key))
        x[..., permutation[max_nonzero:]] = 0
    return x


# Operands with scales.

BLOCKS = {"blocks": 32, "swizzled": 32, "fp4": 16}  # elements of K that share a scale
SCALES = ("tensor", "rows", "rows of x", "rows of w", *BLOCKS)
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
FP4 = torch.float4_e2m1fn_x2
FP4_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
# In units of 1/2: 13 elements x 4 ranks x 4, and 16 each for bias and residual, are at most 240.
# bf16 holds all integers up to 256.
_MAX_NONZERO = 13


@dataclass(frozen=True)
class Operand:
    """A scaled operand [..., K]. Weights have shape [N, K].

    Attributes:
        dequantized: elements times scales, in float64.
    """

    elements: torch.Tensor
    scale: torch.Tensor
    dequantized: torch.Tensor


def scaled_case(
    op: str, rows: tuple[int, ...], k: int = 64, n: tuple[int, ...] = (5,), **options: Any
) -> Case:
    """Create a case whose x has these dims, followed by K or N.

    A gather has one weight per entry of ``n``. A reduction has one weight. Its K is ``k`` on rank 0
    and grows by one block with each rank.
    """
    options = {"dtype": E4M3, "scales": "tensor", **options}
    if "all_gather" in op:
        return Case(op=op, shape=(*rows, k), n=n, **options)
    return Case(op=op, shape=(*rows, *n), k=tuple(k + 32 * rank for rank in range(4)), **options)


def _scale(case: Case, shape: tuple[int, ...], *seed_key: object) -> torch.Tensor:
    """Draw the scales: per row [..., 1], per block [..., blocks], or one for the tensor [].

    Exact cases have powers of two.
    """
    generator = case.generator("scale", *seed_key)
    *rows, k = shape
    per_row = case.scales in ("rows", f"rows of {seed_key[0]}")
    shape = (*rows, 1) if per_row else ()
    if case.scales in BLOCKS:
        shape = (*rows, k // BLOCKS[case.scales])
    low, dtype = 0.5 if seed_key[0] == "x" else 1.0, E4M3 if case.scales == "fp4" else torch.float32
    drawn = low * (1 + torch.randint(0, 2, shape, generator=generator)).float()
    if case.scales in ("blocks", "swizzled"):
        return (drawn if case.integers else drawn**3).to(E8M0)
    if not case.integers:
        drawn = torch.rand(shape, generator=generator) + low
    return drawn.to(dtype)


def operand(case: Case, shape: tuple[int, ...], dtype: torch.dtype, *seed_key: object) -> Operand:
    """Draw an operand with scales.

    In exact cases few elements of a row of x are nonzero, so that sums are exact in every dtype.
    """
    fp32_case = replace(case, dtype=torch.float32)
    values = _draw_x(fp32_case, shape, _MAX_NONZERO if seed_key[0] == "x" else shape[-1], *seed_key)
    elements = values.to(E4M3 if case.scales == "fp4" else dtype)
    dequantized = elements.double()
    if case.scales == "fp4":
        codes = (values.unsqueeze(-1) - FP4_VALUES).abs().argmin(-1)
        pairs = codes.to(torch.uint8).unflatten(-1, (-1, 2))
        elements = (pairs[..., 0] | pairs[..., 1] << 4).view(FP4)
        dequantized = FP4_VALUES[codes].double()
    scale = _scale(case, shape, *seed_key)
    expanded_scale = scale.double()
    if expanded_scale.dim() and expanded_scale.shape[-1] > 1:
        expanded_scale = expanded_scale.repeat_interleave(shape[-1] // expanded_scale.shape[-1], -1)
    return Operand(elements, scale, dequantized * expanded_scale)


def scaled_weight(case: Case, n: int, k: int, *seed_key: object) -> Operand:
    return operand(case, (n, k), case.w_dtype or case.dtype, "w", *seed_key)


def swizzled(scale: torch.Tensor) -> torch.Tensor:
    """Swizzle block scales element by element, as the layout is defined."""
    rows, columns = scale.shape
    tiles_per_row = -(-columns // 4)
    out = torch.zeros(-(-rows // 128) * 128 * tiles_per_row * 4, dtype=torch.uint8)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    tile = row // 128 * tiles_per_row + column // 4
    out[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4] = scale.view(torch.uint8)
    return out.view(scale.dtype)


def format_x_scale(case: Case, scale: torch.Tensor) -> torch.Tensor:
    """Convert the scales of x to the layout that the ops require."""
    return swizzled(scale.flatten(0, -2)) if case.scales == "swizzled" else scale.contiguous()


def format_w_scale(case: Case, w: Operand) -> torch.Tensor:
    if case.scales == "swizzled":
        return swizzled(w.scale)
    return w.scale.t().contiguous() if w.scale.dtype == torch.float32 and w.scale.dim() else w.scale


# Arguments of the ranks.


@_cache_by_values
def gathered_x(case: Case) -> Any:
    """Return the concatenated x of all ranks."""
    if case.scales:
        return operand(case, case.shape, case.dtype, "x")
    if case.n:
        return _draw_x(case, case.shape, _limit(case) - 16, "x")
    return draw(case, case.shape, case.dtype, 100, "x")


@_cache_by_values
def column_weights(case: Case, rank: int) -> list[tuple[Any, torch.Tensor | None]]:
    """Return the (weight, bias) pairs of a rank for an all-gather matmul."""
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


@_cache_by_values
def partial_operands(case: Case, rank: int, world: int) -> tuple[Any, Any]:
    """Return (x, w) of a rank for a reduction. w is None if the op has no matmul."""
    if not case.k:
        return draw(case, case.shape, case.dtype, 8, "x", rank), None
    k = case.k[rank % len(case.k)]
    if case.scales:
        x = operand(case, (*case.shape[:-1], k), case.dtype, "x", rank)
        return x, scaled_weight(case, case.shape[-1], k, rank)
    x = _draw_x(case, (*case.shape[:-1], k), (_limit(case) - 16) // world, "x", rank)
    return x, draw(case, (k, case.shape[-1]), case.dtype, 1, "w", rank)


def reduction_bias(case: Case) -> torch.Tensor | None:
    """Return the bias, which is identical on all ranks."""
    if not case.biases or case.biases[0] is None:
        return None
    return draw(case.values(), case.shape[-1:], case.biases[0], 8, "bias")


def reduction_residual(case: Case) -> torch.Tensor | None:
    """Return the residual of the full output."""
    if case.residual is None:
        return None
    return draw(case.values(), case.shape, case.residual, 8, "residual")


def norm_weight(case: Case) -> torch.Tensor:
    """Return the RMSNorm weight, which is identical on all ranks."""
    return draw(case.values(), case.shape[-1:], case.norm or case.dtype, 8, "norm")


# Results.


@_cache_by_values
def _expected_matmuls(case: Case, rank: int) -> list[Expected]:
    x, results = gathered_x(case), []
    for w, bias in column_weights(case, rank):
        terms, scaled = [_term(x, w)], bool(case.scales)
        results.append(
            reference.expect_sum(
                terms,
                [bias],
                dtype=case.dtype,
                out=case.out,
                integers=case.integers,
                unfused=not scaled,
                roundings=4 * scaled,
            )
        )
    return results


@_cache_by_values
def _expected_sum(case: Case, world: int) -> Expected:
    return reference.expect_sum(
        (_term(*partial_operands(case, rank, world)) for rank in range(world)),
        [reduction_bias(case), reduction_residual(case)],
        dtype=case.dtype,
        out=case.out,
        wire=case.wire,
        integers=case.integers,
        unfused=not case.scales,
        roundings=4 if case.scales else 0,  # the product of the two scales is rounded
    )


def _term(x: Any, w: Any) -> reference.Term:
    return (x.dequantized, w.dequantized.t()) if isinstance(x, Operand) else (x, w)


def expected(case: Case, rank: int, world: int) -> list[Expected]:
    """Return the expected results of a rank, in the order in which the op returns them."""
    if "all_gather" in case.op:
        x = gathered_x(case)
        # Scaled elements are compared by bytes.
        gathered = reference.expect_copy(x.elements.view(torch.uint8) if case.scales else x)
        results = [gathered] if case.return_gathered or not case.n else []
        return results + _expected_matmuls(case, rank)
    sum_ = _expected_sum(case, world)
    if case.scattered:
        exact, bound = (case.shard(tensor, rank, world) for tensor in (sum_.exact, sum_.bound))
        return [Expected(exact, bound, sum_.dtype)]
    return [sum_]


def expected_norm(case: Case, total: torch.Tensor) -> Expected:
    """Return the expected RMSNorm of the rows of a sum."""
    return reference.rms_norm(total, norm_weight(case), NORM_EPS)
