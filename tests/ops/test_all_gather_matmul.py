"""``all_gather_matmul`` on real ranks against float64: exact for integers, else within the
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
    each,
    exact,
    uneven_splits,
)
from tests.support.ranked import SMALLEST_WORKSPACE, run_cases
from tests.support.tiers import sweep

OP = "all_gather_matmul"
F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
WHOLE = ("unfused", "direct", "auto")  # what can gather K itself

pytestmark = pytest.mark.parametrize("world", QUICK_WORLDS)


def test_every_dtype_by_every_algorithm(ranks: RanksFixture, world: int) -> None:
    case = Case(op=OP, shape=(12 * 5, 33), n=(17,))
    run_cases(ranks, world, each(case, dtypes=(*DTYPES, F64), algorithms=MATMUL_ALGORITHMS))


def test_any_dim_is_gathered(ranks: RanksFixture, world: int) -> None:
    shapes = [(12, 24), (12, 1, 24), (2, 12, 24), (12, 3, 24), (2, 3, 12, 24), (2, 12, 5, 24)]
    cases = [
        Case(op=OP, shape=shape, dim=dim, n=(7,), return_gathered=dim > 0)
        for shape in shapes
        for dim in range(len(shape) - 1)
        if shape[dim] == 12
    ]
    run_cases(ranks, world, exact(*cases))


def test_the_last_dim_is_gathered(ranks: RanksFixture, world: int) -> None:
    cases = [
        Case(op=OP, shape=shape, dim=len(shape) - 1, n=(7, 2), return_gathered=True)
        for shape in [(5, 24), (3, 4, 24), (1, 12)]
    ]
    cases += [
        Case(op=OP, shape=(5, 23), dim=1, sizes=sizes, n=(7,)) for sizes in uneven_splits(23, world)
    ]
    run_cases(ranks, world, each(*cases, algorithms=WHOLE, integers=(True,)))


def test_weights_share_one_gather(ranks: RanksFixture, world: int) -> None:
    several = Case(op=OP, shape=(24, 33), n=(16, 1, 40))
    by_rank = Case(op=OP, shape=(12, 33), n=(5, 300), n_by_rank=True, return_gathered=True)
    run_cases(ranks, world, exact(several, by_rank))


def test_biases(ranks: RanksFixture, world: int) -> None:
    case = Case(op=OP, shape=(24, 33), n=(16, 3, 20), n_by_rank=True)
    cases = []
    for dtype in DTYPES:
        for biases in [(dtype,), (None, dtype, None), (F32, None, dtype), (None,)]:
            cases += each(replace(case, biases=biases), dtypes=(dtype,))
    few_rows = Case(op=OP, shape=(world, 33), n=(4,), biases=(F32,))
    run_cases(ranks, world, [*cases, *each(few_rows)])


def test_out_dtype(ranks: RanksFixture, world: int) -> None:
    cases = []
    for dtype, out_dtype in [(BF16, F32), (F16, F32), (F32, BF16), (F32, F16), (F16, BF16)]:
        case = Case(op=OP, shape=(24, 33), n=(9, 300), biases=(F32, dtype), out_dtype=out_dtype)
        few_rows = replace(case, shape=(world, 33), biases=())
        cases += each(case, few_rows, dtypes=(dtype,))
    run_cases(ranks, world, cases)


@pytest.mark.parametrize("layout", sweep(["sliced", "transposed", "offset"]))
def test_strided_inputs_and_weights(ranks: RanksFixture, world: int, layout: str) -> None:
    cases = []
    for weight_layout in ("plain", "linear", "sliced"):
        case = Case(op=OP, shape=(24, 33), n=(20, 6), layout=layout, weight_layout=weight_layout)
        batched = replace(case, shape=(3, 12, 16), dim=1, biases=(F32, None))
        cases += exact(case, batched)
    run_cases(ranks, world, cases)


def test_uneven_shards(ranks: RanksFixture, world: int) -> None:
    cases = []
    for sizes in uneven_splits(23, world):
        case = Case(op=OP, shape=(23, 33), sizes=sizes, n=(8, 3), return_gathered=True)
        cases += [case, replace(case, shape=(2, 23, 3, 8), dim=1)]
    run_cases(ranks, world, exact(*cases))


@pytest.mark.parametrize("k", sweep([33, 1]))
@pytest.mark.parametrize("m", sweep([1023, 1, 7]))
def test_odd_shapes(ranks: RanksFixture, world: int, m: int, k: int) -> None:
    """M rows on each rank, and M rows over all ranks."""
    even = Case(op=OP, shape=(m * world, k), n=(5,))
    split = [
        Case(op=OP, shape=(m, k), sizes=sizes, n=(1,))
        for sizes in uneven_splits(m, world)
        if m < 100 or min(sizes) > 0
    ]
    run_cases(ranks, world, [*each(even, algorithms=MATMUL_ALGORITHMS), *exact(*split)])


def test_no_rows_at_all(ranks: RanksFixture, world: int) -> None:
    case = Case(op=OP, shape=(0, 33), n=(5,), return_gathered=True)
    given = replace(case, shape=(2, 0, *case.shape[1:]), dim=1, sizes=(0,) * world)
    run_cases(ranks, world, exact(case, given))


def test_steps_through_a_small_workspace(ranks: RanksFixture, world: int) -> None:
    """Shards larger than the workspace, and rows so wide that a step makes it grow."""
    rows = 700
    steps = Case(op=OP, shape=(rows * world, 200), n=(6,), return_gathered=True)
    blocks = Case(op=OP, shape=(2, 2 * 180 * world, 3, 50), dim=1, n=(5,))
    uneven = [
        Case(op=OP, shape=(1500, 200), sizes=sizes, n=(6,), biases=(F32,))
        for sizes in uneven_splits(1500, world)
    ]
    grow = Case(op=OP, shape=(300 * world, 1500), n=(3,))
    cases = exact(steps, blocks, *uneven, dtypes=(F32, BF16)) + exact(grow, steps, dtypes=(F32,))
    run_cases(ranks, world, cases, SMALLEST_WORKSPACE)
