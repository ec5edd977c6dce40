"""Results are bitwise identical across runs, ranks and algorithms.

Partials are summed in fp32 in rank order, then bias and residual are added, and the sum is rounded
once.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

import tpkernels
from tests.support import faults
from tests.support.cases import (
    COLLECTIVE_ALGORITHMS,
    DTYPES,
    MATMUL_ALGORITHMS,
    PACKABLE,
    Case,
    RanksFixture,
    expand_cases,
)
from tests.support.ranked import SMALLEST_WORKSPACE, call, fresh_group, on_ranks, report
from tests.support.tiers import sweep
from tpkernels.launch import Ranks

F32, BF16 = torch.float32, torch.bfloat16

MATMULS = [
    Case(op="all_gather_matmul", shape=(48, 133), n=(40, 300), biases=(F32, None)),
    Case(op="all_gather_matmul", shape=(2, 48, 70), dim=1, n=(33,)),
    Case(op="matmul_reduce_scatter", shape=(48, 65), k=(133, 90), biases=(F32,)),
    Case(op="matmul_reduce_scatter", shape=(2, 48, 300), dim=1, k=(70,), residual=F32),
    Case(op="matmul_reduce_scatter", shape=(9, 48), dim=1, k=(133,)),
    Case(op="matmul_reduce_scatter", shape=(64, 60), dim=1, k=(1000,)),
    Case(op="matmul_all_reduce", shape=(48, 300), k=(133, 90), biases=(F32,)),
    Case(op="matmul_all_reduce", shape=(16, 33), k=(70,)),
    # Few rows: the extension reads columns in place, even for chunks of a matmul that torch would
    # run.
    Case(op="all_gather_matmul", shape=(24, 200), n=(24,), weight_layout="linear"),
    Case(op="matmul_reduce_scatter", shape=(24, 24), k=(200,), weight_layout="linear"),
    Case(op="matmul_all_reduce", shape=(10, 24), k=(200,), weight_layout="linear"),
    Case(op="matmul_all_reduce", shape=(3, 24), k=(200,), weight_layout="linear"),
]
COLLECTIVES = [
    Case(op="reduce_scatter", shape=(48, 65)),
    Case(op="reduce_scatter", shape=(5, 48, 3), dim=1),
    Case(op="all_reduce", shape=(48, 65)),
    Case(op="all_reduce", shape=(90, 133)),
    Case(op="all_reduce_", shape=(90, 133)),
]


def _bits(results: list[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for result in results:
        digest.update(result.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def bits_job(cases: list[Case], rounds: int) -> list[list[str]]:
    """Return the digests of each case in several runs with random delays. The last run has a small
    workspace and needs several steps for most cases."""
    runs = []
    for size in [1 << 20] * (rounds - 1) + [SMALLEST_WORKSPACE]:
        with fresh_group(size) as group:
            faults.get_workspace(group).set_chaos(seed=group.rank() + 1, max_delay_us=300)
            runs.append([_bits(call(case, group)) for case in cases])
    return [list(bits) for bits in zip(*runs, strict=True)]


def _cases() -> list[Case]:
    with_residual = [c for c in MATMULS if c.residual is not None]
    matmuls = [c for c in MATMULS if c.residual is None]
    options: dict[str, Any] = {"integers": (False,)}
    return [
        *expand_cases(*matmuls, algorithms=MATMUL_ALGORITHMS, **options),
        *expand_cases(*with_residual, dtypes=(F32,), algorithms=MATMUL_ALGORITHMS, **options),
        *expand_cases(*COLLECTIVES, algorithms=COLLECTIVE_ALGORITHMS, **options),
    ]


def _packed_cases() -> list[Case]:
    split_by_rows = [c for c in MATMULS if not (c.scattered and c.dim == len(c.shape) - 1)]
    packed = [replace(case, weight_layout="packed", residual=None) for case in split_by_rows]
    return expand_cases(*packed, dtypes=PACKABLE, algorithms=MATMUL_ALGORITHMS, integers=(False,))


@pytest.mark.parametrize("world", sweep((3, 1, 2, 4)))
@pytest.mark.parametrize("cases", [_cases(), _packed_cases()], ids=["plain", "packed"])
def test_results_are_bitwise_identical(ranks: RanksFixture, world: int, cases: list[Case]) -> None:
    digests = ranks(world).run(bits_job, cases, 3, timeout=120)
    failures = []
    first: dict[tuple[Case, int], tuple[Case, str]] = {}
    for i, case in enumerate(cases):
        for rank, runs in enumerate(digests):
            if len(set(runs[i])) > 1:
                failures.append(f"rank {rank}: {case} differs from run to run")
            reference, bits = first.setdefault((case.values(), rank), (case, runs[i][0]))
            if bits != runs[i][0]:
                failures.append(f"rank {rank}: {case.algorithm} differs from {reference}")
        if "all_reduce" in case.op and len({runs[i][0] for runs in digests}) > 1:
            failures.append(f"{case} differs from rank to rank")
    report(iter(failures))


@pytest.mark.thorough
def test_new_processes_give_identical_results(ranks: RanksFixture) -> None:
    cases = [case for case in _cases() if case.algorithm != "auto"]
    with Ranks(2) as new_ranks:
        assert ranks(2).run(bits_job, cases, 1) == new_ranks.run(bits_job, cases, 1)


# Order of summation. Two terms of every column are large and cancel. Small terms that are added
# between them lose bits, so the sum depends on the order.


def _terms(dtype: torch.dtype, count: int, shape: tuple[int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    terms = [torch.randn(shape, generator=generator) / 128 for _ in range(count)]
    if count > 1:
        for column in range(shape[1]):
            first, second = torch.randperm(count, generator=generator)[:2].tolist()
            terms[first][:, column] = 2.0**15
            terms[second][:, column] = -(2.0**15)
    return [term.to(dtype) for term in terms]


def _sum(terms: list[torch.Tensor], out_dtype: torch.dtype) -> torch.Tensor:
    return functools.reduce(torch.add, [term.float() for term in terms]).to(out_dtype)


@pytest.mark.parametrize("world", sweep((3, 1, 2, 4)))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(12, 33), (240, 70)])  # one-shot and two-shot
@on_ranks()
def test_sums_are_in_rank_order(dtype: torch.dtype, shape: tuple[int, int]) -> list[str]:
    outs = {dtype, F32}
    return [failure for out in outs for failure in order_failures(dtype, out, shape)]


def order_failures(dtype: torch.dtype, out_dtype: torch.dtype, shape: tuple[int, int]) -> list[str]:
    failures = []
    with fresh_group() as group:
        rank, world = group.rank(), group.size()
        terms = _terms(dtype, world, shape)
        x, total = terms[rank], _sum(terms, out_dtype)
        in_place = x.clone()
        tpkernels.all_reduce_(in_place, group)
        results = {"all_reduce_": (in_place, _sum(terms, dtype))}
        if world > 2 and torch.equal(total, _sum(terms[::-1], out_dtype)):
            failures.append("the order of ranks does not matter: nothing is tested")
        rows = shape[0] // world
        local_rows = slice(rank * rows, (rank + 1) * rows)
        for algorithm in COLLECTIVE_ALGORITHMS:
            options: dict[str, Any] = {"out_dtype": out_dtype, "algorithm": algorithm}
            results[f"all_reduce {algorithm}"] = tpkernels.all_reduce(x, group, **options), total
            scattered = tpkernels.reduce_scatter(x, group, **options)
            results[f"reduce_scatter {algorithm}"] = scattered, total[local_rows]

        *terms, bias, residual = _terms(dtype, world + 2, shape)
        bias = bias[0].float()
        full = _sum([*terms, bias.expand(shape), residual], out_dtype)
        if torch.equal(full, _sum([*terms, residual, bias.expand(shape)], out_dtype)):
            failures.append("the order of bias and residual does not matter: nothing is tested")
        x, eye = terms[rank], torch.eye(shape[1], dtype=dtype)  # x @ eye is x
        for algorithm in MATMUL_ALGORITHMS:
            options = {"out_dtype": out_dtype, "algorithm": algorithm, "bias": bias}
            reduced = tpkernels.matmul_all_reduce(x, eye, group, residual=residual, **options)
            shard = tpkernels.matmul_reduce_scatter(
                x, eye, group, residual=residual[local_rows], **options
            )
            results[f"matmul_all_reduce {algorithm}"] = reduced, full
            results[f"matmul_reduce_scatter {algorithm}"] = shard, full[local_rows]
    for name, (result, expected) in results.items():
        if not torch.equal(result, expected):
            failures.append(
                f"rank {rank}: {name}: {int((result != expected).sum())} elements differ"
            )
    return failures


@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_matmuls_accumulate_in_fp32() -> None:
    """A sum of 4096 ones. An accumulator would stop at 2048 in fp16, and at 256 in bf16."""
    k, ops = 4096, ("all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter")
    with fresh_group() as group:
        world = group.size()
        for op, dtype, rows in itertools.product(ops, DTYPES, (1, 3, 4, 40)):
            x, w = torch.ones(rows * world, k, dtype=dtype), torch.ones(k, 5, dtype=dtype)
            for algorithm in MATMUL_ALGORITHMS:
                result = getattr(tpkernels, op)(x, w, group, algorithm=algorithm)
                result /= 1 if op == "all_gather_matmul" else world
                assert torch.equal(result, torch.full_like(result, k)), (op, algorithm, dtype, rows)
