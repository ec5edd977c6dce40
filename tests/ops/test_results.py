"""Results of the ops on real ranks against float64: exact for integers, otherwise within the
derived bounds of ops/reference.py.

Every test is a list of cases of one op. The op spec selects the tests of an op.
"""

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
    exact_cases,
    expand_cases,
    uneven_splits,
)
from tests.support.ranked import SMALLEST_WORKSPACE, run_cases
from tests.support.tiers import sweep
from tpkernels.planning.op_spec import OPS, OpSpec

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
ONE_SHOT_BYTES = 16 << 10  # csrc/host/collectives.h; above, every rank reduces a slice
K_GATHER_ALGORITHMS = ("unfused", "direct", "auto")  # algorithms that can gather along K
NAMES = [spec.name for spec in OPS.values() if spec.gathers or spec.reduces if not spec.scaled]
SPLITS = [name for name in NAMES if not OPS[name].keeps_sum]
SUMS = [name for name in NAMES if OPS[name].reduces]
IN_PLACE = "all_reduce_"


def get_spec(op: str) -> OpSpec:
    return OPS[op.removesuffix("_")]


def make_case(op: str, *shape: int, **more: Any) -> Case:
    """Return a case of this shape. Ops with a matmul get weights of odd shapes."""
    spec = get_spec(op)
    if spec.has_matmul:
        more = ({"n": (17, 3)} if spec.gathers else {"k": (33, 1, 40)}) | more
    return Case(op=op, shape=shape, **more)


def get_algorithms(op: str) -> tuple[str, ...]:
    return MATMUL_ALGORITHMS if get_spec(op).has_matmul else COLLECTIVE_ALGORITHMS


pytestmark = pytest.mark.parametrize("world", QUICK_WORLDS)


@pytest.mark.parametrize("op", [*NAMES, IN_PLACE])
def test_every_dtype_by_every_algorithm(ranks: RanksFixture, world: int, op: str) -> None:
    spec, cases = get_spec(op), [make_case(op, 60, 33)]
    if spec.keeps_sum and not spec.has_matmul:
        cases += [make_case(op, *shape) for shape in ((200, 77), (1,))]
        cases += [] if spec.normed else [make_case(op)]
    run_cases(
        ranks, world, expand_cases(*cases, dtypes=(*DTYPES, F64), algorithms=get_algorithms(op))
    )


@pytest.mark.parametrize("op", [*NAMES, IN_PLACE])
def test_any_dim(ranks: RanksFixture, world: int, op: str) -> None:
    """Leading dims, and each dim of 12 that can be split, for two element sizes."""
    spec, dtypes = get_spec(op), (F32, BF16)
    shapes = [(12, 12), (12, 3, 12), (2, 12, 1, 12), (12, 12, 2, 3), (1, 12, 1, 1), (5, 12)]
    if spec.keeps_sum:
        all_cases = [make_case(op, *shape) for shape in [*shapes, (1, 1, 1, 7), (5, 300)]]
        cases = exact_cases(*all_cases, dtypes=dtypes)
    else:
        all_cases = along_each_dim(
            make_case(op, 12), [*shapes, *([] if spec.has_matmul else [(12,)])], 12
        )
        last = [case for case in all_cases if case.dim == len(case.shape) - 1 and case.n]
        cases = exact_cases(
            *(
                replace(case, return_gathered=bool(case.n))
                for case in all_cases
                if case not in last
            ),
            dtypes=dtypes,
        )
        cases += expand_cases(
            *last, dtypes=dtypes, algorithms=K_GATHER_ALGORITHMS, integers=(True,)
        )
    run_cases(ranks, world, cases)


@pytest.mark.parametrize("op", [*NAMES, IN_PLACE])
@pytest.mark.parametrize("layout", sweep(["sliced", "transposed", "offset"]))
def test_strides(ranks: RanksFixture, world: int, layout: str, op: str) -> None:
    """Strides of x, of the weights, and of the bias and residual."""
    spec, cases = get_spec(op), []
    for weights in ("plain", "linear", "sliced") if spec.has_matmul else ("plain",):
        case = make_case(op, 24, 24, layout=layout, weight_layout=weights)
        blocks = replace(case, shape=(3, 12, 20), dim=0 if spec.keeps_sum else 1)
        if spec.has_matmul and spec.reduces:
            blocks = replace(blocks, biases=(F32,), residual=F32)
        if spec.normed:
            case, blocks = replace(case, norm=F32), replace(blocks, residual=F32)
        cases += [*exact_cases(case), *exact_cases(blocks, dtypes=(F32,))]
        if spec.scatters:
            cases += exact_cases(replace(case, dim=1))
    run_cases(ranks, world, cases)


@pytest.mark.parametrize("op", SPLITS)
def test_uneven_shards(ranks: RanksFixture, world: int, op: str) -> None:
    spec, cases = OPS[op], []
    for sizes in uneven_splits(23, world):
        case = make_case(op, 23, 8, sizes=sizes, return_gathered=op == "all_gather_matmul")
        if spec.has_matmul and spec.reduces:
            case = replace(case, biases=(F32,), residual=F32)
        dtypes = (F32,) if case.residual else DTYPES
        cases += exact_cases(case, replace(case, shape=(2, 23, 3, 8), dim=1), dtypes=dtypes)
        columns = replace(case, shape=(6, 23), dim=1)
        algorithms = K_GATHER_ALGORITHMS if case.n else get_algorithms(op)
        cases += expand_cases(columns, dtypes=dtypes, algorithms=algorithms, integers=(True,))
    run_cases(ranks, world, cases)


@pytest.mark.parametrize("op", NAMES)
def test_odd_shapes(ranks: RanksFixture, world: int, op: str) -> None:
    """Odd numbers of rows, as rows per rank and as rows of all ranks, with 1, 3 or 5 columns."""
    split, cases = not OPS[op].keeps_sum, []
    for rows in (1023, 1, 7):
        total = rows * world if split else rows
        even = make_case(op, total, 1), make_case(op, total, 5)
        cases += expand_cases(*even, dtypes=(F32,), integers=(False,)) + exact_cases(
            *even, dtypes=(F32, BF16)
        )
        if split:
            uneven = [make_case(op, rows, 3, sizes=sizes) for sizes in uneven_splits(rows, world)]
            cases += exact_cases(*uneven, dtypes=(F32,))
    run_cases(ranks, world, cases)


@pytest.mark.parametrize("op", [*NAMES, IN_PLACE])
def test_empty_tensors(ranks: RanksFixture, world: int, op: str) -> None:
    """No rows. Ops without a matmul also have no columns."""
    spec = get_spec(op)
    cases = [make_case(op, 0, 5), make_case(op, 2, 0, 5)]
    if not spec.keeps_sum:
        cases[1] = replace(cases[1], dim=1, sizes=(0,) * world)
    if not (spec.has_matmul or spec.normed):
        cases.append(make_case(op, 4 * world, 0))
    run_cases(ranks, world, exact_cases(*cases))


@pytest.mark.parametrize("op", [op for op in SUMS if OPS[op].has_matmul or OPS[op].normed])
def test_bias_and_residual(ranks: RanksFixture, world: int, op: str) -> None:
    """Along every dim. A bias belongs to columns, and a rank may own only some of them."""
    spec, cases = OPS[op], []
    for dtype in (BF16,) if spec.has_matmul and spec.normed else DTYPES:
        for dim in range(3 if spec.scatters else 1):
            case = make_case(op, 12, 12, 24, dim=dim, residual=dtype)
            # The second shape is above the one-shot limit.
            variants = [case, *([] if dim else [replace(case, shape=(12, 90, 72))])]
            if spec.has_matmul:
                variants += [replace(case, residual=None, biases=(dtype,))]
                variants += [replace(variant, biases=(F32,)) for variant in variants]
            if spec.normed:
                variants += [replace(variant, norm=F32) for variant in variants]
            cases += expand_cases(*variants, dtypes=(dtype,))
    run_cases(ranks, world, cases)


def test_biases_of_matmuls_that_share_a_gather(ranks: RanksFixture, world: int) -> None:
    case = make_case("all_gather_matmul", 24, 33, n=(16, 1, 300), n_by_rank=True)
    cases = []
    for dtype in DTYPES:
        for biases in [(dtype,), (None, dtype, None), (F32, None, dtype), (None,)]:
            cases += expand_cases(replace(case, biases=biases), dtypes=(dtype,))
    few_rows = make_case(
        "all_gather_matmul", world, 33, n=(4,), biases=(F32,), return_gathered=True
    )
    run_cases(ranks, world, [*cases, *expand_cases(few_rows)])


@pytest.mark.parametrize("op", [op for op in NAMES if op != "all_gather" and not OPS[op].normed])
def test_dtypes_of_results_and_of_partials(ranks: RanksFixture, world: int, op: str) -> None:
    spec, cases = OPS[op], []
    for dtype, out in [(BF16, F32), (F16, F32), (F32, BF16), (F32, F16), (F16, BF16)]:
        case = make_case(op, 24, 300, out_dtype=out)
        variants = [case, replace(case, shape=(3, 24, 5), dim=0 if spec.keeps_sum else 1)]
        if spec.has_matmul and spec.reduces:
            full = replace(case, biases=(F32,), residual=out, wire_dtype=F32)
            variants = [case, full, replace(full, out_dtype=None, residual=dtype)]
            few_rows = (world if spec.scatters else 1, 5)
            variants += [replace(full, wire_dtype=None, shape=few_rows)]
            variants += [replace(full, shape=(5, 24), dim=1)] if spec.scatters else []
        elif spec.has_matmul:
            variants = [replace(case, biases=(F32, dtype)), replace(case, shape=(world, 33))]
        cases += expand_cases(*variants, dtypes=(dtype,), integers=(False,))
    run_cases(ranks, world, cases)


def test_either_side_of_one_shot(ranks: RanksFixture, world: int) -> None:
    cases = []
    for dtype in (F32, BF16):
        limit = ONE_SHOT_BYTES // dtype.itemsize
        sums = [make_case("all_reduce", limit + difference) for difference in (-1, 0, 1, 63, 65)]
        norms = [make_case("all_reduce_rms_norm", rows, limit // 8) for rows in (7, 8, 9)]
        norms += [
            make_case("all_reduce_rms_norm", 1, limit + difference, residual=dtype)
            for difference in (-1, 1)
        ]
        cases += expand_cases(*sums, *norms, dtypes=(dtype,), algorithms=("direct",))
    run_cases(ranks, world, cases)


def steps(op: str, world: int) -> list[Case]:
    """Return tensors of several chunks (csrc/host/collectives.cpp) or steps, some with gaps between
    their blocks. Some rows are so wide that a step enlarges the workspace, and some rows cross
    chunks."""
    spec, rows = OPS[op], 300 * world
    epilogue = {"biases": (F32,), "residual": F32} if spec.has_matmul and spec.reduces else {}
    if spec.keeps_sum:
        # With a matmul, one row of each rank must fit in a chunk. Rows of a collective may cross
        # chunks.
        shape = (500, 301) if spec.has_matmul else (17, 8011)
        cases = [make_case(op, 577, 401, **epilogue), make_case(op, *shape, **epilogue)]
        cases += [replace(cases[0], out_dtype=F32, dtype=BF16)] if not spec.normed else []
    else:
        cases = [
            make_case(op, rows, 200, **epilogue),
            make_case(op, 3, rows // 3, 170, dim=1, **epilogue),
        ]
        _, *splits = uneven_splits(800, world)
        cases += [make_case(op, 800, 200, sizes=sizes, **epilogue) for sizes in splits]
        if spec.scatters:
            cases += [replace(cases[0], out_dtype=F32, dtype=BF16)]
            cases += [make_case(op, 800, 30 * world, dim=1, **epilogue)]
    if spec.has_matmul:
        cases += [make_case(op, 100 * world, 1500), cases[0]]
    fp32_cases = [case for case in cases if case.dtype == F32]
    bf16_cases = [replace(case, residual=None) for case in cases if case.dtype == BF16]
    return [*exact_cases(*fp32_cases, dtypes=(F32,)), *expand_cases(*bf16_cases, dtypes=(BF16,))]


@pytest.mark.parametrize("op", [op for op in NAMES if op != "matmul_all_reduce_rms_norm"])
def test_steps_through_a_small_workspace(ranks: RanksFixture, world: int, op: str) -> None:
    run_cases(ranks, world, steps(op, world), SMALLEST_WORKSPACE)


@pytest.mark.thorough
@pytest.mark.parametrize("op", [op for op in NAMES if not OPS[op].has_matmul])
def test_large_results_are_streamed(ranks: RanksFixture, world: int, op: str) -> None:
    run_cases(ranks, world, exact_cases(make_case(op, 1100 * world, 1001), dtypes=(F32,)))
