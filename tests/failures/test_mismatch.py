"""Ranks in different calls: every rank raises promptly, and the message names both calls."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.cases import RanksFixture
from tests.support.faults import Ending, Report
from tests.support.ranked import on_hosts, on_ranks
from tests.support.tiers import sweep
from tpkernels.ops.column_matmul import column_matmul

WORLD = 3
ODD = 1
LATE_SECONDS = 0.3

Run: TypeAlias = Callable[[dist.ProcessGroup, str], object]


def _x(rows: int = 6, k: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(rows, k, dtype=dtype)


W = torch.ones(8, 3)
BF16, F16 = torch.bfloat16, torch.float16


def _op(name: str, *tensors: torch.Tensor, **options: Any) -> Run:
    """Return a call with the algorithm of the test, unless ``options`` pass one."""
    function = getattr(tpkernels, name)
    return lambda group, algorithm: function(*tensors, group, **{"algorithm": algorithm, **options})


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Run:
    return lambda group, algorithm: tpkernels.empty(*shape, group=group, dtype=dtype)


def _growth(k: int) -> Run:
    return _op("all_gather_matmul", _x(256, k), torch.ones(k, 2), algorithm="pipelined")


def _column_backward(rows: int) -> Run:
    def run(group: dist.ProcessGroup, algorithm: str) -> None:
        (y,) = column_matmul(_x(rows).requires_grad_(), [W], group, [None])
        y.sum().backward()

    return run


def _scaled_gather(scale: torch.Tensor, k: int) -> Run:
    """Return a scaled gather. Packed rows have 16 bytes in both cases that the tests use."""
    x, w = _x(6, k).to(torch.float8_e4m3fn), torch.ones(k, 3).to(torch.float8_e4m3fn)
    return _op("all_gather_scaled_matmul", x, w, scale, torch.ones([]))


# For each name: the call of most ranks, and the call of the odd rank.
GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
NARROW = _x(dtype=BF16), W.to(BF16)
PAIRS: dict[str, tuple[Run, Run]] = {
    # Both transfer the same number of bytes.
    "collectives": (_op("all_gather", _x()), _op("all_reduce", _x(18))),
    "fused ops": (_op(SCATTER, _x(), W), _op(REDUCE, _x(), W)),
    "matmul or not": (_op(SCATTER, _x(), W), _op("reduce_scatter", _x(6, 3))),
    "rows": (_op("all_reduce", _x(6)), _op("all_reduce", _x(7))),
    "kinds of scales": (_scaled_gather(torch.ones([]), 16), _scaled_gather(torch.ones(6, 1), 12)),
    "columns": (_op("all_gather", _x(6, 8)), _op("all_gather", _x(6, 900))),
    "same bytes, other shape": (_op("all_gather", _x(6, 8)), _op("all_gather", _x(8, 6))),
    "dtype": (_op(GATHER, _x(), W), _op(GATHER, *NARROW)),
    "same bytes, other dtype": (
        _op("reduce_scatter", _x(dtype=BF16)),
        _op("reduce_scatter", _x(dtype=F16)),
    ),
    "dim": (_op("reduce_scatter", _x(6, 6)), _op("reduce_scatter", _x(6, 6), scatter_dim=1)),
    "shard_sizes": (
        _op("reduce_scatter", _x(), shard_sizes=[1, 2, 3]),
        _op("reduce_scatter", _x(), shard_sizes=[3, 2, 1]),
    ),
    "algorithm": (
        _op(GATHER, _x(), W, algorithm="direct"),
        _op(GATHER, _x(), W, algorithm="pipelined"),
    ),
    "algorithm of the process group": (
        _op("all_gather", _x(), algorithm="unfused"),
        _op("all_gather", _x(), algorithm="ring"),
    ),
    "out_dtype": (_op("all_reduce", _x()), _op("all_reduce", _x(), out_dtype=BF16)),
    "wire_dtype": (_op(REDUCE, *NARROW), _op(REDUCE, *NARROW, wire_dtype=torch.float32)),
    "bias": (_op(REDUCE, _x(), W, bias=torch.ones(3)), _op(REDUCE, _x(), W)),
    "residual": (_op(REDUCE, _x(), W), _op(REDUCE, _x(), W, residual=torch.ones(6, 3))),
    "column products' backward": (_column_backward(6), _column_backward(7)),
    "growth or not": (_op("all_reduce", _x()), _growth(1024)),
    "growth": (_growth(1024), _growth(2048)),
    "symmetric or not": (_empty(6, 8), _op("all_gather", _x())),
    "symmetric shape": (_empty(6, 8), _empty(6, 800)),
    "symmetric dtype": (_empty(6, 8, dtype=BF16), _empty(6, 8, dtype=F16)),
}
# Pairs for simulated hosts. Messages of different calls must not be confused there: gloo ends the
# process if the sizes differ.
APART = [
    ("columns", "unfused"),
    ("collectives", "ring"),
    ("algorithm of the process group", "auto"),
]
APART += [("same bytes, other dtype", "hierarchical"), ("matmul or not", "ring")]


def mismatch_job(pair: str, late: bool, hosts: str, algorithm: str) -> Report:
    """Run a pair of calls. The odd rank starts late if ``late``, else the usual ranks do."""
    simulated_hosts = (
        [on_hosts(hosts), on_hosts(hosts)] if hosts else [nullcontext(), nullcontext()]
    )
    with simulated_hosts[0]:
        group, rank = faults.new_group(), dist.get_rank()
    other_groups = [faults.new_group()]
    faults.run_op("all_gather", group, algorithm)
    usual, odd = PAIRS[pair]
    if late == (rank == ODD):
        time.sleep(LATE_SECONDS)
    run = odd if rank == ODD else usual
    report = faults.record_report(lambda: run(group, algorithm), group, other_groups)
    with simulated_hosts[1]:
        new = faults.new_group()
    for run in PAIRS[pair]:
        report.other_groups.append(faults.record_ending(lambda run=run: run(new, algorithm)))
    # Destroyed immediately: the peers may still be in their calls.
    for used_group in (group, *other_groups, new):
        dist.destroy_process_group(used_group)
    return report


def skipped_call_job() -> Report:
    """The odd rank skips one call out of 20."""
    group = faults.new_group()

    def calls() -> None:
        for step in range(10):
            if step != 5 or group.rank() != ODD:
                faults.run_op("all_gather", group)
            faults.run_op("all_reduce", group)

    return faults.record_report(calls, group, [])


_MESSAGE = re.compile(
    r"^rank (\d) is in (.+), but rank (\d)(?: \(pid (\d+)\))? is in (.+?)"
    r"(?:, both as call #\d+ of the group)?\. The group is broken"
)


def _require_mismatch(reports: list[Report], pids: list[int]) -> tuple[str, str]:
    for report in reports:
        faults.require_broken(report)
    return _parse_both_calls([report.first for report in reports], pids)


def _parse_both_calls(endings: list[Ending], pids: list[int]) -> tuple[str, str]:
    """Return the usual and the odd call. All messages must name the same two calls."""
    seen = set()
    for rank, first in enumerate(endings):
        assert first.error == "CollectiveMismatchError", first
        assert first.seconds < LATE_SECONDS + faults.PROMPT, first
        match = _MESSAGE.match(first.message)
        assert match is not None, first
        reporting_rank, peer = int(match[1]), int(match[3])
        assert (
            reporting_rank == rank
            and peer == first.peer
            and (reporting_rank == ODD) != (peer == ODD)
        ), first
        assert match[4] in (None, str(pids[peer])), first
        seen.add((match[2], match[5]) if peer == ODD else (match[5], match[2]))
    (named_calls,) = seen
    assert named_calls[0] != named_calls[1]
    return named_calls


@pytest.mark.parametrize(("pair", "late"), [("collectives", False), ("growth", True)])
def test_a_mismatch_reaches_all(ranks: RanksFixture, pair: str, late: bool) -> None:
    pool = ranks(WORLD)
    _require_mismatch(pool.run(mismatch_job, pair, late, "", "auto"), pool.pids)


@pytest.mark.parametrize(("pair", "algorithm"), sweep(APART, 2, num_thorough=3))
def test_a_mismatch_reaches_the_ranks_of_several_hosts(
    ranks: RanksFixture, pair: str, algorithm: str
) -> None:
    pool = ranks(WORLD)
    _require_mismatch(pool.run(mismatch_job, pair, False, "001", algorithm), pool.pids)


def pairs_job(pairs: list[str]) -> list[Ending]:
    """Return the ending of the local call of each pair; every pair uses a new group."""
    endings = []
    for pair in pairs:
        group = faults.new_group()
        run = PAIRS[pair][dist.get_rank() == ODD]
        endings.append(faults.record_ending(lambda run=run, group=group: run(group, "auto")))
        dist.destroy_process_group(group)
    return endings


@pytest.mark.thorough
def test_every_difference_is_seen(ranks: RanksFixture) -> None:
    pool = ranks(WORLD)
    for pair, *endings in zip(PAIRS, *pool.run(pairs_job, list(PAIRS)), strict=True):
        assert len(_parse_both_calls(endings, pool.pids)) == 2, pair


def test_both_calls_are_named(ranks: RanksFixture) -> None:
    pool = ranks(WORLD)
    endings = [first for (first,) in pool.run(pairs_job, ["columns"])]
    usual, odd = _parse_both_calls(endings, pool.pids)
    assert usual == "all_gather([18, 8] float32, dim 0: 6 per rank) [direct]"
    assert odd == "all_gather([18, 900] float32, dim 0: 6 per rank) [direct]"


def test_a_skipped_call_is_detected(ranks: RanksFixture) -> None:
    pool = ranks(WORLD)
    usual, odd = _require_mismatch(pool.run(skipped_call_job), pool.pids)
    assert usual.startswith("all_gather(") and odd.startswith("all_reduce(")


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"timeout": 21.0}, "timeout=21.0"),
        ({"workspace_bytes": (1 << 17) + 64}, "workspace_bytes=131136"),
        # 30 s is the default on CPUs but not on GPUs.
        ({"timeout": 30.0}, "timeout_on_gpus=30.0"),
    ],
)
@on_ranks(WORLD)
def test_different_options_of_init_are_refused(options: dict[str, Any], option: str) -> None:
    group = faults.require_group(dist.new_group())
    local_options = options if group.rank() == ODD else {}
    first = faults.record_ending(lambda: tpkernels.init(group, **local_options))
    for _ in range(2):  # repeating the same options is accepted
        tpkernels.init(group)
    faults.run_op("all_gather", group)
    assert (
        first.error == "ValueError" and "all ranks must pass the same options" in first.message
    ), first
    assert first.seconds < faults.PROMPT and option in first.message, first
