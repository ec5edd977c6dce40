"""``matmul_reduce_scatter`` on real ranks against float64: exact for integers, else within the
derived bound of support/reference.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.cases import (
    DTYPES,
    MATMUL_ALGORITHMS,
    QUICK_WORLDS,
    Case,
    RanksFixture,
    along_each_dim,
    each,
    exact,
    uneven_splits,
)
from tests.support.ranked import SMALLEST_WORKSPACE, run_cases
from tests.support.tiers import sweep

OP = "matmul_reduce_scatter"
F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64

pytestmark = pytest.mark.parametrize("world", QUICK_WORLDS)


def test_every_dtype_by_every_algorithm(ranks: RanksFixture, world: int) -> None:
    case = Case(op=OP, shape=(60, 17), k=(33,))
    run_cases(ranks, world, each(case, dtypes=(*DTYPES, F64), algorithms=MATMUL_ALGORITHMS))


def test_any_dim_is_scattered(ranks: RanksFixture, world: int) -> None:
    shapes = [(12, 24), (5, 12), (2, 12, 7), (12, 3, 12), (1, 1, 12), (2, 3, 12, 5), (2, 12, 3, 5)]
    cases = along_each_dim(Case(op=OP, shape=shapes[0], k=(24,)), shapes, 12)
    run_cases(ranks, world, exact(*cases))


def test_k_differs_by_rank(ranks: RanksFixture, world: int) -> None:
    cases = [Case(op=OP, shape=(24, 9), k=k) for k in [(40, 1, 7), (1, 64)]]
    run_cases(ranks, world, each(*cases))


def test_bias_and_residual(ranks: RanksFixture, world: int) -> None:
    """Along every dim: a bias belongs to columns, of which a rank may have some only."""
    cases = []
    for dtype in DTYPES:
        for dim in range(3):
            case = Case(op=OP, shape=(12, 12, 24), dim=dim, k=(33,), biases=(dtype,))
            some = [
                case,
                replace(case, biases=(), residual=dtype),
                replace(case, biases=(F32,), residual=dtype),
            ]
            cases += each(*some, dtypes=(dtype,))
    run_cases(ranks, world, cases)


def test_out_dtype_and_wire_dtype(ranks: RanksFixture, world: int) -> None:
    cases = []
    for dtype, out, wire in [
        (BF16, F32, None),
        (BF16, F32, F32),
        (BF16, None, F32),
        (F16, F32, F32),
        (F16, BF16, None),
        (F32, BF16, F32),
        (F32, F16, None),
    ]:
        case = Case(op=OP, shape=(24, 300), k=(33,), out_dtype=out, wire_dtype=wire)
        full = replace(case, biases=(F32,), residual=out or dtype)
        few_rows = replace(full, shape=(world, 5))
        by_columns = replace(full, shape=(5, 24), dim=1)
        cases += each(case, full, few_rows, by_columns, dtypes=(dtype,))
    run_cases(ranks, world, cases)


@pytest.mark.parametrize("layout", sweep(["sliced", "transposed", "offset"]))
def test_strided_inputs_and_weights(ranks: RanksFixture, world: int, layout: str) -> None:
    cases = []
    for weights in ("plain", "linear", "sliced"):
        case = Case(op=OP, shape=(24, 24), k=(33,), layout=layout, weight_layout=weights)
        cases += exact(case, replace(case, dim=1))
        full = replace(case, shape=(3, 12, 20), dim=1, biases=(F32,), residual=F32)
        cases += exact(full, replace(full, shape=(3, 20, 12), dim=2), dtypes=(F32,))
    run_cases(ranks, world, cases)


def test_uneven_shards(ranks: RanksFixture, world: int) -> None:
    cases = []
    for sizes in uneven_splits(23, world):
        case = Case(op=OP, shape=(23, 8), k=(33,), sizes=sizes, biases=(F32,))
        columns = replace(case, shape=(6, 23), dim=1)
        blocks = replace(case, shape=(2, 23, 3, 8), dim=1)
        cases += exact(case, columns, blocks)
        with_residual = [replace(one, residual=F32) for one in (columns, blocks)]
        cases += exact(*with_residual, dtypes=(F32,))
    run_cases(ranks, world, cases)


@pytest.mark.parametrize("k", sweep([33, 1]))
@pytest.mark.parametrize("m", sweep([1023, 1, 7]))
def test_odd_shapes(ranks: RanksFixture, world: int, m: int, k: int) -> None:
    """M rows for each rank, and M rows over all ranks."""
    even = Case(op=OP, shape=(m * world, 5), k=(k,))
    split = [
        Case(op=OP, shape=(m, 1), k=(k,), sizes=sizes)
        for sizes in uneven_splits(m, world)
        if m < 100 or min(sizes) > 0
    ]
    run_cases(ranks, world, [*each(even, algorithms=MATMUL_ALGORITHMS), *exact(*split)])


def test_no_rows_at_all(ranks: RanksFixture, world: int) -> None:
    case = Case(op=OP, shape=(0, 5), k=(33,), biases=(F32,))
    given = replace(case, shape=(2, 0, *case.shape[1:]), dim=1, sizes=(0,) * world)
    run_cases(ranks, world, exact(case, given))


def test_steps_through_a_small_workspace(ranks: RanksFixture, world: int) -> None:
    """Shards larger than the workspace, and rows so wide that a step makes it grow."""
    steps = Case(op=OP, shape=(600 * world, 40), k=(6,), biases=(F32,))
    blocks = replace(steps, shape=(3, 180 * world, 2, 40), dim=1, residual=F32)
    columns = replace(steps, shape=(1000, 30 * world), dim=1, residual=F32)
    uneven = [replace(steps, shape=(1100, 40), sizes=sizes) for sizes in uneven_splits(1100, world)]
    grow = Case(op=OP, shape=(300 * world, 1200), k=(5,))
    cases = exact(steps, blocks, columns, *uneven, grow, steps, dtypes=(F32,))
    wide = replace(steps, out_dtype=F32, wire_dtype=F32, residual=F32)
    cases += each(wide, replace(columns, residual=BF16), dtypes=(BF16,))
    run_cases(ranks, world, cases, SMALLEST_WORKSPACE)


def test_chunks_of_a_collective(ranks: RanksFixture, world: int) -> None:
    """Shards of several chunks (csrc/host/collectives.cpp), which begin in the midst of a row."""
    rows = Case(op=OP, shape=(500 * world, 333), k=(3,), biases=(F32,), residual=F32)
    columns = replace(rows, shape=(1500, 111 * world), dim=1)
    run_cases(ranks, world, exact(rows, columns, dtypes=(F32,)), SMALLEST_WORKSPACE)
