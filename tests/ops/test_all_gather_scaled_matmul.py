"""``all_gather_scaled_matmul`` on real ranks against float64: exact for small integers with powers
of two as scales, else within the derived bound of support/scaled.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tpkernels
from tests.support.cases import MATMUL_ALGORITHMS, QUICK_WORLDS, RanksFixture
from tests.support.ranked import fresh_group, report
from tests.support.scaled import (
    BF16,
    E4M3,
    E5M2,
    E8M0,
    F16,
    F32,
    GATHER,
    SCALES,
    ScaledCase,
    each,
    uneven,
)
from tests.support.scaled_run import run_cases
from tpkernels.local.scaled import scaled_matmul

PATTERNS = (0x7F800001, 0xFFBFFFFF, 0x00000001, 0x807FFFFF)  # of float32: NaNs, denormal numbers
DENORMALS = (1, 0x123456, 0x7FFFFF)

pytestmark = pytest.mark.parametrize("world", QUICK_WORLDS)


def test_every_dtype_by_every_algorithm(ranks: RanksFixture, world: int) -> None:
    cases = [
        ScaledCase(op=GATHER, rows=(6 * world,), n=(5, 300), scales="rows", x_dtype=x, w_dtype=w)
        for x, w in ((E4M3, E4M3), (E5M2, E4M3), (E5M2, E5M2))
    ]
    cases += [replace(cases[0], out=out) for out in (F32, F16)]
    run_cases(ranks, world, each(*cases, algorithms=MATMUL_ALGORITHMS))


def test_every_kind_of_scales(ranks: RanksFixture, world: int) -> None:
    """Swizzled ones need whole tiles of 128 rows on each rank."""
    cases = [
        ScaledCase(op=GATHER, rows=(128 * world,), n=(130, 5), k=k, scales=scales, out=out)
        for scales in SCALES
        for k, out in ((96, None), (160, F32))
    ]
    cases += [replace(cases[0], scales="rows", replicated=True), replace(cases[0], k=37)]
    cases += [replace(cases[0], scales="rows", k=37)]
    run_cases(ranks, world, each(*cases, algorithms=("direct", "pipelined")))


def test_uneven_shards_and_other_dims(ranks: RanksFixture, world: int) -> None:
    cases = []
    for scales in ("tensor", "rows", "blocks", "fp4"):
        case = ScaledCase(op=GATHER, rows=(11,), scales=scales, sizes=uneven(11, world))
        between = replace(case, rows=(2, 11, 3), dim=1, return_gathered=True)
        cases += [case, between, replace(between, rows=(3, 2 * world), sizes=None)]
    cases += [replace(case, scales="rows", replicated=True) for case in cases[3:6]]
    run_cases(ranks, world, each(*cases))


@pytest.mark.thorough
def test_biases_layouts_and_few_rows(ranks: RanksFixture, world: int) -> None:
    case = ScaledCase(op=GATHER, rows=(3 * world,), n=(7, 260), scales="rows", bias=True)
    cases = [case, replace(case, out=F32), replace(case, out=BF16, return_gathered=True)]
    cases += [
        replace(case, layout=layout, scales=scales)
        for layout in ("sliced", "transposed")
        for scales in ("tensor", "rows", "blocks")
    ]
    cases += [replace(case, rows=(world,), scales=scales) for scales in ("rows", "blocks")]
    cases += [replace(case, rows=(0,), scales=scales) for scales in ("tensor", "rows", "fp4")]
    run_cases(ranks, world, each(*cases))


def test_bytes_that_are_no_numbers_arrive(ranks: RanksFixture, world: int) -> None:
    report(failure for rank in ranks(world).run(every_byte_job) for failure in rank)


def every_byte_job() -> list[str]:
    """All 256 bytes travel as they are, also where four of them would be a NaN or a denormal number
    of float32, and so does a denormal scale."""
    failures = []
    with fresh_group() as group:
        words = torch.tensor(PATTERNS).to(torch.int32).repeat_interleave(256).view(-1, 256)
        every = torch.arange(256, dtype=torch.uint8).repeat(4, 4)
        x = torch.cat((every, words.view(torch.uint8))).roll(group.rank(), 1).view(E4M3)
        w = torch.ones(1, x.shape[1]).to(E4M3).t()
        rows = x.shape[0]
        for algorithm in ("unfused", "direct", "pipelined", "ring"):
            for scale in (torch.ones([]), torch.ones(rows, 1)):
                gathered, _ = tpkernels.all_gather_scaled_matmul(
                    x, w, scale, torch.ones([]), group, return_gathered=True, algorithm=algorithm
                )
                for rank, shard in enumerate(gathered.view(torch.uint8).split(rows)):
                    mine = x.view(torch.uint8).roll(rank - group.rank(), 1)
                    if not torch.equal(shard, mine):
                        failures.append(f"{algorithm}, scale {list(scale.shape)}")
            one = torch.eye(1, 32).to(E4M3)
            scale = torch.tensor(DENORMALS, dtype=torch.int32).view(F32).unsqueeze(1)
            factors = (one.expand(len(DENORMALS), 32), one.t(), scale, torch.ones([]))
            y = tpkernels.all_gather_scaled_matmul(
                *factors, group, out_dtype=F32, algorithm=algorithm
            )
            # Where the product takes denormal numbers for zero, there are no bits to compare.
            local = scaled_matmul(*factors, torch.empty(len(DENORMALS), 1))
            want = local.repeat(group.size(), 1)
            if not torch.equal(y.view(torch.int32), want.view(torch.int32)):
                failures.append(f"{algorithm}: {y.flatten()}, not {want.flatten()}")
    return failures


def uneven_tiles_job() -> str:
    """Rank 0 has whole tiles of scales, the last rank has not."""
    with fresh_group() as group:
        sizes = [128] * (group.size() - 1) + [4]
        x, w = torch.ones(sizes[group.rank()], 32).to(E4M3), torch.ones(32, 5).to(E4M3)
        scales = torch.ones(512).to(E8M0), torch.ones(512).to(E8M0)
        try:
            tpkernels.all_gather_scaled_matmul(x, w, *scales, group, shard_sizes=sizes)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "not refused"


def test_all_ranks_refuse_the_tiles_of_one(ranks: RanksFixture, world: int) -> None:
    wrong = f"NotImplementedError: x has 4 rows on rank {world - 1} and swizzled scales"
    results = ranks(world).run(uneven_tiles_job)
    report(text for text in results if not text.startswith(wrong))


def test_rows_that_lie_across_words(ranks: RanksFixture, world: int) -> None:
    report(failure for rank in ranks(world).run(odd_memory_job) for failure in rank)


def odd_memory_job() -> list[str]:
    """A row of a matrix whose rows are no whole words, and a matrix that begins in a word."""
    rows, failures = 4, []
    with fresh_group() as group:
        numbers = torch.randint(-2, 3, (rows, 66)).to(E4M3)
        wide = torch.empty(1 + rows * 64, dtype=torch.uint8).view(E4M3)
        shifted = wide[1:].view(rows, 64)
        shifted.copy_(numbers[:, :64])
        w, one = torch.eye(64).to(E4M3), torch.ones([])
        for x in (numbers[:1, :64], shifted, numbers[:, :64]):
            y = tpkernels.all_gather_scaled_matmul(x, w, one, one, group, out_dtype=F32)
            mine = y.split(x.shape[0])[group.rank()]
            if not torch.equal(mine, x.float()):
                failures.append(f"strides {x.stride()}, offset {x.storage_offset()}")
    return failures
