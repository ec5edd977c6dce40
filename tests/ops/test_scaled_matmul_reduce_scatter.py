"""``scaled_matmul_reduce_scatter`` on real ranks against float64: exact for small integers with
powers of two as scales, else within the derived bound of support/scaled.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.cases import MATMUL_ALGORITHMS, QUICK_WORLDS, RanksFixture
from tests.support.scaled import (
    E4M3,
    E5M2,
    F16,
    F32,
    SCALES,
    SCATTER,
    ScaledCase,
    each,
    uneven,
)
from tests.support.scaled_run import run_cases

pytestmark = pytest.mark.parametrize("world", QUICK_WORLDS)


def test_every_dtype_by_every_algorithm(ranks: RanksFixture, world: int) -> None:
    cases = [
        ScaledCase(op=SCATTER, rows=(6 * world,), n=(300,), scales="rows", x_dtype=x, w_dtype=w)
        for x, w in ((E4M3, E4M3), (E5M2, E4M3), (E5M2, E5M2))
    ]
    for out, wire in ((F32, None), (F16, None), (F16, F32), (None, F32)):
        cases.append(replace(cases[0], out=out, wire=wire))
    run_cases(ranks, world, each(*cases, algorithms=MATMUL_ALGORITHMS))


def test_every_kind_of_scales(ranks: RanksFixture, world: int) -> None:
    """Each rank has scales of its own, and a K of its own."""
    cases = [
        ScaledCase(op=SCATTER, rows=(4 * world,), n=(9,), k=k, scales=scales, out=out)
        for scales in SCALES
        for k, out in ((64, None), (160, F32))
    ]
    cases += [replace(cases[0], k=37), replace(cases[0], k=37, scales="rows")]
    run_cases(ranks, world, each(*cases, algorithms=("direct", "pipelined")))


@pytest.mark.thorough
def test_bias_residual_and_layouts(ranks: RanksFixture, world: int) -> None:
    case = ScaledCase(op=SCATTER, rows=(3 * world,), n=(260,), scales="rows", bias=True)
    full = replace(case, residual=True)
    cases = [case, full, replace(full, out=F32), replace(full, wire=F32, scales="blocks")]
    cases += [
        replace(full, layout=layout, scales=scales)
        for layout in ("sliced", "transposed")
        for scales in ("tensor", "rows", "blocks")
    ]
    cases += [replace(full, rows=rows) for rows in ((0,), (world,), (world, 2, 3))]
    run_cases(ranks, world, each(*cases))


def test_uneven_shards_and_other_dims(ranks: RanksFixture, world: int) -> None:
    cases = []
    for scales in ("tensor", "rows", "blocks", "swizzled"):
        case = ScaledCase(op=SCATTER, rows=(11,), scales=scales, sizes=uneven(11, world))
        between = replace(case, rows=(2, 11, 3), dim=1, bias=True, residual=True)
        cases += [case, between, replace(between, rows=(3, 2 * world), sizes=None)]
    run_cases(ranks, world, each(*cases))
