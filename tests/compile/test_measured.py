"""Collectives of CUDA tensors are rewritten where measured times favour the op, and only there.
CPU tensors are taken for CUDA tensors."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch

import tpkernels
from tests.support.cases import RanksFixture
from tests.support.ranked import fresh_group
from tests.support.traced import AG, AR, RS, gather, reduce, rewritten, scatter
from tpkernels import groups
from tpkernels.bench.specs import Spec
from tpkernels.compile import graph as compile_graph
from tpkernels.groups.group import Group
from tpkernels.planning.table import Measurement, Table

M, K, N = 64, 24, 40
F32 = torch.float32
SPECS = {op: Spec(op, (M, N, K), F32) for op in (AG, RS, AR)}
GRAPHS: dict[str, Any] = {
    AG: lambda x, w, world, group: gather(x[: M // world], 0, world, group) @ w,
    RS: lambda x, w, world, group: scatter(x @ w, 0, world, group),
    AR: lambda x, w, world, group: reduce(x @ w, group),
}


def times(op: str, world: int, **ms: float) -> Table:
    key = SPECS[op].problem(world, "cuda").tuning_key
    assert key is not None
    return Table((Measurement(*key, other=SPECS[op].other, ms=ms, date="2026-11-22"),))


def graph_job(op: str, ms: dict[str, float] | None, rows: int, symbolic: bool) -> list[str]:
    """What the pass says of a graph with x of that many rows, given these times for `M` rows."""
    on_gpus = functools.partial(_why, compile_graph.why_left_to_torch)
    with fresh_group() as group, mock.patch.object(compile_graph, "why_left_to_torch", on_gpus):
        world, name = group.size(), group.group_name
        if ms is not None:
            groups.get(name).measured.tables["cuda"] = times(op, world, **ms)

        def function(x: torch.Tensor) -> Any:  # a weight's sizes are known
            return GRAPHS[op](x, torch.ones(K, N), world, name)

        _, told = rewritten(function, [torch.ones(rows, K)], symbolic=symbolic)
        return [each.op for each in told.rewritten] + [each.reason for each in told.left_alone]


def _why(function: Any, group: Any, op: str, device: str, **more: Any) -> Any:
    return function(group, op, "cuda", **more)


FAST, SLOW = {"unfused": 2.0, "direct": 1.0}, {"unfused": 1.0, "direct": 2.0}


@pytest.mark.parametrize("op", [AG, RS, AR])
def test_only_what_was_measured_to_be_faster(ranks: RanksFixture, op: str) -> None:
    run = functools.partial(ranks(2).run, graph_job, op)
    each = (run(None, M, False), run(FAST, M, False), run(SLOW, M, False), run(FAST, 8 * M, False))
    for (nothing,), (fast,), (slow,), (far,) in zip(*each, strict=True):
        assert "CUDA tensors keep torch's calls" in nothing and "there are none" in nothing
        assert fast == op
        assert slow.endswith("favour the op: tuned: 1 ms, direct 2 ms, 2026-11-22")
        assert (far == op) == (op == AG)  # AG's rows are cut to M


@pytest.mark.parametrize(("ms", "rewrites"), [(FAST, True), (SLOW, False)])
def test_rows_that_are_not_known_yet(ranks: RanksFixture, ms: Any, rewrites: bool) -> None:
    """Any measured number of rows may be met, and `auto` decides at each call."""
    for (found,) in ranks(2).run(graph_job, AR, ms, M, True):
        assert (found == AR) == rewrites


def tuned_job() -> tuple[list[str], bool]:
    """What the pass takes while `autotune` is on, and whether that is part of inductor's key."""
    on_gpus = functools.partial(_why, compile_graph.why_left_to_torch)
    with fresh_group() as group, mock.patch.object(compile_graph, "why_left_to_torch", on_gpus):
        world, name = group.size(), group.group_name
        fusion = tpkernels.compile.fuse_collectives(group)
        key = fusion.uuid()
        with tpkernels.autotune(group):
            graph = functools.partial(GRAPHS[AR], world=world, group=name)
            _, told = rewritten(lambda x: graph(x, torch.ones(K, N)), [torch.ones(M, K)])
            return [each.op for each in told.rewritten], fusion.uuid() == key


def test_while_autotune_is_on(ranks: RanksFixture) -> None:
    assert ranks(2).run(tuned_job) == [([AR], False)] * 2


def batch_job() -> list[str]:
    on_gpus = functools.partial(_why, compile_graph.why_left_to_torch)
    with fresh_group() as group, mock.patch.object(compile_graph, "why_left_to_torch", on_gpus):
        world, name = group.size(), group.group_name
        groups.get(name).measured.tables["cuda"] = times(RS, world, **FAST)
        x, w = torch.ones(2, M // 2, K), torch.ones(K, N)
        _, told = rewritten(lambda x, w: scatter(x @ w, 1, world, name), [x, w])
        return [each.op for each in told.rewritten] + [each.reason for each in told.left_alone]


def test_a_split_for_which_there_are_no_times(ranks: RanksFixture) -> None:
    for (reason,) in ranks(2).run(batch_job):
        assert reason.endswith("none are for this split")


def cache_job() -> tuple[bool, bool]:
    """Whether inductor's cache tells graphs apart that were made with other times."""
    with fresh_group() as group:
        fusion = tpkernels.compile.fuse_collectives(group)
        keys = [fusion.uuid(), fusion.uuid()]
        groups.get(group.group_name).measured.tables["cuda"] = times(AR, group.size(), **FAST)
        keys.append(fusion.uuid())
    return keys[0] == keys[1], keys[1] == keys[2]


def test_times_are_part_of_the_key_of_inductors_cache(ranks: RanksFixture) -> None:
    assert ranks(2).run(cache_job) == [(True, False)] * 2


def sent_job() -> list[list[str]]:
    """For which device types times were read when a pass was made: by NCCL, by gloo, without GPUs,
    and for a group that was not named."""
    read: list[str] = []
    found = []
    for by_gloo, gpus, named in (
        (False, True, True),
        (True, True, True),
        (False, False, True),
        (False, True, False),
    ):
        read.clear()
        with (
            fresh_group() as group,
            mock.patch.object(Group, "by_gloo", lambda self, device, gloo=by_gloo: gloo),
            mock.patch.object(Group, "tuned", lambda self, device: read.append(device)),
            mock.patch.object(torch.cuda, "is_available", lambda yes=gpus: yes),
        ):
            tpkernels.compile.fuse_collectives(*[group] * named)
        found.append(list(read))
    return found


def test_times_are_sent_to_the_ranks_of_named_groups(ranks: RanksFixture) -> None:
    assert ranks(2).run(sent_job) == [[["cuda"], [], [], []]] * 2
