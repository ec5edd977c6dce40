"""Collectives of CUDA tensors are rewritten where measured times favour the op, and only there.
CPU tensors are taken for CUDA tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

import tpkernels
from tests.planning.test_table import measured
from tests.support.compiled import AG, AR, RS, gather, reduce, rewritten, scatter
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


def times(op: str, **ms: float) -> Table:
    return Table((measured(SPECS[op], "cuda", **ms),))


@contextmanager
def group_on_gpus(op: str = AR, ms: dict[str, float] | None = None) -> Iterator[Any]:
    """A group whose tensors are taken for CUDA tensors, given these times for `M` rows."""
    why = compile_graph.why_left_to_torch
    on_gpus = lambda group, op, _, **more: why(group, op, "cuda", **more)  # noqa: E731
    with fresh_group() as group, mock.patch.object(compile_graph, "why_left_to_torch", on_gpus):
        if ms is not None:
            tables = groups.get(group.group_name).measured.tables
            tables["cuda"] = times(op, **ms)
        yield group


def reply(function: Any, inputs: list[torch.Tensor], symbolic: bool = False) -> str:
    """The op that the pass puts into a function, or why it does not."""
    _, told = rewritten(function, inputs, symbolic=symbolic)
    (text,) = [entry.op for entry in told.rewritten] + [e.reason for e in told.left_alone]
    return text


def graph_of(op: str, group: Any) -> Any:
    """A function of x alone: a weight's sizes are known."""
    return lambda x: GRAPHS[op](x, torch.ones(K, N), group.size(), group.group_name)


@on_ranks(2)
def test_only_what_was_measured_to_be_faster() -> None:
    """What the pass says of graphs with x of so many rows, known or not, given times for `M`."""
    replies: dict[Any, str] = {}
    for op in (AG, RS, AR):
        for ms, rows in ((None, M), (FAST, M), (SLOW, M), (FAST, 8 * M)):
            with group_on_gpus(op, ms) as group:
                graph = graph_of(op, group)
                speed = "none" if ms is None else "fast" if ms is FAST else "slow"
                replies[op, speed, rows] = reply(graph, [torch.ones(rows, K)])
                if op == AR and rows == M:
                    replies[op, speed, "unknown"] = reply(graph, [torch.ones(rows, K)], True)
    with group_on_gpus(RS, FAST) as group:
        where = group.size(), group.group_name
        inputs = [torch.ones(2, M // 2, K), torch.ones(K, N)]
        replies["split"] = reply(lambda x, w: scatter(x @ w, 1, *where), inputs)
    for op in (AG, RS, AR):
        nothing = replies[op, "none", M]
        assert "CUDA tensors use the torch calls" in nothing and "measured for it" in nothing
        assert replies[op, "fast", M] == op
        why = "favor the op: tuned: 1 ms, direct 2 ms, 2026-11-21"
        assert replies[op, "slow", M].endswith(why)
        assert (replies[op, "fast", 8 * M] == op) == (op == AG)  # AG's rows are cut to M
    # Any measured number of rows may be met, and `auto` decides at each call.
    assert replies[AR, "fast", "unknown"] == AR != replies[AR, "slow", "unknown"]
    assert replies["split"].endswith("no times are measured for this split")


@on_ranks(2)
def test_autotune_and_times_are_part_of_inductors_key() -> None:
    """What the pass takes while `autotune` is on; and whether inductor's cache tells graphs apart
    that were made meanwhile, or with other times."""
    with group_on_gpus() as group:
        name = group.group_name
        fusion = tpkernels.compile.fuse_collectives(group)
        keys = [fusion.uuid(), fusion.uuid()]
        with tpkernels.autotune(group):
            taken = reply(graph_of(AR, group), [torch.ones(M, K)])
            keys.append(fusion.uuid())
        groups.get(name).measured.tables["cuda"] = times(AR, **FAST)
        keys.append(fusion.uuid())
        assert (taken, [key == keys[0] for key in keys]) == (AR, [True, True, False, False])


@on_ranks(2)
def test_times_are_sent_to_the_ranks_of_named_groups() -> None:
    """For which device types times were read when a pass was made: by NCCL, by gloo, without GPUs,
    and for a group that was not named."""
    read: list[str] = []
    found = []
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
            mock.patch.object(Group, "tuned", lambda self, device: read.append(device)),
            mock.patch.object(torch.cuda, "is_available", lambda yes=gpus: yes),
        ):
            tpkernels.compile.fuse_collectives(*[group] * named)
        found.append(list(read))
    assert found == [["cuda"], [], [], []]
