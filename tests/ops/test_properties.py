"""Every op on generated calls: any shape, dim, split, dtype, layout and option, by every algorithm
that supports them, against float64 (ops/reference.py)."""

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
from tests.support.tiers import sweep
from tpkernels.planning.op_spec import OPS

LAYOUTS = ("plain", "transposed", "sliced", "offset", "symmetric", "symmetric_end", "mixed")
WEIGHT_LAYOUTS = ("plain", "linear", "sliced", "offset")

# Examples depend only on the strategies, so all runs use the same examples. The ranks stay alive
# between examples.
example_settings = settings(
    max_examples=30,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

Draw = st.DrawFn
Example = tuple[int, Case]  # world size and call


def _dims(draw: Draw, min_dims: int) -> list[int]:
    """Draw the sizes of dims. One dim may be large and need several vectors or panels."""
    size = st.one_of(st.integers(1, 9), st.sampled_from([16, 17, 31, 64, 65, 129, 300]))
    dims = draw(st.lists(st.integers(1, 4), min_size=min_dims, max_size=4))
    if dims:
        dims[draw(st.integers(0, len(dims) - 1))] = draw(size)
    return dims


def _split(draw: Draw, world: int, dims: list[int]) -> tuple[int, tuple[int, ...] | None]:
    """Split a dim into shards and update its size. Return (dim, shard sizes), or (dim, None) for
    equal shards."""
    dim = draw(st.integers(0, len(dims) - 1))
    if draw(st.booleans()):
        dims[dim] *= world
        return dim, None
    shard = st.one_of(st.just(0), st.integers(0, 9), st.just(33))
    sizes = draw(st.lists(shard, min_size=world, max_size=world))
    sizes[draw(st.integers(0, world - 1))] += 1  # fully empty tensors have a separate test
    dims[dim] = sum(sizes)
    return dim, tuple(sizes)


def _out_dtype(draw: Draw) -> torch.dtype | None:
    return draw(st.sampled_from([None, None, *DTYPES]))


@st.composite
def examples(draw: Draw, op: str) -> Example:
    """Draw a call of an op. Reductions may have an epilogue, and gathers several weights."""
    world, dtype, spec = draw(st.sampled_from(WORLDS)), draw(st.sampled_from(DTYPES)), OPS[op]
    dims = _dims(draw, 2 if spec.has_matmul else 0 if spec.keeps_sum else 1)
    dim, sizes = (0, None) if spec.keeps_sum else _split(draw, world, dims)
    case = Case(
        op=op,
        shape=tuple(dims),
        dim=dim,
        sizes=sizes,
        dtype=dtype,
        layout=draw(st.sampled_from(LAYOUTS)),
        integers=draw(st.booleans()),
    )
    if op == "all_reduce" and draw(st.booleans()):
        return world, replace(case, op="all_reduce_")
    if op != "all_gather":
        case = replace(case, out_dtype=_out_dtype(draw))
    if not spec.has_matmul:
        return world, case
    bias = st.sampled_from([None, dtype, torch.float32])
    case = replace(case, weight_layout=draw(st.sampled_from(WEIGHT_LAYOUTS)))
    if spec.gathers:
        columns = st.one_of(st.integers(1, 9), st.sampled_from([65, 300]))
        return world, replace(
            case,
            n=tuple(draw(st.lists(columns, min_size=1, max_size=3))),
            n_by_rank=draw(st.booleans()),
            biases=tuple(draw(st.lists(bias, max_size=3))),
            return_gathered=draw(st.booleans()),
        )
    k = st.one_of(st.integers(1, 9), st.sampled_from([33, 130]))
    return world, replace(
        case,
        k=tuple(draw(st.lists(k, min_size=1, max_size=4))),
        biases=(draw(bias),),
        residual=draw(st.sampled_from([None, dtype, case.out_dtype])),
        wire_dtype=draw(st.sampled_from([None, torch.float32])),
    )


def with_every_algorithm(case: Case) -> list[Case]:
    """Return the case for each algorithm that supports it."""
    algorithms = MATMUL_ALGORITHMS if "matmul" in case.op else COLLECTIVE_ALGORITHMS
    along_k = case.op == "all_gather_matmul" and case.dim == len(case.shape) - 1
    supported = [
        algorithm
        for algorithm in algorithms
        if not (along_k and algorithm in ("ring", "pipelined"))
    ]
    return [replace(case, algorithm=algorithm) for algorithm in supported]


NAMES = ("all_reduce", "all_gather", "reduce_scatter")
NAMES += ("matmul_all_reduce", "all_gather_matmul", "matmul_reduce_scatter")


@pytest.mark.parametrize("op", sweep(NAMES, 0, 2))
@example_settings
@given(data=st.data())
def test_any_call_by_every_algorithm(ranks: RanksFixture, op: str, data: st.DataObject) -> None:
    world, case = data.draw(examples(op))
    run_cases(ranks, world, with_every_algorithm(case), SMALLEST_WORKSPACE)
