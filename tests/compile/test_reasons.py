"""Collectives that the pass leaves alone: a graph for each reason, which computes what it did."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx

import tpkernels
from tests.support.cases import RanksFixture
from tests.support.ordered import called
from tests.support.ranked import fresh_group, report
from tests.support.traced import AG, AR, Graph, check, gather, reduce, rewritten, scatter

_c10d = torch.ops._c10d_functional


def _read_twice(x: Any, w: Any, world: int, group: str) -> Any:
    product = x @ w
    return scatter(product, 0, world, group), product.relu()


def _own_weight(x: Any, world: int, group: str) -> Any:
    whole = gather(x, 0, world, group)
    return whole @ whole.t().abs()


def _own_bias(whole: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.addmm(whole.sum(0)[:5], whole, w)


def _coalesced(x: Any, w: Any, _: int, group: str) -> Any:
    return [_c10d.wait_tensor(t) for t in _c10d.all_reduce_coalesced([x @ w, w], "sum", group)]


def _cut(x: Any, w: Any, world: int, group: str) -> Any:
    """Half of the ranks' axis is moved behind the rows."""
    halves = gather(x, 0, world, group).view(2, -1, 6)
    return halves.transpose(0, 1).reshape(-1, 6) @ w


def _size_of_data(x: Any, w: Any, world: int, group: str) -> Any:
    """How many rows a rank sends is known only at run time; they are read in two layouts."""
    rows = x.new_ones(4, 2).nonzero().to(x.dtype)
    shard = rows.expand(x.shape[0], *rows.shape)
    whole = gather(shard, 0, world, group)
    return torch.cat(whole.chunk(world, 0), 1).flatten(0, 1) @ w, whole.neg()


def _shard_written(x: Any, w: Any, world: int, group: str) -> Any:
    shard = x.clone()
    whole = gather(shard, 0, world, group)
    shard.add_(1)
    return whole @ w


def _written_behind(x: Any, w: Any, world: int, group: str) -> Any:
    whole = gather(x, 0, world, group)
    flat, product = whole.view(-1), torch.cat(whole.chunk(world, 0), 1).flatten(0, 1) @ w
    whole.mul_(2)
    return product, flat.neg()


def _factor_written(x: Any, w: Any, world: int, group: str) -> Any:
    left = x.clone()
    product = left @ w
    left.add_(1)
    return reduce(product, group)


LEFT_ALONE = {
    "contraction": Graph(
        lambda x, g, *rest: gather(x, 0, *rest).t() @ g,
        ((4, 6), ("4W", 5)),
        reasons=("aten.mm sums over the gathered dim, so it needs all shards before it can start",),
    ),
    "right factor": Graph(
        lambda x, a, *g: a @ gather(x, 0, *g), ((2, 6), (3, "2W")),
        reasons=("aten.mm has it as its right factor",),
    ),
    "no matmul": Graph(
        lambda x, *g: gather(x, 0, *g).relu(), ((4, 6),),
        reasons=("aten.relu reads it and is not a plain matmul",),
    ),
    "a bias of one element": Graph(
        lambda x, w, b, *g: torch.addmm(b, gather(x, 0, *g), w), ((4, 6), (6, 5), (1,)),
        reasons=("aten.addmm reads it and is not a plain matmul",),
    ),
    "a bias for each row": Graph(
        lambda x, w, b, *g: torch.addmm(b, gather(x, 0, *g), w), ((4, 6), (6, 5), ("4W", 5)),
        reasons=("aten.addmm reads it and is not a plain matmul",),
    ),
    "a product with a factor": Graph(
        lambda x, w, b, *g: torch.addmm(b, gather(x, 0, *g), w, alpha=2),
        ((4, 6), (6, 5), (5,)),
        reasons=("aten.addmm reads it and is not a plain matmul",),
    ),
    "a batch of matmuls": Graph(
        lambda x, w, *g: gather(x, 0, *g).bmm(w), ((2, 3, 6), ("2W", 6, 5)),
        reasons=("aten.bmm reads it and is not a plain matmul",),
    ),
    "returned": Graph(
        lambda x, *g: gather(x, 0, *g), ((4, 6),),
        reasons=("the graph's output reads it and is not a plain matmul",),
    ),
    "own weight": Graph(
        _own_weight, ((4, 6),),
        reasons=(
            "the other factor of aten.mm, or its bias, depends on it too; "
            "aten.abs reads it and is not a plain matmul",
        ),
    ),
    "own bias": Graph(
        lambda x, w, *g: _own_bias(gather(x, 0, *g), w), ((4, 6), (6, 5)),
        reasons=(
            "aten.sum.dim_IntList reads it and is not a plain matmul; "
            "the other factor of aten.addmm, or its bias, depends on it too",
        ),
    ),
    "no product": Graph(
        lambda x, *g: scatter(x.relu(), 0, *g), (("3W", 6),),
        reasons=("its input is made by aten.relu, which is not a plain matmul",),
    ),
    "an input": Graph(
        lambda x, _, g: reduce(x, g), ((4, 6),),
        reasons=("its input is made by an input of the graph, which is not a plain matmul",),
    ),
    "a sum that broadcasts": Graph(
        lambda x, w, _, g: reduce(x @ w + w.sum(0), g), ((4, 6), (6, 5)),
        reasons=("its input is a sum that broadcasts",),
    ),
    "a difference": Graph(
        lambda x, w, _, g: reduce(torch.add(x @ w, x @ w, alpha=-2), g), ((4, 6), (6, 5)),
        reasons=("its input is a sum with a factor",),
    ),
    "a sum of unlike layouts": Graph(
        lambda x, a, y, b, _, g: reduce((x @ a).t() + y @ b, g),
        ((4, 6), (6, 5), (5, 6), (6, 4)),
        reasons=("its input is a sum of matmuls in different layouts",),
    ),
    "a sum of unlike shapes": Graph(
        lambda x, a, y, b, _, g: reduce((x @ a).view(-1) + (y @ b).view(-1), g),
        ((4, 6), (6, 6), (6, 5), (5, 4)),
        reasons=("its input is a sum of matmuls in different layouts",),
    ),
    "columns times columns": Graph(
        lambda x, y, _, g: reduce(x * y, g), ((4, 1), (4, 5)),
        reasons=("its input is made by aten.mul.Tensor, which is not a plain matmul",),
    ),
    "a view across rows": Graph(
        lambda x, w, _, g: reduce((x @ w).view(15, 4), g), ((6, 6), (6, 10)),
        reasons=("how the matmul is laid out in its input is unknown",),
    ),
    "shards that end within a batch": Graph(
        lambda x, w, *g: scatter((x @ w).flatten(0, 1), 0, *g), ((3, "2W", 6), (6, 5)),
        reasons=("the shards of [12, 5] are not blocks of the matmul's rows",),
    ),
    "columns in several blocks": Graph(
        lambda x, w, *g: scatter((x @ w).unflatten(1, (2, -1)), 2, *g), ((4, 6), (6, "2W")),
        reasons=("each rank gets several blocks of columns",),
    ),
    "maximum": Graph(
        lambda x, w, _, g: reduce(x @ w, g, "max"), ((4, 6), (6, 5)),
        reasons=("its reduction is max, and the ops only sum",),
    ),
    "bias": Graph(
        lambda x, w, b, *g: scatter(torch.addmm(b, x, w), 0, *g), (("3W", 6), (6, 5), (5,)),
        reasons=("aten.addmm adds a bias before the sum, and biases may differ by rank",),
    ),
    "read twice": Graph(
        _read_twice, (("3W", 6), (6, 5)),
        reasons=("aten.mm in its input is also read by aten.relu",),
    ),
    "several tensors": Graph(
        _coalesced, ((4, 6), (6, 5)), reasons=("it moves several tensors at once",),
    ),
    "in place": Graph(
        lambda x, w, _, g: _c10d.wait_tensor(_c10d.all_reduce_(x @ w, "sum", g)),
        ((4, 6), (6, 5)),
        reasons=("it writes into one of its arguments",),
    ),
    "integers": Graph(
        lambda x, _, g: reduce(x.long(), g), ((4, 6),), reasons=("the ops do not take int64",),
    ),
    "a scalar": Graph(
        lambda x, _, g: reduce(x.sum(), g), ((4, 6),),
        reasons=("its input has shape [], which is not a matrix",),
    ),
    "its shard is overwritten": Graph(
        _shard_written, ((4, 6), (6, 5)),
        reasons=("aten.add_.Tensor writes in place between it and the matmuls",),
    ),
    "what it gathers is overwritten": Graph(
        _written_behind, ((2, 3, 6), (6, 5)),
        reasons=("aten.mul_.Tensor writes into the gathered tensor",),
    ),
    "a factor is overwritten": Graph(
        _factor_written, ((4, 6), (6, 5)),
        reasons=("aten.add_.Tensor writes in place between it and the matmuls",),
    ),
    "no rows": Graph(
        lambda x, w, *g: gather(x, 0, *g) @ w, ((0, 6), (6, 5)),
        reasons=("its input has shape [0, 6], which is not a matrix",),
    ),
}  # fmt: skip


def left_job() -> list[str]:
    with fresh_group() as group:
        return [
            f"{name}: {wrong}"
            for name, graph in LEFT_ALONE.items()
            for wrong in check(graph, group)
        ]


def test_the_reasons(ranks: RanksFixture) -> None:
    report(f for rank in ranks(2).run(left_job, timeout=250) for f in rank)


def cut_job() -> list[str]:
    reasons = ("aten.mm reads rows in which a view has cut up the shards",)
    with fresh_group() as group:
        return check(Graph(_cut, ((2, 6), (6, 5)), reasons=reasons), group)


@pytest.mark.slow
def test_a_view_that_cuts_up_the_shards(ranks: RanksFixture) -> None:
    report(f for rank in ranks(4).run(cut_job, timeout=100) for f in rank)


def unknown_size_job() -> list[str]:
    """Nodes that the pass added before it gave up are removed again."""
    with fresh_group() as group:
        where = (group.size(), group.group_name)
        inputs = [torch.ones(3, 6), torch.ones(2, 5)]
        traced, pass_report = rewritten(lambda *x: _size_of_data(*x, *where), inputs, symbolic=True)
        failures = (
            []
            if "cannot be computed from the sizes of the graph's inputs" in str(pass_report)
            else [str(pass_report)]
        )
        failures += [f"{name} is left" for name in called(traced) if "tpkernels" in str(name)]
        for got, want in zip(traced(*inputs), _size_of_data(*inputs, *where), strict=True):
            failures += [] if torch.equal(got, want) else [f"{got}, not {want}"]
        return failures


def test_a_size_that_only_the_data_tell(ranks: RanksFixture) -> None:
    report(f for rank in ranks(2).run(unknown_size_job, timeout=100) for f in rank)


def groups_job() -> list[str]:
    """Collectives of other groups are left alone, and those of a group of one rank."""
    failures = []
    with fresh_group() as mine, fresh_group() as other:
        x, w = torch.randint(-3, 4, (4, 6)).float(), torch.randint(-3, 4, (6, 5)).float()

        def function(x: torch.Tensor, w: torch.Tensor) -> Any:
            first = reduce(x @ w, mine.group_name)
            return first, gather(first, 0, 2, other.group_name) @ w.t()

        traced, pass_report = rewritten(function, [x, w], only=[mine])
        why = f"group '{other.group_name}' is not one of those given: ['{mine.group_name}']"
        left_alone = [(each.site.group, each.reason) for each in pass_report.left_alone]
        if pass_report.counts != {AR: 1} or left_alone != [(other.group_name, why)]:
            failures.append(str(pass_report))
        for got, want in zip(traced(x, w), function(x, w), strict=True):
            failures += [] if torch.equal(got, want) else [f"{got}, not {want}"]
        traced, pass_report = rewritten(function, [x, w])
        if pass_report.counts != {AR: 1, AG: 1}:
            failures.append(str(pass_report))
        alone = [dist.new_group([rank]) for rank in range(2)][mine.rank()]
        _, pass_report = rewritten(lambda x, w: reduce(x @ w, alone.group_name), [x, w])
        why = f"group '{alone.group_name}' has one rank"
        if [each.reason for each in pass_report.left_alone] != [why]:
            failures.append(str(pass_report))
        _, pass_report = rewritten(
            lambda x, w: reduce(x @ w, mine.group_name), [x.to("meta"), w.to("meta")]
        )
        if [each.reason for each in pass_report.left_alone] != ["the ops do not run on meta"]:
            failures.append(str(pass_report))
    return failures


def test_groups_and_devices(ranks: RanksFixture) -> None:
    report(f for rank in ranks(2).run(groups_job, timeout=100) for f in rank)


def test_a_group_without_a_name() -> None:
    graph = fx.Graph()
    x, group = graph.placeholder("x"), graph.placeholder("group")
    graph.output(graph.call_function(_c10d.all_reduce.default, (x, "sum", group)))
    fusion = tpkernels.compile.fuse_collectives()
    fusion(graph)
    assert [each.reason for each in fusion.report.left_alone] == [
        "its group has no name in the graph"
    ]
    assert "group 'group'" in str(fusion.report)
