"""Every op on calls that nobody thought of: any shape, dim, split, dtype, layout and option, by
every algorithm that can, against float64 (support/reference.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.cases import (
    COLLECTIVE_ALGORITHMS,
    DTYPES,
    MATMUL_ALGORITHMS,
    WORLDS,
    Case,
    RanksFixture,
)
from tests.support.ranked import SMALLEST_WORKSPACE, run_cases

LAYOUTS = ("plain", "transposed", "sliced", "offset", "symmetric", "symmetric_end", "mixed")
WEIGHT_LAYOUTS = ("plain", "linear", "sliced", "offset")

# Examples follow from the strategies alone: the same ones in every run.
# The ranks go on from example to example.
each_example = settings(
    max_examples=30,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

Draw = st.DrawFn
Example = tuple[int, Case]  # a number of ranks, and a call on them


def _dims(draw: Draw, least: int) -> list[int]:
    """Sizes of dims: small, but for one that may need several vectors or panels."""
    size = st.one_of(st.integers(1, 9), st.sampled_from([16, 17, 31, 64, 65, 129, 300]))
    dims = draw(st.lists(st.integers(1, 4), min_size=least, max_size=4))
    if dims:
        dims[draw(st.integers(0, len(dims) - 1))] = draw(size)
    return dims


def _split(draw: Draw, world: int, dims: list[int]) -> tuple[int, tuple[int, ...] | None]:
    """Replaces a dim's size by a sum of shards; (dim, shards or None where they are equal)."""
    dim = draw(st.integers(0, len(dims) - 1))
    if draw(st.booleans()):
        dims[dim] *= world
        return dim, None
    shard = st.one_of(st.just(0), st.integers(0, 9), st.just(33))
    sizes = draw(st.lists(shard, min_size=world, max_size=world))
    sizes[draw(st.integers(0, world - 1))] += 1  # nothing at all is a case of its own
    dims[dim] = sum(sizes)
    return dim, tuple(sizes)


def _common(draw: Draw, case: Case) -> Case:
    """The case in a drawn dtype, layout and kind of values."""
    return replace(
        case,
        dtype=draw(st.sampled_from(DTYPES)),
        layout=draw(st.sampled_from(LAYOUTS)),
        integers=draw(st.booleans()),
    )


def _out_dtype(draw: Draw) -> torch.dtype | None:
    return draw(st.sampled_from([None, None, *DTYPES]))


@st.composite
def all_gathers(draw: Draw) -> Example:
    world, dims = draw(st.sampled_from(WORLDS)), _dims(draw, 1)
    dim, sizes = _split(draw, world, dims)
    return world, _common(draw, Case(op="all_gather", shape=tuple(dims), dim=dim, sizes=sizes))


@st.composite
def reduce_scatters(draw: Draw) -> Example:
    world, dims = draw(st.sampled_from(WORLDS)), _dims(draw, 1)
    dim, sizes = _split(draw, world, dims)
    case = Case(op="reduce_scatter", shape=tuple(dims), dim=dim, sizes=sizes)
    return world, replace(_common(draw, case), out_dtype=_out_dtype(draw))


@st.composite
def all_reduces(draw: Draw) -> Example:
    world, dims = draw(st.sampled_from(WORLDS)), _dims(draw, 0)
    case = _common(draw, Case(op="all_reduce", shape=tuple(dims)))
    if draw(st.booleans()):
        return world, replace(case, op="all_reduce_")
    return world, replace(case, out_dtype=_out_dtype(draw))


@st.composite
def all_gather_matmuls(draw: Draw) -> Example:
    world, dims = draw(st.sampled_from(WORLDS)), _dims(draw, 2)
    dim, sizes = _split(draw, world, dims)
    case = _common(draw, Case(op="all_gather_matmul", shape=tuple(dims), dim=dim, sizes=sizes))
    columns = st.one_of(st.integers(1, 9), st.sampled_from([65, 300]))
    bias = st.sampled_from([None, case.dtype, torch.float32])
    return world, replace(
        case,
        n=tuple(draw(st.lists(columns, min_size=1, max_size=3))),
        n_by_rank=draw(st.booleans()),
        biases=tuple(draw(st.lists(bias, max_size=3))),
        out_dtype=_out_dtype(draw),
        return_gathered=draw(st.booleans()),
        weight_layout=draw(st.sampled_from(WEIGHT_LAYOUTS)),
    )


def _partial_sum(draw: Draw, case: Case) -> Case:
    """A reduction of products with a drawn epilogue."""
    case = _common(draw, case)
    out = _out_dtype(draw)
    k = st.one_of(st.integers(1, 9), st.sampled_from([33, 130]))
    return replace(
        case,
        k=tuple(draw(st.lists(k, min_size=1, max_size=4))),
        biases=(draw(st.sampled_from([None, case.dtype, torch.float32])),),
        residual=draw(st.sampled_from([None, case.dtype, out])),
        out_dtype=out,
        wire_dtype=draw(st.sampled_from([None, torch.float32])),
        weight_layout=draw(st.sampled_from(WEIGHT_LAYOUTS)),
    )


@st.composite
def matmul_reduce_scatters(draw: Draw) -> Example:
    world, dims = draw(st.sampled_from(WORLDS)), _dims(draw, 2)
    dim, sizes = _split(draw, world, dims)
    case = Case(op="matmul_reduce_scatter", shape=tuple(dims), dim=dim, sizes=sizes)
    return world, _partial_sum(draw, case)


@st.composite
def matmul_all_reduces(draw: Draw) -> Example:
    world, dims = draw(st.sampled_from(WORLDS)), _dims(draw, 2)
    return world, _partial_sum(draw, Case(op="matmul_all_reduce", shape=tuple(dims)))


def by_every_algorithm(case: Case) -> list[Case]:
    """The case by each algorithm that can run it."""
    algorithms = MATMUL_ALGORITHMS if "matmul" in case.op else COLLECTIVE_ALGORITHMS
    along_k = case.op == "all_gather_matmul" and case.dim == len(case.shape) - 1
    ways = [way for way in algorithms if not (along_k and way in ("ring", "pipelined"))]
    return [replace(case, algorithm=way) for way in ways]


def check(ranks: RanksFixture, example: Example) -> None:
    """The example by every algorithm that can."""
    world, case = example
    run_cases(ranks, world, by_every_algorithm(case), SMALLEST_WORKSPACE)


@pytest.mark.slow
@each_example
@given(all_gathers())
def test_all_gather(ranks: RanksFixture, example: Example) -> None:
    check(ranks, example)


@pytest.mark.slow
@each_example
@given(reduce_scatters())
def test_reduce_scatter(ranks: RanksFixture, example: Example) -> None:
    check(ranks, example)


@pytest.mark.thorough
@each_example
@given(all_reduces())
def test_all_reduce(ranks: RanksFixture, example: Example) -> None:
    check(ranks, example)


@pytest.mark.slow
@each_example
@given(all_gather_matmuls())
def test_all_gather_matmul(ranks: RanksFixture, example: Example) -> None:
    check(ranks, example)


@pytest.mark.slow
@each_example
@given(matmul_reduce_scatters())
def test_matmul_reduce_scatter(ranks: RanksFixture, example: Example) -> None:
    check(ranks, example)


@pytest.mark.thorough
@each_example
@given(matmul_all_reduces())
def test_matmul_all_reduce(ranks: RanksFixture, example: Example) -> None:
    check(ranks, example)


EXAMPLES = st.one_of(
    all_gathers(),
    reduce_scatters(),
    all_reduces(),
    all_gather_matmuls(),
    matmul_reduce_scatters(),
    matmul_all_reduces(),
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(each_example, max_examples=160, derandomize=False)
@given(st.lists(EXAMPLES, min_size=12, max_size=12))
def test_thousands_of_exact_calls(ranks: RanksFixture, examples: list[Example]) -> None:
    """Integers small enough for every sum to be exact, so that all algorithms must give the same
    values: some 8000 calls, other ones in each run. Hypothesis prints what fails."""
    for world in WORLDS:
        cases = [
            each
            for size, case in examples
            if size == world
            for each in by_every_algorithm(replace(case, integers=True))
        ]
        if cases:
            run_cases(ranks, world, cases, SMALLEST_WORKSPACE)
