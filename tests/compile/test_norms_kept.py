"""Graphs in which an RMS norm stays outside the all-reduce in front of it, and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support.cases import RanksFixture
from tests.support.normed import (
    ALONE,
    BF16,
    EPS,
    F32,
    MATMUL,
    compiled,
    inputs,
    llama_norm,
    ours,
)
from tests.support.ranked import report
from tests.support.tiers import sweep
from tests.support.traced import reduce


def kept_job(make: str) -> list[str]:
    """Graphs in which the norm stays outside the all-reduce."""
    group = dist.group.WORLD
    assert group is not None
    name, (h, x, w) = group.group_name, inputs(BF16)
    function = GRAPHS[make]
    grad = make == "a gradient"

    def run(h: torch.Tensor, x: torch.Tensor, w: Any) -> Any:
        return function(h, x, w, name)

    with torch.set_grad_enabled(grad):
        given = h.clone().requires_grad_(grad), x, w
        _, before, _ = compiled(run, given, False)
        _, after, told = compiled(run, given, True)
    normed = [op for op in told.counts if op in (MATMUL, ALONE)]
    return [] if before == after and not normed else [f"{make}: {told}\n{before} -> {after}"]


def read_twice(h: torch.Tensor, x: torch.Tensor, w: Any, group: str) -> Any:
    y = ours(x, w["out"], group)
    return llama_norm(h + y, w["first"]), y


def rounded_twice(h: torch.Tensor, x: torch.Tensor, w: Any, group: str) -> Any:
    total = (h.float() + ours(x, w["out"], group).float()).relu().to(h.dtype)
    return llama_norm(total, w["first"])


def its_square(h: torch.Tensor, x: torch.Tensor, w: Any, group: str) -> Any:
    y = ours(x, w["out"], group)
    return llama_norm(y + y.relu(), w["first"])


def its_rows(h: torch.Tensor, x: torch.Tensor, w: Any, group: str) -> Any:
    """The norm's factor is read by others."""
    total = (h + ours(x, w["out"], group)).float()
    factor = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPS)
    return w["first"] * (total * factor).to(BF16), factor


def other_dim(h: torch.Tensor, x: torch.Tensor, w: Any, group: str) -> Any:
    total = (h + ours(x, w["out"], group)).float()
    factor = torch.rsqrt(total.pow(2).mean(-2, keepdim=True) + EPS)
    return w["first"] * (total * factor).to(BF16)


def other_power(h: torch.Tensor, x: torch.Tensor, w: Any, group: str) -> Any:
    total = (h + ours(x, w["out"], group)).float()
    factor = torch.rsqrt(total.pow(4).mean(-1, keepdim=True) + EPS)
    return w["first"] * (total * factor).to(BF16)


def its_weight(h: torch.Tensor, x: torch.Tensor, w: Any, group: str) -> Any:
    total = h + ours(x, w["out"], group)
    return llama_norm(total, total[0, 0] * 2)


def scaled_sum(h: torch.Tensor, x: torch.Tensor, w: Any, group: str) -> Any:
    return llama_norm(torch.add(h, ours(x, w["out"], group), alpha=2), w["first"])


def broadcast(h: torch.Tensor, x: torch.Tensor, w: Any, group: str) -> Any:
    return llama_norm(ours(x, w["out"], group) + h[:1, :1], w["first"])


def transposed(h: torch.Tensor, x: torch.Tensor, w: Any, group: str) -> Any:
    return llama_norm(h.transpose(0, 1) + ours(x, w["out"], group).transpose(0, 1), w["first"])


def wide_result(h: torch.Tensor, x: torch.Tensor, w: Any, group: str) -> Any:
    y = tpkernels.matmul_all_reduce(x, w["out"], group, out_dtype=F32)
    return llama_norm(y + h.float(), w["first"].float())


def wide_wire(h: torch.Tensor, x: torch.Tensor, w: Any, group: str) -> Any:
    y = tpkernels.matmul_all_reduce(x, w["out"], group, wire_dtype=F32)
    return llama_norm(y + h, w["first"])


def two_residuals(h: torch.Tensor, x: torch.Tensor, w: Any, group: str) -> Any:
    y = tpkernels.matmul_all_reduce(x, w["out"], group, residual=h)
    return llama_norm(y + h, w["first"])


def mean_of_ranks(h: torch.Tensor, x: torch.Tensor, w: Any, group: str) -> Any:
    return llama_norm(reduce(torch.relu(x @ w["out"]), group, "avg") + h, w["first"])


def a_gradient(h: torch.Tensor, x: torch.Tensor, w: Any, group: str) -> Any:
    """The backward needs the factor."""
    return llama_norm(h + ours(x, w["out"], group), w["first"])


KEPT = [read_twice, rounded_twice, its_square, its_rows, other_dim, other_power, scaled_sum]
KEPT += [
    its_weight,
    broadcast,
    transposed,
    wide_result,
    wide_wire,
    two_residuals,
    mean_of_ranks,
    a_gradient,
]
GRAPHS = {each.__name__.replace("_", " "): each for each in KEPT}


@pytest.mark.parametrize("make", sweep(GRAPHS, 2, later=6))
def test_what_is_left_alone(ranks: RanksFixture, make: str) -> None:
    report(each for rank in ranks(2).run(kept_job, make) for each in rank)
