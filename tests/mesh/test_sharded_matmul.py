"""Sharded matmuls for every placement of x, w and the result on small meshes, with uneven and empty
shards. Results and gradients match the unsharded matmul."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

import tpkernels
from tests.support.cases import RanksFixture
from tests.support.meshes import (
    S0,
    S1,
    DrawnMatrix,
    P,
    Placements,
    R,
    all_placements,
    draw,
    find_error,
    local_shard,
    make_mesh,
)
from tests.support.ranked import check_job, report
from tests.support.tiers import thorough
from tpkernels import mesh as tpmesh
from tpkernels.mesh.planner import MatmulProblem, make_plans


@dataclass(frozen=True, kw_only=True)
class MatmulCase:
    """One sharded matmul. If ``out`` is None, any result placement is allowed."""

    x: Placements
    w: Placements
    out: Placements | None
    shape: tuple[int, int, int] = (7, 5, 6)
    strategy: str = "auto"
    algorithm: str = "auto"
    dtype: torch.dtype = torch.float32
    integers: bool = True
    wire_dtype: torch.dtype | None = None


def _gradient_placements(placements: Sequence[Placement]) -> Placements:
    return tuple(
        Replicate() if isinstance(placement, Partial) else placement for placement in placements
    )


def _bound(case: MatmulCase, terms: torch.Tensor, k: int) -> torch.Tensor:
    """Return the documented bound ``sqrt(K) * eps * (|A| @ |B|)``, plus one rounding of the result
    for the comparison. Integers are exact."""
    if case.integers:
        return torch.zeros_like(terms)
    return (math.sqrt(k) + 1) * torch.finfo(case.dtype).eps * terms


def check(case: MatmulCase, mesh: DeviceMesh) -> list[str]:
    """Return the errors of one matmul and its gradients, as messages."""
    (m, k, n), dtype, integers = case.shape, case.dtype, case.integers

    def draw_matrix(name: str, shape: tuple[int, int], placements: Placements) -> DrawnMatrix:
        return draw(name, shape, mesh, placements, dtype, integers)

    x, w = draw_matrix("x", (m, k), case.x), draw_matrix("w", (k, n), case.w)
    y = tpkernels.sharded_matmul(
        x.sharded,
        w.sharded,
        case.out,
        case.strategy,
        wire_dtype=case.wire_dtype,
        algorithm=case.algorithm,
    )
    if y.dtype != dtype:
        return [f"{case}: has dtype {y.dtype}"]
    out = case.out or tuple(y.placements)
    failures = []
    if Partial() in out and case.out is None:
        failures.append("is Partial")
    pairs = {"y": (y, x.value @ w.value, x.size @ w.size, k, out)}
    grad = draw_matrix("grad", (m, n), _gradient_placements(out))
    grads = torch.autograd.grad(y, [x.sharded, w.sharded], grad.sharded.detach())
    pairs["grad x"] = (
        grads[0], grad.value @ w.value.t(), grad.size @ w.size.t(), n, _gradient_placements(case.x)
    )  # fmt: skip
    pairs["grad w"] = (
        grads[1], x.value.t() @ grad.value, x.size.t() @ grad.size, m, _gradient_placements(case.w)
    )  # fmt: skip
    for name, (got, exact, terms, summands, placements) in pairs.items():
        error = find_error(got, exact, _bound(case, terms, summands), placements)
        if error is not None:
            failures.append(f"{name} {error}")
    return [f"{case} on {mesh.shape} at {mesh.get_coordinate()}: {failure}" for failure in failures]


def cases_job(mesh_shape: tuple[int, ...], cases: Iterable[MatmulCase]) -> list[str]:
    mesh = make_mesh(mesh_shape)
    failures: list[str] = []
    for case in cases:
        failures += check(case, mesh)
    return failures


def make_cases(dims: int, **options: object) -> list[MatmulCase]:
    """Return one case for every placement of x, w and the result."""
    return [
        MatmulCase(x=x, w=w, out=out, **options)  # type: ignore[arg-type]
        for x in all_placements(dims)
        for w in all_placements(dims)
        for out in (*all_placements(dims), None)
    ]


def sample_results(cases: list[MatmulCase]) -> list[MatmulCase]:
    """Keep one result placement per (x, w), so that all result placements are equally frequent."""
    outs = list(dict.fromkeys(case.out for case in cases))
    pairs = list(dict.fromkeys((case.x, case.w) for case in cases))
    selected = {(*pair, outs[i % len(outs)]) for i, pair in enumerate(pairs)}
    return [case for case in cases if (case.x, case.w, case.out) in selected]


def with_all_strategies(cases: list[MatmulCase], mesh_shape: tuple[int, ...]) -> list[MatmulCase]:
    """Expand each case into one case per available strategy."""
    expanded = []
    for case in cases:
        m, k, n = case.shape
        placements = {"x": case.x, "w": case.w, "out": case.out}
        problem = MatmulProblem(m=m, k=k, n=n, mesh_shape=mesh_shape, itemsize=4, **placements)
        expanded += [replace(case, strategy=plan.strategy) for plan in make_plans(problem)]
    return expanded


# K split over different mesh dims, a tensor dim split over both, sums over both, and combinations.
TWO_DIMS = [
    MatmulCase(x=x, w=w, out=out)
    for x, w, out in [
        ((S1, R), (R, S0), None),
        ((S0, S0), (S1, S1), (R, R)),
        ((S1, S1), (S0, S0), (P, S0)),
        ((P, S0), (S1, P), (S1, S0)),
        ((P, P), (R, S1), None),
        ((S0, S1), (S1, S0), (P, P)),
    ]
]


# Half of the ranks hold no rows, and only the remaining ranks reduce.
NO_ROWS = [
    MatmulCase(x=(S0, S1), w=(R, S0), out=out, shape=(1, 5, 6), strategy="M,K")
    for out in ((S0, R), (S0, S1))
]


def few_rows(shape: tuple[int, int, int]) -> list[MatmulCase]:
    """Return cases in which most ranks hold no rows, columns or summands."""
    return sample_results(make_cases(2, shape=shape))[::48]


def algorithm_cases(*names: str) -> list[MatmulCase]:
    """Return cases for these algorithms with every strategy, including algorithms without a
    standalone collective or without a split along the summed dim."""
    cases = [case for name in names for case in sample_results(make_cases(1, algorithm=name))]
    return with_all_strategies(cases, (2,))


def random_cases(dtype: torch.dtype, wire_dtype: torch.dtype | None) -> list[MatmulCase]:
    options = {"dtype": dtype, "wire_dtype": wire_dtype, "integers": False}
    return sample_results(make_cases(1, shape=(33, 70, 20), **options))


@pytest.mark.parametrize(
    ("mesh_shape", "cases"),
    [
        ((2,), make_cases(1)),
        ((2, 2), TWO_DIMS),
        ((2,), algorithm_cases("pipelined", "auto")),
        ((2,), random_cases(torch.bfloat16, torch.float32)),
        *(
            pytest.param(mesh_shape, cases, marks=pytest.mark.thorough)
            for mesh_shape, cases in [
                ((2, 2), [*NO_ROWS, *few_rows((0, 5, 6))]),
            ]
        ),
        *(
            pytest.param(mesh_shape, cases, marks=pytest.mark.slow)
            for mesh_shape, cases in [
                ((2,), algorithm_cases("ring", "direct", "unfused")),
                ((3,), with_all_strategies(sample_results(make_cases(1)), (3,))),
                ((3, 2), TWO_DIMS),
                ((2,), random_cases(torch.float32, None)),
                ((3,), make_cases(1)),
                ((3, 2), sample_results(make_cases(2))[::4]),
                ((2, 2), [*sample_results(make_cases(2))[::4], *few_rows((1, 1, 1))]),
                ((2, 2), with_all_strategies(sample_results(make_cases(2))[::48], (2, 2))),
                ((3, 2), with_all_strategies(sample_results(make_cases(2))[::48], (3, 2))),
            ]
        ),
        *(
            pytest.param(mesh_shape, [p for p in make_cases(2) if p.x == x], marks=pytest.mark.slow)
            for mesh_shape in [(2, 2), (1, 4), (4, 1), (3, 2)]
            for x in all_placements(2)
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, tuple) else str(len(value)),
)
def test_sharded_matmul(
    ranks: RanksFixture, mesh_shape: tuple[int, ...], cases: list[MatmulCase]
) -> None:
    assert cases
    check_job(ranks(math.prod(mesh_shape)), cases_job, mesh_shape, cases, timeout=280)


# bf16 partial sums that are sent in fp32.


BF16, F32 = torch.bfloat16, torch.float32
M, K, N = 6, 8, 4


def summed_job(mesh_shape: tuple[int, ...]) -> tuple[list[str], int]:
    """Sum 256, 1, -256 and zeros over all mesh dims, with partial sums sent in fp32.

    Return the errors, and the number of errors with bf16 partial sums, where 257 rounds to 256."""
    mesh, failures, num_wrong_bf16 = make_mesh(mesh_shape), [], 0
    rows = torch.zeros(M, K, dtype=BF16)
    rows[:, 0], rows[:, 1], rows[:, K // 2] = 256, 1, -256
    split = (S1,) * mesh.ndim, (S0,) * mesh.ndim

    def sharded(full: torch.Tensor, placements: Placements) -> DTensor:
        return DTensor.from_local(
            local_shard(full, placements, mesh), mesh, placements, run_check=False
        )

    a, b = sharded(rows, split[0]), sharded(torch.ones(K, N, dtype=BF16), split[1])
    for out in itertools.product((R, S0, S1), repeat=mesh.ndim):
        for plan in tpmesh.plans(a, b, out, wire_dtype=F32):
            y = tpkernels.sharded_matmul(a, b, out, plan.strategy, wire_dtype=F32)
            if y.dtype != BF16 or not (y.to_local() == 1).all():
                failures.append(f"{out}: {plan} gives {y.to_local()}")
            z = tpkernels.sharded_matmul(a, b, out, plan.strategy)
            num_wrong_bf16 += not (z.to_local() == 1).all()
    if mesh.ndim == 2:  # a result that stays Partial along one mesh dim
        rows[:, 2], rows[:, K // 2] = -256, 0
        a = sharded(rows, split[0])
        y = tpkernels.sharded_matmul(a, b, [P, R], "K,K", wire_dtype=F32)
        total = y.to_local().clone()
        dist.all_reduce(total, group=mesh.get_group(0))
        if y.dtype != BF16 or not (total == 1).all():
            failures.append(f"left Partial: {y}")
    return failures, num_wrong_bf16


@pytest.mark.parametrize("mesh_shape", [(2,), thorough((2, 2))], ids=str)
def test_sums_that_are_exact_in_fp32_only(ranks: RanksFixture, mesh_shape: tuple[int, ...]) -> None:
    failures, num_wrong_bf16 = zip(
        *ranks(math.prod(mesh_shape)).run(summed_job, mesh_shape), strict=True
    )
    report(message for rank in failures for message in rank)
    assert max(num_wrong_bf16) > 0
