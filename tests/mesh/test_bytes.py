"""The bytes that a plan names are those that its ranks send, counted in the transport: `ring` sends
every byte through ``PeerLinks``, and none twice (algorithms/test_ring.py)."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

import tpkernels
from tests.support.cases import RanksFixture
from tests.support.meshes import S0, S1, P, Placements, R, draw, make_mesh, placements_of
from tests.support.ranked import apart, bytes_sent
from tpkernels import mesh as tpmesh

SHAPE = (7, 5, 6)

Operands = tuple[Placements, Placements, Placements]
Dtypes = tuple[torch.dtype, torch.dtype | None]  # of the operands and of partials that travel

DEFAULT: Dtypes = (torch.float32, None)


def moved_job(
    mesh_shape: tuple[int, ...],
    operands: list[Operands],
    shape: tuple[int, int, int] = SHAPE,
    dtypes: Dtypes = DEFAULT,
) -> list[tuple[str, int, int]]:
    """(what, bytes in the plan, bytes that this rank sends) of every plan of each product, between
    ranks that share no memory."""
    (m, k, n), (dtype, wire) = shape, dtypes
    results = []
    with apart(), bytes_sent() as sent:
        mesh = make_mesh(mesh_shape)  # the default group would stay apart for later tests
        for x, w, out in operands:
            a = draw("x", (m, k), mesh, x, dtype).sharded
            b = draw("w", (k, n), mesh, w, dtype).sharded
            for plan in tpmesh.plans(a, b, out, wire_dtype=wire):
                before = sent.total()
                tpkernels.sharded_matmul(
                    a, b, out, plan.strategy, wire_dtype=wire, algorithm="ring"
                )
                results.append((f"{x} {w} {out}: {plan}", plan.nbytes, sent.total() - before))
    return results


ONE_DIM: list[Operands] = [
    ((x,), (w,), (out,)) for x, w, out in itertools.product((R, S0, S1, P), repeat=3)
]
TWO_DIMS: list[Operands] = [
    ((S0, S1), (S0, R), (S0, R)),
    ((S1, R), (R, S0), (R, R)),
    ((S0, S0), (S1, S1), (R, S1)),
    ((P, S0), (S1, P), (S1, S0)),
]
EACH_ON_TWO: list[Operands] = [
    (x, w, out)
    for i, x in enumerate(placements_of(2))
    for j, w in enumerate(placements_of(2))
    for o, out in enumerate(placements_of(2))
    if (i + 3 * j + 5 * o) % 16 == 0
]


IN_FP32 = (torch.bfloat16, torch.float32)

SENT: list[tuple[Any, ...]] = [
    ((2,), ONE_DIM[5::6]),
    ((3,), ONE_DIM[::4]),
    ((2, 2), TWO_DIMS),
    ((4,), ONE_DIM),
    ((3, 2), TWO_DIMS),
    ((2, 2), EACH_ON_TWO),
    ((2,), [((S1,), (S0,), (R,)), ((P,), (S1,), (S0,))], SHAPE, IN_FP32),
    # Rounded late, by a step along the dim of one rank.
    ((1, 2), [((S1, S0), (S0, R), (R, R))], SHAPE, IN_FP32),
    ((2, 2), [*TWO_DIMS[1:], ((S1, S1), (S0, S0), (P, R))], SHAPE, IN_FP32),
]


def _tier(number: int) -> Any:
    return () if number == 0 else pytest.mark.thorough if number < 2 else pytest.mark.slow


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=_tier(number)) for number, case in enumerate(SENT)]
)
def test_as_many_bytes_travel_as_planned(ranks: RanksFixture, case: tuple[Any, ...]) -> None:
    by_rank = ranks(math.prod(case[0])).run(moved_job, *case, timeout=280)
    moved = 0
    for plans in zip(*by_rank, strict=True):
        what, planned, _ = plans[0]
        total = sum(bytes_of_rank for _, _, bytes_of_rank in plans)
        assert total == planned, f"{what}: {total} bytes"
        moved += total
    assert moved
