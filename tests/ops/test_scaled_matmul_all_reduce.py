"""``scaled_matmul_all_reduce`` on real ranks against float64: exact for small integers with
powers of two as scales, else within the derived bound of support/scaled.py."""

from __future__ import annotations

import pytest

from tests.support.cases import MATMUL_ALGORITHMS, QUICK_WORLDS, RanksFixture
from tests.support.scaled import (
    REDUCE,
    ScaledCase,
    cases_of_dtypes,
    cases_of_layouts,
    cases_of_scales,
    each,
)
from tests.support.scaled_run import run_cases

pytestmark = pytest.mark.parametrize("world", QUICK_WORLDS)


def test_every_dtype_by_every_algorithm(ranks: RanksFixture, world: int) -> None:
    run_cases(ranks, world, each(*cases_of_dtypes(REDUCE, world), algorithms=MATMUL_ALGORITHMS))


def test_every_kind_of_scales(ranks: RanksFixture, world: int) -> None:
    algorithms = ("direct", "pipelined")
    run_cases(ranks, world, each(*cases_of_scales(REDUCE, world), algorithms=algorithms))


@pytest.mark.thorough
def test_bias_residual_and_layouts(ranks: RanksFixture, world: int) -> None:
    run_cases(ranks, world, each(*cases_of_layouts(REDUCE, world)))


@pytest.mark.thorough
def test_other_shapes(ranks: RanksFixture, world: int) -> None:
    cases = []
    for scales in ("tensor", "rows", "swizzled"):
        for rows in ((1,), (11,), (2, 5, 3), (200,)):
            cases.append(ScaledCase(op=REDUCE, rows=rows, scales=scales, bias=True))
    run_cases(ranks, world, each(*cases))
