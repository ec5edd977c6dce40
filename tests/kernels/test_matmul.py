"""The tile loop alone, under Triton's interpreter: any size and layout, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.cases import DTYPES, RanksFixture
from tests.support.ranked import place
from tests.support.tiers import sweep

SIZES = [(1, 1, 1), (1, 33, 7), (65, 31, 33), (64, 64, 64), (100, 70, 40)]


def _wrong(
    m: int, n: int, k: int, dtype: torch.dtype, tma: bool, layout: str, block_m: int
) -> list[str]:
    from tpkernels.kernels.configs import INTERPRETER
    from tpkernels.kernels.matmul import matmul

    generator = torch.Generator().manual_seed(m * n + k)
    a, b = (torch.randn(size, generator=generator) for size in ((m, k), (k, n)))
    bias = torch.randn(n, generator=generator)
    a, b = a.to(dtype), place(b.to(dtype), layout)
    config = replace(INTERPRETER, tma=tma, block_m=block_m, programs=3)
    got = matmul(place(a, layout), b, bias, config=config)
    exact = a.double() @ b.double() + bias
    terms = a.double().abs() @ b.double().abs() + bias.abs()
    eps = torch.finfo(dtype).eps
    bound = eps / 2 * exact.abs() + (k + 2) * torch.finfo(torch.float32).eps * terms
    right = (got - exact).abs() <= bound
    return [] if right.all() and got.dtype == dtype else [f"{m, n, k} {dtype} {tma} {layout}"]


def sizes_job(dtype: torch.dtype) -> list[str]:
    from tpkernels.kernels.configs import INTERPRETER

    wrong: list[str] = []
    for m, n, k in SIZES:
        for tma in (True, False):
            wrong += _wrong(m, n, k, dtype, tma, "plain", INTERPRETER.block_m)
    return wrong


def layouts_job() -> list[str]:
    wrong: list[str] = []
    for layout in ("transposed", "sliced", "offset"):
        for tma in (True, False):
            wrong += _wrong(40, 48, 64, torch.float16, tma, layout, 16)
    return wrong


@pytest.mark.parametrize("dtype", sweep(DTYPES))
def test_sizes(interpreting: RanksFixture, dtype: torch.dtype) -> None:
    assert not interpreting(1).run(sizes_job, dtype)[0]


def test_layouts(interpreting: RanksFixture) -> None:
    assert not interpreting(1).run(layouts_job)[0]


def rounding_job() -> list[bool]:
    """Ties and neighbours of bf16, whose cast the interpreter would cut off."""
    from tpkernels.kernels.matmul import matmul

    values = 1 + torch.arange(-600, 600) / 2**9
    x = torch.stack([values, torch.ones_like(values)], 1)
    one = torch.eye(2)[:, :1].contiguous()
    got = matmul(x, one, out_dtype=torch.bfloat16)
    return [bool(torch.equal(got[:, 0], values.to(torch.bfloat16)))]


def test_results_are_rounded_to_the_nearest_even(interpreting: RanksFixture) -> None:
    assert interpreting(1).run(rounding_job) == [[True]]
