"""The unfused program that each op equals, in float64, and how far a result may be from it.

Every op moves rows, multiplies and sums. What only moves rows has no error. For all other results
the bound is derived, not chosen. An element may be as far off as that of the unfused program (one
``torch.matmul`` per rank in the same dtype, then their sum), plus the smaller of

    sqrt(K) * eps * (|A| @ |B|)                                  the contract of all ops
    eps/2 * (|y| + sum_r |p_r|) + sqrt(K) * u * (|A| @ |B|)      one rounding of the result y and of
                                                                 each partial p_r that travels, and
                                                                 sums in the accumulator, whose eps
                                                                 is u

since with large K the first exceeds 16-bit results themselves. Sums of small integers are exact:
no error at all.

The tests, `tpkernels.qualification` and the benchmarks compare with these results. It is all plain
torch: to read what an op computes, read it here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from tpkernels.common.dtypes import accumulator
from tpkernels.common.shards import shard_sizes

__all__ = ["Expected", "Term", "assignments", "bounded", "moe_combine", "moved", "product"]
__all__ += ["rms_norm", "summed", "unrounded"]

#: A summand: x and w of a rank's matmul, or the summand itself and None.
Term = tuple[torch.Tensor, torch.Tensor | None]

_SECOND_ORDER = 1.01  # products of roundings, which the second bound leaves out


@dataclass(frozen=True)
class Expected:
    """One result in float64, and how far a result of ``dtype`` may be off, element by element."""

    exact: torch.Tensor
    bound: torch.Tensor
    dtype: torch.dtype

    def wrong(self, result: torch.Tensor) -> torch.Tensor:
        """Return which elements of a result are out of bounds. A NaN always is."""
        return ~((result.double() - self.exact).abs() <= self.bound)

    def worst(self, result: torch.Tensor) -> float:
        """Return the largest error over its bound: at most 1 is right. It is infinite for a NaN,
        and for a result of another shape or dtype."""
        if result.shape != self.exact.shape or result.dtype != self.dtype:
            return math.inf
        if not result.numel():
            return 0.0
        error = (result.double() - self.exact).abs()
        ratio = torch.where(error == 0, 0.0, error / self.bound)
        return float(ratio.nan_to_num(nan=math.inf, posinf=math.inf).max())


def moved(x: torch.Tensor) -> Expected:
    """Return what an op must return that only moves rows: `all_gather`, `all_to_all`."""
    return Expected(x.double(), torch.zeros_like(x, dtype=torch.float64), x.dtype)


def product(
    x: torch.Tensor, w: torch.Tensor | None, integers: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x @ w`` in float64, as if nothing were rounded, and ``|x| @ |w|``; without w, x.

    Float32 holds the sums of small integers, and some GPUs take 60 times as long for float64.
    """
    if w is None:
        return x.double(), x.double().abs()
    magnitude = (x.float().abs() @ w.float().abs()).double()
    return (x.float() @ w.float()).double() if integers else x.double() @ w.double(), magnitude


def summed(
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
    """Return the sum of terms, one for each rank, and of what is added to it once.

    This is the reference of all reductions and, with one term, of `all_gather_matmul`::

        y = sum(x @ w for x, w in terms) + bias + residual

    Args:
        terms: in rank order. They are consumed one at a time.
        added: bias and residual, where they are given.
        dtype: of the operands, which says how matmuls accumulate.
        out: of the result, by default ``dtype``.
        wire: the dtype in which partials travel; None if they do not.
        integers: all sums are exact in each of these dtypes.
        unfused: the unfused program's error is part of the bound. False: it is not run.
        roundings, sum_roundings: as `bounded` takes them.

    Raises:
        ValueError: a sum is not exact, although ``integers`` says so.
    """
    out = out or dtype
    low = wire or (dtype if out == dtype else torch.float32)
    exact = magnitude = partials = total = torch.zeros(())
    count, most = 0, 1
    for x, w in terms:
        partial, size = product(x, w, integers)
        exact, magnitude = (exact + partial, magnitude + size) if count else (partial, size)
        partials = partials + partial.abs() if wire is not None else partials
        if unfused and not integers:
            here = x.to(low) if w is None else torch.matmul(x.to(low), w.to(low))
            total = total + here if count else here
        count, most = count + 1, most if w is None else max(most, x.shape[-1])
    for extra in (extra for extra in added if extra is not None):
        exact, magnitude = exact + extra.double(), magnitude + extra.double().abs()
        total = total + extra.to(low)
    if integers:
        return unrounded(exact, out)
    return bounded(
        exact,
        magnitude,
        most + count - 1,
        dtype=dtype,
        out=out,
        wire=wire,
        partials=None if wire is None else partials,
        unfused=total.to(out) if unfused else None,
        roundings=roundings,
        sum_roundings=sum_roundings,
    )


def unrounded(exact: torch.Tensor, out: torch.dtype) -> Expected:
    """Return a result of ``out`` that has no error, such as a sum of small integers.

    Raises:
        ValueError: ``out`` does not hold it.
    """
    if not torch.equal(exact.to(out).double(), exact):
        raise ValueError(
            f"{out} cannot represent the exact sums; use smaller integers as test operands"
        )
    return Expected(exact, torch.zeros_like(exact), out)


def bounded(
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
    """Return a result with the bound that the head of this file derives.

    Args:
        exact: the result in float64.
        magnitude: ``|A| @ |B|``, plus the magnitude of everything else that is added.
        depth: K, plus the additions of other ranks' partials.
        dtype: of the operands.
        out: of the result.
        wire: of partials that travel.
        partials: ``sum_r |p_r|`` of these; None if none are rounded to ``wire``.
        unfused: the result of the unfused program, whose error is allowed as well.
        roundings: in the accumulator besides those of sums, such as of products of scales.
        sum_roundings: how often the sum over the ranks is rounded to ``wire`` before it is
            complete: once by a switch, W - 1 times by NCCL.
    """
    eps, unit = torch.finfo(out).eps, torch.finfo(accumulator(dtype)).eps
    # Two more: of a bias and a residual.
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
    """Return the normalised rows of the sum that an op returned.

    Rows are normalised after the sum is rounded, so this takes the rounded sum. The squares of a
    row are added up in 128 partial sums; ``any_order``: they may be added up in any order, as torch
    does on GPUs.
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
    """Return, for each rank, its rows after `moe_dispatch` and its tokens per expert.

    A row is given as its (token, expert) assignment, an index into the flattened ``topk_ids`` of
    all ranks. Rows are sorted by expert, then by token.
    """
    experts = topk_ids.flatten()
    counts = experts.bincount(minlength=num_experts).split(shard_sizes(num_experts, world))
    order = experts.argsort(stable=True)
    return order.split([int(count.sum()) for count in counts]), counts


def moe_combine(
    rows: torch.Tensor, weights: torch.Tensor, *, dtype: torch.dtype, integers: bool = False
) -> Expected:
    """Return each token's sum of its experts' rows [tokens, k, n] times the weights [tokens, k]."""
    slots = zip(rows.double().unbind(1), weights.double().unbind(1), strict=True)
    terms = ((row * weight[:, None], None) for row, weight in slots)
    return summed(terms, dtype=dtype, integers=integers, unfused=False)


def _subnormal(dtype: torch.dtype) -> float:
    """Return the distance of subnormal numbers."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
