"""Results of the ops on real ranks against float64: exact for integers, else within the derived
bounds of ops/reference.py. Every test is a list of cases of one op; the op's record says which
it has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.cases import (
    COLLECTIVE_ALGORITHMS,
    DTYPES,
    MATMUL_ALGORITHMS,
    QUICK_WORLDS,
    Case,
    RanksFixture,
    along_each_dim,
    each,
    exact,
    uneven_splits,
)
from tests.support.ranked import SMALLEST_WORKSPACE, run_cases
from tests.support.tiers import sweep
from tpkernels.planning.op_spec import OPS, OpSpec

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
ONE_SHOT_BYTES = 16 << 10  # csrc/host/collectives.h: above, every rank sums a part
WHOLE = ("unfused", "direct", "auto")  # what can gather K itself
NAMES = [spec.name for spec in OPS.values() if spec.gathers or spec.reduces if not spec.scaled]
SPLITS = [name for name in NAMES if not OPS[name].keeps_sum]
SUMS = [name for name in NAMES if OPS[name].reduces]
IN_PLACE = "all_reduce_"


def spec_of(op: str) -> OpSpec:
    return OPS[op.removesuffix("_")]


def made(op: str, *shape: int, **more: Any) -> Case:
    """A case of that shape; of an op with a matmul, with odd factors."""
    spec = spec_of(op)
    if spec.has_matmul:
        more = ({"n": (17, 3)} if spec.gathers else {"k": (33, 1, 40)}) | more
    return Case(op=op, shape=shape, **more)


def algorithms_of(op: str) -> tuple[str, ...]:
    return MATMUL_ALGORITHMS if spec_of(op).has_matmul else COLLECTIVE_ALGORITHMS


pytestmark = pytest.mark.parametrize("world", QUICK_WORLDS)


@pytest.mark.parametrize("op", [*NAMES, IN_PLACE])
def test_every_dtype_by_every_algorithm(ranks: RanksFixture, world: int, op: str) -> None:
    spec, cases = spec_of(op), [made(op, 60, 33)]
    if spec.keeps_sum and not spec.has_matmul:
        cases += [made(op, *shape) for shape in ((200, 77), (1,))]
        cases += [] if spec.normed else [made(op)]
    run_cases(ranks, world, each(*cases, dtypes=(*DTYPES, F64), algorithms=algorithms_of(op)))


@pytest.mark.parametrize("op", [*NAMES, IN_PLACE])
def test_any_dim(ranks: RanksFixture, world: int, op: str) -> None:
    """Leading dims, and each dim of 12 that can be split, of elements of both sizes."""
    spec, dtypes = spec_of(op), (F32, BF16)
    shapes = [(12, 12), (12, 3, 12), (2, 12, 1, 12), (12, 12, 2, 3), (1, 12, 1, 1), (5, 12)]
    if spec.keeps_sum:
        every = [made(op, *shape) for shape in [*shapes, (1, 1, 1, 7), (5, 300)]]
        cases = exact(*every, dtypes=dtypes)
    else:
        every = along_each_dim(made(op, 12), [*shapes, *([] if spec.has_matmul else [(12,)])], 12)
        last = [case for case in every if case.dim == len(case.shape) - 1 and case.n]
        cases = exact(
            *(replace(case, return_gathered=bool(case.n)) for case in every if case not in last),
            dtypes=dtypes,
        )
        cases += each(*last, dtypes=dtypes, algorithms=WHOLE, integers=(True,))
    run_cases(ranks, world, cases)


@pytest.mark.parametrize("op", [*NAMES, IN_PLACE])
@pytest.mark.parametrize("layout", sweep(["sliced", "transposed", "offset"]))
def test_strides(ranks: RanksFixture, world: int, layout: str, op: str) -> None:
    """Of x, of the weights and of what is added to a sum."""
    spec, cases = spec_of(op), []
    for weights in ("plain", "linear", "sliced") if spec.has_matmul else ("plain",):
        case = made(op, 24, 24, layout=layout, weight_layout=weights)
        blocks = replace(case, shape=(3, 12, 20), dim=0 if spec.keeps_sum else 1)
        if spec.has_matmul and spec.reduces:
            blocks = replace(blocks, biases=(F32,), residual=F32)
        if spec.normed:
            case, blocks = replace(case, norm=F32), replace(blocks, residual=F32)
        cases += [*exact(case), *exact(blocks, dtypes=(F32,))]
        if spec.scatters:
            cases += exact(replace(case, dim=1))
    run_cases(ranks, world, cases)


@pytest.mark.parametrize("op", SPLITS)
def test_uneven_shards(ranks: RanksFixture, world: int, op: str) -> None:
    spec, cases = OPS[op], []
    for sizes in uneven_splits(23, world):
        case = made(op, 23, 8, sizes=sizes, return_gathered=op == "all_gather_matmul")
        if spec.has_matmul and spec.reduces:
            case = replace(case, biases=(F32,), residual=F32)
        dtypes = (F32,) if case.residual else DTYPES
        cases += exact(case, replace(case, shape=(2, 23, 3, 8), dim=1), dtypes=dtypes)
        columns = replace(case, shape=(6, 23), dim=1)
        algorithms = WHOLE if case.n else algorithms_of(op)
        cases += each(columns, dtypes=dtypes, algorithms=algorithms, integers=(True,))
    run_cases(ranks, world, cases)


@pytest.mark.parametrize("op", NAMES)
def test_odd_shapes(ranks: RanksFixture, world: int, op: str) -> None:
    """So many rows for each rank, and over all ranks; single columns."""
    split, cases = not OPS[op].keeps_sum, []
    for rows in (1023, 1, 7):
        total = rows * world if split else rows
        two = made(op, total, 1), made(op, total, 5)
        cases += each(*two, dtypes=(F32,), integers=(False,)) + exact(*two, dtypes=(F32, BF16))
        if split:
            some = [made(op, rows, 3, sizes=sizes) for sizes in uneven_splits(rows, world)]
            cases += exact(*some, dtypes=(F32,))
    run_cases(ranks, world, cases)


@pytest.mark.parametrize("op", [*NAMES, IN_PLACE])
def test_nothing(ranks: RanksFixture, world: int, op: str) -> None:
    """No rows, and no columns where there is no matmul."""
    spec = spec_of(op)
    cases = [made(op, 0, 5), made(op, 2, 0, 5)]
    if not spec.keeps_sum:
        cases[1] = replace(cases[1], dim=1, sizes=(0,) * world)
    if not (spec.has_matmul or spec.normed):
        cases.append(made(op, 4 * world, 0))
    run_cases(ranks, world, exact(*cases))


@pytest.mark.parametrize("op", [op for op in SUMS if OPS[op].has_matmul or OPS[op].normed])
def test_bias_and_residual(ranks: RanksFixture, world: int, op: str) -> None:
    """Along every dim: a bias belongs to columns, of which a rank may have some only."""
    spec, cases = OPS[op], []
    for dtype in (BF16,) if spec.has_matmul and spec.normed else DTYPES:
        for dim in range(3 if spec.scatters else 1):
            case = made(op, 12, 12, 24, dim=dim, residual=dtype)
            some = [case, *([] if dim else [replace(case, shape=(12, 90, 72))])]  # above one-shot
            if spec.has_matmul:
                some += [replace(case, residual=None, biases=(dtype,))]
                some += [replace(one, biases=(F32,)) for one in some]
            if spec.normed:
                some += [replace(one, norm=F32) for one in some]
            cases += each(*some, dtypes=(dtype,))
    run_cases(ranks, world, cases)


def test_biases_of_products_that_share_a_gather(ranks: RanksFixture, world: int) -> None:
    case = made("all_gather_matmul", 24, 33, n=(16, 1, 300), n_by_rank=True)
    cases = []
    for dtype in DTYPES:
        for biases in [(dtype,), (None, dtype, None), (F32, None, dtype), (None,)]:
            cases += each(replace(case, biases=biases), dtypes=(dtype,))
    few_rows = made("all_gather_matmul", world, 33, n=(4,), biases=(F32,), return_gathered=True)
    run_cases(ranks, world, [*cases, *each(few_rows)])


@pytest.mark.parametrize("op", [op for op in NAMES if op != "all_gather" and not OPS[op].normed])
def test_dtypes_of_results_and_of_partials(ranks: RanksFixture, world: int, op: str) -> None:
    spec, cases = OPS[op], []
    for dtype, out in [(BF16, F32), (F16, F32), (F32, BF16), (F32, F16), (F16, BF16)]:
        case = made(op, 24, 300, out_dtype=out)
        some = [case, replace(case, shape=(3, 24, 5), dim=0 if spec.keeps_sum else 1)]
        if spec.has_matmul and spec.reduces:
            full = replace(case, biases=(F32,), residual=out, wire_dtype=F32)
            some = [case, full, replace(full, out_dtype=None, residual=dtype)]
            few = (world if spec.scatters else 1, 5)
            some += [replace(full, wire_dtype=None, shape=few)]
            some += [replace(full, shape=(5, 24), dim=1)] if spec.scatters else []
        elif spec.has_matmul:
            some = [replace(case, biases=(F32, dtype)), replace(case, shape=(world, 33))]
        cases += each(*some, dtypes=(dtype,), integers=(False,))
    run_cases(ranks, world, cases)


def test_either_side_of_one_shot(ranks: RanksFixture, world: int) -> None:
    cases = []
    for dtype in (F32, BF16):
        most = ONE_SHOT_BYTES // dtype.itemsize
        some = [made("all_reduce", most + more) for more in (-1, 0, 1, 63, 65)]
        norms = [made("all_reduce_rms_norm", rows, most // 8) for rows in (7, 8, 9)]
        norms += [made("all_reduce_rms_norm", 1, most + more, residual=dtype) for more in (-1, 1)]
        cases += each(*some, *norms, dtypes=(dtype,), algorithms=("direct",))
    run_cases(ranks, world, cases)


def steps(op: str, world: int) -> list[Case]:
    """Tensors of several chunks (csrc/host/collectives.cpp) or steps, also with gaps between their
    blocks; rows so wide that a step makes the workspace grow; rows that cross chunks."""
    spec, rows = OPS[op], 300 * world
    added = {"biases": (F32,), "residual": F32} if spec.has_matmul and spec.reduces else {}
    if spec.keeps_sum:
        # Of a matmul one row of each rank must fit; a collective's may cross chunks.
        shape = (500, 301) if spec.has_matmul else (17, 8011)
        cases = [made(op, 577, 401, **added), made(op, *shape, **added)]
        cases += [replace(cases[0], out_dtype=F32, dtype=BF16)] if not spec.normed else []
    else:
        cases = [made(op, rows, 200, **added), made(op, 3, rows // 3, 170, dim=1, **added)]
        _, *splits = uneven_splits(800, world)
        cases += [made(op, 800, 200, sizes=sizes, **added) for sizes in splits]
        if spec.scatters:
            cases += [replace(cases[0], out_dtype=F32, dtype=BF16)]
            cases += [made(op, 800, 30 * world, dim=1, **added)]
    if spec.has_matmul:
        cases += [made(op, 100 * world, 1500), cases[0]]
    wide = [case for case in cases if case.dtype == F32]
    narrow = [replace(case, residual=None) for case in cases if case.dtype == BF16]
    return [*exact(*wide, dtypes=(F32,)), *each(*narrow, dtypes=(BF16,))]


@pytest.mark.parametrize("op", [op for op in NAMES if op != "matmul_all_reduce_rms_norm"])
def test_steps_through_a_small_workspace(ranks: RanksFixture, world: int, op: str) -> None:
    run_cases(ranks, world, steps(op, world), SMALLEST_WORKSPACE)


@pytest.mark.thorough
@pytest.mark.parametrize("op", [op for op in NAMES if not OPS[op].has_matmul])
def test_large_results_are_streamed(ranks: RanksFixture, world: int, op: str) -> None:
    run_cases(ranks, world, exact(made(op, 1100 * world, 1001), dtypes=(F32,)))
