"""Products of few rows in the extension, in every vector unit that this processor has."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.cases import RanksFixture
from tests.support.products import product, threads, within_rounding
from tests.support.ranked import place
from tests.support.refusals import packable
from tpkernels import _C
from tpkernels.dtypes import CODES
from tpkernels.local.matmul import local_matmul

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (F32, F16, BF16)
MOST = 16
WIDTHS = (2, 15, 16, 31, 32, 33, 64, 100)  # K
COLUMNS = (1, 3, 4, 5, 63, 64, 65, 130)
UNITS = [name for name in _C.host.vector_units() if name != "plain"]
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 13, MOST)


def few_rows(unit: str, dtype: torch.dtype) -> int:
    """For so many, columns are read in place whatever the processor."""
    return 0 if unit == "plain" else 4 if dtype == BF16 else 8


def k_major(k: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(n, k).to(dtype).t()


def test_exact_for_integers(unit: str) -> None:
    torch.manual_seed(0)
    for dtype, k, n in itertools.product(DTYPES, WIDTHS, COLUMNS):
        w = torch.randint(-1, 2, (n, k)).to(dtype).t()
        x, bias = torch.randint(-1, 2, (MOST, k)).to(dtype), torch.randint(-3, 4, (n,)).float()
        expected = x.float() @ w.float()
        few = few_rows(unit, dtype)
        assert _C.calls.multiplies(CODES[dtype], "columns", 4) is (few > 0)
        for rows, out_dtype, added in itertools.product(ROWS, {dtype, F32}, (None, bias)):
            got = product(x[:rows], w, out_dtype, added)
            assert got is not None or rows > few, (dtype, k, n, rows)
            if got is not None:
                exact = expected[:rows] if added is None else expected[:rows] + added
                assert torch.equal(got.float(), exact), (dtype, k, n, rows, out_dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_close_to_float64(unit: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    for k, n in [(100, 65), (768, 70), (4096, 9)]:
        x, w = torch.randn(3, k).to(dtype), k_major(k, n, dtype)
        got = product(x, w, F32)
        if got is None:
            assert unit == "plain"
            continue
        assert within_rounding(got, x, w), (k, n)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_result_does_not_depend_on_the_others(unit: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    most = few_rows(unit, dtype)
    if not most:
        return
    # The last one is read in chunks by all rows, and not by one.
    for (k, n), count in itertools.product([(1000, 300), (4099, 70)], (1, 2)):
        x, w = torch.randn(most, k).to(dtype), k_major(k, n, dtype)
        with threads(count):
            whole = product(x, w, F32)
            assert whole is not None
            for rows, columns in itertools.product([(0, 1), (1, 3)], [(0, n), (7, 68), (n - 1, n)]):
                part = product(x[slice(*rows)], w[:, slice(*columns)], F32)
                assert part is not None
                assert torch.equal(part, whole[slice(*rows), slice(*columns)]), (k, rows, columns)


@pytest.mark.skipif(not UNITS, reason="needs a vector unit")
def test_what_is_left_to_torch() -> None:
    x, w = torch.randn(3, 40), k_major(40, 12, F32)
    assert product(x, w, F32) is not None
    assert product(torch.randn(6, 48)[::2, 3:43], k_major(60, 12, F32)[9:49], F32) is not None
    assert product(torch.randn(MOST + 1, 40), w, F32) is None  # w has few columns
    assert product(x, w.contiguous(), F32) is None
    assert product(place(x, "transposed").bfloat16(), w.bfloat16(), BF16) is None
    assert product(x.bfloat16(), w, F32) is None
    assert product(x.double(), w.double(), torch.float64) is None
    assert product(x, w, torch.float64) is None
    assert product(x[:, :0], w[:0], F32) is None
    with pytest.raises(ValueError, match="another shape"):
        product(x, w, F32, torch.ones(11))
    assert product(x[:, :30], w, F32) is None
    part = torch.empty(3, 12)
    assert not _C.calls.multiply(x, w, part, None, False, (MOST + 1, 0))
    assert not _C.calls.multiply(x, w, part, None, False, (2, 0))


@pytest.mark.skipif(not UNITS, reason="needs a vector unit")
def test_a_part_is_computed_as_the_whole_is() -> None:
    """By torch, if that multiplies so many rows."""
    x, w, out = torch.ones(2, 33), k_major(33, 5, F32), torch.empty(2, 5)
    for rows, by_torch in [(2, False), (MOST + 1, True)]:
        with mock.patch.object(torch, "mm", wraps=torch.mm) as called:
            local_matmul(x, w, out, None, rows)
        assert called.called is by_torch


def parts_and_whole(rows: int) -> None:
    """One product by each algorithm of the ranks of a host. Those that multiply parts of the rows
    say how many there are."""
    import torch.distributed as dist

    import tpkernels

    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    told = set()
    multiply = _C.calls.multiply

    def told_rows(*args: Any) -> bool:
        told.add(args[5][0])
        return bool(multiply(*args))

    for dtype in DTYPES:
        numbers = torch.Generator().manual_seed(rank)
        x = torch.randn(rows, 200, generator=numbers).to(dtype)
        w = torch.randn(24, 200, generator=numbers).to(dtype).t()
        sizes = tpkernels.shard_sizes(rows, world)
        weights = [w]
        if dtype in packable():
            weights += [each for each in [tpkernels.pack(w)] if hasattr(each, "_tpkernels_panels")]
        first: dict[object, torch.Tensor] = {}
        ways = itertools.product(weights, ("unfused", "direct", "pipelined", "ring"))
        for w, algorithm in ways:
            with mock.patch.object(_C.calls, "multiply", told_rows):
                results = (
                    tpkernels.matmul_all_reduce(x, w, group, algorithm=algorithm),
                    tpkernels.matmul_reduce_scatter(
                        x, w, group, shard_sizes=sizes, algorithm=algorithm
                    ),
                    tpkernels.all_gather_matmul(
                        x[: sizes[rank]], w, group, shard_sizes=sizes, algorithm=algorithm
                    ),
                )
            for i, result in enumerate(results):
                same = torch.equal(first.setdefault((w.is_mkldnn, i), result), result)
                assert same, (dtype, w.layout, algorithm, i)
    assert told == {rows}


@pytest.mark.skipif(not UNITS, reason="needs a vector unit")
@pytest.mark.parametrize("rows", [1, 3, 4])
def test_all_algorithms_give_the_same_bits(ranks: RanksFixture, rows: int) -> None:
    """Also in fp32, where torch's products of few rows round as their number has it."""
    ranks(3).run(parts_and_whole, rows)
