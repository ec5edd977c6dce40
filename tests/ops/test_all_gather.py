"""``all_gather`` on real ranks: the very bits, along any dim."""

from __future__ import annotations

import functools
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

OP = "all_gather"

pytestmark = pytest.mark.parametrize("world", QUICK_WORLDS)
run = functools.partial(run_each, integers=(False,))


def test_every_dtype_by_every_algorithm(ranks: RanksFixture, world: int) -> None:
    case, dtypes = Case(op=OP, shape=(60, 33)), (*DTYPES, torch.float64)
    run(ranks, world, case, dtypes=dtypes, algorithms=COLLECTIVE_ALGORITHMS)


def test_any_dim_is_gathered(ranks: RanksFixture, world: int) -> None:
    shapes = [(12,), (12, 12), (12, 3, 12), (2, 12, 1, 12), (12, 12, 2, 3), (1, 12, 1, 1)]
    cases = along_each_dim(Case(op=OP, shape=shapes[0]), shapes, 12)
    run(ranks, world, *cases)


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
    run(ranks, world, *cases)


def test_uneven_shards(ranks: RanksFixture, world: int) -> None:
    cases = [
        Case(op=OP, shape=shape, dim=dim, sizes=sizes)
        for sizes in uneven_splits(23, world)
        for shape, dim in [((23,), 0), ((23, 5), 0), ((5, 23), 1), ((2, 23, 3), 1)]
    ]
    run(ranks, world, *cases)


@pytest.mark.parametrize("rows", sweep([1023, 1, 7]))
def test_odd_shapes(ranks: RanksFixture, world: int, rows: int) -> None:
    """So many rows on each rank, and over all ranks."""
    cases = [Case(op=OP, shape=(rows * world, k)) for k in (1, 33)]
    cases += [Case(op=OP, shape=(rows, 3), sizes=sizes) for sizes in uneven_splits(rows, world)]
    run(ranks, world, *cases)


def test_nothing_to_gather(ranks: RanksFixture, world: int) -> None:
    cases = [Case(op=OP, shape=(0, 5)), Case(op=OP, shape=(4 * world, 0))]
    run(ranks, world, *cases, Case(op=OP, shape=(3, 0, 5), dim=1, sizes=(0,) * world))


@pytest.mark.thorough
def test_chunks_through_a_small_workspace(ranks: RanksFixture, world: int) -> None:
    """Shards of several chunks (csrc/host/collectives.cpp), and a result that is streamed."""
    rows = 700 * world
    cases = [Case(op=OP, shape=(rows, 500)), Case(op=OP, shape=(3, rows, 170), dim=1)]
    cases += [Case(op=OP, shape=(1500, 333), sizes=sizes) for sizes in uneven_splits(1500, world)]
    small: dict[str, Any] = {"workspace_bytes": SMALLEST_WORKSPACE}
    run(ranks, world, *cases, dtypes=(torch.float32,), **small)
    run(ranks, world, Case(op=OP, shape=(1200, 1801)), dtypes=(torch.float32,))
