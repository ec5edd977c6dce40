"""``hierarchical`` on CUDA tensors: the results with gloo's transfers in place of NCCL's, the order
of the batches, and what is queued. No GPU has confirmed any of it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeAlias
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.algorithms.test_hierarchical import BITS
from tests.algorithms.test_hierarchical_routes import hosts
from tests.algorithms.test_unfused_cuda import AGM, DEFAULTS, F32, GATHER, MAR, MRS, factors
from tests.cuda.test_numerics import cases
from tests.planning.test_choose import TWO_LEVELS, problem
from tests.support import faults
from tests.support.cases import DTYPES, Case, RanksFixture
from tests.support.cuda_rehearsal import pretending
from tests.support.launches import Queue, queued
from tests.support.nccl_rehearsal import over_nccl
from tests.support.ranked import (
    call,
    check_cases,
    check_job,
    fresh_group,
    on_hosts,
    on_ranks,
    report,
)
from tests.support.tiers import sweep
from tpkernels.algorithms.hierarchical import cuda as hierarchical
from tpkernels.backends import TABLES
from tpkernels.call import Call
from tpkernels.ops.problems import problem_of
from tpkernels.ops.registration import execution_of
from tpkernels.planning.choose import Means, choose
from tpkernels.planning.problem import ORDERED
from tpkernels.transport.point_to_point import PeerLinks

Log: TypeAlias = list[dict[tuple[int, int, int], int]]  # elements by source, end and number


def in_turn(logs: Sequence[Log]) -> bool:
    """Whether ranks that run their batches one after the other come to an end, where a batch ends
    together with those at the other ends of its messages."""
    queues = [[batch for batch in log if batch] for log in logs]
    while any(queues):
        heads = {rank: queue[0] for rank, queue in enumerate(queues) if queue}
        together = dict(heads)
        while waiting := [
            rank
            for rank, batch in together.items()
            for key, count in batch.items()
            if any(together.get(end, {}).get(key) != count for end in key[:2])
        ]:
            for rank in waiting:
                together.pop(rank, None)
        if not together:
            return False
        for rank in together:
            queues[rank].pop(0)
    return True


@contextlib.contextmanager
def logged() -> Iterator[Log]:
    """What this rank sends and receives, batch by batch. Those between two ranks are numbered."""
    log: Log = []
    begin, rank, counts = PeerLinks._start, dist.get_rank(), Counter[tuple[int, int]]()

    def start(link: PeerLinks, sends: Any, receives: Any, tag: int) -> Any:
        batch = {}
        ends = [(x, rank, to) for x, to in sends] + [(x, source, rank) for x, source in receives]
        for x, source, to in ends:
            if x.numel():
                counts[source, to] += 1
                batch[source, to, counts[source, to]] = x.numel()
        log.append(batch)
        return begin(link, sends, receives, tag)

    with mock.patch.object(PeerLinks, "_start", start):
        yield log


def cases_job(driver: str, on: str, given: Sequence[Case]) -> tuple[list[str], Log]:
    with over_nccl(driver), on_hosts(on), fresh_group() as group, logged() as log:
        return check_cases(given, group), log


LAYOUTS = sweep(["001", "0011", "0111", "00112", "01122", "011111"])


@pytest.mark.thorough
@pytest.mark.parametrize("on", LAYOUTS)
def test_results_and_order(ranks: RanksFixture, cuda_driver: str, on: str) -> None:
    given = [replace(case, algorithm="hierarchical") for case in cases(len(on))]
    told = ranks(len(on)).run(cases_job, cuda_driver, on, given, timeout=240)
    report(failure for failures, _ in told for failure in failures)
    logs = [log for _, log in told]
    assert in_turn(logs)
    assert not in_turn([logs[0][::-1], *logs[1:]])  # else this shows nothing


def bits_job(driver: str, on: str, given: Sequence[Case]) -> list[str]:
    """Cases whose bits differ from those of CPU tensors."""
    with fresh_group() as group:
        want = [call(replace(case, algorithm="unfused"), group) for case in given]
    with over_nccl(driver), on_hosts(on), fresh_group() as group:
        got = [call(replace(case, algorithm="hierarchical"), group) for case in given]
    wrong = zip(given, want, got, strict=True)
    return [str(case) for case, ws, gs in wrong if not all(map(torch.equal, ws, gs))]


@pytest.mark.parametrize("on", LAYOUTS)
def test_the_bits_are_those_of_cpu_tensors(ranks: RanksFixture, cuda_driver: str, on: str) -> None:
    given = [replace(case, dtype=dtype) for case in BITS for dtype in DTYPES]
    check_job(ranks(len(on)), bits_job, cuda_driver, on, given, timeout=120)


@on_ranks(3)
def test_gloo_is_refused() -> None:
    with pretending(), on_hosts("001"), fresh_group() as group:
        x = torch.ones(3, 4)
        text = faults.ending_of(
            lambda: tpkernels.all_reduce(x, group, algorithm="hierarchical")
        ).text
        assert "'hierarchical' of all_reduce sends CUDA tensors, which gloo cannot" in text


@pytest.mark.parametrize("op", TWO_LEVELS)
def test_two_levels_of_cuda_tensors_are_only_for_who_asks(op: str) -> None:
    """They need no room in the host's memory, and were not measured."""
    large, across = problem(op, shape=(1 << 12, 1 << 20), device="cuda"), Means(False, 1 << 16)
    assert choose(large, across).algorithm == "unfused"
    plan = choose(large, across, requested="hierarchical")
    assert plan.algorithm == "hierarchical" and plan.numerics == ORDERED


class Side:
    """A second stream whose joints are queued by name."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.join = self.fork = lambda: None
        self.copying = contextlib.nullcontext
        self.copied = None
        self.current = contextlib.nullcontext

    def wait(self, _: None) -> None:
        self.queue.launches.append("wait")


def queue_of(
    op: str, sizes: Sequence[int], make: Callable[[], dict[str, Any]], rank: int | None = None
) -> Queue:
    """What a rank queues in a call, by default the last."""
    on, world = hosts(sizes), sum(sizes)
    rank = world - 1 if rank is None else rank
    ours = next(ranks for ranks in on if rank in ranks)
    with queued(rank, world) as (queue, group), pytest.MonkeyPatch.context() as patch:

        def start(link: PeerLinks, sends: Any, receives: Any, tag: int) -> list[Any]:
            queue.launches.append("batch")
            queue.received += sum(x.nbytes for x, _ in receives)
            queue.crossed += sum(x.nbytes for x, source in receives if source not in ours)
            return []

        patch.setattr(PeerLinks, "_start", start)
        patch.setattr(hierarchical, "SideStream", lambda device: Side(queue))
        group.node = SimpleNamespace(hosts=on, ranks=ours, usable_bytes=1 << 20)
        given = SimpleNamespace(**DEFAULTS | make())
        problem = problem_of(op, group, given)
        plan = choose(problem, Means(shared_memory=False), requested="hierarchical")
        call = Call(group, problem, plan, TABLES["cuda"][op, "hierarchical"], 0)
        queue.launches.clear()
        queue.touched = 0
        execution_of(problem.spec)(call, given)
    return queue


@pytest.mark.parametrize(
    ("op", "sizes", "make", "launches"),
    [
        # The own shard, the host's, the one that this rank was sent, the others'.
        (
            AGM,
            (2, 2),
            factors(**GATHER),
            ["batch", "mm", "wait", "batch", "mm", "wait", "batch", "mm", "wait", "mm"],
        ),
        (
            AGM,
            (2, 2),
            factors(**GATHER, return_gathered=True),
            ["batch", "mm", "copy_", "wait", "batch", "mm", "wait", "batch", "mm", "wait", "mm"],
        ),
        # Partials for the second host's owners, then for the first's while these travel.
        (MRS, (2, 2), factors(), ["mm", "mm", "batch", "mm", "mm", "batch", "sum_partials"]),
        # A sum in fp32 comes from the first host: a launch for each of the four partials in bf16.
        (
            MRS,
            (4, 4),
            factors(),
            [*["mm"] * 4, "batch", *["mm"] * 4, "batch", *["sum_partials"] * 4, "sum_partials"],
        ),
        # In fp32 they are one launch, and the sum for the first host goes back.
        (
            MRS,
            (4, 4),
            factors(wire_dtype=F32),
            [*["mm"] * 4, "batch", *["mm"] * 4, "batch", "sum_partials", "batch", "sum_partials"],
        ),
    ],
)
def test_launches(
    op: str, sizes: Sequence[int], make: Callable[[], dict[str, Any]], launches: list[str]
) -> None:
    assert queue_of(op, sizes, make).launches == launches


LARGE = {
    AGM: {"x": (512, 8192), "weights": [(8192, 1024)]},
    MRS: {"x": (8192, 1024), "w": (1024, 8192)},
    MAR: {"x": (8192, 1024), "w": (1024, 8192)},
}


@pytest.mark.parametrize(("op", "shares"), [(AGM, 1 + 1), (MRS, 2 + 4), (MAR, 2 + 4 + 2)])
def test_large_calls_on_two_hosts_of_eight(op: str, shares: int) -> None:
    """M = N = 8192, K = 8192 or 1024 a rank, bf16: the lines of
    benchmarks/results/gpu-counted-hierarchical.md. ``shares``: what a rank of each host receives
    from the other host, as so many shards in bf16."""
    first, last = (queue_of(op, (8, 8), factors(**LARGE[op]), rank) for rank in (0, 15))
    assert first.crossed + last.crossed == shares * 512 * 8192 * 2
    for queue in (first, last):
        made = Counter(queue.launches)
        print(
            f"{op}: {dict(made)}, {queue.touched / 1e6:.0f} MB of memory, received "
            f"{queue.received / 1e6:.1f} MB, from the other host {queue.crossed / 1e6:.1f} MB"
        )
