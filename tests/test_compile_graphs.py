"""What the pass makes of graphs: every way to write a gather before, or a reduction after, a
matmul; what it must leave alone, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import RanksFixture
from ranked import fresh_group, report
from torch.utils._pytree import tree_leaves
from traced import gather, reduce, rewritten, scatter

AG, RS, AR = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"


@dataclass(frozen=True)
class Graph:
    """A function of float32 inputs of the given shapes ("W" is the number of ranks), of the group's
    size and its name; what the pass puts in, with how many products, and what it says of the
    rest. ``reference`` computes the same where gloo cannot."""

    function: Callable[..., Any]
    shapes: tuple[tuple[int | str, ...], ...]
    ops: tuple[tuple[str, int], ...] = ()
    reasons: tuple[str, ...] = ()
    reference: Callable[..., Any] | None = None


def _several(x: Any, a: Any, b: Any, c: Any, world: int, group: str) -> Any:
    whole = gather(x, 1, world, group)
    biased = torch.addmm(c, whole.flatten(0, 1), b)
    return whole @ a, biased.view(*whole.shape[:2], -1), whole.flatten(0, 1) @ b


def _kept(x: Any, w: Any, world: int, group: str) -> Any:
    whole = gather(x, 1, world, group)
    return whole @ w, whole.relu(), whole.transpose(0, 1).cos()


def _kept_as_gathered(x: Any, w: Any, world: int, group: str) -> Any:
    """The chunks that the ranks sent are read too, one by one and all together."""
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


def _moved(x: Any, w: Any, world: int, group: str) -> Any:
    return reduce((x @ w).transpose(0, 1), group), reduce((x @ w).unsqueeze(0), group)


FUSED = {
    "gather": Graph(lambda x, w, *g: gather(x, 0, *g) @ w, ((4, 6), (6, 5)), ((AG, 1),)),
    "gather dim 1": Graph(
        lambda x, w, *g: gather(x, 1, *g) @ w, ((2, 3, 6), (6, 5)), ((AG, 1),)
    ),
    "gather dim 1 of one batch": Graph(
        lambda x, w, *g: gather(x, 0, *g).view(1, -1, 6) @ w, ((1, 3, 6), (6, 5)), ((AG, 1),)
    ),
    "gather dim 2 of 4": Graph(
        lambda x, w, *g: gather(x, 2, *g) @ w, ((2, 3, 2, 6), (6, 5)), ((AG, 1),)
    ),
    "gather transposed": Graph(_transposed, ((3, 2, 6), (6, 5)), ((AG, 1),)),
    "gather, three products, one bias": Graph(
        _several, ((2, 3, 6), (6, 5), (6, 4), (4,)), ((AG, 3),)
    ),
    "gather kept": Graph(_kept, ((2, 3, 6), (6, 5)), ((AG, 1),)),
    "gather kept as it came": Graph(_kept_as_gathered, ((2, 3, 6), (6, 5)), ((AG, 1),)),
    "gather, one weight made of it": Graph(_weight_made_of_it, ((4, 6), (6, 5)), ((AG, 1),)),
    "scatter": Graph(lambda x, w, *g: scatter(x @ w, 0, *g), (("W", 6), (6, 5)), ((RS, 1),)),
    "scatter dim 1": Graph(
        lambda x, w, *g: scatter(x @ w, 1, *g), ((2, "W", 6), (6, 5)), ((RS, 1),)
    ),
    "scatter the columns": Graph(
        lambda x, w, *g: scatter(x @ w, 2, *g), ((2, 3, 6), (6, "W")), ((RS, 1),)
    ),
    "scatter dim 2 of 4": Graph(
        lambda x, w, *g: scatter(x @ w, 2, *g), ((2, 3, "W", 6), (6, 5)), ((RS, 1),)
    ),
    "scatter a sum": Graph(
        _sum, ((2, "W", 6), (2, "W", 4), (6, 5), (4, 5)), ((RS, 3),)
    ),
    "scatter the mean": Graph(
        lambda x, w, *g: scatter(x @ w, 0, *g, "avg"), (("W", 6), (6, 5)), ((RS, 1),),
        reference=lambda x, w, world, g: scatter(x @ w, 0, world, g) / world,
    ),
    "reduce": Graph(lambda x, w, _, g: reduce(x @ w, g), ((4, 6), (6, 5)), ((AR, 1),)),
    "reduce the mean": Graph(
        lambda x, w, _, g: reduce(x @ w, g, "avg"), ((4, 6), (6, 5)), ((AR, 1),),
        reference=lambda x, w, world, g: reduce(x @ w, g) / world,
    ),
    "reduce, moved": Graph(_moved, ((4, 6), (6, 5)), ((AR, 1), (AR, 1))),
    "reduce a sum": Graph(
        lambda x, w, _, g: reduce(x @ w + x.relu() @ w, g), ((2, 3, 6), (6, 5)), ((AR, 2),)
    ),
}  # fmt: skip


def _read_twice(x: Any, w: Any, world: int, group: str) -> Any:
    product = x @ w
    return scatter(product, 0, world, group), product.sin()


LEFT_ALONE = {
    "contraction": Graph(
        lambda x, g, *rest: gather(x, 0, *rest).t() @ g,
        ((4, 6), ("4W", 5)),
        reasons=("aten.mm sums over the gathered dim",),
    ),
    "right factor": Graph(
        lambda x, a, *g: a @ gather(x, 0, *g), ((2, 6), (3, "2W")),
        reasons=("aten.mm has it as its right factor",),
    ),
    "no matmul": Graph(
        lambda x, *g: gather(x, 0, *g).relu(), ((4, 6),),
        reasons=("aten.relu reads it, and no matmul",),
    ),
    "own weight": Graph(
        lambda x, *g: _squared(gather(x, 0, *g)), ((4, 6),),
        reasons=("the right factor of aten.mm is made of it too; aten.exp reads it",),
    ),
    "no product": Graph(
        lambda x, *g: scatter(x.relu(), 0, *g), (("W", 6),),
        reasons=("made by aten.relu, and not by a matmul",),
    ),
    "a sum with no product": Graph(
        lambda x, w, _, g: reduce(x @ w + w.sum(0), g), ((4, 6), (6, 5)),
        reasons=("a sum that broadcasts",),
    ),
    "a difference": Graph(
        lambda x, w, _, g: reduce(torch.add(x @ w, x @ w, alpha=-2), g), ((4, 6), (6, 5)),
        reasons=("a sum with a factor",),
    ),
    "maximum": Graph(
        lambda x, w, _, g: reduce(x @ w, g, "max"), ((4, 6), (6, 5)),
        reasons=("it takes the max",),
    ),
    "bias": Graph(
        lambda x, w, b, *g: scatter(torch.addmm(b, x, w), 0, *g), (("W", 6), (6, 5), (5,)),
        reasons=("aten.addmm adds a bias before the sum",),
    ),
    "read twice": Graph(
        _read_twice, (("W", 6), (6, 5)), reasons=("aten.mm, which it reduces, is also read by",),
    ),
    "integers": Graph(
        lambda x, _, g: reduce(x.long(), g), ((4, 6),), reasons=("the ops take no int64",),
    ),
}  # fmt: skip


def _squared(x: torch.Tensor) -> torch.Tensor:
    return x @ x.t().exp()


def _inputs(graph: Graph, rank: int, world: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(rank)

    def size(given: int | str) -> int:
        return given if isinstance(given, int) else int(given[:-1] or 3) * world

    return [torch.randn([size(s) for s in shape]).to(dtype) for shape in graph.shapes]


def _near(got: torch.Tensor, want: torch.Tensor) -> bool:
    """16-bit sums of gloo round at every step, those of the ops once."""
    allowed = 1e-5 if got.dtype == torch.float32 else 0.05
    return (
        got.dtype == want.dtype
        and got.shape == want.shape
        and torch.allclose(got, want, rtol=allowed, atol=allowed)
    )


def _check(graph: Graph, pg: dist.ProcessGroup, dtype: torch.dtype, symbolic: bool) -> list[str]:
    where = (pg.size(), pg.group_name)
    inputs = _inputs(graph, pg.rank(), pg.size(), dtype)
    traced, said = rewritten(lambda *x: graph.function(*x, *where), inputs, symbolic=symbolic)
    failures = []
    ops = tuple((each.op, each.products) for each in said.rewritten)
    reasons = [each.reason for each in said.left_alone]
    told = [want in got for want, got in zip(graph.reasons, reasons, strict=False)]
    if ops != graph.ops or len(reasons) != len(graph.reasons) or not all(told):
        failures.append(str(said))
    left = [node.name for node in traced.graph.nodes if "c10d" in str(node.target)]
    if graph.ops and left:
        failures.append(f"{left} are left")
    got = tree_leaves(traced(*inputs))
    want = tree_leaves((graph.reference or graph.function)(*inputs, *where))
    pairs = enumerate(zip(got, want, strict=True))
    return failures + [f"result {i} is {g}, not {w}" for i, (g, w) in pairs if not _near(g, w)]


def graphs_job(names: list[str], dtype: torch.dtype, symbolic: bool) -> list[str]:
    """The graph holds what it should, and gives what the function gives."""
    failures = []
    with fresh_group() as pg:
        for name in names:
            graph = (FUSED | LEFT_ALONE)[name]
            failures += [f"{name}: {wrong}" for wrong in _check(graph, pg, dtype, symbolic)]
    return failures


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
def test_it_is_fused_and_gives_the_same(ranks: RanksFixture, world: int, symbolic: bool) -> None:
    job = (graphs_job, list(FUSED), torch.float32, symbolic)
    report(f for rank in ranks(world).run(*job, timeout=250) for f in rank)


def test_sixteen_bits(ranks: RanksFixture) -> None:
    job = (graphs_job, list(FUSED), torch.bfloat16, False)
    report(f for rank in ranks(2).run(*job, timeout=250) for f in rank)


def test_what_does_not_fit_is_left_alone_with_the_reason(ranks: RanksFixture) -> None:
    job = (graphs_job, list(LEFT_ALONE), torch.float32, False)
    report(f for rank in ranks(2).run(*job, timeout=250) for f in rank)


def groups_job() -> list[str]:
    """Collectives of another group stay; so do those of a group of one rank."""
    failures = []
    with fresh_group() as mine, fresh_group() as other:
        x, w = torch.randn(4, 6), torch.randn(6, 5)

        def function(x: torch.Tensor, w: torch.Tensor) -> Any:
            first = reduce(x @ w, mine.group_name)
            return first, gather(first, 0, 2, other.group_name) @ w.t()

        traced, said = rewritten(function, [x, w], only=[mine])
        if said.counts != {AR: 1} or "none of those asked for" not in said.left_alone[0].reason:
            failures.append(str(said))
        if said.left_alone[0].site.group != other.group_name:
            failures.append(f"left alone: {said.left_alone[0].site}")
        for got, want in zip(traced(x, w), function(x, w), strict=True):
            failures += [] if torch.allclose(got, want, atol=1e-5) else [f"{got}, not {want}"]
        alone = [dist.new_group([rank]) for rank in range(2)][mine.rank()]
        _, said = rewritten(lambda x, w: reduce(x @ w, alone.group_name), [x, w])
        if [each.reason for each in said.left_alone] != [
            f"group '{alone.group_name}' has one rank"
        ]:
            failures.append(str(said))
    return failures


def test_only_the_groups_asked_for(ranks: RanksFixture) -> None:
    report(f for rank in ranks(2).run(groups_job, timeout=100) for f in rank)
