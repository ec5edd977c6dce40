"""What the pass rewrites, in every form of a gather before a matmul and a reduction after one, and
what it leaves alone: the graphs give the same bits as before."""

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
    called,
    differences,
    gather,
    graphs_job,
    kept,
    one,
    reduce,
    rewritten,
    scatter,
)
from tests.support.ranked import check_job, fresh_group, on_ranks

BF16 = torch.bfloat16

_c10d = torch.ops._c10d_functional


def _several(x: Any, a: Any, b: Any, c: Any, world: int, group: str) -> Any:
    whole = gather(x, 1, world, group)
    biased = torch.addmm(c, whole.flatten(0, 1), b)
    return whole @ a, biased.view(*whole.shape[:2], -1), whole.flatten(0, 1) @ b


def _kept(x: Any, w: Any, world: int, group: str) -> Any:
    whole = gather(x, 1, world, group)
    return whole, whole @ w, whole.relu(), whole.transpose(0, 1).cos()


def _kept_as_gathered(x: Any, w: Any, world: int, group: str) -> Any:
    """The ranks' chunks are also read, one by one and all together."""
    whole = gather(x, 0, world, group)
    chunks = whole.chunk(world, 0)
    return torch.cat(chunks, 1) @ w, whole.sin(), chunks[0].exp()


def _transposed(x: Any, w: Any, world: int, group: str) -> Any:
    """[s, b, k] gathered along s, multiplied as [b, s, k]."""
    return gather(x, 0, world, group).transpose(0, 1).flatten(0, 1).contiguous() @ w


def _weight_made_of_it(x: Any, w: Any, world: int, group: str) -> Any:
    whole = gather(x, 0, world, group)
    return whole @ (w * whole.sum()), whole @ w


def _sum(x: Any, y: Any, a: Any, b: Any, world: int, group: str) -> Any:
    return scatter(x @ a + (y @ b) + (x.relu() @ a), 1, world, group)


def _no_columns(x: Any, w: Any, b: Any, world: int, group: str) -> Any:
    whole = gather(x, 1, world, group)
    return whole @ w, torch.addmm(b, whole.flatten(0, 1), w)


def _two_widths(x: Any, a: Any, b: Any, world: int, group: str) -> Any:
    whole = gather(x, 0, world, group)
    return whole @ a, whole.view(-1, 3) @ b


def _kept_in_memory(x: Any, w: Any, world: int, group: str) -> Any:
    """Readers that need the gathered tensor in the collective's layout."""
    whole = gather(x, 0, world, group)
    product = whole.transpose(0, 1).flatten(0, 1) @ w
    return product, whole.as_strided((16,), (1,)).sin(), whole.view(3, -1).cos()


def _kept_in_other_memory(x: Any, w: Any, world: int, group: str) -> Any:
    """A copy with a layout that no view of the op's gathered tensor has."""
    whole = gather(x, 0, world, group)
    copy = whole.permute(2, 1, 0).clone()
    product = torch.cat(whole.chunk(world, 0), 1) @ w
    return product, copy.as_strided((3, 2), (6, 18)).sin(), copy[1].cos()


def _written_afterwards(x: Any, y: Any, w: Any, world: int, group: str) -> Any:
    """The inputs of an op are overwritten after it, as the inputs of a graph are."""
    shard, factor = x.clone(), y.clone()
    products = gather(shard, 0, world, group) @ w, reduce(factor @ w, group)
    return products, shard.add_(1), factor.mul_(2)


def _moved(x: Any, w: Any, world: int, group: str) -> Any:
    return reduce((x @ w).transpose(0, 1), group), reduce((x @ w).unsqueeze(0), group)


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


FUSED = {
    "gather": one(AG, lambda x, w, *g: gather(x, 0, *g) @ w, (4, 6), (6, 5)),
    "gather dim 1": one(AG, lambda x, w, *g: gather(x, 1, *g) @ w, (2, 3, 6), (6, 5)),
    "gather dim 1 of one batch": one(
        AG, lambda x, w, *g: gather(x, 0, *g).view(1, -1, 6) @ w, (1, 3, 6), (6, 5)
    ),
    "gather transposed": one(AG, _transposed, (3, 2, 6), (6, 5)),
    "gather, three products, one bias": one(
        AG, _several, (2, 3, 6), (6, 5), (6, 4), (4,), matmuls=3
    ),
    "gather kept": one(AG, _kept, (2, 3, 6), (6, 5)),
    "gather kept as it came": one(AG, _kept_as_gathered, (2, 3, 6), (6, 5)),
    "gather, products of two widths": one(AG, _two_widths, (4, 6), (6, 5), (3, 7)),
    "gather kept, and read by strides": one(AG, _kept_in_memory, (3, 2, 6), (6, 5)),
    "gather kept, and read by strides of a copy": one(AG, _kept_in_other_memory, (2, 3, 6), (6, 5)),
    "what they read is overwritten afterwards": Graph(
        _written_afterwards, ((4, 6), (4, 6), (6, 5)), ((AG, 1), (AR, 1))
    ),
    "gather, one weight made of it": one(AG, _weight_made_of_it, (4, 6), (6, 5)),
    "gather, no columns": one(AG, _no_columns, (2, 3, 6), (6, 0), (0,), matmuls=2),
    "scatter nothing": one(RS, lambda x, w, *g: scatter(x @ w, 1, *g), (2, "3W", 0), (0, 5)),
    "scatter": one(RS, lambda x, w, *g: scatter(x @ w, 0, *g), ("3W", 6), (6, 5)),
    "scatter the columns": one(RS, lambda x, w, *g: scatter(x @ w, 2, *g), (2, 3, 6), (6, "3W")),
    "scatter dim 2 of 4": one(RS, lambda x, w, *g: scatter(x @ w, 2, *g), (2, 3, "2W", 6), (6, 5)),
    "scatter a sum": one(RS, _sum, (2, "3W", 6), (2, "3W", 4), (6, 5), (4, 5), matmuls=3),
    "scatter the mean": Graph(
        lambda x, w, *g: scatter(x @ w, 0, *g, "avg"), (("3W", 6), (6, 5)), ((RS, 1),),
        reference=lambda x, w, world, g: scatter(x @ w, 0, world, g) / world
    ),
    "reduce": one(AR, lambda x, w, _, g: reduce(x @ w, g), (4, 6), (6, 5)),
    "reduce, moved": Graph(_moved, ((4, 6), (6, 5)), ((AR, 1), (AR, 1))),
    "scatter transposed, flattened": one(
        RS, lambda x, w, *g: scatter((x @ w).t(), 0, *g).view(-1), (4, 6), (6, "3W")
    ),
    "reduce a column times a row": one(AR, lambda x, w, _, g: reduce(x * w, g), (4, 1), (1, 5)),
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
     _own_weight, (4, 6)),
    ("aten.sum.dim_IntList reads it and is not a plain matmul; the right operand of "
     "aten.addmm, or its bias, also depends on it",
     lambda x, w, *g: _own_bias(gather(x, 0, *g), w), (4, 6), (6, 5)),
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
    ("aten.mul_.Tensor writes into the gathered tensor", _written_behind, (2, 3, 6), (6, 5)),
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
    return kept(LEFT_ALONE)


def cut() -> Any:
    why = "aten.mm reads a view of it that splits the shards"
    return kept([(why, _cut, (2, 6), (6, 5))])


@pytest.mark.parametrize(
    ("world", "graphs", "dtype", "symbolic"),
    [
        (2, fused, torch.float32, False),
        (2, left_alone, torch.float32, False),
        pytest.param(2, some_fused, torch.float32, True, marks=pytest.mark.thorough),
        pytest.param(3, fused, BF16, False, marks=pytest.mark.slow),
        pytest.param(4, fused, torch.float32, True, marks=pytest.mark.slow),
        pytest.param(4, cut, torch.float32, False, marks=pytest.mark.slow),
    ],
)
def test_graphs(
    ranks: RanksFixture, world: int, graphs: Any, dtype: torch.dtype, symbolic: bool
) -> None:
    check_job(ranks(world), graphs_job, graphs, dtype, symbolic, timeout=280)


def _reduced(group: str, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return reduce(x @ w, group)


@on_ranks(2)
def test_what_is_no_table() -> list[str]:
    """A mean is rounded once; nodes that the pass added before it gave up are removed again;
    collectives of other groups are left alone, and those of a group of one rank."""
    failures = []
    with fresh_group() as mine, fresh_group() as other:
        name, world = mine.group_name, mine.size()
        torch.manual_seed(mine.rank())
        x, w = torch.randint(-200, 200, (1000, 1)).bfloat16(), torch.ones(1, 2).bfloat16()
        traced, _ = rewritten(lambda x, w: reduce(x @ w, name, "avg"), [x, w])
        total = reduce(x.double().expand(-1, 2), name)  # sums overflow 16 bits, their terms do not
        failures += differences(traced(x, w), (total / world).bfloat16())

        inputs = [torch.ones(3, 6), torch.ones(2, 5)]
        traced, told = rewritten(lambda *x: _size_of_data(*x, world, name), inputs, symbolic=True)
        assert "cannot be computed from the sizes of the graph's inputs" in str(told), str(told)
        failures += [f"{op} is left" for op in called(traced) if "tpkernels" in str(op)]
        failures += differences(traced(*inputs), _size_of_data(*inputs, world, name))

        x, w = torch.randint(-3, 4, (4, 6)).float(), torch.randint(-3, 4, (6, 5)).float()

        def function(x: torch.Tensor, w: torch.Tensor) -> Any:
            first = reduce(x @ w, name)
            return first, gather(first, 0, 2, other.group_name) @ w.t()

        traced, told = rewritten(function, [x, w], only=[mine])
        why = f"group '{other.group_name}' is not a selected group: ['{name}']"
        left = [(entry.site.group, entry.reason) for entry in told.left_alone]
        assert told.counts == {AR: 1} and left == [(other.group_name, why)], str(told)
        failures += differences(traced(x, w), function(x, w))
        _, told = rewritten(function, [x, w])
        assert told.counts == {AR: 1, AG: 1}, str(told)
        alone = [dist.new_group([rank]) for rank in range(world)][mine.rank()].group_name
        for group, device, why in (
            (alone, "cpu", f"group '{alone}' has one rank"),
            (name, "meta", "the ops do not support tensors on meta"),
        ):
            given = [x.to(device), w.to(device)]
            _, told = rewritten(partial(_reduced, group), given)
            assert [entry.reason for entry in told.left_alone] == [why], str(told)
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
