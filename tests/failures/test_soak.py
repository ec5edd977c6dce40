"""Many calls in a row under random delays: every result is exact and the epochs stay in step.

The negative controls run the same calls on a broken protocol and must detect the errors.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support.cases import DTYPES, Case, RanksFixture
from tests.support.faults import get_workspace, poison_buffer, require_group
from tests.support.ranked import SMALLEST_WORKSPACE, check_cases
from tests.support.tiers import sweep
from tpkernels import groups

WORLD = 4
TIMEOUT = 20.0  # seconds per wait


def draw_case(rng: random.Random, layouts: list[str]) -> Case:
    """Draw a random call with exact integers; many need several chunks of the small workspace."""
    ops = ["all_gather", "reduce_scatter", "all_reduce", "all_reduce_", "all_gather_matmul"]
    op = rng.choice([*ops, "matmul_reduce_scatter", "matmul_all_reduce"])
    sizes = tuple(rng.choice([0, rng.randint(1, 40)]) for _ in range(WORLD))
    rows = rng.choice([sum(sizes) or 1, rng.randint(1, 90), 5000])
    matmul, all_reduce = "matmul" in op, "all_reduce" in op
    width = rng.choice([1, 5, 40] if matmul else [1, 7, 33, 300] if rows < 5000 else [1, 4])
    options: dict[str, Any] = {"shape": (rows, width)}
    if not all_reduce:
        options = {"shape": (sum(sizes), width), "sizes": sizes}
    if matmul and "gather" not in op:
        options |= {"k": (rng.randint(1, 20),), "biases": (torch.float32,)}
    if op == "all_gather_matmul":
        options |= {"n": (rng.choice([1, 5, 40]), 3), "return_gathered": True}
    algorithms = ["direct", "direct", "auto", "unfused", *(["pipelined"] if matmul else [])]
    return Case(
        op=op,
        dtype=rng.choice(DTYPES),
        algorithm=rng.choice(algorithms),
        layout=rng.choice(layouts),
        integers=True,
        **options,
    )


def run_calls(seed: int, calls: int, poison: str = "", **chaos: Any) -> tuple[int, list[str]]:
    """Run random calls, identical on all ranks, on a new group. Return its epoch and the first
    errors.

    Args:
        poison: the local buffer to fill with NaN after each call. After a call returns, no rank
            reads the "next" buffer, but peers may still read the "last" buffer.
    """
    group = require_group(dist.new_group())
    tpkernels.init(group, timeout=TIMEOUT, workspace_bytes=SMALLEST_WORKSPACE, autotune=False)
    groups.get(group.group_name).timing_table("cpu")
    dist.barrier()  # the protocol is still correct up to this point
    workspace, rng, wrong = get_workspace(group), random.Random(seed), list[str]()
    workspace.set_chaos(seed=seed * 100 + group.rank(), **chaos)
    layouts = ["plain"] if len(chaos) > 1 else ["plain"] * 10 + ["symmetric", "mixed"]
    for _ in range(calls):
        wrong += check_cases([draw_case(rng, layouts)], group)
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
def test_results_are_exact_under_random_delays(
    ranks: RanksFixture, seed: int, calls: int, max_delay_us: int
) -> None:
    options = {"poison": "next", "max_delay_us": max_delay_us, "timeout": max(100, calls / 48)}
    epochs, wrong = zip(*ranks(WORLD).run(run_calls, seed, calls, **options), strict=True)
    assert not any(wrong), wrong
    assert len({*epochs}) == 1 and epochs[0] >= calls  # each call uses at least one epoch


@pytest.mark.parametrize(
    ("seed", "broken"),
    sweep([(7, {"single_buffer": True}), (8, {"skip_waits": True}), (9, {"poison": "last"})]),
)
def test_a_broken_protocol_is_detected(
    ranks: RanksFixture, seed: int, broken: dict[str, Any]
) -> None:
    """Each run of 80 calls detects the broken protocol with high probability. The correct protocol
    passes these calls."""
    options = {"max_delay_us": 1_000, "timeout": 100, **broken}
    runs = (ranks(WORLD).run(run_calls, seed + i, 80, **options) for i in range(10))
    assert any(wrong for results in runs for _, wrong in results)
