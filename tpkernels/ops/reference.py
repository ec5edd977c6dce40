"""Float64 references of the ops, with error bounds.

Every op copies rows, multiplies and sums. Copies are exact. For all other results the bound is
derived, not chosen. It is the error of the unfused program (a ``torch.matmul`` per rank in the same
dtype, then the sum), plus the smaller of

    sqrt(K) * eps * (|A| @ |B|)                                  the contract of all ops
    eps/2 * (|y| + sum_r |p_r|) + sqrt(K) * u * (|A| @ |B|)      a rounding of the result y and of
                                                                 each communicated partial p_r, and
                                                                 sums in the accumulator with
                                                                 eps = u

The second bound exists because with large K the first exceeds the 16-bit results themselves. Sums
of small integers are exact.

The tests, `tpkernels.qualification` and the benchmarks compare with these results. The code is
plain torch and defines the result of each op.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from tpkernels.common.dtypes import accumulator
from tpkernels.common.shards import shard_sizes

__all__ = [
    "Expected",
    "Term",
    "assignments",
    "exact_matmul",
    "expect_bounded",
    "expect_copy",
    "moe_combine",
]
__all__ += ["expect_exact", "expect_sum", "rms_norm"]

#: A summand: operands (x, w) of the matmul of a rank, or (summand, None).
Term = tuple[torch.Tensor, torch.Tensor | None]

_SECOND_ORDER = 1.01  # margin for second-order rounding errors, absent from the second bound


@dataclass(frozen=True)
class Expected:
    """A float64 result, with the elementwise error bound of a result of ``dtype``."""

    exact: torch.Tensor
    bound: torch.Tensor
    dtype: torch.dtype

    def wrong(self, result: torch.Tensor) -> torch.Tensor:
        """Return the mask of the elements that are out of bounds. NaN is out of bounds."""
        return ~((result.double() - self.exact).abs() <= self.bound)

    def worst(self, result: torch.Tensor) -> float:
        """Return the largest ratio of error to bound. The result is right if it is at most 1.

        The ratio is infinite for NaN and for a result with a wrong shape or dtype.
        """
        if result.shape != self.exact.shape or result.dtype != self.dtype:
            return math.inf
        if not result.numel():
            return 0.0
        error = (result.double() - self.exact).abs()
        ratio = torch.where(error == 0, 0.0, error / self.bound)
        return float(ratio.nan_to_num(nan=math.inf, posinf=math.inf).max())


def expect_copy(x: torch.Tensor) -> Expected:
    """Return the expected result of ops that only copy rows: `all_gather`, `all_to_all`."""
    return Expected(x.double(), torch.zeros_like(x, dtype=torch.float64), x.dtype)


def exact_matmul(
    x: torch.Tensor, w: torch.Tensor | None, integers: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x @ w`` and ``|x| @ |w|`` in float64. Without w: ``x`` and ``|x|``.

    With ``integers`` the matmul runs in float32, where sums of small integers are exact. On some
    GPUs float64 is 60 times slower.
    """
    if w is None:
        return x.double(), x.double().abs()
    magnitude = (x.float().abs() @ w.float().abs()).double()
    return (x.float() @ w.float()).double() if integers else x.double() @ w.double(), magnitude


def expect_sum(
    terms: Iterable[Term],
    added: Sequence[torch.Tensor | None] = (),
    *,
    dtype: torch.dtype,
    out: torch.dtype | None = None,
    wire: torch.dtype | None = None,
    integers: bool = False,
    unfused: bool = True,
    roundings: int = 0,
    sum_roundings: int = 0,
) -> Expected:
    """Return the expected sum of the terms of all ranks, plus ``added``.

    This is the reference of all reductions and, with a single term, of `all_gather_matmul`::

        y = sum(x @ w for x, w in terms) + bias + residual

    Args:
        terms: Terms in rank order. They are consumed lazily.
        added: Optional bias and residual.
        dtype: Dtype of the operands. It determines the accumulator of the matmuls.
        out: Dtype of the result. Default: ``dtype``.
        wire: Dtype of the communicated partials, or None if they are not communicated.
        integers: All sums are exact in each of these dtypes.
        unfused: Run the unfused program and add its error to the bound.
        roundings, sum_roundings: See `expect_bounded`.

    Raises:
        ValueError: ``integers`` is set, but a sum is not exact.
    """
    out = out or dtype
    unfused_dtype = wire or (dtype if out == dtype else torch.float32)
    exact = magnitude = partials = total = torch.zeros(())
    count, max_k = 0, 1
    for x, w in terms:
        partial, size = exact_matmul(x, w, integers)
        exact, magnitude = (exact + partial, magnitude + size) if count else (partial, size)
        partials = partials + partial.abs() if wire is not None else partials
        if unfused and not integers:
            term = (
                x.to(unfused_dtype)
                if w is None
                else torch.matmul(x.to(unfused_dtype), w.to(unfused_dtype))
            )
            total = total + term if count else term
        count, max_k = count + 1, max_k if w is None else max(max_k, x.shape[-1])
    for extra in (extra for extra in added if extra is not None):
        exact, magnitude = exact + extra.double(), magnitude + extra.double().abs()
        total = total + extra.to(unfused_dtype)
    if integers:
        return expect_exact(exact, out)
    return expect_bounded(
        exact,
        magnitude,
        max_k + count - 1,
        dtype=dtype,
        out=out,
        wire=wire,
        partials=None if wire is None else partials,
        unfused=total.to(out) if unfused else None,
        roundings=roundings,
        sum_roundings=sum_roundings,
    )


def expect_exact(exact: torch.Tensor, out: torch.dtype) -> Expected:
    """Return an expected result without error, such as a sum of small integers.

    Raises:
        ValueError: ``out`` cannot represent the result.
    """
    if not torch.equal(exact.to(out).double(), exact):
        raise ValueError(
            f"{out} cannot represent the exact sums; use smaller integers as test operands"
        )
    return Expected(exact, torch.zeros_like(exact), out)


def expect_bounded(
    exact: torch.Tensor,
    magnitude: torch.Tensor,
    depth: int,
    *,
    dtype: torch.dtype,
    out: torch.dtype,
    wire: torch.dtype | None = None,
    partials: torch.Tensor | None = None,
    unfused: torch.Tensor | None = None,
    roundings: int = 0,
    sum_roundings: int = 0,
) -> Expected:
    """Return an expected result with the bound derived in the module docstring.

    Args:
        exact: The result in float64.
        magnitude: ``|A| @ |B|``, plus the magnitudes of all other summands.
        depth: K, plus the number of additions of partials of peers.
        dtype: Dtype of the operands.
        out: Dtype of the result.
        wire: Dtype of the communicated partials.
        partials: ``sum_r |p_r|``, or None if no partial is rounded to ``wire``.
        unfused: Result of the unfused program. Its error is added to the bound.
        roundings: Roundings in the accumulator besides the sums, such as the multiplication of
            scales.
        sum_roundings: Roundings of the incomplete sum over the ranks to ``wire``: 1 for an
            in-switch reduction, W - 1 for NCCL.
    """
    eps, unit = torch.finfo(out).eps, torch.finfo(accumulator(dtype)).eps
    # 2: roundings of the bias and the residual.
    accumulated = math.sqrt(depth + roundings + 2) * unit * magnitude
    rounding = eps / 2 * exact.abs() + accumulated
    if wire is not None and partials is not None:
        rounding += (1 + sum_roundings) * torch.finfo(wire).eps / 2 * partials
        eps = max(eps, torch.finfo(wire).eps)
    contract = math.sqrt(depth + roundings) * eps * magnitude
    bound = torch.minimum(contract, _SECOND_ORDER * rounding) + _subnormal(out)
    return Expected(exact, bound if unfused is None else bound + (unfused - exact).abs(), out)


def rms_norm(
    total: torch.Tensor, weight: torch.Tensor, eps: float, *, any_order: bool = False
) -> Expected:
    """Return the expected RMSNorm of a sum that an op returned.

    ``total`` is the rounded sum, because the ops normalize rows after rounding. They add the
    squares of a row in 128 partial sums. With ``any_order`` the squares may be added in any order,
    as torch does on GPUs.
    """
    columns, dtype = total.shape[-1], total.dtype
    rows = total.double()
    exact = rows / (rows.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    additions = columns / 2 if any_order else columns / 128
    if dtype == torch.float64:
        additions = columns
    unit = torch.finfo(accumulator(dtype)).eps / 2
    relative = torch.finfo(dtype).eps / 2 + (additions + 8) * unit
    return Expected(exact, exact.abs() * relative + _subnormal(dtype), dtype)


def assignments(
    topk_ids: torch.Tensor, num_experts: int, world: int
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Return the rows of each rank after `moe_dispatch`, and the rows per local expert.

    A row is represented by its (token, expert) assignment, an index into the flattened ``topk_ids``
    of all ranks. Rows are sorted by expert, then by token.
    """
    experts = topk_ids.flatten()
    counts = experts.bincount(minlength=num_experts).split(shard_sizes(num_experts, world))
    order = experts.argsort(stable=True)
    return order.split([int(count.sum()) for count in counts]), counts


def moe_combine(
    rows: torch.Tensor, weights: torch.Tensor, *, dtype: torch.dtype, integers: bool = False
) -> Expected:
    """Return the expected sum over k of rows [tokens, k, n] times weights [tokens, k]."""
    slots = zip(rows.double().unbind(1), weights.double().unbind(1), strict=True)
    terms = ((row * weight[:, None], None) for row, weight in slots)
    return expect_sum(terms, dtype=dtype, integers=integers, unfused=False)


def _subnormal(dtype: torch.dtype) -> float:
    """Return the spacing of subnormal numbers."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
