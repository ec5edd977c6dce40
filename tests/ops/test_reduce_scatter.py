"""``reduce_scatter`` on real ranks against float64: exact for integers, else within the
derived bound of support/reference.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.cases import (
    COLLECTIVE_ALGORITHMS,
    DTYPES,
    QUICK_WORLDS,
    Case,
    RanksFixture,
    along_each_dim,
    uneven_splits,
)
from tests.support.ranked import SMALLEST_WORKSPACE, run_each
from tests.support.tiers import sweep

OP = "reduce_scatter"
F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64

pytestmark = pytest.mark.parametrize("world", QUICK_WORLDS)


def test_every_dtype_by_every_algorithm(ranks: RanksFixture, world: int) -> None:
    case, dtypes = Case(op=OP, shape=(60, 33)), (*DTYPES, F64)
    run_each(ranks, world, case, dtypes=dtypes, algorithms=COLLECTIVE_ALGORITHMS)


def test_any_dim_is_scattered(ranks: RanksFixture, world: int) -> None:
    shapes = [(12,), (12, 12), (12, 3, 12), (2, 12, 1, 12), (12, 12, 2, 3), (1, 12, 1, 1)]
    cases = along_each_dim(Case(op=OP, shape=shapes[0]), shapes, 12)
    run_each(ranks, world, *cases, integers=(True,))


@pytest.mark.parametrize(
    "dtype,out_dtype", sweep([(BF16, F32), (F16, F32), (F32, BF16), (F16, BF16)])
)
def test_out_dtype(
    ranks: RanksFixture, world: int, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    case = Case(op=OP, shape=(24, 7), out_dtype=out_dtype)
    run_each(ranks, world, case, replace(case, shape=(3, 24, 5), dim=1), dtypes=(dtype,))


@pytest.mark.parametrize("layout", sweep(["sliced", "transposed", "offset"]))
def test_strided_inputs(ranks: RanksFixture, world: int, layout: str) -> None:
    cases = [
        Case(op=OP, shape=shape, dim=dim, layout=layout)
        for shape, dim in [
            ((12,), 0),
            ((24, 5), 0),
            ((5, 24), 1),
            ((3, 12, 7), 1),
            ((2, 12, 3, 4), 1),
        ]
    ]
    run_each(ranks, world, *cases, integers=(True,))


def test_uneven_shards(ranks: RanksFixture, world: int) -> None:
    cases = [
        Case(op=OP, shape=shape, dim=dim, sizes=sizes)
        for sizes in uneven_splits(23, world)
        for shape, dim in [((23,), 0), ((23, 5), 0), ((5, 23), 1), ((2, 23, 3), 1)]
    ]
    run_each(ranks, world, *cases, integers=(True,))


@pytest.mark.parametrize("rows", sweep([1023, 1, 7]))
def test_odd_shapes(ranks: RanksFixture, world: int, rows: int) -> None:
    """So many rows for each rank, and over all ranks."""
    cases = [Case(op=OP, shape=(rows * world, k)) for k in (1, 33)]
    cases += [Case(op=OP, shape=(rows, 3), sizes=sizes) for sizes in uneven_splits(rows, world)]
    run_each(ranks, world, *cases)


def test_nothing_to_reduce(ranks: RanksFixture, world: int) -> None:
    cases = [Case(op=OP, shape=(0, 5)), Case(op=OP, shape=(4 * world, 0))]
    run_each(
        ranks,
        world,
        *cases,
        Case(op=OP, shape=(3, 0, 5), dim=1, sizes=(0,) * world),
        integers=(True,),
    )


def test_chunks_through_a_small_workspace(ranks: RanksFixture, world: int) -> None:
    """Shards of several chunks (csrc/host/collectives.cpp), also with gaps between their blocks."""
    cases = [Case(op=OP, shape=(500 * world, 333)), Case(op=OP, shape=(5, 100 * world, 333), dim=1)]
    cases += [Case(op=OP, shape=(700, 333), sizes=sizes) for sizes in uneven_splits(700, world)]
    options: dict[str, Any] = {"integers": (True,), "workspace_bytes": SMALLEST_WORKSPACE}
    run_each(ranks, world, *cases, dtypes=(F32,), **options)
    run_each(ranks, world, replace(cases[1], out_dtype=F32), dtypes=(BF16,), **options)
    if world == 2:  # from 4 MiB a rank on the unfused way moves in steps too
        run_each(
            ranks, world, Case(op=OP, shape=(1100, 1001), sizes=(0, 1100)), dtypes=(F32,), **options
        )
