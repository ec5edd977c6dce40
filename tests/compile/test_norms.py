"""All-reduces with the residual and the RMS norm that follow them, in a block like Llama's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support.cases import RanksFixture
from tests.support.normed import (
    ALONE,
    BATCH,
    BF16,
    F16,
    F32,
    HIDDEN,
    MATMUL,
    TOKENS,
    WIDTH,
    Layer,
    Norm,
    block,
    compiled,
    functional,
    inputs,
    llama_norm,
    no_matmul,
    our_sum,
    ours,
    squared_norm,
    torch_norm,
)
from tests.support.ranked import fresh_group, report
from tests.support.tiers import sweep
from tpkernels import groups
from tpkernels.bench.specs import Spec
from tpkernels.compile import graph as compile_graph
from tpkernels.planning.table import Measurement, Table


def exactly(given: Any, layer: Layer, group: str) -> Any:
    """The same in float64, by torch's own calls."""
    h, x, w = given
    plain: Layer = functional if layer in (functional, ours) else no_matmul
    wide = {name: each.double() for name, each in w.items()}
    return block(h.double(), x.double(), wide, torch_norm, plain, group)


def block_job(layer: Layer, norm: Norm, dtype: torch.dtype) -> list[str]:
    group = dist.group.WORLD
    assert group is not None
    name, given = group.group_name, inputs(dtype)

    def function(h: torch.Tensor, x: torch.Tensor, w: Any) -> Any:
        return block(h, x, w, norm, layer, name)

    with torch.no_grad():
        plain, before, _ = compiled(function, given, False)
        fused, after, told = compiled(function, given, True)
        exact = exactly(given, layer, name)
    op = MATMUL if layer in (functional, ours) else ALONE
    failures = []
    if told.counts != {op: 2} or [each.op for each in told.left_alone]:
        failures.append(str(told))
    left = [key for key in after if "pow" in key or "rsqrt" in key or "add" in key]
    if after[f"tpkernels::{op}"] != 2 or before[f"tpkernels::{op}"] or left:
        failures.append(f"{before} -> {after}")
    eps = torch.finfo(dtype).eps
    for got, without, right in zip(fused, plain, exact, strict=True):
        error, scale = (without - right).abs().max(), right.abs().max()
        bound = float(error + HIDDEN**0.5 * eps * scale)
        off = float((got - right).abs().max())
        if not off <= bound or error > 0.1 * scale or got.stride() != without.stride():
            failures.append(f"off by {off}, without the pass by {error}, of {scale}")
    return failures


# First every norm and every dtype, then the other layers.
CASES = [(functional, llama_norm, BF16), (no_matmul, squared_norm, F32), (ours, torch_norm, F16)]
CASES += [(our_sum, llama_norm, BF16), (ours, llama_norm, F32)]


@pytest.mark.parametrize(
    ("layer", "norm", "dtype"),
    sweep(CASES, later=3),
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_a_block(ranks: RanksFixture, layer: Layer, norm: Norm, dtype: torch.dtype) -> None:
    report(each for rank in ranks(2).run(block_job, layer, norm, dtype) for each in rank)


def written_job(what: str) -> list[str]:
    """Between the all-reduce and the norm the graph writes into what one of them reads, by an op
    that stays in place in the graph."""
    with fresh_group() as group:
        name = group.group_name

        def function(h: torch.Tensor, x: torch.Tensor, w: Any) -> Any:
            read = {"residual": h * 2, "input": x * 2, "weight": w["first"] * 2}
            y = ours(read["input"], w["out"], name)
            tpkernels.all_reduce_(read[what], name)
            total = read["residual"] + y
            return llama_norm(total, read["weight"]), total, read[what]

        given = inputs(F32)
        with torch.no_grad():
            want = function(*given)
            got, after, told = compiled(function, given, True)
        failures = [] if told.counts == {MATMUL: 1} else [str(told)]
        return failures + [
            f"{what}: off by {(a - b).abs().max()}; {after}; {told}"
            for a, b in zip(got, want, strict=True)
            if not torch.allclose(a, b, rtol=1e-4, atol=1e-4)
        ]


@pytest.mark.parametrize("what", sweep(["residual", "input", "weight"]))
def test_a_write_in_place_before_the_norm(ranks: RanksFixture, what: str) -> None:
    report(each for rank in ranks(2).run(written_job, what) for each in rank)


def measured_job(ms: dict[str, float] | None) -> dict[str, int]:
    """The ops of a block whose tensors are taken for CUDA tensors, given times for its products."""
    why = compile_graph.why_left_to_torch
    spec = Spec(MATMUL, (BATCH * TOKENS, WIDTH, 2 * HIDDEN), F32)
    with fresh_group() as group, pytest.MonkeyPatch.context() as patch:
        on_gpus = lambda own, op, _, **more: why(own, op, "cuda", **more)  # noqa: E731
        patch.setattr(compile_graph, "why_left_to_torch", on_gpus)
        name, given = group.group_name, inputs(F32)
        key = spec.problem(group.size(), "cuda").tuning_key
        if ms is not None and key is not None:
            found = Measurement(*key, other=spec.other, ms=ms, date="2026-11-23")
            groups.get(name).measured.tables["cuda"] = Table((found,))

        def function(h: torch.Tensor, x: torch.Tensor, w: Any) -> Any:
            return block(h, x, w, llama_norm, ours, name)

        with torch.no_grad():
            _, _, told = compiled(function, given, True)
        return told.counts


FAST, SLOW = {"unfused": 2.0, "direct": 1.0}, {"unfused": 1.0, "direct": 2.0}


@pytest.mark.parametrize(("ms", "count"), sweep([(FAST, 2), (SLOW, 0)]))
def test_cuda_tensors_need_times(
    ranks: RanksFixture, ms: dict[str, float] | None, count: int
) -> None:
    wanted = {MATMUL: count} if count else {}
    assert ranks(2).run(measured_job, ms) == [wanted] * 2


def more_job() -> list[str]:
    """Without a residual, with one and a bias in the op, read by others, of symbolic sizes; with no
    ``norms`` on a CPU; outside the groups that are named."""
    group = dist.group.WORLD
    assert group is not None
    name, (h, x, w) = group.group_name, inputs(F32)

    def plain(h: torch.Tensor, x: torch.Tensor, w: Any) -> Any:
        y = functional(x, w["out"], name)
        return torch_norm(y, w["first"]), y * 2

    def full(h: torch.Tensor, x: torch.Tensor, w: Any) -> Any:
        y = tpkernels.matmul_all_reduce(
            x, w["out"], name, bias=w["second"], residual=h, algorithm="unfused"
        )
        return llama_norm(y, w["first"]), torch.relu(y)

    failures = []
    with torch.no_grad():
        for function in (plain, full):
            expected = function(h, x, w)
            got, ops, told = compiled(function, (h, x, w), True)
            close = all(map(torch.allclose, got, expected))
            if ops[f"tpkernels::{MATMUL}"] != 1 or not close or told.counts != {MATMUL: 1}:
                failures.append(f"{function.__name__}: {ops} {told} {got} {expected}")
        _, ops, told = compiled(plain, (h, x, w), None)
        if MATMUL in told.counts:
            failures.append(f"by default: {told}")
        for given in (h, x):
            torch._dynamo.mark_dynamic(given, 1)
        got, ops, told = compiled(plain, (h, x, w), True)
        if told.counts != {MATMUL: 1} or not all(map(torch.allclose, got, plain(h, x, w))):
            failures.append(f"symbolic: {told}")
    return failures


@pytest.mark.thorough
def test_other_forms(ranks: RanksFixture) -> None:
    report(each for rank in ranks(2).run(more_job) for each in rank)


def test_graphs_with_and_without_norms_are_kept_apart() -> None:
    keys = {tpkernels.compile.fuse_collectives(norms=norms).uuid() for norms in (None, True, False)}
    assert len(keys) == 3
