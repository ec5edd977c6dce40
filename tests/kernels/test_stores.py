"""Tiles that are stored in parts or by descriptors, and published one tile later, under Triton's
interpreter. Its own config has tiles of one part."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.cases import Case, RanksFixture
from tests.support.ranked import check_cases, fresh_group
from tests.support.tiers import sweep
from tpkernels import groups

F32, BF16 = torch.float32, torch.bfloat16


@contextlib.contextmanager
def interpreted_as(one_shot_bytes: int = 0, **changed: Any) -> Iterator[None]:
    """With another config of the interpreter."""
    from tpkernels.kernels import configs, matmul_all_reduce

    known, limit = configs.INTERPRETER, matmul_all_reduce.ONE_SHOT_BYTES
    configs.INTERPRETER = replace(known, **changed)
    matmul_all_reduce.ONE_SHOT_BYTES = one_shot_bytes
    configs._chosen.cache_clear()
    try:
        yield
    finally:
        configs.INTERPRETER, matmul_all_reduce.ONE_SHOT_BYTES = known, limit
        configs._chosen.cache_clear()


def cases(n: int, world: int) -> list[Case]:
    """Uneven and odd, with a K of three blocks and of less than one; then of one size."""
    sizes = tuple(5 + 31 * r for r in range(world))
    scatter = Case(op="matmul_reduce_scatter", shape=(sum(sizes), n), sizes=sizes, k=(70,))
    scatter = replace(scatter, algorithm="fused", integers=True, dtype=BF16, biases=(F32,))
    reduce = replace(scatter, op="matmul_all_reduce", sizes=None)
    even = replace(scatter, shape=(16 * world, n), sizes=None, k=(7,))
    wide = replace(scatter, wire_dtype=F32, residual=BF16, out_dtype=F32)
    return [scatter, reduce, even, wide]


def parts_job(n: int, one_shot_bytes: int) -> list[str]:
    """All columns of a row are two tiles, of four parts each; one program has all tiles."""
    with interpreted_as(one_shot_bytes, block_n=256, programs=1), fresh_group(1 << 22) as group:
        return check_cases(cases(n, group.size()), group)


@pytest.mark.parametrize("world", sweep([2, 3, 1, 4]))
@pytest.mark.parametrize(("n", "one_shot_bytes"), sweep([(264, 0), (301, 0), (301, 1 << 30)]))
def test_parts_and_descriptors(
    interpreting: RanksFixture, world: int, n: int, one_shot_bytes: int
) -> None:
    """By descriptors where rows are aligned (264 columns)."""
    for wrong in interpreting(world).run(parts_job, n, one_shot_bytes, timeout=240):
        assert not wrong, wrong


def late_job(one_shot_bytes: int) -> list[str]:
    """The last rank multiplies its tiles late, while the others wait for them."""
    with interpreted_as(one_shot_bytes, programs=1), fresh_group(1 << 22) as group:
        wanted = [replace(case, k=(130,)) for case in cases(72, group.size())[:3]]
        wrong = check_cases(wanted[:1], group)
        workspace = groups.get(group.group_name).workspace
        assert workspace is not None and workspace._device is not None
        last = group.rank() == group.size() - 1
        workspace.set_chaos(seed=1, max_delay_us=15_000 * last)
        for case in wanted:
            wrong += check_cases([case] * 2, group)
        return wrong


@pytest.mark.slow
@pytest.mark.parametrize("one_shot_bytes", sweep([0, 1 << 30]))
def test_no_tile_is_published_before_it_is_stored(
    interpreting: RanksFixture, one_shot_bytes: int
) -> None:
    for wrong in interpreting(2).run(late_job, one_shot_bytes, timeout=240):
        assert not wrong, wrong


def matmul_job() -> list[bool]:
    from tpkernels.kernels.configs import INTERPRETER
    from tpkernels.kernels.matmul import matmul

    config = replace(INTERPRETER, block_n=256, programs=1)
    a = torch.arange(33 * 5).view(33, 5).to(F32)
    b = torch.arange(5 * 301).view(5, 301).to(F32) % 64
    bias = torch.arange(301).to(F32)
    return [torch.equal(matmul(a, b, bias, config=config), a @ b + bias)]


def test_parts_of_a_product(interpreting: RanksFixture) -> None:
    assert interpreting(1).run(matmul_job) == [[True]]
