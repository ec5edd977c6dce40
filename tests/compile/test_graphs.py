"""Graphs that the pass rewrites, with all forms of a gather before or a reduction after a matmul,
and graphs that it leaves unchanged. Results are bitwise identical to the original graphs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx

import tpkernels
from tests.support.cases import RanksFixture
from tests.support.compiled import (
    AG,
    AR,
    RS,
    Graph,
    call_targets,
    compare_results,
    fused_graph,
    gather,
    graphs_job,
    reduce,
    scatter,
    trace_and_fuse,
    unfused_graphs,
)
from tests.support.ranked import check_job, fresh_group, on_ranks

BF16 = torch.bfloat16

_c10d = torch.ops._c10d_functional


def _several(x: Any, a: Any, b: Any, c: Any, world: int, group: str) -> Any:
    gathered = gather(x, 1, world, group)
    biased = torch.addmm(c, gathered.flatten(0, 1), b)
    return gathered @ a, biased.view(*gathered.shape[:2], -1), gathered.flatten(0, 1) @ b


def _gathered_read(x: Any, w: Any, world: int, group: str) -> Any:
    gathered = gather(x, 1, world, group)
    return gathered, gathered @ w, gathered.relu(), gathered.transpose(0, 1).cos()


def _chunks_read(x: Any, w: Any, world: int, group: str) -> Any:
    """The gathered chunks are also read, individually and together."""
    gathered = gather(x, 0, world, group)
    chunks = gathered.chunk(world, 0)
    return torch.cat(chunks, 1) @ w, gathered.sin(), chunks[0].exp()


def _transposed(x: Any, w: Any, world: int, group: str) -> Any:
    """Gather [s, b, k] along s, and multiply as [b, s, k]."""
    return gather(x, 0, world, group).transpose(0, 1).flatten(0, 1).contiguous() @ w


def _weight_from_gathered(x: Any, w: Any, world: int, group: str) -> Any:
    gathered = gather(x, 0, world, group)
    return gathered @ (w * gathered.sum()), gathered @ w


def _sum(x: Any, y: Any, a: Any, b: Any, world: int, group: str) -> Any:
    return scatter(x @ a + (y @ b) + (x.relu() @ a), 1, world, group)


def _no_columns(x: Any, w: Any, b: Any, world: int, group: str) -> Any:
    gathered = gather(x, 1, world, group)
    return gathered @ w, torch.addmm(b, gathered.flatten(0, 1), w)


def _two_widths(x: Any, a: Any, b: Any, world: int, group: str) -> Any:
    gathered = gather(x, 0, world, group)
    return gathered @ a, gathered.view(-1, 3) @ b


def _read_by_strides(x: Any, w: Any, world: int, group: str) -> Any:
    """Readers need the gathered tensor in the layout of the collective."""
    gathered = gather(x, 0, world, group)
    product = gathered.transpose(0, 1).flatten(0, 1) @ w
    return product, gathered.as_strided((16,), (1,)).sin(), gathered.view(3, -1).cos()


def _copy_read(x: Any, w: Any, world: int, group: str) -> Any:
    """A copy has a layout that no view of the gathered tensor has."""
    gathered = gather(x, 0, world, group)
    copy = gathered.permute(2, 1, 0).clone()
    product = torch.cat(gathered.chunk(world, 0), 1) @ w
    return product, copy.as_strided((3, 2), (6, 18)).sin(), copy[1].cos()


def _written_afterwards(x: Any, y: Any, w: Any, world: int, group: str) -> Any:
    """Overwrite the inputs of an op after its call, like inputs of a graph."""
    shard, factor = x.clone(), y.clone()
    products = gather(shard, 0, world, group) @ w, reduce(factor @ w, group)
    return products, shard.add_(1), factor.mul_(2)


def _moved(x: Any, w: Any, world: int, group: str) -> Any:
    return reduce((x @ w).transpose(0, 1), group), reduce((x @ w).unsqueeze(0), group)


def _read_twice(x: Any, w: Any, world: int, group: str) -> Any:
    product = x @ w
    return scatter(product, 0, world, group), product.relu()


def _weight_of_gathered(x: Any, world: int, group: str) -> Any:
    gathered = gather(x, 0, world, group)
    return gathered @ gathered.t().abs()


def _bias_from_gathered(gathered: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.addmm(gathered.sum(0)[:5], gathered, w)


def _coalesced(x: Any, w: Any, _: int, group: str) -> Any:
    return [_c10d.wait_tensor(t) for t in _c10d.all_reduce_coalesced([x @ w, w], "sum", group)]


def _split_rank_axis(x: Any, w: Any, world: int, group: str) -> Any:
    """Move half of the rank axis after the rows."""
    halves = gather(x, 0, world, group).view(2, -1, 6)
    return halves.transpose(0, 1).reshape(-1, 6) @ w


def _size_of_data(x: Any, w: Any, world: int, group: str) -> Any:
    """The number of sent rows depends on data, and the rows are read in two layouts."""
    rows = x.new_ones(4, 2).nonzero().to(x.dtype)
    shard = rows.expand(x.shape[0], *rows.shape)
    gathered = gather(shard, 0, world, group)
    return torch.cat(gathered.chunk(world, 0), 1).flatten(0, 1) @ w, gathered.neg()


def _shard_written(x: Any, w: Any, world: int, group: str) -> Any:
    shard = x.clone()
    gathered = gather(shard, 0, world, group)
    shard.add_(1)
    return gathered @ w


def _gathered_written(x: Any, w: Any, world: int, group: str) -> Any:
    gathered = gather(x, 0, world, group)
    flat, product = gathered.view(-1), torch.cat(gathered.chunk(world, 0), 1).flatten(0, 1) @ w
    gathered.mul_(2)
    return product, flat.neg()


def _factor_written(x: Any, w: Any, world: int, group: str) -> Any:
    left = x.clone()
    product = left @ w
    left.add_(1)
    return reduce(product, group)


FUSED = {
    "gather": fused_graph(AG, lambda x, w, *g: gather(x, 0, *g) @ w, (4, 6), (6, 5)),
    "gather dim 1": fused_graph(AG, lambda x, w, *g: gather(x, 1, *g) @ w, (2, 3, 6), (6, 5)),
    "gather dim 1 of one batch": fused_graph(
        AG, lambda x, w, *g: gather(x, 0, *g).view(1, -1, 6) @ w, (1, 3, 6), (6, 5)
    ),
    "gather transposed": fused_graph(AG, _transposed, (3, 2, 6), (6, 5)),
    "gather, three products, one bias": fused_graph(
        AG, _several, (2, 3, 6), (6, 5), (6, 4), (4,), matmuls=3
    ),
    "gather kept": fused_graph(AG, _gathered_read, (2, 3, 6), (6, 5)),
    "gather kept as it came": fused_graph(AG, _chunks_read, (2, 3, 6), (6, 5)),
    "gather, products of two widths": fused_graph(AG, _two_widths, (4, 6), (6, 5), (3, 7)),
    "gather kept, and read by strides": fused_graph(AG, _read_by_strides, (3, 2, 6), (6, 5)),
    "gather kept, and read by strides of a copy": fused_graph(AG, _copy_read, (2, 3, 6), (6, 5)),
    "what they read is overwritten afterwards": Graph(
        _written_afterwards, ((4, 6), (4, 6), (6, 5)), ((AG, 1), (AR, 1))
    ),
    "gather, one weight made of it": fused_graph(AG, _weight_from_gathered, (4, 6), (6, 5)),
    "gather, no columns": fused_graph(AG, _no_columns, (2, 3, 6), (6, 0), (0,), matmuls=2),
    "scatter nothing": fused_graph(
        RS, lambda x, w, *g: scatter(x @ w, 1, *g), (2, "3W", 0), (0, 5)
    ),
    "scatter": fused_graph(RS, lambda x, w, *g: scatter(x @ w, 0, *g), ("3W", 6), (6, 5)),
    "scatter the columns": fused_graph(
        RS, lambda x, w, *g: scatter(x @ w, 2, *g), (2, 3, 6), (6, "3W")
    ),
    "scatter dim 2 of 4": fused_graph(
        RS, lambda x, w, *g: scatter(x @ w, 2, *g), (2, 3, "2W", 6), (6, 5)
    ),
    "scatter a sum": fused_graph(RS, _sum, (2, "3W", 6), (2, "3W", 4), (6, 5), (4, 5), matmuls=3),
    "scatter the mean": Graph(
        lambda x, w, *g: scatter(x @ w, 0, *g, "avg"), (("3W", 6), (6, 5)), ((RS, 1),),
        reference=lambda x, w, world, g: scatter(x @ w, 0, world, g) / world
    ),
    "reduce": fused_graph(AR, lambda x, w, _, g: reduce(x @ w, g), (4, 6), (6, 5)),
    "reduce, moved": Graph(_moved, ((4, 6), (6, 5)), ((AR, 1), (AR, 1))),
    "scatter transposed, flattened": fused_graph(
        RS, lambda x, w, *g: scatter((x @ w).t(), 0, *g).view(-1), (4, 6), (6, "3W")
    ),
    "reduce a column times a row": fused_graph(
        AR, lambda x, w, _, g: reduce(x * w, g), (4, 1), (1, 5)
    ),
}  # fmt: skip


LEFT_ALONE = [
    ("aten.mm sums over the gathered dim, so it needs all shards before it can start",
     lambda x, g, *rest: gather(x, 0, *rest).t() @ g, (4, 6), ("4W", 5)),
    ("aten.split.Tensor reads it and is not a plain matmul",
     lambda x, w, world, g: torch.cat(gather(x, 0, world, g).chunk(world)[::-1], 1) @ w,
     (2, 3, 6), (6, 5)),
    ("aten.mm reads it as its right operand",
     lambda x, a, *g: a @ gather(x, 0, *g), (2, 6), (3, "2W")),
    ("aten.addmm reads it and is not a plain matmul",
     lambda x, w, b, *g: torch.addmm(b, gather(x, 0, *g), w), (4, 6), (6, 5), (1,)),
    ("aten.addmm reads it and is not a plain matmul",
     lambda x, w, b, *g: torch.addmm(b, gather(x, 0, *g), w, alpha=2), (4, 6), (6, 5), (5,)),
    ("the output of the graph reads it and is not a plain matmul",
     lambda x, *g: gather(x, 0, *g), (4, 6)),
    ("the right operand of aten.mm, or its bias, also depends on it; aten.abs reads it "
     "and is not a plain matmul",
     _weight_of_gathered, (4, 6)),
    ("aten.sum.dim_IntList reads it and is not a plain matmul; the right operand of "
     "aten.addmm, or its bias, also depends on it",
     lambda x, w, *g: _bias_from_gathered(gather(x, 0, *g), w), (4, 6), (6, 5)),
    ("its input comes from an input of the graph, which is not a plain matmul",
     lambda x, _, g: reduce(x, g), (4, 6)),
    ("its input is a sum with broadcasting",
     lambda x, w, _, g: reduce(x @ w + w.sum(0), g), (4, 6), (6, 5)),
    ("its input is a sum with alpha != 1",
     lambda x, w, _, g: reduce(torch.add(x @ w, x @ w, alpha=-2), g), (4, 6), (6, 5)),
    ("its input is a sum of matmuls in different layouts",
     lambda x, a, y, b, _, g: reduce((x @ a).t() + y @ b, g), (4, 6), (6, 5), (5, 6), (6, 4)),
    ("its input is a sum of matmuls in different layouts",
     lambda x, a, y, b, _, g: reduce((x @ a).view(-1) + (y @ b).view(-1), g),
     (4, 6), (6, 6), (6, 5), (5, 4)),
    ("its input comes from aten.mul.Tensor, which is not a plain matmul",
     lambda x, y, _, g: reduce(x * y, g), (4, 1), (4, 5)),
    ("the layout of the matmul in its input is unknown",
     lambda x, w, _, g: reduce((x @ w).view(15, 4), g), (6, 6), (6, 10)),
    ("the shards of [12, 5] are not blocks of rows of the matmul",
     lambda x, w, *g: scatter((x @ w).flatten(0, 1), 0, *g), (3, "2W", 6), (6, 5)),
    ("each rank gets several blocks of columns",
     lambda x, w, *g: scatter((x @ w).unflatten(1, (2, -1)), 2, *g), (4, 6), (6, "2W")),
    ("its reduction is max; the ops support sum and avg",
     lambda x, w, _, g: reduce(x @ w, g, "max"), (4, 6), (6, 5)),
    ("aten.addmm adds a bias before the sum, and biases may differ by rank",
     lambda x, w, b, *g: scatter(torch.addmm(b, x, w), 0, *g), ("3W", 6), (6, 5), (5,)),
    ("aten.mm in its input is also read by aten.relu", _read_twice, ("3W", 6), (6, 5)),
    ("it moves several tensors in one call", _coalesced, (4, 6), (6, 5)),
    ("it writes into one of its arguments",
     lambda x, w, _, g: _c10d.wait_tensor(_c10d.all_reduce_(x @ w, "sum", g)), (4, 6), (6, 5)),
    ("the ops do not support int64", lambda x, _, g: reduce(x.long(), g), (4, 6)),
    ("its input has shape [], which is not a matrix", lambda x, _, g: reduce(x.sum(), g), (4, 6)),
    ("aten.add_.Tensor writes in place between it and the matmuls", _shard_written, (4, 6), (6, 5)),
    ("aten.mul_.Tensor writes into the gathered tensor", _gathered_written, (2, 3, 6), (6, 5)),
    ("aten.add_.Tensor writes in place between it and the matmuls",
     _factor_written, (4, 6), (6, 5)),
    ("its input has shape [0, 6], which is not a matrix",
     lambda x, w, *g: gather(x, 0, *g) @ w, (0, 6), (6, 5)),
]  # fmt: skip


def fused() -> Any:
    return FUSED.items()


def some_fused() -> Any:
    return [(name, FUSED[name]) for name in ("gather transposed", "gather kept", "scatter a sum")]


def left_alone() -> Any:
    return unfused_graphs(LEFT_ALONE)


def split_shards() -> Any:
    reason = "aten.mm reads a view of it that splits the shards"
    return unfused_graphs([(reason, _split_rank_axis, (2, 6), (6, 5))])


@pytest.mark.parametrize(
    ("world", "graphs", "dtype", "symbolic"),
    [
        (2, fused, torch.float32, False),
        (2, left_alone, torch.float32, False),
        pytest.param(2, some_fused, torch.float32, True, marks=pytest.mark.thorough),
        pytest.param(3, fused, BF16, False, marks=pytest.mark.slow),
        pytest.param(4, fused, torch.float32, True, marks=pytest.mark.slow),
        pytest.param(4, split_shards, torch.float32, False, marks=pytest.mark.slow),
    ],
)
def test_graphs(
    ranks: RanksFixture, world: int, graphs: Any, dtype: torch.dtype, symbolic: bool
) -> None:
    check_job(ranks(world), graphs_job, graphs, dtype, symbolic, timeout=280)


def _reduced(group: str, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return reduce(x @ w, group)


@on_ranks(2)
def test_means_groups_and_devices() -> list[str]:
    """A mean is rounded once. Nodes that the pass added before it gave up are removed. Collectives
    of unselected groups, of one-rank groups and on unsupported devices stay unchanged."""
    failures = []
    with fresh_group() as selected, fresh_group() as unselected:
        name, world = selected.group_name, selected.size()
        torch.manual_seed(selected.rank())
        x, w = torch.randint(-200, 200, (1000, 1)).bfloat16(), torch.ones(1, 2).bfloat16()
        traced, _ = trace_and_fuse(lambda x, w: reduce(x @ w, name, "avg"), [x, w])
        total = reduce(x.double().expand(-1, 2), name)  # sums overflow 16 bits, their terms do not
        failures += compare_results(traced(x, w), (total / world).bfloat16())

        inputs = [torch.ones(3, 6), torch.ones(2, 5)]
        traced, report = trace_and_fuse(
            lambda *x: _size_of_data(*x, world, name), inputs, symbolic=True
        )
        assert "cannot be computed from the sizes of the graph's inputs" in str(report), str(report)
        failures += [f"{op} is left" for op in call_targets(traced) if "tpkernels" in str(op)]
        failures += compare_results(traced(*inputs), _size_of_data(*inputs, world, name))

        x, w = torch.randint(-3, 4, (4, 6)).float(), torch.randint(-3, 4, (6, 5)).float()

        def function(x: torch.Tensor, w: torch.Tensor) -> Any:
            first = reduce(x @ w, name)
            return first, gather(first, 0, 2, unselected.group_name) @ w.t()

        traced, report = trace_and_fuse(function, [x, w], only=[selected])
        reason = f"group '{unselected.group_name}' is not a selected group: ['{name}']"
        unchanged = [(entry.site.group, entry.reason) for entry in report.left_alone]
        assert report.counts == {AR: 1} and unchanged == [(unselected.group_name, reason)], str(
            report
        )
        failures += compare_results(traced(x, w), function(x, w))
        _, report = trace_and_fuse(function, [x, w])
        assert report.counts == {AR: 1, AG: 1}, str(report)
        single_rank_group = [dist.new_group([rank]) for rank in range(world)][
            selected.rank()
        ].group_name
        for group, device, reason in (
            (single_rank_group, "cpu", f"group '{single_rank_group}' has one rank"),
            (name, "meta", "the ops do not support tensors on meta"),
        ):
            args = [x.to(device), w.to(device)]
            _, report = trace_and_fuse(partial(_reduced, group), args)
            assert [entry.reason for entry in report.left_alone] == [reason], str(report)
    return failures


def test_a_group_without_a_name() -> None:
    graph = fx.Graph()
    x, group = graph.placeholder("x"), graph.placeholder("group")
    graph.output(graph.call_function(_c10d.all_reduce.default, (x, "sum", group)))
    fusion = tpkernels.compile.fuse_collectives()
    fusion(graph)
    assert [entry.reason for entry in fusion.report.left_alone] == [
        "its group has no name in the graph"
    ]
    assert "group 'group'" in str(fusion.report)
