"""All-reduces in lines of 128 bytes with one flag, run on the CPU. The emulation shows lines whole,
as NVLink does, and what goes wrong where they are not."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from tests.cuda.test_emulated import BF16, DTYPES, F32, bits, host_sum, random
from tests.cuda.test_low_latency import TEARINGS
from tests.support import emulated
from tests.support.cases import RanksFixture
from tests.support.tiers import sweep
from tpkernels import cuda
from tpkernels.cuda import calls, low_latency
from tpkernels.symm.device import EPOCH, LAST_EPOCH

WAY = "whole_lines"
TEARINGS_OF_LINES = (*TEARINGS, "torn lines", "lines that stay")  # tests/native/emulated/grid.h
# A last line that is full, and others; fewer elements than ranks have segments.
COUNTS = (0, 1, 8, 55, 57, 64, 193, 448, 1001)


def exact_job(driver: str) -> list[str]:
    """Workspaces that have the words of the largest call, and no more."""
    layouts = [calls.layout(WAY, max(COUNTS), dist.get_world_size(), 4, size) for size in (4, 2)]
    space, wrong = emulated.space_of(driver, words=max(each.words for each in layouts)), []
    cases = itertools.product(COUNTS, DTYPES, (F32, BF16))
    for number, (count, dtype, out_dtype) in enumerate(cases):
        xs = [random(count, dtype, 100 * number + r) for r in range(space.world)]
        out = torch.empty(count, dtype=out_dtype)
        x = out if dtype == out_dtype and number % 2 else torch.empty_like(xs[0])
        cuda.all_reduce(space, number + 1, x.copy_(xs[space.rank]), out, way=WAY)
        if not torch.equal(bits(out), bits(host_sum(xs, out_dtype))):
            wrong.append(f"{count} {dtype} {out_dtype}")
    return [*wrong, *map(str, filter(None, [space.failure()]))]


@pytest.mark.parametrize("world", sweep([4, 2, 9]))
def test_every_line_is_where_it_is_looked_for(
    ranks: RanksFixture, cuda_driver: str, world: int
) -> None:
    """9 ranks: more sources than are looked at at once."""
    assert ranks(world).run(exact_job, cuda_driver) == [[]] * world


def mixed_job(driver: str, how: str, delay_us: int, first: int = 0) -> int:
    """Calls of two kinds over the same words, each rank late at random places. Data look like words
    of the call after next, in all 4 bytes; how many calls were wrong."""
    library = emulated.load(driver)
    space = emulated.space_of(driver, words=low_latency.words(1 << 12))
    space.state[EPOCH] = first
    dist.barrier()
    space.set_chaos(seed=space.rank, max_delay_us=delay_us)
    library.emulated_tear(TEARINGS_OF_LINES.index(how))
    wrong = 0
    try:
        for call in range(32):
            way = (WAY, WAY, "low_latency_two_shot", "low_latency", WAY, "two_shot")[call % 6]
            after_next = int(space.state[EPOCH]) + 3 if first == 0 else call
            x = torch.full((400,), after_next, dtype=torch.int32).view(F32)  # denormal
            out = torch.empty_like(x)
            cuda.all_reduce(space, call + 1, x, out, way=way)
            total = after_next * space.world
            wrong += not bool((out.view(torch.int32) == total).all())
    finally:
        library.emulated_tear(0)
    return wrong + (space.failure() is not None)


@pytest.mark.parametrize("world", sweep([3, 2]))
def test_call_after_call_under_delays(ranks: RanksFixture, cuda_driver: str, world: int) -> None:
    assert ranks(world).run(mixed_job, cuda_driver, TEARINGS[0], 300) == [0] * world


def test_epochs_begin_anew(ranks: RanksFixture, cuda_driver: str) -> None:
    told = ranks(2).run(mixed_job, cuda_driver, TEARINGS[0], 50, LAST_EPOCH - 11)
    assert told == [0, 0]


@pytest.mark.parametrize("how", TEARINGS_OF_LINES[3:])
def test_what_the_protocol_rules_out_would_be_seen(
    ranks: RanksFixture, cuda_driver: str, how: str
) -> None:
    """Negative controls: a flag that comes before the rest of its line, as where lines are not
    whole; and data that stay where a later call looks for its words."""
    assert sum(ranks(3).run(mixed_job, cuda_driver, how, 2000)) > 0


def test_fewer_words_than_words_with_epochs() -> None:
    """512 KiB in bf16 over 8 ranks: 8/7 of the data in place of twice."""
    for way, words in ((WAY, 16 + 2 * 586 * 16), ("low_latency_two_shot", 2 + 2 * 4096 * 4)):
        assert calls.layout(way, 1 << 18, 8, 2, 2).words == words
    assert calls.layout(WAY, 1 << 18, 8, 2, 2).blocks == 19  # 586 lines, 32 in a block
