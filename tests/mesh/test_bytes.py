"""The bytes in a plan equal the bytes that its ranks send, counted in the transport. `ring` sends
every byte through ``PeerLinks``, exactly once (algorithms/test_ring.py)."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

import tpkernels
from tests.support.cases import RanksFixture
from tests.support.meshes import S0, S1, P, Placements, R, all_placements, draw, make_mesh
from tests.support.ranked import bytes_sent, separate_hosts
from tpkernels import mesh as tpmesh

SHAPE = (7, 5, 6)

Operands = tuple[Placements, Placements, Placements]
Dtypes = tuple[torch.dtype, torch.dtype | None]  # dtypes of the operands and of sent partial sums

DEFAULT: Dtypes = (torch.float32, None)


def sent_bytes_job(
    mesh_shape: tuple[int, ...],
    operands: list[Operands],
    shape: tuple[int, int, int] = SHAPE,
    dtypes: Dtypes = DEFAULT,
) -> list[tuple[str, int, int]]:
    """Run every plan of each matmul between ranks that share no memory. Return (plan, bytes in the
    plan, bytes sent by this rank) for each."""
    (m, k, n), (dtype, wire) = shape, dtypes
    results = []
    with separate_hosts(), bytes_sent() as sent:
        mesh = make_mesh(mesh_shape)  # new groups: the default group would stay separated
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
SAMPLE_OF_TWO_DIMS: list[Operands] = [
    (x, w, out)
    for i, x in enumerate(all_placements(2))
    for j, w in enumerate(all_placements(2))
    for o, out in enumerate(all_placements(2))
    if (i + 3 * j + 5 * o) % 16 == 0
]


IN_FP32 = (torch.bfloat16, torch.float32)

SENT: list[tuple[Any, ...]] = [
    ((2,), ONE_DIM[5::6]),
    ((3,), ONE_DIM[::4]),
    ((2, 2), TWO_DIMS),
    ((4,), ONE_DIM),
    ((3, 2), TWO_DIMS),
    ((2, 2), SAMPLE_OF_TWO_DIMS),
    ((2,), [((S1,), (S0,), (R,)), ((P,), (S1,), (S0,))], SHAPE, IN_FP32),
    # Rounding happens late, in a step along the mesh dim of one rank.
    ((1, 2), [((S1, S0), (S0, R), (R, R))], SHAPE, IN_FP32),
    ((2, 2), [*TWO_DIMS[1:], ((S1, S1), (S0, S0), (P, R))], SHAPE, IN_FP32),
]


def _tier(number: int) -> Any:
    return () if number == 0 else pytest.mark.thorough if number < 2 else pytest.mark.slow


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=_tier(number)) for number, case in enumerate(SENT)]
)
def test_sent_bytes_match_the_plan(ranks: RanksFixture, case: tuple[Any, ...]) -> None:
    by_rank = ranks(math.prod(case[0])).run(sent_bytes_job, *case, timeout=280)
    total_sent = 0
    for plans in zip(*by_rank, strict=True):
        plan, planned, _ = plans[0]
        total = sum(local_bytes for _, _, local_bytes in plans)
        assert total == planned, f"{plan}: {total} bytes"
        total_sent += total
    assert total_sent
