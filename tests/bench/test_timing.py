"""`tpkernels.benchmark`: statistics of known samples, the timed calls, and the slowest rank."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tpkernels import timing as benchmarking
from tpkernels.launch import Ranks
from tpkernels.timing import Timing


class Clock:
    """A manual clock. Each call of ``spend`` advances it by the next of ``milliseconds``,
    cyclically."""

    def __init__(self, *milliseconds: float) -> None:
        self._milliseconds = milliseconds
        self.now, self.calls = 0.0, 0

    def spend(self) -> None:
        self.now += 1e-3 * self._milliseconds[self.calls % len(self._milliseconds)]
        self.calls += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Clock]:
    """Replace the host clock with a manual clock."""

    def use(*milliseconds: float) -> Clock:
        manual = Clock(*milliseconds)
        monkeypatch.setattr(benchmarking.time, "perf_counter", lambda: manual.now)
        return manual

    return use


def test_statistics_of_known_samples() -> None:
    samples = [float(i) for i in range(200, 0, -1)]
    timing = Timing.of(samples, warmup=3, calls=2)
    assert (timing.mean, timing.median, timing.min, timing.max) == (100.5, 100.5, 1.0, 200.0)
    assert (timing.p95, timing.p99) == (190.0, 198.0)
    assert timing.stdev == pytest.approx((200 * 201 / 12) ** 0.5)
    assert (timing.iterations, timing.warmup, timing.calls) == (200, 3, 2)
    assert str(timing) == (
        "median 100.5 ms, mean 100.5 +- 58, min 1, max 200, p95 190, p99 198 "
        "(200 iterations of 2 calls, 3 warm-up)"
    )
    one = Timing.of([2.5], warmup=0, calls=1)
    assert one == Timing(2.5, 2.5, 0.0, 2.5, 2.5, 2.5, 2.5, 1, 0, 1)
    assert str(one).endswith("(1 iterations, 0 warm-up)")
    two = Timing.of([4.0, 2.0], warmup=0, calls=1)
    assert (two.median, two.stdev, two.p95) == (3.0, pytest.approx(2**0.5), 4.0)


def test_each_iteration_is_one_sample(clock: Callable[..., Clock]) -> None:
    now = clock(100.0, 1.0, 2.0, 3.0, 10.0)
    timing = tpkernels.benchmark(now.spend, warmup=1, iterations=4)
    assert now.calls == 5
    numbers = (timing.mean, timing.median, timing.min, timing.max, timing.p99)
    assert numbers == pytest.approx((4.0, 2.5, 1.0, 10.0, 10.0))
    assert (timing.iterations, timing.warmup) == (4, 1)
    now = clock(1.0, 3.0)  # the sample of two calls is their mean
    timing = tpkernels.benchmark(now.spend, warmup=2, iterations=5, calls=2)
    assert now.calls == 2 + 5 * 2
    assert (timing.min, timing.max) == pytest.approx((2.0, 2.0))


def test_the_warm_up_sets_the_number_of_iterations(clock: Callable[..., Clock]) -> None:
    now = clock(900.0, 2.0, 2.0, 2.0)
    timing = tpkernels.benchmark(now.spend, warmup=3, min_seconds=0.1)
    assert timing.iterations == 50  # from the median of the warm-up, not its first call
    assert tpkernels.benchmark(clock(1.0).spend).iterations == 500
    assert tpkernels.benchmark(clock(1.0).spend, calls=10).iterations == 50
    assert tpkernels.benchmark(clock(9e3).spend).iterations == 1
    still = clock(0.0)
    assert tpkernels.benchmark(still.spend, min_seconds=1e-4).iterations == 1000


def test_arguments_arrive(clock: Callable[..., Clock]) -> None:
    seen, now = [], clock(30.0)
    spend = functools.partial(lambda *args, unit: seen.append((args, unit, now.spend())), unit=1.0)
    timing = tpkernels.benchmark(spend, 1, [2], warmup=2, iterations=5)
    assert timing.min == timing.median == pytest.approx(30)
    assert seen == [((1, [2]), 1.0, None)] * 7


REFUSED: dict[str, dict[str, Any]] = {
    "warmup=-1": {"warmup": -1},
    "iterations=0": {"iterations": 0},
    "calls=0": {"calls": 0},
    "min_seconds is 0.0": {"min_seconds": 0.0},
    "min_seconds is nan": {"min_seconds": float("nan")},
    "iterations=3 and min_seconds=1.0": {"iterations": 3, "min_seconds": 1.0},
    "pass iterations": {"warmup": 0},
    "flush_l2 needs a CUDA device, not cpu": {"flush_l2": True},
    "process group 'nobody' does not exist": {"group": "nobody"},
}


def test_refusals() -> None:
    for message, options in REFUSED.items():
        with pytest.raises(ValueError, match=message):
            tpkernels.benchmark(pytest.fail, **options)
    x = torch.empty(1, device="meta")  # the first tensor selects the device
    with pytest.raises(NotImplementedError, match="device is meta; supported: cpu, cuda"):
        tpkernels.benchmark(pytest.fail, 1, [2, (x,)], torch.empty(1))


def test_one_synchronization_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake CUDA: events around the calls, one synchronization, then the elapsed times."""
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")

        def elapsed_time(self, _: Event) -> float:
            log.append("read")
            return 6.0

    def device(device: torch.device) -> AbstractContextManager[None]:
        assert device.type == "cuda"
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
    timing = tpkernels.benchmark(
        lambda: log.append("call"), warmup=1, iterations=2, calls=3, device="cuda"
    )
    warm = ["event", "call", "event", "wait", "read"]
    timed = ["event", "call", "call", "call", "event"]
    assert log == [*warm, *timed, *timed, "wait", "read", "read"]
    assert (timing.min, timing.max) == (2.0, 2.0)


Span = tuple[float, float]


def sleep_alternately() -> tuple[Timing, Timing, list[Span], str]:
    """Run a benchmark in which the ranks sleep alternately.

    Returns the times on this rank only, the times of the group, the begin and end of each call of
    the group (on a clock that the processes share), and the error for options that differ between
    ranks.
    """
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    spans: list[Span] = []

    def call() -> None:
        begin = time.monotonic()
        if len(spans) % 2 == rank:
            time.sleep(0.1)
        spans.append((begin, time.monotonic()))

    single = tpkernels.benchmark(call, warmup=0, iterations=6)
    spans.clear()
    grouped = tpkernels.benchmark(call, warmup=2, min_seconds=0.6, group=group)
    refusal = ""
    try:
        tpkernels.benchmark(pytest.fail, iterations=5 + rank, group=group)
    except ValueError as error:
        refusal = str(error)
    return single, grouped, spans, refusal


def test_the_slowest_rank_counts_in_each_iteration(ranks: Callable[[int], Ranks]) -> None:
    results = ranks(2).run(sleep_alternately, timeout=60)
    both = list(zip(*(spans for _, _, spans, _ in results), strict=True))
    longest = statistics.median(max(end - begin for begin, end in pair) for pair in both)
    for rank, (single, grouped, spans, refusal) in enumerate(results):
        assert single.min < 50 and single.max >= 100  # the rank sleeps in every second call
        assert grouped == results[0][1]
        assert grouped.min >= 100
        # The median would be twice as long if it included a wait for the peer.
        assert grouped.median < 1.5e3 * longest
        assert 3 <= grouped.iterations <= 6
        assert len(spans) == grouped.iterations + 2
        assert f"rank {rank} has iterations={5 + rank}, but in the group it ranges" in refusal
        assert "from 5 to 6" in refusal
    for before, after in pairwise(both):  # a barrier separates the calls
        assert max(end for _, end in before) <= min(begin for begin, _ in after)


@pytest.mark.gpu
@pytest.mark.parametrize("flush_l2", [False, True])
def test_time_of_a_cuda_kernel(flush_l2: bool) -> None:
    x = torch.randn(2048, 2048, device="cuda")
    timing = tpkernels.benchmark(torch.mm, x, x, iterations=20, flush_l2=flush_l2)
    assert timing.iterations == 20
    assert 0.01 < timing.min <= timing.median < 100  # 17 GFLOP
