"""Ranks in different calls: each of them raises at once and names both calls."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeAlias

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.cases import RanksFixture
from tests.support.faults import PATIENCE, Ending, Report
from tests.support.ranked import on_hosts
from tests.support.tiers import sweep
from tpkernels.ops.column_matmul import column_matmul

WORLD = 3
ODD = 1
LATE_SECONDS = 0.3

Run: TypeAlias = Callable[[dist.ProcessGroup, str], object]


def _x(rows: int = 6, k: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(rows, k, dtype=dtype)


def _growth(k: int, group: dist.ProcessGroup) -> None:
    tpkernels.all_gather_matmul(_x(256, k), torch.ones(k, 2), group, algorithm="pipelined")


def _column_backward(rows: int, group: dist.ProcessGroup) -> None:
    (y,) = column_matmul(_x(rows).requires_grad_(), [W], group, [None])
    y.sum().backward()


def _scaled_gather(scale: torch.Tensor, k: int, group: dist.ProcessGroup) -> None:
    """The packed rows have 16 bytes in either case."""
    x, w = _x(6, k).to(torch.float8_e4m3fn), torch.ones(k, 3).to(torch.float8_e4m3fn)
    tpkernels.all_gather_scaled_matmul(x, w, scale, torch.ones([]), group)


W = torch.ones(8, 3)
BF16, F16 = torch.bfloat16, torch.float16

# What the ranks call, and what the odd one calls meanwhile; by an algorithm, where it matters.
PAIRS: dict[str, tuple[Run, Run]] = {
    "collectives": (
        lambda g, way: tpkernels.all_gather(_x(), g, algorithm=way),
        lambda g, way: tpkernels.all_reduce(_x(18), g, algorithm=way),  # the same bytes
    ),
    "fused ops": (
        lambda g, way: tpkernels.matmul_reduce_scatter(_x(), W, g),
        lambda g, way: tpkernels.matmul_all_reduce(_x(), W, g),
    ),
    "matmul or not": (
        lambda g, way: tpkernels.matmul_reduce_scatter(_x(), W, g, algorithm=way),
        lambda g, way: tpkernels.reduce_scatter(_x(6, 3), g, algorithm=way),
    ),
    "rows": (
        lambda g, way: tpkernels.all_reduce(_x(6), g),
        lambda g, way: tpkernels.all_reduce(_x(7), g),
    ),
    "kinds of scales": (
        lambda g, way: _scaled_gather(torch.ones([]), 16, g),
        lambda g, way: _scaled_gather(torch.ones(6, 1), 12, g),
    ),
    "columns": (
        lambda g, way: tpkernels.all_gather(_x(6, 8), g, algorithm=way),
        lambda g, way: tpkernels.all_gather(_x(6, 900), g, algorithm=way),
    ),
    "same bytes, other shape": (
        lambda g, way: tpkernels.all_gather(_x(6, 8), g),
        lambda g, way: tpkernels.all_gather(_x(8, 6), g),
    ),
    "dtype": (
        lambda g, way: tpkernels.all_gather_matmul(_x(), W, g),
        lambda g, way: tpkernels.all_gather_matmul(_x(dtype=BF16), W.to(BF16), g),
    ),
    "same bytes, other dtype": (
        lambda g, way: tpkernels.reduce_scatter(_x(dtype=BF16), g, algorithm=way),
        lambda g, way: tpkernels.reduce_scatter(_x(dtype=F16), g, algorithm=way),
    ),
    "dim": (
        lambda g, way: tpkernels.reduce_scatter(_x(6, 6), g, 0),
        lambda g, way: tpkernels.reduce_scatter(_x(6, 6), g, 1),
    ),
    "shard_sizes": (
        lambda g, way: tpkernels.reduce_scatter(_x(), g, shard_sizes=[1, 2, 3]),
        lambda g, way: tpkernels.reduce_scatter(_x(), g, shard_sizes=[3, 2, 1]),
    ),
    "algorithm": (
        lambda g, way: tpkernels.all_gather_matmul(_x(), W, g, algorithm="direct"),
        lambda g, way: tpkernels.all_gather_matmul(_x(), W, g, algorithm="pipelined"),
    ),
    "algorithm of the process group": (
        lambda g, way: tpkernels.all_gather(_x(), g, algorithm="unfused"),
        lambda g, way: tpkernels.all_gather(_x(), g, algorithm="ring"),
    ),
    "out_dtype": (
        lambda g, way: tpkernels.all_reduce(_x(), g),
        lambda g, way: tpkernels.all_reduce(_x(), g, out_dtype=BF16),
    ),
    "wire_dtype": (
        lambda g, way: tpkernels.matmul_all_reduce(_x(dtype=BF16), W.to(BF16), g),
        lambda g, way: tpkernels.matmul_all_reduce(
            _x(dtype=BF16), W.to(BF16), g, wire_dtype=torch.float32
        ),
    ),
    "bias": (
        lambda g, way: tpkernels.matmul_all_reduce(_x(), W, g, bias=torch.ones(3)),
        lambda g, way: tpkernels.matmul_all_reduce(_x(), W, g),
    ),
    "residual": (
        lambda g, way: tpkernels.matmul_all_reduce(_x(), W, g),
        lambda g, way: tpkernels.matmul_all_reduce(_x(), W, g, residual=torch.ones(6, 3)),
    ),
    "column products' backward": (
        lambda g, way: _column_backward(6, g),
        lambda g, way: _column_backward(7, g),
    ),
    "growth or not": (
        lambda g, way: tpkernels.all_reduce(_x(), g),
        lambda g, way: _growth(1024, g),
    ),
    "growth": (lambda g, way: _growth(1024, g), lambda g, way: _growth(2048, g)),
    "symmetric or not": (
        lambda g, way: tpkernels.empty(6, 8, group=g),
        lambda g, way: tpkernels.all_gather(_x(), g),
    ),
    "symmetric shape": (
        lambda g, way: tpkernels.empty(6, 8, group=g),
        lambda g, way: tpkernels.empty(6, 800, group=g),
    ),
    "symmetric dtype": (
        lambda g, way: tpkernels.empty(6, 8, group=g, dtype=BF16),
        lambda g, way: tpkernels.empty(6, 8, group=g, dtype=F16),
    ),
}
# Among ranks of several hosts messages must not be confused: gloo ends a process if sizes differ.
APART = [
    ("columns", "unfused"),
    ("collectives", "ring"),
    ("algorithm of the process group", "auto"),
]
APART += [("same bytes, other dtype", "hierarchical"), ("matmul or not", "ring")]


def mismatch_job(pair: str, late: bool, hosts: str, algorithm: str) -> Report:
    """The odd rank is late, or all the others are."""
    kept = [on_hosts(hosts), on_hosts(hosts)] if hosts else [nullcontext(), nullcontext()]
    with kept[0]:
        group, rank = faults.new_group(), dist.get_rank()
    others = [faults.new_group()]
    faults.run_op("all_gather", group, algorithm)
    usual, odd = PAIRS[pair]
    if late == (rank == ODD):
        time.sleep(LATE_SECONDS)
    run = odd if rank == ODD else usual
    report = faults.report_of(lambda: run(group, algorithm), group, others)
    with kept[1]:
        new = faults.new_group()
    for run in PAIRS[pair]:
        report.others.append(faults.ending_of(lambda run=run: run(new, algorithm)))
    for made in (group, *others, new):  # at once, whatever the peers are still doing
        dist.destroy_process_group(made)
    return report


def skipped_call_job() -> Report:
    """The odd rank skips a call."""
    group = faults.new_group()

    def calls() -> None:
        for step in range(10):
            if step != 5 or group.rank() != ODD:
                faults.run_op("all_gather", group)
            faults.run_op("all_reduce", group)

    return faults.report_of(calls, group, [])


_TEXT = re.compile(
    r"^rank (\d) is in (.+), but rank (\d)(?: \(pid (\d+)\))? is in (.+?)"
    r"(?:, both as call #\d+ of the group)?\. The group is broken"
)


def _require_mismatch(reports: list[Report], pids: list[int]) -> tuple[str, str]:
    for report in reports:
        faults.require_broken(report)
    return _both_calls([report.first for report in reports], pids)


def _both_calls(endings: list[Ending], pids: list[int]) -> tuple[str, str]:
    """The calls that the ranks and the odd one were in; all ranks must name the same two."""
    seen = set()
    for rank, first in enumerate(endings):
        assert first.error == "CollectiveMismatchError", first
        assert first.seconds < LATE_SECONDS + faults.PROMPT, first
        match = _TEXT.match(first.text)
        assert match is not None, first
        own, peer = int(match[1]), int(match[3])
        assert own == rank and peer == first.peer and (own == ODD) != (peer == ODD), first
        assert match[4] in (None, str(pids[peer])), first
        seen.add((match[2], match[5]) if peer == ODD else (match[5], match[2]))
    (both,) = seen
    assert both[0] != both[1]
    return both


@pytest.mark.parametrize(("pair", "late"), [("collectives", False), ("growth", True)])
def test_a_mismatch_reaches_all(ranks: RanksFixture, pair: str, late: bool) -> None:
    pool = ranks(WORLD)
    _require_mismatch(pool.run(mismatch_job, pair, late, "", "auto"), pool.pids)


@pytest.mark.parametrize(("pair", "algorithm"), sweep(APART, 2, later=3))
def test_a_mismatch_reaches_the_ranks_of_several_hosts(
    ranks: RanksFixture, pair: str, algorithm: str
) -> None:
    pool = ranks(WORLD)
    _require_mismatch(pool.run(mismatch_job, pair, False, "001", algorithm), pool.pids)


def pairs_job(pairs: list[str]) -> list[Ending]:
    """How the calls of each pair end, each on a group of its own."""
    endings = []
    for pair in pairs:
        group = faults.new_group()
        run = PAIRS[pair][dist.get_rank() == ODD]
        endings.append(faults.ending_of(lambda run=run, group=group: run(group, "auto")))
        dist.destroy_process_group(group)
    return endings


@pytest.mark.thorough
def test_every_difference_is_seen(ranks: RanksFixture) -> None:
    pool = ranks(WORLD)
    for pair, *endings in zip(PAIRS, *pool.run(pairs_job, list(PAIRS)), strict=True):
        assert len(_both_calls(endings, pool.pids)) == 2, pair


def test_both_calls_are_named(ranks: RanksFixture) -> None:
    pool = ranks(WORLD)
    endings = [first for (first,) in pool.run(pairs_job, ["columns"])]
    usual, odd = _both_calls(endings, pool.pids)
    assert usual == "all_gather([18, 8] float32, dim 0 by 6 a rank) [direct]"
    assert odd == "all_gather([18, 900] float32, dim 0 by 6 a rank) [direct]"


def test_a_skipped_call_is_detected(ranks: RanksFixture) -> None:
    pool = ranks(WORLD)
    usual, odd = _require_mismatch(pool.run(skipped_call_job), pool.pids)
    assert usual.startswith("all_gather(") and odd.startswith("all_reduce(")


def different_options_job(timeout: float, workspace_bytes: int) -> tuple[Ending, Ending]:
    group = faults.group_of(dist.new_group())
    mine = (timeout, workspace_bytes) if group.rank() == ODD else (PATIENCE, 1 << 16)
    first = faults.ending_of(lambda: tpkernels.init(group, *mine))
    tpkernels.init(group, PATIENCE, 1 << 16)
    return first, faults.ending_of(lambda: faults.run_op("all_gather", group))


@pytest.mark.parametrize(("timeout", "workspace_bytes"), [(21.0, 1 << 16), (PATIENCE, 1 << 17)])
def test_other_options_of_init_are_refused(
    ranks: RanksFixture, timeout: float, workspace_bytes: int
) -> None:
    for first, then in ranks(WORLD).run(different_options_job, timeout, workspace_bytes):
        assert first.error == "ValueError" and "all ranks must give the same" in first.text, first
        assert first.seconds < faults.PROMPT, first
        assert f"{timeout}" in first.text and f"{workspace_bytes}" in first.text, first
        assert not then.error, then


def default_timeout_job() -> tuple[Ending, Ending]:
    """The default is 30 s on CPUs and another time on GPUs."""
    group = faults.group_of(dist.new_group())
    given = {} if group.rank() == ODD else {"timeout": 30.0}
    first = faults.ending_of(lambda: tpkernels.init(group, **given))
    return first, faults.ending_of(lambda: tpkernels.init(group))


def test_a_timeout_that_is_the_default_on_cpus_only(ranks: RanksFixture) -> None:
    for first, then in ranks(WORLD).run(default_timeout_job):
        assert first.error == "ValueError" and "timeout_on_gpus=30.0" in first.text, first
        assert not then.error, then
