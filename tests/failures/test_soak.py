"""Many calls in a row under random delays: every result is exact, the epochs do not drift.

The negative controls run the same calls on a broken protocol, and must detect that.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support.cases import DTYPES, Case, RanksFixture
from tests.support.faults import group_of, poison_buffer, workspace_of
from tests.support.ranked import SMALLEST_WORKSPACE, check
from tests.support.tiers import sweep
from tpkernels import groups

WORLD = 4
TIMEOUT = 20.0  # of one wait


@dataclass(frozen=True)
class Outcome:
    """What one rank saw."""

    epoch: int
    wrong: list[str]  #: calls with a wrong result, the first few
    failed: str  #: the error that ended the sequence early


@dataclass(frozen=True, kw_only=True)
class Task:
    """A sequence of calls, the same on all ranks."""

    seed: int
    calls: int
    max_delay_us: int = 0
    single_buffer: bool = False
    skip_waits: bool = False
    #: Which of the rank's own buffers to fill with NaN after each call: "next", or "last" (wrong).
    poison: str = ""


def drawn_case(draw: random.Random, layouts: list[str]) -> Case:
    """A random call with exact integers; many take several chunks of the small workspace."""
    ops = ["all_gather", "reduce_scatter", "all_reduce", "all_reduce_", "all_gather_matmul"]
    op = draw.choice([*ops, "matmul_reduce_scatter", "matmul_all_reduce"])
    sizes = tuple(draw.choice([0, draw.randint(1, 40)]) for _ in range(WORLD))
    rows = draw.choice([sum(sizes) or 1, draw.randint(1, 90), 5000])
    matmul, all_reduce = "matmul" in op, "all_reduce" in op
    width = draw.choice([1, 5, 40] if matmul else [1, 7, 33, 300] if rows < 5000 else [1, 4])
    options: dict[str, Any] = {"shape": (rows, width)}
    if not all_reduce:
        options = {"shape": (sum(sizes), width), "sizes": sizes}
    if matmul and "gather" not in op:
        options |= {"k": (draw.randint(1, 20),), "biases": (torch.float32,)}
    if op == "all_gather_matmul":
        options |= {"n": (draw.choice([1, 5, 40]), 3), "return_gathered": True}
    ways = ["direct", "direct", "auto", "unfused", *(["pipelined"] if matmul else [])]
    return Case(
        op=op,
        dtype=draw.choice(DTYPES),
        algorithm=draw.choice(ways),
        layout=draw.choice(layouts),
        integers=True,
        **options,
    )


def _poison(group: dist.ProcessGroup, which: str) -> None:
    """Fills one of this rank's two buffers with NaN. When a call has returned, nobody reads the
    "next" one any more, but peers may still be reading the "last" one."""
    workspace = workspace_of(group)
    poison_buffer(workspace, workspace.channel.epoch + (which == "next"))


def run_task(task: Task) -> Outcome:
    """Runs the calls on a group of its own; a wrong result does not end them."""
    group = group_of(dist.new_group())
    tpkernels.init(group, timeout=TIMEOUT, workspace_bytes=SMALLEST_WORKSPACE, autotune=False)
    groups.get(group.group_name).tuned("cpu")
    dist.barrier()  # so far the protocol is whole
    draw = random.Random(task.seed)
    broken = task.single_buffer or task.skip_waits
    if task.max_delay_us or broken:
        workspace_of(group).set_chaos(
            seed=task.seed * 100 + group.rank(),
            max_delay_us=task.max_delay_us,
            single_buffer=task.single_buffer,
            skip_waits=task.skip_waits,
        )
    wrong: list[str] = []
    failed = ""
    for _ in range(task.calls):
        case = drawn_case(draw, ["plain"] if broken else ["plain"] * 10 + ["symmetric", "mixed"])
        try:
            wrong += check(case, group)
        except Exception as failure:  # after which no more calls can run
            failed = f"{case}: {type(failure).__name__}: {failure}"
            break
        if task.poison:
            _poison(group, task.poison)
    outcome = Outcome(workspace_of(group).epoch, wrong[:5], failed)
    dist.destroy_process_group(group)
    return outcome


def _require_exact(outcomes: list[Outcome]) -> None:
    wrong = [what for outcome in outcomes for what in [*outcome.wrong, outcome.failed] if what]
    assert not wrong, "\n".join(wrong)
    assert len({outcome.epoch for outcome in outcomes}) == 1, outcomes
    assert outcomes[0].epoch > 0


def _soak(ranks: RanksFixture, task: Task, timeout: float) -> None:
    outcomes = ranks(WORLD).run(run_task, task, timeout=timeout)
    _require_exact(outcomes)
    assert outcomes[0].epoch >= task.calls  # a call takes at least one


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("max_delay_us", [0, 200])
def test_more_calls_with_other_seeds(ranks: RanksFixture, max_delay_us: int) -> None:
    _soak(ranks, Task(seed=11 + max_delay_us, calls=40_000, max_delay_us=max_delay_us), 840)


def test_nothing_is_read_that_was_not_written(ranks: RanksFixture) -> None:
    _soak(ranks, Task(seed=4, calls=100, max_delay_us=200, poison="next"), 100)


@pytest.mark.parametrize(
    "broken",
    sweep(
        [
            Task(seed=7, calls=80, max_delay_us=1_000, single_buffer=True),
            Task(seed=8, calls=80, max_delay_us=1_000, skip_waits=True),
            Task(seed=9, calls=80, max_delay_us=1_000, poison="last"),
        ]
    ),
    ids=["single_buffer", "skip_waits", "poison_what_is_read"],
)
def test_a_broken_protocol_is_detected(ranks: RanksFixture, broken: Task) -> None:
    """So few calls are enough to detect it; the correct protocol passes them."""
    outcomes = ranks(WORLD).run(run_task, broken, timeout=100)
    assert any(outcome.wrong for outcome in outcomes), outcomes
