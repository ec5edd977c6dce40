"""The bytes that a plan names are those that its ranks send, counted in the transport, or read of
their peers' memory.

`ring` sends every byte through ``PeerLinks``, and none twice (algorithms/test_ring.py). With
`direct` and `pipelined` ranks read shared memory, and count what they read. `unfused` moves the
same tensors by the backend's collectives, where nothing counts them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import tpkernels
from tests.support.cases import RanksFixture
from tests.support.meshes import S0, S1, P, Placements, R, draw, make_mesh, placements_of
from tests.support.ranked import apart
from tests.support.tiers import thorough
from tpkernels import groups
from tpkernels import mesh as tpmesh
from tpkernels.transport import point_to_point as links
from tpkernels.transport.point_to_point import PeerLinks

SHAPE = (7, 5, 6)
# Of which no tensor is reduced one-shot by three ranks: all have more than 16 KiB.
LARGE = (67, 65, 66)

Operands = tuple[Placements, Placements, Placements]
Dtypes = tuple[torch.dtype, torch.dtype | None]  # of the operands and of partials that travel

DEFAULT: Dtypes = (torch.float32, None)


def sent_job(
    mesh_shape: tuple[int, ...], operands: list[Operands], dtypes: Dtypes = DEFAULT
) -> list[tuple[str, int, int]]:
    """(what, bytes in the plan, bytes that this rank sends) of every plan of each product."""
    sent = 0
    begin = PeerLinks._start

    def count(link: PeerLinks, sends: Any, receives: Any, tag: int) -> Any:
        nonlocal sent
        if tag != links._GREETING_TAG:
            sent += sum(tensor.nbytes for tensor, _ in sends)
        return begin(link, sends, receives, tag)

    (m, k, n), (dtype, wire) = SHAPE, dtypes
    results = []
    with apart():
        mesh = make_mesh(mesh_shape)  # the default group would stay apart for later tests
        PeerLinks._start = count  # type: ignore[method-assign]
        try:
            for x, w, out in operands:
                a = draw("x", (m, k), mesh, x, dtype).sharded
                b = draw("w", (k, n), mesh, w, dtype).sharded
                for plan in tpmesh.plans(a, b, out, wire_dtype=wire):
                    sent = 0
                    tpkernels.sharded_matmul(
                        a, b, out, plan.strategy, wire_dtype=wire, algorithm="ring"
                    )
                    results.append((f"{x} {w} {out}: {plan}", plan.nbytes, sent))
        finally:
            PeerLinks._start = begin  # type: ignore[method-assign]
    return results


def read_job(
    mesh_shape: tuple[int, ...],
    operands: list[Operands],
    algorithm: str,
    shape: tuple[int, int, int],
    dtypes: Dtypes = DEFAULT,
) -> list[tuple[str, int, int]]:
    """(what, bytes in the plan, bytes that this rank reads) of every plan of each product."""
    (m, k, n), (dtype, wire), mesh = shape, dtypes, make_mesh(mesh_shape)
    spaces = [groups.get(groups.name_of((mesh, dim))).workspace for dim in range(mesh.ndim)]
    results = []
    for x, w, out in operands:
        a = draw("x", (m, k), mesh, x, dtype).sharded
        b = draw("w", (k, n), mesh, w, dtype).sharded
        for plan in tpmesh.plans(a, b, out, wire_dtype=wire):
            before = sum(space.bytes_read for space in spaces if space)
            tpkernels.sharded_matmul(a, b, out, plan.strategy, wire_dtype=wire, algorithm=algorithm)
            read = sum(space.bytes_read for space in spaces if space) - before
            results.append((f"{x} {w} {out}: {plan}", plan.nbytes, read))
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


@pytest.mark.parametrize(
    ("mesh_shape", "operands"),
    [
        pytest.param((2,), ONE_DIM[5::6], id="a few on 2"),
        *(
            pytest.param(shape, operands, id=f"{shape}", marks=marks)
            for shape, operands, marks in [
                ((3,), ONE_DIM[::4], pytest.mark.thorough),
                ((4,), ONE_DIM, pytest.mark.slow),
                ((2, 2), TWO_DIMS, pytest.mark.thorough),
                ((3, 2), TWO_DIMS, pytest.mark.slow),
            ]
        ),
        pytest.param((2, 2), EACH_ON_TWO, id="many on 2x2", marks=pytest.mark.slow),
    ],
)
def test_as_many_bytes_travel_as_planned(
    ranks: RanksFixture, mesh_shape: tuple[int, ...], operands: list[Operands]
) -> None:
    run(ranks, mesh_shape, operands, DEFAULT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh_shape", "operands"),
    [
        ((2,), [((S1,), (S0,), (R,)), ((P,), (S1,), (S0,))]),
        ((1, 2), [((S1, S0), (S0, R), (R, R))]),  # rounded by a step along the dim of one rank
        thorough((2, 2), [*TWO_DIMS[1:], ((S1, S1), (S0, S0), (P, R))]),
    ],
)
def test_partials_travel_in_fp32(
    ranks: RanksFixture, mesh_shape: tuple[int, ...], operands: list[Operands]
) -> None:
    run(ranks, mesh_shape, operands, (torch.bfloat16, torch.float32))


def run(
    ranks: RanksFixture, mesh_shape: tuple[int, ...], operands: list[Operands], dtypes: Dtypes
) -> None:
    by_rank = ranks(math.prod(mesh_shape)).run(sent_job, mesh_shape, operands, dtypes, timeout=280)
    compare(by_rank)


# Meshes on which at most two ranks reduce need no large tensors.
READ = [
    pytest.param((2,), ONE_DIM[5::6], SHAPE, id="a few on 2"),
    *(
        pytest.param(mesh, operands, shape, id=f"{mesh}", marks=marks)
        for mesh, operands, shape, marks in [
            ((3,), ONE_DIM[::4], LARGE, pytest.mark.thorough),
            ((2, 2), TWO_DIMS, SHAPE, pytest.mark.thorough),
            ((4,), ONE_DIM, LARGE, pytest.mark.slow),
            ((3, 2), TWO_DIMS, (97, 95, 96), pytest.mark.slow),
        ]
    ),
    pytest.param((2, 2), EACH_ON_TWO, SHAPE, id="many on 2x2", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["direct", "pipelined"])
@pytest.mark.parametrize(("mesh_shape", "operands", "shape"), READ)
def test_as_many_bytes_are_read_as_planned(
    ranks: RanksFixture,
    mesh_shape: tuple[int, ...],
    operands: list[Operands],
    shape: tuple[int, int, int],
    algorithm: str,
) -> None:
    world = math.prod(mesh_shape)
    compare(ranks(world).run(read_job, mesh_shape, operands, algorithm, shape, timeout=280))


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", ["direct"])
def test_partials_are_read_in_fp32(ranks: RanksFixture, algorithm: str) -> None:
    # Operands of bf16 are reduced one-shot below 8192 elements.
    shape, dtypes = (97, 95, 96), (torch.bfloat16, torch.float32)
    compare(ranks(3).run(read_job, (3,), ONE_DIM[1::3], algorithm, shape, dtypes, timeout=280))


@pytest.mark.thorough
def test_small_all_reduces_of_three_ranks_read_more(ranks: RanksFixture) -> None:
    """Each rank reads all of the others' addends, not a part of them and then the other sums."""
    by_rank = ranks(3).run(read_job, (3,), [((S1,), (S0,), (R,))], "direct", SHAPE)
    (planned, read), *_ = [
        (each[0][1], sum(one for _, _, one in each))
        for each in zip(*by_rank, strict=True)
        if "matmul + all-reduce" in each[0][0]
    ]
    whole = 4 * SHAPE[0] * SHAPE[2]
    assert (planned, read) == (2 * 2 * whole, 3 * 2 * whole)


def compare(by_rank: Sequence[list[tuple[str, int, int]]]) -> None:
    """The ranks' bytes in all with the plans'."""
    moved = 0
    for plans in zip(*by_rank, strict=True):
        what, planned, _ = plans[0]
        total = sum(sent for _, _, sent in plans)
        assert total == planned, f"{what}: {total} bytes"
        moved += total
    assert moved
