"""From which rows on a CPU splits a matmul."""

from __future__ import annotations

import pytest
import torch

from tests.planning.test_plan import PIPELINE_MIN_ROWS, problem
from tpkernels.planning.choose import Means, choose


@pytest.mark.parametrize(
    ("instructions", "dtype", "fewest"),
    [
        ({"avx2"}, torch.bfloat16, 256),
        ({"avx2", "amx_bf16", "avx512_bf16"}, torch.bfloat16, 1024),
        ({"avx2", "avx512_bf16"}, torch.bfloat16, 1024),
        ({"avx2", "avx512_bf16"}, torch.float16, 256),
        ({"avx2", "amx_bf16"}, torch.float32, 256),
        (set(), torch.bfloat16, 1024),
    ],
)
def test_the_kind_of_cpu_decides_how_many_rows_are_many(
    instructions: set[str], dtype: torch.dtype, fewest: int
) -> None:
    means = Means(shared_memory=True, instructions=frozenset(instructions))
    for rows, algorithm in [(fewest, "pipelined"), (fewest - 1, "direct")]:
        one = problem("all_gather_matmul", shape=(4 * rows, 512), sizes=(rows,) * 4, dtype=dtype)
        plan = choose(one, means)
        assert plan.algorithm == algorithm and str(fewest) in plan.reason


def test_rows_count_in_all_dims_of_the_matrix_but_those_before_the_split() -> None:
    """Blocks before the split dim are separate products."""
    behind = problem("all_gather_matmul", shape=(8, PIPELINE_MIN_ROWS // 2, 512), sizes=(2,) * 4)
    before = problem("all_gather_matmul", shape=(PIPELINE_MIN_ROWS, 8, 512), dim=1, sizes=(2,) * 4)
    assert choose(behind, Means(shared_memory=True)).algorithm == "pipelined"
    assert choose(before, Means(shared_memory=True)).algorithm == "direct"


def test_columns_are_split_if_there_are_many_rows() -> None:
    sizes = (128,) * 4
    for rows, algorithm in [(PIPELINE_MIN_ROWS, "pipelined"), (PIPELINE_MIN_ROWS - 1, "direct")]:
        columns = problem("matmul_reduce_scatter", shape=(rows, 512), dim=1, sizes=sizes)
        assert choose(columns, Means(shared_memory=True)).algorithm == algorithm


def test_before_an_all_reduce_some_cpus_do_not_split() -> None:
    for op, instructions, algorithm in [
        ("matmul_all_reduce", {"avx512_bf16"}, "direct"),
        ("matmul_reduce_scatter", {"avx512_bf16"}, "pipelined"),
        ("matmul_all_reduce", {"avx2"}, "pipelined"),
        ("matmul_all_reduce", set(), "pipelined"),
    ]:
        means = Means(shared_memory=True, instructions=frozenset(instructions))
        assert choose(problem(op), means).algorithm == algorithm, (op, instructions)
