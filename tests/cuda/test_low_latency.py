"""The low-latency kernels between processes, run on the CPU: the same bits as the others, under
delays, over the end of the epochs, and what goes wrong without a flag in every word."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch
import torch.distributed as dist

from tests.cuda.test_emulated import BF16, DTYPES, F32, bits, host_sum, random
from tests.support import emulated
from tests.support.cases import RanksFixture
from tests.support.tiers import sweep
from tpkernels import cuda
from tpkernels.cuda import low_latency
from tpkernels.symm.device import EPOCH, LAST_EPOCH, MISMATCH, DeviceWorkspace

COUNTS = (0, 1, 7, 8, 9, 64, 1001)
WORDS = low_latency.words(4 * max(COUNTS))
WAY, TWO_SHOT = "low_latency", "low_latency_two_shot"


def shards_of(space: DeviceWorkspace, rows: int) -> tuple[int, ...]:
    """Uneven shards, an empty one among three."""
    return tuple(rows * (r % 3) + (r % 2) for r in range(space.world))


def gather(space: DeviceWorkspace, signature: int, row: int, dtype: torch.dtype, way: str) -> bool:
    sizes = shards_of(space, 3)
    xs = [random(n * row, dtype, 50 + r).view(n, row) for r, n in enumerate(sizes)]
    out = torch.full((sum(sizes), row), 77, dtype=dtype)
    cuda.all_gather(space, signature, xs[space.rank], out, sizes, way)
    return torch.equal(bits(out), bits(torch.cat(xs)))


def scatter(
    space: DeviceWorkspace,
    signature: int,
    row: int,
    dtype: torch.dtype,
    way: str,
    epilogue: bool = False,
) -> bool:
    sizes, rank = shards_of(space, 3), space.rank
    begin = sum(sizes[:rank])
    xs = [random(sum(sizes) * row, dtype, 60 + r).view(-1, row) for r in range(space.world)]
    bias = random(row, F32, 7) if epilogue else None
    residual = random(sizes[rank] * row, BF16, 8 + rank).view(-1, row) if epilogue else None
    out = torch.empty(sizes[rank], row, dtype=dtype)
    cuda.reduce_scatter(space, signature, xs[rank], out, sizes, bias, residual, way)
    parts = [x[begin : begin + sizes[rank]].contiguous() for x in xs]
    return torch.equal(bits(out), bits(host_sum(parts, dtype, bias, residual)))


def shards_job(driver: str) -> list[str]:
    space, wrong = emulated.space_of(driver, words=2 * WORDS), []
    cases = itertools.product((1, 5, 8, 64), DTYPES, (WAY, "one_shot"))
    for number, (row, dtype, way) in enumerate(cases):
        for kind, right in (
            ("gather", gather(space, 3 * number + 1, row, dtype, way)),
            ("scatter", scatter(space, 3 * number + 2, row, dtype, way)),
            ("epilogue", scatter(space, 3 * number + 3, row, dtype, way, epilogue=True)),
        ):
            if not right:
                wrong.append(f"{kind} {row} {dtype} {way}")
    return [*wrong, *map(str, filter(None, [space.failure()]))]


@pytest.mark.parametrize("world", sweep([3, 1, 4]))
def test_shards(ranks: RanksFixture, cuda_driver: str, world: int) -> None:
    assert ranks(world).run(shards_job, cuda_driver) == [[]] * world


def blocks_job(driver: str) -> list[bool]:
    """Calls of several blocks, of which two run at a time."""
    space = emulated.space_of(driver, words=1 << 14)
    x = torch.full((12_000,), 1.0 + space.rank)
    cuda.all_reduce(space, 1, x, x, way=WAY)
    wide = torch.full((20_000,), 1.0 + space.rank, dtype=BF16)  # whose sums take twice the lines
    cuda.all_reduce(space, 4, wide, out := torch.empty(20_000), way=TWO_SHOT)
    total = sum(1.0 + r for r in range(space.world))
    return [
        bool((x == total).all() and (out == total).all()),
        gather(space, 2, 2000, F32, WAY),
        scatter(space, 3, 2000, F32, WAY),
        space.failure() is None,
    ]


@pytest.mark.parametrize("world", sweep([2, 3]))
def test_blocks_wait_only_for_those_of_their_number(
    ranks: RanksFixture, cuda_driver: str, world: int
) -> None:
    assert ranks(world).run(blocks_job, cuda_driver) == [[True] * 4] * world


def delays_job(driver: str, delay_us: int, skip_waits: bool, first: int = 0) -> tuple[int, bool]:
    """Calls one after another, each rank late at random places: how many were wrong, and whether
    this rank holds no word of an epoch that comes again. ``first``: the last epoch before them."""
    space = emulated.space_of(driver, words=WORDS)
    space.state[EPOCH] = first
    dist.barrier()
    space.set_chaos(seed=space.rank, max_delay_us=delay_us, skip_waits=skip_waits)
    wrong = 0
    for call in range(24):
        if call % 4 == 3:
            shards = (gather, scatter)[call // 4 % 2]
            wrong += not shards(space, call + 1, 5 + call, F32, ("one_shot", WAY)[call // 8 % 2])
            continue
        way = (WAY, TWO_SHOT, ("two_shot", TWO_SHOT)[call // 4 % 2])[call % 4]
        count = 200 + 37 * (call % 5)
        out = torch.full((count,), call * 3 + space.rank, dtype=F32)
        cuda.all_reduce(space, call + 1, out, out, way=way)
        total = call * 3 * space.world + sum(range(space.world))
        wrong += not bool((out == total).all())
    region = torch.frombuffer(space._memory[space.rank], dtype=torch.int64)
    epochs = region[: 2 * space.world * space.words] & 0xFFFF_FFFF
    return wrong + (space.failure() is not None), bool((epochs <= int(space.state[EPOCH])).all())


@pytest.mark.parametrize("world", sweep([4, 2]))
def test_call_after_call_under_delays(ranks: RanksFixture, cuda_driver: str, world: int) -> None:
    assert ranks(world).run(delays_job, cuda_driver, 300, False) == [(0, True)] * world


@pytest.mark.parametrize("world", sweep([2, 3]))
def test_epochs_begin_anew(ranks: RanksFixture, cuda_driver: str, world: int) -> None:
    """The calls go on beyond the last epoch, and no word of an epoch before it is left."""
    told = ranks(world).run(delays_job, cuda_driver, 50, False, LAST_EPOCH - 11)
    assert told == [(0, True)] * world


def test_without_looking_at_flags_it_is_wrong(ranks: RanksFixture, cuda_driver: str) -> None:
    """Negative control of the test under delays."""
    told = ranks(4).run(delays_job, cuda_driver, 2000, True)
    assert sum(wrong for wrong, _ in told) > 0


def mismatch_job(driver: str, ways: tuple[str, str]) -> tuple[bool, bool]:
    """Rank 0 makes one call, rank 1 another: both fail, and neither has a result."""
    space = emulated.space_of(driver, words=WORDS)
    x = torch.ones(200)
    out = torch.zeros(200)
    cuda.all_reduce(space, 5 + space.rank, x, out, way=ways[space.rank])
    failure = space.failure()
    told = failure is not None and failure[:2] == (MISMATCH, 1 - space.rank)
    return told, bool(out.isnan().all())


@pytest.mark.parametrize("ways", [(WAY, "one_shot"), ("whole_lines", TWO_SHOT)])
def test_words_of_another_call_are_no_result(
    ranks: RanksFixture, cuda_driver: str, ways: tuple[str, str]
) -> None:
    """Its words have the epoch as well, in the places of data."""
    assert ranks(2).run(mismatch_job, cuda_driver, ways) == [(True, True)] * 2


def test_what_auto_takes() -> None:
    for nbytes, world, way in (
        (25_714, 8, WAY),
        (25_716, 8, TWO_SHOT),
        (524_288, 2, WAY),
        (524_288, 8, TWO_SHOT),
        (524_290, 2, "two_shot"),
    ):
        x = torch.empty(nbytes // 2, dtype=BF16)
        needs, wanted = (
            cuda.prepare_all_reduce(world, x, x),
            cuda.calls.layout(way, *x.shape, world, 2, 2),
        )
        assert (needs.words, needs.buffer_bytes) == (wanted.words, wanted.nbytes)
    sizes = (64, 64)  # 128 KiB and one row more
    for rows, small in ((64, True), (65, False)):
        shard, whole = torch.empty(rows, 512, dtype=BF16), torch.empty(64 + rows, 512, dtype=BF16)
        sizes = (64, rows)
        gathers = cuda.prepare_all_gather(shard, whole, sizes)
        scatters = cuda.prepare_reduce_scatter(whole, shard, sizes)
        assert (gathers.buffer_bytes == 0) == (scatters.buffer_bytes == 0) == small
    with pytest.raises(ValueError, match="way is 'ring'; it must be auto, one_shot or low_latency"):
        cuda.prepare_all_gather(shard, whole, sizes, "ring")


TEARINGS = ("between words", "one flag per line", "torn words")  # tests/native/emulated/grid.h


def torn_job(driver: str, how: str) -> int:
    """Lines whose two words come one after the other, while other ranks run; how many calls were
    wrong."""
    library, space = emulated.load(driver), emulated.space_of(driver, words=WORDS)
    library.emulated_tear(TEARINGS.index(how))
    wrong = 0
    try:
        for call in range(150):
            x = torch.arange(64).add(call + 2 * space.rank).to(F32)
            out = torch.empty_like(x)
            cuda.all_reduce(space, call + 1, x, out, way=(WAY, TWO_SHOT)[call % 2])
            xs = [torch.arange(64).add(call + 2 * r) for r in range(space.world)]
            wrong += not torch.equal(out, torch.stack(xs).sum(0).to(F32))
    finally:
        library.emulated_tear(0)
    return wrong + (space.failure() is not None)


def test_no_torn_line_is_taken_for_data(ranks: RanksFixture, cuda_driver: str) -> None:
    assert ranks(2).run(torn_job, cuda_driver, "between words") == [0, 0]


@pytest.mark.parametrize("how", TEARINGS[1:])
def test_what_is_torn_would_be_seen(ranks: RanksFixture, cuda_driver: str, how: str) -> None:
    """Negative controls: one flag for 16 bytes, and words of 8 bytes that are stored in halves."""
    assert sum(ranks(2).run(torn_job, cuda_driver, how)) > 0


def counts_job(driver: str) -> dict[str, tuple[int, ...]]:
    """By call: barriers, releases at system scope, and ordering atomics that one thread does one
    after the other. A block has a thread for each peer."""
    library = emulated.load(driver)
    space = emulated.space_of(driver, words=1 << 14)
    library.emulated_threads(8)
    x, whole = torch.ones(128), torch.empty(128 * space.world)
    sizes, column = (128,) * space.world, x.view(-1, 1)
    found = {}

    def count(what: str) -> None:
        counts = (ctypes.c_int * 3)()
        library.emulated_counts(counts)
        found[what] = tuple(counts)

    try:
        for way in ("one_shot", "two_shot", WAY, TWO_SHOT):
            cuda.all_reduce(space, 1, x, x, way=way)
            count(f"all_reduce {way}")
        for way in ("one_shot", WAY):
            cuda.all_gather(space, 2, column, whole.view(-1, 1), sizes, way)
            count(f"all_gather {way}")
            cuda.reduce_scatter(space, 3, whole.view(-1, 1), column, sizes, way=way)
            count(f"reduce_scatter {way}")
        cuda.all_reduce(space, 4, (x := torch.ones(4096)), x, way=WAY)
        count("all_reduce in 2 blocks")
    finally:
        library.emulated_threads(2)
    return found


@pytest.mark.parametrize("world", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_what_a_call_does_in_turn(ranks: RanksFixture, cuda_driver: str, world: int) -> None:
    """A release waits until the stores before it have arrived: a round trip."""
    for found in ranks(world).run(counts_job, cuda_driver):
        assert found == {
            "all_reduce one_shot": (6, 2, 0),
            "all_reduce two_shot": (8 + world - 1, 3, 0),
            "all_reduce low_latency": (2, 0, 0),
            "all_reduce low_latency_two_shot": (2, 0, 0),
            "all_gather one_shot": (5 + world - 1, 2, 0),
            "reduce_scatter one_shot": (6, 2, 0),
            "all_gather low_latency": (2, 0, 0),
            "reduce_scatter low_latency": (2, 0, 0),
            "all_reduce in 2 blocks": (2, 0, 1),
        }
