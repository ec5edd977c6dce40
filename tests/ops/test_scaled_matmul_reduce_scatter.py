"""``scaled_matmul_reduce_scatter`` on real ranks against float64: exact for small integers with
powers of two as scales, else within the derived bound of support/scaled.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.cases import MATMUL_ALGORITHMS, QUICK_WORLDS, RanksFixture
from tests.support.scaled import (
    SCATTER,
    ScaledCase,
    cases_of_dtypes,
    cases_of_layouts,
    cases_of_scales,
    each,
    uneven,
)
from tests.support.scaled_run import run_cases

pytestmark = pytest.mark.parametrize("world", QUICK_WORLDS)


def test_every_dtype_by_every_algorithm(ranks: RanksFixture, world: int) -> None:
    run_cases(ranks, world, each(*cases_of_dtypes(SCATTER, world), algorithms=MATMUL_ALGORITHMS))


def test_every_kind_of_scales(ranks: RanksFixture, world: int) -> None:
    algorithms = ("direct", "pipelined")
    run_cases(ranks, world, each(*cases_of_scales(SCATTER, world), algorithms=algorithms))


@pytest.mark.thorough
def test_bias_residual_and_layouts(ranks: RanksFixture, world: int) -> None:
    run_cases(ranks, world, each(*cases_of_layouts(SCATTER, world)))


def test_uneven_shards_and_other_dims(ranks: RanksFixture, world: int) -> None:
    cases = []
    for scales in ("tensor", "rows", "blocks", "swizzled"):
        case = ScaledCase(op=SCATTER, rows=(11,), scales=scales, sizes=uneven(11, world))
        between = replace(case, rows=(2, 11, 3), dim=1, bias=True, residual=True)
        cases += [case, between, replace(between, rows=(3, 2 * world), sizes=None)]
    run_cases(ranks, world, each(*cases))
