"""The CUDA all-reduces between processes, run on the CPU (see support/emulated.py): the sums bit
for bit those of csrc/host, call after call, under delays, among calls of the Triton kernels."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
import torch.distributed as dist

from tests.support import emulated
from tests.support.cases import RanksFixture
from tests.support.tiers import sweep
from tpkernels import _C, cuda
from tpkernels.algorithms.reduction import Reduction
from tpkernels.dtypes import CODES
from tpkernels.symm.device import EPOCH, LAST_EPOCH

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (F32, F16, BF16)
COUNTS = (0, 1, 7, 63, 64, 65, 1000, 4096, 9001)
EXACT_WAYS = ("one_shot", "two_shot", "low_latency", "low_latency_two_shot", "whole_lines")


def random(count: int, dtype: torch.dtype, seed: int, offset: int = 0) -> torch.Tensor:
    """Sizes so different that the order of a sum matters; ``offset`` elements off alignment."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count + offset, generator=generator, dtype=torch.float64)
    size = 10.0 ** torch.randint(-2, 3, (count + offset,), generator=generator)
    return (values * size).to(dtype)[offset:]


def host_sum(
    partials: list[torch.Tensor],
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """What csrc/host computes."""
    out = torch.empty(partials[0].shape, dtype=out_dtype)
    bias = None if bias is None else bias.float()
    epilogue = Reduction(out_dtype, bias, residual).epilogue()
    wire, addresses = CODES[partials[0].dtype], [p.data_ptr() for p in partials]
    _C.host.sum_partials(out.data_ptr(), addresses, wire, 0, out.numel(), epilogue)
    return out


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.dtype == F32 else torch.int16)


def sums_job(driver: str, way: str) -> list[str]:
    """All dtypes, counts, places and epilogues; what was wrong."""
    space = emulated.space_of(driver, words=emulated.WORDS if way in EXACT_WAYS[:2] else 1 << 14)
    rank, world, wrong = space.rank, space.world, []
    cases = itertools.product(COUNTS, DTYPES, (F32, BF16), (None, F16), (0, 1))
    for number, (count, dtype, out_dtype, residual_dtype, offset) in enumerate(cases):
        xs = [random(count, dtype, 100 * number + r, offset) for r in range(world)]
        bias = random(count, DTYPES[number % 3], 7) if number % 2 else None
        residual = None if residual_dtype is None else random(count, residual_dtype, 9, offset)
        out = torch.empty(count + offset, dtype=out_dtype)[offset:]
        cuda.all_reduce(space, number + 1, xs[rank], out, bias, residual, way)
        want = host_sum(xs, out_dtype, bias, residual)
        if not torch.equal(bits(out), bits(want)):
            wrong.append(f"{count} {dtype} {out_dtype} {residual_dtype} {offset}")
    failure = space.failure()
    return wrong if failure is None else [*wrong, str(failure)]


@pytest.mark.parametrize("world", [*sweep((3, 1, 2)), pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", EXACT_WAYS)
def test_sums_are_the_hosts_bit_for_bit(
    ranks: RanksFixture, cuda_driver: str, way: str, world: int
) -> None:
    assert ranks(world).run(sums_job, cuda_driver, way) == [[]] * world


def multimem_job(driver: str) -> list[str]:
    """Integers, whose sum has no order."""
    space = emulated.space_of(driver)
    rank, world, wrong = space.rank, space.world, []
    for number, (count, dtype) in enumerate(itertools.product(COUNTS, DTYPES)):
        xs = [torch.arange(count).add(r).remainder(9).to(dtype) for r in range(world)]
        out = torch.empty(count, dtype=dtype)
        cuda.all_reduce(space, number + 1, xs[rank], out, way="multimem")
        exact = torch.stack(xs).double().sum(0)
        if not torch.equal(out.double(), exact):
            wrong.append(f"{count} {dtype}")
    return wrong if space.failure() is None else [*wrong, str(space.failure())]


@pytest.mark.parametrize("world", sweep([4, 1, 2]))
def test_multimem(ranks: RanksFixture, cuda_driver: str, world: int) -> None:
    assert ranks(world).run(multimem_job, cuda_driver) == [[]] * world


def pieces_job(driver: str, way: str) -> tuple[bool, int]:
    """Whether a sum that the buffers do not hold is right, and how many calls it took."""
    space = emulated.space_of(driver)
    xs = [random(70_003, BF16, r) for r in range(space.world)]
    bias, residual = random(70_003, F32, 8), random(70_003, F32, 9)
    out = torch.empty(70_003, dtype=BF16)
    cuda.all_reduce(space, 1, xs[space.rank], out, bias, residual, way)
    right = torch.equal(bits(out), bits(host_sum(xs, BF16, bias, residual)))
    return right and space.failure() is None, int(space.state[0])


@pytest.mark.parametrize("way", EXACT_WAYS)
def test_a_large_sum_goes_piece_by_piece(ranks: RanksFixture, cuda_driver: str, way: str) -> None:
    (right, calls), (also_right, as_many) = ranks(2).run(pieces_job, cuda_driver, way)
    assert right and also_right
    assert calls == as_many > 2


def delays_job(driver: str, broken: dict[str, bool]) -> int:
    """Calls one after another, each rank late at random places; how many were wrong."""
    space = emulated.space_of(driver)
    space.set_chaos(seed=space.rank, max_delay_us=300, **broken)
    wrong = 0
    for call in range(40):
        way = ("one_shot", "two_shot", "multimem")[call % 3]
        if broken.get("single_buffer") and way == "multimem":
            way = "one_shot"
        count = 200 + 37 * (call % 5)
        out = torch.full((count,), call * 3 + space.rank, dtype=F32)
        cuda.all_reduce(space, call + 1, out, out, way=way)
        total = call * 3 * space.world + sum(range(space.world))
        wrong += not bool((out == total).all())
    return wrong + (space.failure() is not None)


@pytest.mark.parametrize("world", sweep([2, 4]))
def test_call_after_call_under_delays(ranks: RanksFixture, cuda_driver: str, world: int) -> None:
    assert ranks(world).run(delays_job, cuda_driver, {}) == [0] * world


@pytest.mark.parametrize("breakage", ["single_buffer", "skip_waits"])
def test_a_broken_protocol_is_seen(ranks: RanksFixture, cuda_driver: str, breakage: str) -> None:
    """Negative control of the test above."""
    assert sum(ranks(4).run(delays_job, cuda_driver, {breakage: True})) > 0


def mixed_job(driver: str) -> list[str]:
    """Calls of the Triton kernels and of these on one workspace, by turns, while epochs begin anew:
    the last but one is a Triton kernel's."""
    from tpkernels.kernels import matmul_all_reduce as fused
    from tpkernels.kernels.configs import INTERPRETER

    space = emulated.space_of(driver, buffer_bytes=1 << 18)
    space.state[EPOCH] = LAST_EPOCH - 5
    dist.barrier()
    space.set_chaos(seed=space.rank, max_delay_us=200)
    wrong = []
    for call in range(12):
        rows = 40 if call == 3 else 8  # whose words no later call overwrites
        x, out = torch.full((rows, 16), 1.0 + call), torch.empty(rows, 24)
        if call % 3 == 0:
            w = torch.ones(16, 24)
            prepared = fused.prepare(INTERPRETER, x, w, F32, space.world, F32)
            prepared.launch(x, w, None, None, out).run(space, call + 1)
            want = 16 * (1.0 + call) * space.world
        elif call % 3 == 1:
            way = ("one_shot", "low_latency")[call // 3 % 2]
            cuda.all_reduce(space, call + 1, out.fill_(call), out, way=way)
            want = call * space.world
        else:
            cuda.barrier(space, call + 1)
            out.fill_(want := 0.0)
        if not bool((out == want).all()):
            wrong.append(f"call {call}")
    words = torch.frombuffer(space._memory[space.rank], dtype=torch.int64)
    if (words[: 2 * space.world * space.words] & 0xFFFF_FFFF > int(space.state[EPOCH])).any():
        wrong.append("words of old epochs are left")
    return [*wrong, *map(str, filter(None, [space.failure()]))]


@pytest.mark.thorough
def test_triton_kernels_may_come_between(interpreting: RanksFixture, cuda_driver: str) -> None:
    assert interpreting(3).run(mixed_job, cuda_driver) == [[]] * 3


def pulled_job(driver: str) -> int:
    """A Triton kernel whose peers read this rank's buffer, then a copy that writes into it."""
    from tpkernels.kernels import all_gather_matmul as gather
    from tpkernels.kernels.configs import INTERPRETER

    space = emulated.space_of(driver, buffer_bytes=1 << 14)
    space.set_chaos(seed=space.rank, max_delay_us=2000)
    wrong, weight = 0, torch.eye(16)
    everything = torch.full((2 * space.buffer_bytes,), 66, dtype=torch.uint8)
    for call in range(6):
        x = torch.full((8, 16), 1.0 + call)
        out, gathered = torch.empty(8 * space.world, 16), torch.empty(8 * space.world, 16)
        sizes = (8,) * space.world
        prepared = gather.prepare(INTERPRETER, x, [weight], gathered, F32, sizes)
        prepared.launch(x, [weight], [None], [out], gathered).run(space, call + 1)
        with cuda.CopyCall(space, call + 100) as copies:
            copies.put(everything, 0)
        wrong += not bool((out == 1.0 + call).all())
    return wrong + (space.failure() is not None)


@pytest.mark.thorough
def test_copies_wait_for_those_who_still_read(interpreting: RanksFixture, cuda_driver: str) -> None:
    assert interpreting(3).run(pulled_job, cuda_driver) == [0] * 3


def copies_job(driver: str, broken: dict[str, bool]) -> int:
    """Each rank hands every peer a chunk of its own, in calls at the same addresses, with calls of
    one launch between; how many chunks were wrong."""
    space = emulated.space_of(driver)
    space.set_chaos(seed=space.rank, max_delay_us=1000, **broken)
    rank, world, wrong = space.rank, space.world, 0
    for call in range(20):
        with cuda.CopyCall(space, call + 1) as copies:
            for i in range(1, world):
                to = (rank + i) % world
                copies.put(torch.full((100,), 100 * call + 10 * rank + to), 800 * to)
                copies.publish(1 + to, to)
            for i in range(1, world):
                source = (rank + i) % world
                chunk = torch.empty(100, dtype=torch.int64)
                copies.fetch(source, 1 + rank, chunk, 800 * rank)
                wrong += not bool((chunk == 100 * call + 10 * source + rank).all())
        # Which stores into the same bytes, and waits for nobody before.
        out = torch.full((600,), call + rank, dtype=F32)
        cuda.all_reduce(space, 1000 + call, out, out, way="one_shot")
        wrong += not bool((out == world * call + sum(range(world))).all())
    return wrong + (space.failure() is not None)


@pytest.mark.parametrize("world", sweep([3, 1, 2]))
def test_copies_ordered_by_words(ranks: RanksFixture, cuda_driver: str, world: int) -> None:
    assert ranks(world).run(copies_job, cuda_driver, {}) == [0] * world


def test_copies_without_waits_are_wrong(ranks: RanksFixture, cuda_driver: str) -> None:
    assert sum(ranks(3).run(copies_job, cuda_driver, {"skip_waits": True})) > 0


@pytest.mark.parametrize("world", sweep([2, 1]))
def test_the_gpu_suites_checks(ranks: RanksFixture, cuda_driver: str, world: int) -> None:
    """They have not seen a GPU; here they run on the CPU."""
    for told in ranks(world).run(suite_job, cuda_driver):
        assert told and all(right for _, right in told), told


def suite_job(driver: str) -> list[tuple[str, bool]]:
    from benchmarks.gpu.cuda import check_job

    emulated.load(driver)
    return check_job("cpu", 3, 200)


def barrier_job(driver: str) -> list[bool]:
    """Whether a barrier ends only when the last rank has come to it."""
    space = emulated.space_of(driver)
    told = []
    for late in range(space.world):
        dist.barrier()
        begin = time.monotonic()
        if space.rank == late:
            time.sleep(0.2)
        cuda.barrier(space, late + 1)
        told.append(time.monotonic() - begin >= 0.19)
    return told


def test_a_barrier_waits_for_every_rank(ranks: RanksFixture, cuda_driver: str) -> None:
    assert ranks(3).run(barrier_job, cuda_driver) == [[True] * 3] * 3
