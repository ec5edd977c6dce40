"""The bytes that a plan names are those that its ranks send, counted in the transport, or read of
their peers' memory.

`ring` sends every byte through ``PeerLinks``, and none twice (algorithms/test_ring.py). With
`direct` and `pipelined` ranks read shared memory, and count what they read. `unfused` moves the
same tensors by the backend's collectives, where nothing counts them.
"""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import tpkernels
from tests.support.cases import RanksFixture
from tests.support.meshes import S0, S1, P, Placements, R, draw, make_mesh, placements_of
from tests.support.ranked import apart, bytes_sent
from tpkernels import groups
from tpkernels import mesh as tpmesh

SHAPE = (7, 5, 6)
# Of which no tensor is reduced one-shot by three ranks: all have more than 16 KiB.
LARGE = (67, 65, 66)

Operands = tuple[Placements, Placements, Placements]
Dtypes = tuple[torch.dtype, torch.dtype | None]  # of the operands and of partials that travel

DEFAULT: Dtypes = (torch.float32, None)


def moved_job(
    mesh_shape: tuple[int, ...],
    operands: list[Operands],
    algorithm: str,
    shape: tuple[int, int, int] = SHAPE,
    dtypes: Dtypes = DEFAULT,
) -> list[tuple[str, int, int]]:
    """(what, bytes in the plan, bytes that this rank sends or reads) of every plan of each
    product. With `ring` the ranks share no memory."""
    (m, k, n), (dtype, wire) = shape, dtypes
    results = []
    with apart() if algorithm == "ring" else nullcontext(), bytes_sent() as sent:
        mesh = make_mesh(mesh_shape)  # the default group would stay apart for later tests
        spaces = [groups.get(groups.name_of((mesh, dim))).workspace for dim in range(mesh.ndim)]

        def total() -> int:
            return sent.total() + sum(space.bytes_read for space in spaces if space)

        for x, w, out in operands:
            a = draw("x", (m, k), mesh, x, dtype).sharded
            b = draw("w", (k, n), mesh, w, dtype).sharded
            for plan in tpmesh.plans(a, b, out, wire_dtype=wire):
                before = total()
                tpkernels.sharded_matmul(
                    a, b, out, plan.strategy, wire_dtype=wire, algorithm=algorithm
                )
                results.append((f"{x} {w} {out}: {plan}", plan.nbytes, total() - before))
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

# With `direct` and `pipelined`, meshes on which at most two ranks reduce need no large tensors.
SENT: list[tuple[Any, ...]] = [
    ((2,), ONE_DIM[5::6], "ring"),
    ((3,), ONE_DIM[::4], "ring"),
    ((2, 2), TWO_DIMS, "ring"),
    ((3,), ONE_DIM[1::3], "direct", (97, 95, 96), IN_FP32),
    ((4,), ONE_DIM, "ring"),
    ((3, 2), TWO_DIMS, "ring"),
    ((2, 2), EACH_ON_TWO, "ring"),
    ((2,), [((S1,), (S0,), (R,)), ((P,), (S1,), (S0,))], "ring", SHAPE, IN_FP32),
    # Rounded late, by a step along the dim of one rank.
    ((1, 2), [((S1, S0), (S0, R), (R, R))], "ring", SHAPE, IN_FP32),
    ((2, 2), [*TWO_DIMS[1:], ((S1, S1), (S0, S0), (P, R))], "ring", SHAPE, IN_FP32),
]
for _algorithm in ("direct", "pipelined"):
    SENT += [
        ((2,), ONE_DIM[5::6], _algorithm),
        ((2, 2), [*TWO_DIMS, *EACH_ON_TWO], _algorithm),
        ((3,), ONE_DIM[::4], _algorithm, LARGE),
        ((4,), ONE_DIM, _algorithm, LARGE),
        ((3, 2), TWO_DIMS, _algorithm, (97, 95, 96)),
    ]


def _tier(number: int) -> Any:
    return () if number == 0 else pytest.mark.thorough if number < 4 else pytest.mark.slow


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
