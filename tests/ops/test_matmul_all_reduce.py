"""``matmul_all_reduce`` on real ranks against float64: exact for integers, else within the
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
)
from tests.support.ranked import SMALLEST_WORKSPACE, run_cases
from tests.support.tiers import sweep

OP = "matmul_all_reduce"
F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64

pytestmark = pytest.mark.parametrize("world", QUICK_WORLDS)


def test_every_dtype_by_every_algorithm(ranks: RanksFixture, world: int) -> None:
    case = Case(op=OP, shape=(60, 17), k=(33,))
    run_cases(ranks, world, each(case, dtypes=(*DTYPES, F64), algorithms=MATMUL_ALGORITHMS))


def test_leading_dims(ranks: RanksFixture, world: int) -> None:
    shapes = [(3, 20, 9), (2, 3, 4, 5), (1, 1, 1, 7), (5, 300)]
    run_cases(ranks, world, exact(*(Case(op=OP, shape=shape, k=(24,)) for shape in shapes)))


def test_k_differs_by_rank(ranks: RanksFixture, world: int) -> None:
    cases = [Case(op=OP, shape=(20, 9), k=k) for k in [(40, 1, 7), (1, 64)]]
    run_cases(ranks, world, each(*cases))


def test_bias_and_residual(ranks: RanksFixture, world: int) -> None:
    cases = []
    for dtype in DTYPES:
        case = Case(op=OP, shape=(3, 8, 17), k=(33,), biases=(dtype,))
        some = [
            case,
            replace(case, biases=(F32,)),
            replace(case, biases=(), residual=dtype),
            replace(case, biases=(F32,), residual=dtype),
            replace(case, shape=(90, 70), residual=dtype),  # above one-shot
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
        few_rows = replace(full, shape=(1, 5))
        cases += each(case, full, few_rows, dtypes=(dtype,))
    run_cases(ranks, world, cases)


@pytest.mark.parametrize("layout", sweep(["sliced", "transposed", "offset"]))
def test_strided_inputs_and_weights(ranks: RanksFixture, world: int, layout: str) -> None:
    cases = []
    for weights in ("plain", "linear", "sliced"):
        case = Case(op=OP, shape=(24, 20), k=(33,), layout=layout, weight_layout=weights)
        cases += exact(case)
        full = replace(case, shape=(3, 8, 20), biases=(F32,), residual=F32)
        cases += exact(full, dtypes=(F32,))
    run_cases(ranks, world, cases)


@pytest.mark.parametrize("k", sweep([33, 1]))
@pytest.mark.parametrize("m", sweep([1023, 1, 7]))
def test_odd_shapes(ranks: RanksFixture, world: int, m: int, k: int) -> None:
    cases = [Case(op=OP, shape=(m, n), k=(k,), biases=(F32,)) for n in (1, 5)]
    run_cases(ranks, world, each(*cases, algorithms=MATMUL_ALGORITHMS))


def test_no_rows_at_all(ranks: RanksFixture, world: int) -> None:
    case = Case(op=OP, shape=(0, 5), k=(33,), biases=(F32,))
    run_cases(ranks, world, exact(case, replace(case, shape=(2, 0, 5))))


def test_steps_through_a_small_workspace(ranks: RanksFixture, world: int) -> None:
    """Results larger than the workspace, and rows so wide that a step makes it grow."""
    steps = Case(op=OP, shape=(1500, 200), k=(6,), biases=(F32,))
    more = [replace(steps, residual=F32), replace(steps, shape=(700, 300))]
    wider = replace(steps, out_dtype=F32, residual=F32)
    grow = Case(op=OP, shape=(300, 1500), k=(5,))
    cases = exact(steps, *more, grow, steps, dtypes=(F32,)) + each(wider, grow, dtypes=(BF16,))
    run_cases(ranks, world, cases, SMALLEST_WORKSPACE)
