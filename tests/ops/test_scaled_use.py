"""The ops on scaled operands across hosts, under autocast and ``torch.compile``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import tpkernels
from tests.support.cases import RanksFixture
from tests.support.ranked import apart, fresh_group, on_hosts, report
from tests.support.scaled import E4M3, GATHER, REDUCE, SCATTER, ScaledCase, each
from tests.support.scaled_run import check
from tests.support.tiers import sweep


def across_job(hosts: str, cases: Sequence[ScaledCase]) -> list[str]:
    with on_hosts(hosts) if "1" in hosts else apart(), fresh_group() as group:
        return [failure for case in cases for failure in check(case, group)]


@pytest.mark.parametrize("hosts", sweep(["000", "001", "0011"]))
def test_across_hosts(ranks: RanksFixture, hosts: str) -> None:
    """With several ranks on a host, and with none that share memory."""
    world = len(hosts)
    cases = [
        ScaledCase(op=op, rows=(12 * world,), scales=scales)
        for op in (GATHER, SCATTER, REDUCE)
        for scales in ("tensor", "rows", "blocks")
    ]
    ways = ("hierarchical", "auto") if "1" in hosts else ("unfused", "ring", "auto")
    results = ranks(world).run(across_job, hosts, each(*cases, algorithms=ways), timeout=240)
    report(failure for rank in results for failure in rank)


def step(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, scale: Any, group: Any) -> Any:
    hidden = tpkernels.all_gather_scaled_matmul(x.to(E4M3), up, scale, torch.ones([]), group)
    hidden = hidden.clamp(-2, 2).to(E4M3)
    y = tpkernels.scaled_matmul_reduce_scatter(hidden, down, scale[0], scale[0], group)
    return y + tpkernels.scaled_matmul_all_reduce(x.to(E4M3), up, scale, torch.ones([]), group)[0]


def use_job() -> list[str]:
    """Autocast casts no fp8; a compiled step has the eager one's bits, also with symbolic M."""
    failures = []
    with fresh_group() as group, torch.no_grad():
        up, down = (torch.randn(n, 32).to(E4M3).t() for n in (32, 32))
        given = [torch.randn(m, 32) for m in (4, 6, 9)]
        scales = [torch.rand(x.shape[0], 1) + 0.5 for x in given]
        scalars = [scale[:1].reshape([1]) for scale in scales]
        want = [step(x, up, down, s, group) for x, s in zip(given, scalars, strict=True)]
        with torch.autocast("cpu"):
            found = [step(x, up, down, s, group) for x, s in zip(given, scalars, strict=True)]
        if not all(map(torch.equal, found, want)):
            failures.append("autocast: other bits")
        for dynamic in (False, True):
            torch._dynamo.reset()
            compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
            found = [compiled(x, up, down, s, group) for x, s in zip(given, scalars, strict=True)]
            if not all(map(torch.equal, found, want)):
                failures.append(f"compiled, dynamic={dynamic}: other bits")
    return failures


@pytest.mark.thorough
def test_autocast_and_compile(ranks: RanksFixture) -> None:
    report(failure for rank in ranks(2).run(use_job, timeout=120) for failure in rank)
