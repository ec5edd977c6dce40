"""Many calls in a row under random delays: every result is exact, the epochs do not drift.

The negative controls run the same calls on a broken protocol, and must detect that.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support.cases import DTYPES, Case, RanksFixture
from tests.support.faults import group_of, poison_buffer, workspace_of
from tests.support.ranked import SMALLEST_WORKSPACE, check_cases
from tests.support.tiers import sweep
from tpkernels import groups

WORLD = 4
TIMEOUT = 20.0  # of one wait


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


def run_calls(seed: int, calls: int, poison: str = "", **chaos: Any) -> tuple[int, list[str]]:
    """Run calls, the same on all ranks, on a group of their own; return its epoch, and what is
    wrong. ``poison``: which of this rank's two buffers to fill with NaN after each call. When it
    has returned, nobody reads the "next" one any more, but peers may still read the "last" one."""
    group = group_of(dist.new_group())
    tpkernels.init(group, timeout=TIMEOUT, workspace_bytes=SMALLEST_WORKSPACE, autotune=False)
    groups.get(group.group_name).tuned("cpu")
    dist.barrier()  # so far the protocol is whole
    workspace, draw, wrong = workspace_of(group), random.Random(seed), list[str]()
    workspace.set_chaos(seed=seed * 100 + group.rank(), **chaos)
    layouts = ["plain"] if len(chaos) > 1 else ["plain"] * 10 + ["symmetric", "mixed"]
    for _ in range(calls):
        wrong += check_cases([drawn_case(draw, layouts)], group)
        if poison:
            poison_buffer(workspace, workspace.channel.epoch + (poison == "next"))
    epoch = workspace.epoch
    dist.destroy_process_group(group)
    return epoch, wrong[:5]


@pytest.mark.parametrize(
    ("seed", "calls", "max_delay_us"),
    [
        (4, 100, 200),
        pytest.param(11, 40_000, 0, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
        pytest.param(211, 40_000, 200, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_nothing_is_read_that_was_not_written(
    ranks: RanksFixture, seed: int, calls: int, max_delay_us: int
) -> None:
    given = {"poison": "next", "max_delay_us": max_delay_us, "timeout": max(100, calls / 48)}
    epochs, wrong = zip(*ranks(WORLD).run(run_calls, seed, calls, **given), strict=True)
    assert not any(wrong), wrong
    assert len({*epochs}) == 1 and epochs[0] >= calls  # a call takes at least one


@pytest.mark.parametrize(
    ("seed", "broken"),
    sweep([(7, {"single_buffer": True}), (8, {"skip_waits": True}), (9, {"poison": "last"})]),
)
def test_a_broken_protocol_is_detected(
    ranks: RanksFixture, seed: int, broken: dict[str, Any]
) -> None:
    """So few calls are mostly enough to detect it; the correct protocol passes them."""
    options = {"max_delay_us": 1_000, "timeout": 100, **broken}
    tries = (ranks(WORLD).run(run_calls, seed + i, 80, **options) for i in range(10))
    assert any(wrong for results in tries for _, wrong in results)
