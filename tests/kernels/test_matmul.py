"""The tile loop under the Triton interpreter.

Covers all sizes and layouts against float64, and tiles that are stored in slices or by descriptors
and published one tile later.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.cases import DTYPES, Case
from tests.support.emulated import require_no_failures
from tests.support.ranked import check_cases, copy_to_layout, fresh_group, on_ranks
from tests.support.tiers import sweep

F32, BF16 = torch.float32, torch.bfloat16
interpreted = functools.partial(on_ranks, fixture="interpreter_ranks")
SIZES = [(1, 1, 1), (1, 33, 7), (65, 31, 33), (64, 64, 64), (100, 70, 40)]


def _find_error(
    m: int, n: int, k: int, dtype: torch.dtype, tma: bool, layout: str, block_m: int
) -> str | None:
    from tpkernels.kernels.configs import INTERPRETER
    from tpkernels.kernels.matmul import matmul

    generator = torch.Generator().manual_seed(m * n + k)
    a, b = (torch.randn(size, generator=generator) for size in ((m, k), (k, n)))
    bias = torch.randn(n, generator=generator)
    a, b = a.to(dtype), copy_to_layout(b.to(dtype), layout)
    config = replace(INTERPRETER, tma=tma, block_m=block_m, programs=3)
    got = matmul(copy_to_layout(a, layout), b, bias, config=config)
    exact = a.double() @ b.double() + bias
    terms = a.double().abs() @ b.double().abs() + bias.abs()
    eps = torch.finfo(dtype).eps
    bound = eps / 2 * exact.abs() + (k + 2) * torch.finfo(torch.float32).eps * terms
    within_bound = (got - exact).abs() <= bound
    return (
        None if within_bound.all() and got.dtype == dtype else f"{m, n, k} {dtype} {tma} {layout}"
    )


@pytest.mark.parametrize("dtype", sweep(DTYPES))
@interpreted(1)
def test_sizes(dtype: torch.dtype) -> None:
    from tpkernels.kernels.configs import INTERPRETER

    cases = itertools.product(SIZES, (True, False))
    require_no_failures(
        [_find_error(*mnk, dtype, tma, "plain", INTERPRETER.block_m) for mnk, tma in cases]
    )


@interpreted(1)
def test_layouts() -> None:
    """Multiply several layouts, and a matrix whose rows span two tiles of four slices."""
    from tpkernels.kernels.configs import INTERPRETER
    from tpkernels.kernels.matmul import matmul

    a = torch.arange(33 * 5).view(33, 5).to(F32)
    b = torch.arange(5 * 301).view(5, 301).to(F32) % 64
    bias, config = torch.arange(301).to(F32), replace(INTERPRETER, block_n=256, programs=1)
    assert torch.equal(matmul(a, b, bias, config=config), a @ b + bias)
    cases = itertools.product((True, False), ("transposed", "sliced", "offset"))
    require_no_failures([_find_error(40, 48, 64, torch.float16, *case, 16) for case in cases])


@interpreted(1)
def test_results_are_rounded_to_the_nearest_even() -> None:
    """Store fp32 ties and their neighbors as bf16.

    The cast of the interpreter would truncate them.
    """
    from tpkernels.kernels.matmul import matmul

    values = 1 + torch.arange(-600, 600) / 2**9
    x = torch.stack([values, torch.ones_like(values)], 1)
    first_column = torch.eye(2)[:, :1].contiguous()
    got = matmul(x, first_column, out_dtype=BF16)
    assert torch.equal(got[:, 0], values.to(BF16))


@contextlib.contextmanager
def interpreter_config(one_shot_bytes: int = 0, **overrides: Any) -> Iterator[None]:
    """Change the config of the interpreter."""
    from tpkernels.kernels import configs, matmul_all_reduce

    original, limit = configs.INTERPRETER, matmul_all_reduce.ONE_SHOT_BYTES
    configs.INTERPRETER = replace(original, **overrides)
    matmul_all_reduce.ONE_SHOT_BYTES = one_shot_bytes
    configs.config_for.cache_clear()
    try:
        yield
    finally:
        configs.INTERPRETER, matmul_all_reduce.ONE_SHOT_BYTES = original, limit
        configs.config_for.cache_clear()


def cases(n: int, world: int) -> list[Case]:
    """Create cases with uneven and equal shards, with K of three blocks and of less than one."""
    sizes = tuple(5 + 31 * r for r in range(world))
    scatter = Case(op="matmul_reduce_scatter", shape=(sum(sizes), n), sizes=sizes, k=(70,))
    scatter = replace(scatter, algorithm="fused", integers=True, dtype=BF16, biases=(F32,))
    reduce = replace(scatter, op="matmul_all_reduce", sizes=None)
    even = replace(scatter, shape=(16 * world, n), sizes=None, k=(7,))
    fp32_wire = replace(scatter, wire_dtype=F32, residual=BF16, out_dtype=F32)
    return [scatter, reduce, even, fp32_wire]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 1, 4])
@pytest.mark.parametrize(("n", "one_shot_bytes"), sweep([(264, 0), (301, 0), (301, 1 << 30)]))
@interpreted()
def test_sliced_tiles_and_descriptors(n: int, one_shot_bytes: int) -> None:
    """Run all tiles in one program. A row has two tiles of four slices each.

    Aligned rows (264 columns) are stored by descriptors.
    """
    with interpreter_config(one_shot_bytes, block_n=256, programs=1), fresh_group(1 << 22) as group:
        require_no_failures(check_cases(cases(n, group.size()), group))
