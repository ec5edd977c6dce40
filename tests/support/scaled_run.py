"""The ops on scaled operands next to float64: results of the numbers times their scales, and the
bound on the error.

Random products of numbers are exact in fp32, so a result may be off by one rounding of itself and
of each partial that travels, and by u = 2**-24 for each addition and each factor, of the sum of
magnitudes.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist

import tpkernels
from tests.support.cases import RanksFixture
from tests.support.ranked import difference, fresh_group, report
from tests.support.reference import Expected
from tests.support.scaled import (
    BF16,
    GATHER,
    SCATTER,
    ScaledCase,
    bias_of,
    operand,
    strided,
    w_scale,
    x_scale,
)
from tpkernels import groups


def check(case: ScaledCase, group: dist.ProcessGroup) -> list[str]:
    """Runs one case; what is wrong with its results, as text."""
    rank, world = group.rank(), group.size()
    run = _check_gather if case.op == GATHER else _check_reduction
    errors = [error for error in run(case, group) if error is not None]
    return [f"rank {rank} of {world}: {case}: {error}" for error in errors]


def _check_gather(case: ScaledCase, group: dist.ProcessGroup) -> list[str | None]:
    rank, sizes = group.rank(), case.split(group.size())
    x = operand(case, prod(case.rows), case.k, case.x_dtype, "x")
    own = torch.arange(prod(case.rows)).view(case.rows)
    own = own.narrow(case.dim, sum(sizes[:rank]), sizes[rank])
    rows, lead = own.reshape(-1), own.shape
    scale_x = x.scale
    if scale_x.dim() and not case.replicated:
        scale_x = x.scale[rows]
    weights = [operand(case, n, case.k, case.w_dtype, "w", rank, i) for i, n in enumerate(case.n)]
    out = case.out or BF16
    biases = [bias_of(case, n, out) for n in case.n] if case.bias else None
    shard = strided(case, x.elements.view(torch.uint8)[rows].view(x.elements.dtype))
    result = tpkernels.all_gather_scaled_matmul(
        shard.view(*lead, shard.shape[1]) if shard.is_contiguous() else shard,
        [strided(case, w.elements).t() for w in weights],
        x_scale(case, scale_x, case.rows if case.replicated else lead),
        [w_scale(case, w) for w in weights],
        group,
        case.dim,
        biases=biases,
        out_dtype=case.out,
        return_gathered=case.return_gathered,
        shard_sizes=case.sizes,
        algorithm=case.algorithm,
    )
    errors: list[str | None] = []
    if case.return_gathered:
        gathered, result = result
        whole = x.elements.view(*case.rows, -1)
        same = gathered.dtype == whole.dtype and gathered.is_contiguous()
        if not same or not torch.equal(gathered.view(torch.uint8), whole.view(torch.uint8)):
            errors.append("another gathered x")
    for i, (w, got) in enumerate(zip(weights, result, strict=True)):
        exact, size = x.worth @ w.worth.t(), x.worth.abs() @ w.worth.abs().t()
        if biases is not None:
            exact, size = exact + biases[i].double(), size + biases[i].double().abs()
        want = _expected(case, exact, [], size, case.k, out)
        shape = (*case.rows, exact.shape[1])
        want = Expected(want.exact.view(shape), want.bound.view(shape), out)
        errors.append(difference(got, want))
    return errors


def _check_reduction(case: ScaledCase, group: dist.ProcessGroup) -> list[str | None]:
    rank, world, (n,) = group.rank(), group.size(), case.n
    out, m = case.out or BF16, prod(case.rows)
    factors = [
        (
            operand(case, m, case.k_of(r), case.x_dtype, "x", r),
            operand(case, n, case.k_of(r), case.w_dtype, "w", r),
        )
        for r in range(world)
    ]
    partials = [x.worth @ w.worth.t() for x, w in factors]
    exact, size = sum(partials), sum(x.worth.abs() @ w.worth.abs().t() for x, w in factors)
    options: dict[str, Any] = {"algorithm": case.algorithm, "wire_dtype": case.wire}
    shape = (*case.rows, n)
    if case.bias:
        options["bias"] = bias_of(case, n, out)
        exact, size = exact + options["bias"].double(), size + options["bias"].double().abs()
    residual = torch.randint(-2, 3, (m, n), generator=case.generator("residual")).to(out)
    if case.residual:
        options["residual"] = _part(case, residual.view(shape), rank, world)
        exact, size = exact + residual.double(), size + residual.double().abs()
    if case.op == SCATTER:
        options |= {"scatter_dim": case.dim, "shard_sizes": case.sizes}
    x, w = factors[rank]
    elements = strided(case, x.elements)
    got = getattr(tpkernels, case.op)(
        elements.view(*case.rows, elements.shape[1]) if elements.is_contiguous() else elements,
        strided(case, w.elements).t(),
        x_scale(case, x.scale, case.rows),
        w_scale(case, w),
        group,
        out_dtype=case.out,
        **options,
    )
    want = _expected(case, exact, partials, size, case.k_of(world), out)
    parts = [_part(case, each.view(shape), rank, world) for each in (want.exact, want.bound)]
    return [difference(got, Expected(*parts, out))]


def _part(case: ScaledCase, whole: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    if case.op != SCATTER:
        return whole
    sizes = case.split(world)
    return whole.narrow(case.dim, sum(sizes[:rank]), sizes[rank]).contiguous()


def _expected(
    case: ScaledCase,
    exact: Any,
    partials: list[torch.Tensor],
    size: Any,
    k: int,
    out: torch.dtype,
) -> Expected:
    if case.exact:
        return Expected(exact, torch.zeros_like(exact), out)
    wire = torch.finfo(case.wire or out).eps / 2
    rounded = sum((partial.abs() for partial in partials), torch.zeros_like(exact))
    additions = k + len(partials) + 6  # two scales of a product, a bias and a residual among them
    bound = torch.finfo(out).eps / 2 * exact.abs() + wire * rounded + additions * 2**-24 * size
    return Expected(exact, 1.01 * bound, out)


def cases_job(cases: Sequence[ScaledCase]) -> list[str]:
    failures: list[str] = []
    with fresh_group() as group:
        for case in cases:
            try:
                failures += check(case, group)
            except Exception as error:
                failures.append(f"{case}: {traceback.format_exc()}")
                groups.get(group.group_name).mark_broken(error)
                break
    return failures


def run_cases(ranks: RanksFixture, world: int, cases: Sequence[ScaledCase]) -> None:
    """Runs the cases on ``world`` ranks and fails with the failures of all ranks."""
    results = ranks(world).run(cases_job, list(cases), timeout=240)
    report(failure for rank in results for failure in rank)
