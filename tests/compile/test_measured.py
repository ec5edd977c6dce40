"""Collectives on CUDA tensors are rewritten only if timings favour the op. In these tests, CPU
tensors count as CUDA tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

import tpkernels
from tests.planning.test_table import measured
from tests.support.compiled import AG, AR, RS, gather, reduce, scatter, trace_and_fuse
from tests.support.ranked import fresh_group, on_ranks
from tpkernels import groups
from tpkernels.bench.specs import Spec
from tpkernels.compile import graph as compile_graph
from tpkernels.groups.group import Group
from tpkernels.planning.table import Table

M, K, N = 64, 24, 40
F32 = torch.float32
SPECS = {op: Spec(op, (M, N, K), F32) for op in (AG, RS, AR)}
GRAPHS: dict[str, Any] = {
    AG: lambda x, w, world, group: gather(x[: M // world], 0, world, group) @ w,
    RS: lambda x, w, world, group: scatter(x @ w, 0, world, group),
    AR: lambda x, w, world, group: reduce(x @ w, group),
}


FAST, SLOW = {"unfused": 2.0, "direct": 1.0}, {"unfused": 1.0, "direct": 2.0}


def make_table(op: str, **ms: float) -> Table:
    return Table((measured(SPECS[op], "cuda", **ms),))


@contextmanager
def group_on_gpus(op: str = AR, ms: dict[str, float] | None = None) -> Iterator[Any]:
    """Yield a group whose tensors count as CUDA tensors, with timings ``ms`` for `M` rows."""
    find_reason = compile_graph.reason_against_replacement
    on_gpus = lambda group, op, _, **options: find_reason(group, op, "cuda", **options)  # noqa: E731
    with (
        fresh_group() as group,
        mock.patch.object(compile_graph, "reason_against_replacement", on_gpus),
    ):
        if ms is not None:
            tables = groups.get(group.group_name).planner_inputs.tables
            tables["cuda"] = make_table(op, **ms)
        yield group


def run_pass(function: Any, inputs: list[torch.Tensor], symbolic: bool = False) -> str:
    """Return the op that the pass inserts into a function, or the reason against it."""
    _, report = trace_and_fuse(function, inputs, symbolic=symbolic)
    (outcome,) = [entry.op for entry in report.rewritten] + [e.reason for e in report.left_alone]
    return outcome


def make_graph(op: str, group: Any) -> Any:
    """Return a function of x. The sizes of the weight are static."""
    return lambda x: GRAPHS[op](x, torch.ones(K, N), group.size(), group.group_name)


@on_ranks(2)
def test_only_faster_ops_are_inserted() -> None:
    """Run the pass on graphs with static or symbolic numbers of rows, and timings for `M` rows."""
    outcomes: dict[Any, str] = {}
    for op in (AG, RS, AR):
        for ms, rows in ((None, M), (FAST, M), (SLOW, M), (FAST, 8 * M)):
            with group_on_gpus(op, ms) as group:
                graph = make_graph(op, group)
                speed = "none" if ms is None else "fast" if ms is FAST else "slow"
                outcomes[op, speed, rows] = run_pass(graph, [torch.ones(rows, K)])
                if op == AR and rows == M:
                    outcomes[op, speed, "unknown"] = run_pass(graph, [torch.ones(rows, K)], True)
    with group_on_gpus(RS, FAST) as group:
        args = group.size(), group.group_name
        inputs = [torch.ones(2, M // 2, K), torch.ones(K, N)]
        outcomes["split"] = run_pass(lambda x, w: scatter(x @ w, 1, *args), inputs)
    for op in (AG, RS, AR):
        untimed = outcomes[op, "none", M]
        assert "CUDA tensors use the torch calls" in untimed and "measured for it" in untimed
        assert outcomes[op, "fast", M] == op
        reason = "favor the op: tuned: 1 ms, direct 2 ms, 2026-11-21"
        assert outcomes[op, "slow", M].endswith(reason)
        assert (outcomes[op, "fast", 8 * M] == op) == (op == AG)  # the AG graph slices x to M rows
    # A symbolic number of rows may be any measured number, and `auto` decides at each call.
    assert outcomes[AR, "fast", "unknown"] == AR != outcomes[AR, "slow", "unknown"]
    assert outcomes["split"].endswith("no times are measured for this split")


@on_ranks(2)
def test_autotune_and_timings_are_part_of_the_inductor_key() -> None:
    """With `autotune` on, the pass inserts the op. The key changes with `autotune` and with new
    timings."""
    with group_on_gpus() as group:
        name = group.group_name
        fusion = tpkernels.compile.fuse_collectives(group)
        keys = [fusion.uuid(), fusion.uuid()]
        with tpkernels.autotune(group):
            outcome = run_pass(make_graph(AR, group), [torch.ones(M, K)])
            keys.append(fusion.uuid())
        groups.get(name).planner_inputs.tables["cuda"] = make_table(AR, **FAST)
        keys.append(fusion.uuid())
        assert (outcome, [key == keys[0] for key in keys]) == (AR, [True, True, False, False])


@on_ranks(2)
def test_timings_of_named_groups_are_read() -> None:
    """Create a pass for NCCL, for gloo, without GPUs, and without a named group. Only the first
    pass reads timings."""
    read: list[str] = []
    device_types = []
    for uses_gloo, gpus, named in (
        (False, True, True),
        (True, True, True),
        (False, False, True),
        (False, True, False),
    ):
        read.clear()
        with (
            fresh_group() as group,
            mock.patch.object(Group, "uses_gloo", lambda self, device, gloo=uses_gloo: gloo),
            mock.patch.object(Group, "timing_table", lambda self, device: read.append(device)),
            mock.patch.object(torch.cuda, "is_available", lambda available=gpus: available),
        ):
            tpkernels.compile.fuse_collectives(*[group] * named)
        device_types.append(list(read))
    assert device_types == [["cuda"], [], [], []]
