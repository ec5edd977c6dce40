"""``all_reduce`` and ``all_reduce_`` on real ranks against float64: exact for integers, else within
the derived bound of support/reference.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.cases import (
    COLLECTIVE_ALGORITHMS,
    DTYPES,
    QUICK_WORLDS,
    Case,
    RanksFixture,
)
from tests.support.ranked import SMALLEST_WORKSPACE, run_each
from tests.support.tiers import sweep

OPS = ("all_reduce", "all_reduce_")
F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
ONE_SHOT_BYTES = 16 << 10  # csrc/host/collectives.h: above, every rank sums a part

pytestmark = pytest.mark.parametrize("world", QUICK_WORLDS)


@pytest.mark.parametrize("op", OPS)
def test_every_dtype_by_every_algorithm(ranks: RanksFixture, world: int, op: str) -> None:
    shapes = [(60, 33), (200, 77), (1,), (3, 1, 2), ()]
    cases = [Case(op=op, shape=shape) for shape in shapes]
    run_each(ranks, world, *cases, dtypes=(*DTYPES, F64), algorithms=COLLECTIVE_ALGORITHMS)


def test_either_side_of_one_shot(ranks: RanksFixture, world: int) -> None:
    for dtype in (F32, BF16):
        most = ONE_SHOT_BYTES // dtype.itemsize
        cases = [Case(op="all_reduce", shape=(most + more,)) for more in (-1, 0, 1, 63, 65)]
        run_each(ranks, world, *cases, dtypes=(dtype,))


@pytest.mark.parametrize(
    "dtype,out_dtype", sweep([(BF16, F32), (F16, F32), (F32, BF16), (F16, BF16)])
)
def test_out_dtype(
    ranks: RanksFixture, world: int, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    case = Case(op="all_reduce", shape=(24, 7), out_dtype=out_dtype)
    run_each(ranks, world, case, replace(case, shape=(301, 77)), dtypes=(dtype,))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("layout", sweep(["sliced", "transposed", "offset"]))
def test_strided_inputs(ranks: RanksFixture, world: int, layout: str, op: str) -> None:
    shapes = [(13,), (24, 5), (130, 77), (3, 12, 7)]
    cases = [Case(op=op, shape=shape, layout=layout) for shape in shapes]
    run_each(ranks, world, *cases, integers=(True,))


@pytest.mark.parametrize("rows", sweep([1023, 1, 7]))
def test_odd_shapes(ranks: RanksFixture, world: int, rows: int) -> None:
    run_each(ranks, world, *(Case(op="all_reduce", shape=(rows, k)) for k in (1, 33)))


@pytest.mark.parametrize("op", OPS)
def test_nothing_to_reduce(ranks: RanksFixture, world: int, op: str) -> None:
    run_each(ranks, world, Case(op=op, shape=(0, 5)), Case(op=op, shape=(0,)), integers=(True,))


@pytest.mark.thorough
@pytest.mark.parametrize("op", OPS)
def test_chunks_through_a_small_workspace(ranks: RanksFixture, world: int, op: str) -> None:
    """Tensors of several chunks (csrc/host/collectives.cpp)."""
    case = Case(op=op, shape=(777, 801))
    run_each(
        ranks, world, case, dtypes=(F32,), integers=(True,), workspace_bytes=SMALLEST_WORKSPACE
    )
    if op == "all_reduce":
        wider, narrower = replace(case, out_dtype=F32), replace(case, out_dtype=BF16)
        for one, dtype in [(wider, BF16), (narrower, F32)]:
            run_each(ranks, world, one, dtypes=(dtype,), workspace_bytes=SMALLEST_WORKSPACE)
    if world == 2:  # a result that is streamed, and several steps of the unfused way
        large = Case(op=op, shape=(2200, 1001))
        run_each(ranks, world, large, dtypes=(F32,), integers=(True,))
