"""Ranks in different calls: each of them raises at once and names both calls."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.cases import RanksFixture
from tests.support.faults import PATIENCE, Ending, Report
from tpkernels.ops.column_matmul import column_matmul

WORLD = 3
ODD = 1
LATE_SECONDS = 0.3

Run: TypeAlias = Callable[[dist.ProcessGroup], object]


def _x(rows: int = 6, k: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(rows, k, dtype=dtype)


def _column_backward(rows: int, group: dist.ProcessGroup) -> None:
    (y,) = column_matmul(_x(rows).requires_grad_(), [W], group, [None])
    y.sum().backward()


def _scaled_gather(scale: torch.Tensor, k: int, group: dist.ProcessGroup) -> None:
    """The packed rows have 16 bytes in either case."""
    x, w = _x(6, k).to(torch.float8_e4m3fn), torch.ones(k, 3).to(torch.float8_e4m3fn)
    tpkernels.all_gather_scaled_matmul(x, w, scale, torch.ones([]), group)


W = torch.ones(8, 3)
BF16 = torch.bfloat16

# What the ranks call, and what the odd one calls meanwhile.
PAIRS: dict[str, tuple[Run, Run]] = {
    "collectives": (
        lambda g: tpkernels.all_gather(_x(), g),
        lambda g: tpkernels.all_reduce(_x(), g),
    ),
    "fused ops": (
        lambda g: tpkernels.matmul_reduce_scatter(_x(), W, g),
        lambda g: tpkernels.matmul_all_reduce(_x(), W, g),
    ),
    "matmul or not": (
        lambda g: tpkernels.all_gather_matmul(_x(), W, g),
        lambda g: tpkernels.all_gather(_x(), g),
    ),
    "rows": (
        lambda g: tpkernels.all_reduce(_x(6), g),
        lambda g: tpkernels.all_reduce(_x(7), g),
    ),
    "kinds of scales": (
        lambda g: _scaled_gather(torch.ones([]), 16, g),
        lambda g: _scaled_gather(torch.ones(6, 1), 12, g),
    ),
    "columns": (
        lambda g: tpkernels.all_gather(_x(6, 8), g),
        lambda g: tpkernels.all_gather(_x(6, 9), g),
    ),
    "same bytes, other shape": (
        lambda g: tpkernels.all_gather(_x(6, 8), g),
        lambda g: tpkernels.all_gather(_x(8, 6), g),
    ),
    "dtype": (
        lambda g: tpkernels.all_gather_matmul(_x(), W, g),
        lambda g: tpkernels.all_gather_matmul(_x(dtype=BF16), W.to(BF16), g),
    ),
    "same bytes, other dtype": (
        lambda g: tpkernels.all_reduce(_x(dtype=BF16), g),
        lambda g: tpkernels.all_reduce(_x(dtype=torch.float16), g),
    ),
    "dim": (
        lambda g: tpkernels.reduce_scatter(_x(6, 6), g, 0),
        lambda g: tpkernels.reduce_scatter(_x(6, 6), g, 1),
    ),
    "shard_sizes": (
        lambda g: tpkernels.reduce_scatter(_x(), g, shard_sizes=[1, 2, 3]),
        lambda g: tpkernels.reduce_scatter(_x(), g, shard_sizes=[3, 2, 1]),
    ),
    "algorithm": (
        lambda g: tpkernels.all_gather_matmul(_x(), W, g, algorithm="direct"),
        lambda g: tpkernels.all_gather_matmul(_x(), W, g, algorithm="pipelined"),
    ),
    "algorithm unfused": (
        lambda g: tpkernels.matmul_reduce_scatter(_x(), W, g, algorithm="direct"),
        lambda g: tpkernels.matmul_reduce_scatter(_x(), W, g, algorithm="unfused"),
    ),
    "out_dtype": (
        lambda g: tpkernels.all_reduce(_x(), g),
        lambda g: tpkernels.all_reduce(_x(), g, out_dtype=BF16),
    ),
    "wire_dtype": (
        lambda g: tpkernels.matmul_all_reduce(_x(dtype=BF16), W.to(BF16), g),
        lambda g: tpkernels.matmul_all_reduce(
            _x(dtype=BF16), W.to(BF16), g, wire_dtype=torch.float32
        ),
    ),
    "bias": (
        lambda g: tpkernels.matmul_all_reduce(_x(), W, g, bias=torch.ones(3)),
        lambda g: tpkernels.matmul_all_reduce(_x(), W, g),
    ),
    "residual": (
        lambda g: tpkernels.matmul_all_reduce(_x(), W, g),
        lambda g: tpkernels.matmul_all_reduce(_x(), W, g, residual=torch.ones(6, 3)),
    ),
    "column products' backward": (
        lambda g: _column_backward(6, g),
        lambda g: _column_backward(7, g),
    ),
    "growth or not": (
        lambda g: tpkernels.all_reduce(_x(), g),
        lambda g: tpkernels.all_gather_matmul(
            _x(256, 1024), torch.ones(1024, 2), g, algorithm="pipelined"
        ),
    ),
    "growth": (
        lambda g: tpkernels.all_gather_matmul(
            _x(256, 1024), torch.ones(1024, 2), g, algorithm="pipelined"
        ),
        lambda g: tpkernels.all_gather_matmul(
            _x(256, 2048), torch.ones(2048, 2), g, algorithm="pipelined"
        ),
    ),
    "symmetric or not": (
        lambda g: tpkernels.empty(6, 8, group=g),
        lambda g: tpkernels.all_gather(_x(), g),
    ),
    "symmetric shape": (
        lambda g: tpkernels.empty(6, 8, group=g),
        lambda g: tpkernels.empty(6, 800, group=g),
    ),
    "symmetric dtype": (
        lambda g: tpkernels.empty(6, 8, group=g, dtype=BF16),
        lambda g: tpkernels.empty(6, 8, group=g, dtype=torch.float16),
    ),
}


def mismatch_job(pair: str, late: bool) -> Report:
    """The odd rank is late, or all the others are."""
    group, rank = faults.new_group(), dist.get_rank()
    others = [faults.new_group()]
    faults.run_op("all_gather", group)
    usual, odd = PAIRS[pair]
    if late == (rank == ODD):
        time.sleep(LATE_SECONDS)
    report = faults.report_of(lambda: (odd if rank == ODD else usual)(group), group, others)
    new = faults.new_group()
    for run in PAIRS[pair]:
        report.others.append(faults.ending_of(lambda run=run: run(new)))
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
    r"^rank (\d) is in (.+), but rank (\d) \(pid (\d+)\) is in (.+), "
    r"both as call #\d+ of the group"
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
        assert int(match[4]) == pids[peer], first
        seen.add((match[2], match[5]) if peer == ODD else (match[5], match[2]))
    (both,) = seen
    assert both[0] != both[1]
    return both


@pytest.mark.parametrize(("pair", "late"), [("collectives", False), ("growth", True)])
def test_a_mismatch_reaches_all(ranks: RanksFixture, pair: str, late: bool) -> None:
    pool = ranks(WORLD)
    _require_mismatch(pool.run(mismatch_job, pair, late), pool.pids)


def pairs_job(pairs: list[str]) -> list[Ending]:
    """How the calls of each pair end, each on a group of its own."""
    endings = []
    for pair in pairs:
        group = faults.new_group()
        run = PAIRS[pair][dist.get_rank() == ODD]
        endings.append(faults.ending_of(lambda run=run, group=group: run(group)))
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
    assert odd == "all_gather([18, 9] float32, dim 0 by 6 a rank) [direct]"


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
