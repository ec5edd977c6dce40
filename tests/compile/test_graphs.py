"""The pass rewrites every form of a gather before a matmul and of a reduction after one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.cases import RanksFixture
from tests.support.ranked import fresh_group, report
from tests.support.traced import AG, AR, RS, Graph, check, gather, reduce, rewritten, scatter

F32 = torch.float32


def _several(x: Any, a: Any, b: Any, c: Any, world: int, group: str) -> Any:
    whole = gather(x, 1, world, group)
    biased = torch.addmm(c, whole.flatten(0, 1), b)
    return whole @ a, biased.view(*whole.shape[:2], -1), whole.flatten(0, 1) @ b


def _kept(x: Any, w: Any, world: int, group: str) -> Any:
    whole = gather(x, 1, world, group)
    return whole @ w, whole.relu(), whole.transpose(0, 1).cos()


def _returned(x: Any, w: Any, world: int, group: str) -> Any:
    whole = gather(x, 1, world, group)
    return whole, whole @ w


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
    "gather returned": Graph(_returned, ((2, 3, 6), (6, 5)), ((AG, 1),)),
    "gather kept as it came": Graph(_kept_as_gathered, ((2, 3, 6), (6, 5)), ((AG, 1),)),
    "gather, products of two widths": Graph(
        _two_widths, ((4, 6), (6, 5), (3, 7)), ((AG, 1),)
    ),
    "gather kept, and read by strides": Graph(
        _kept_in_memory, ((3, 2, 6), (6, 5)), ((AG, 1),)
    ),
    "gather kept, and read by strides of a copy": Graph(
        _kept_in_other_memory, ((2, 3, 6), (6, 5)), ((AG, 1),)
    ),
    "what they read is overwritten afterwards": Graph(
        _written_afterwards, ((4, 6), (4, 6), (6, 5)), ((AG, 1), (AR, 1))
    ),
    "gather, one weight made of it": Graph(_weight_made_of_it, ((4, 6), (6, 5)), ((AG, 1),)),
    "gather, no columns": Graph(
        _no_columns, ((2, 3, 6), (6, 0), (0,)), ((AG, 2),)
    ),
    "scatter nothing": Graph(
        lambda x, w, *g: scatter(x @ w, 1, *g), ((2, "3W", 0), (0, 5)), ((RS, 1),)
    ),
    "scatter": Graph(lambda x, w, *g: scatter(x @ w, 0, *g), (("3W", 6), (6, 5)), ((RS, 1),)),
    "scatter dim 1": Graph(
        lambda x, w, *g: scatter(x @ w, 1, *g), ((2, "3W", 6), (6, 5)), ((RS, 1),)
    ),
    "scatter the columns": Graph(
        lambda x, w, *g: scatter(x @ w, 2, *g), ((2, 3, 6), (6, "3W")), ((RS, 1),)
    ),
    "scatter dim 2 of 4": Graph(
        lambda x, w, *g: scatter(x @ w, 2, *g), ((2, 3, "2W", 6), (6, 5)), ((RS, 1),)
    ),
    "scatter a sum": Graph(
        _sum, ((2, "3W", 6), (2, "3W", 4), (6, 5), (4, 5)), ((RS, 3),)
    ),
    "scatter the mean": Graph(
        lambda x, w, *g: scatter(x @ w, 0, *g, "avg"), (("3W", 6), (6, 5)), ((RS, 1),),
        reference=lambda x, w, world, g: scatter(x @ w, 0, world, g) / world,
    ),
    "reduce": Graph(lambda x, w, _, g: reduce(x @ w, g), ((4, 6), (6, 5)), ((AR, 1),)),
    "reduce the mean": Graph(
        lambda x, w, _, g: reduce(x @ w, g, "avg"), ((4, 6), (6, 5)), ((AR, 1),),
        reference=lambda x, w, world, g: reduce(x @ w, g) / world,
    ),
    "reduce, moved": Graph(_moved, ((4, 6), (6, 5)), ((AR, 1), (AR, 1))),
    "scatter transposed, flattened": Graph(
        lambda x, w, *g: scatter((x @ w).t(), 0, *g).view(-1), ((4, 6), (6, "3W")), ((RS, 1),)
    ),
    "reduce transposed, flattened": Graph(
        lambda x, w, _, g: reduce((x @ w).t(), g).view(-1), ((4, 6), (6, 5)), ((AR, 1),)
    ),
    "reduce a column times a row": Graph(
        lambda x, w, _, g: reduce(x * w, g), ((4, 1), (1, 5)), ((AR, 1),)
    ),
    "reduce a sum": Graph(
        lambda x, w, _, g: reduce(x @ w + x.relu() @ w, g), ((2, 3, 6), (6, 5)), ((AR, 2),)
    ),
}  # fmt: skip


def job(dtype: torch.dtype, symbolic: bool, names: list[str]) -> list[str]:
    failures = []
    with fresh_group() as group:
        for name in names:
            wrong = check(FUSED[name], group, dtype, symbolic)
            failures += [f"{name}: {each}" for each in wrong]
    return failures


def test_it_is_fused_and_gives_the_same(ranks: RanksFixture) -> None:
    report(f for rank in ranks(2).run(job, F32, False, list(FUSED), timeout=250) for f in rank)


@pytest.mark.thorough
def test_symbolic_sizes(ranks: RanksFixture) -> None:
    names = ["gather transposed", "gather kept", "scatter a sum"]
    report(f for rank in ranks(2).run(job, F32, True, names, timeout=250) for f in rank)


@pytest.mark.slow
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
def test_four_ranks(ranks: RanksFixture, symbolic: bool) -> None:
    report(f for rank in ranks(4).run(job, F32, symbolic, list(FUSED), timeout=280) for f in rank)


@pytest.mark.slow
def test_another_dtype(ranks: RanksFixture) -> None:
    names = list(FUSED)[::4]
    report(f for rank in ranks(3).run(job, torch.bfloat16, False, names, timeout=250) for f in rank)


def mean_job() -> list[str]:
    """Sums that overflow 16 bits, of terms that do not."""
    w = torch.ones(1, 2).bfloat16()
    with fresh_group() as group:
        torch.manual_seed(group.rank())
        x = torch.randint(-200, 200, (1000, 1)).bfloat16()
        name, world = group.group_name, group.size()
        traced, _ = rewritten(lambda x, w: reduce(x @ w, name, "avg"), [x, w])
        total = reduce(x.double().expand(-1, 2), name)
        want = (total / world).bfloat16()
        got = traced(x, w)
        return [] if torch.equal(got, want) else [f"{(got != want).sum()} of {got.numel()} differ"]


@pytest.mark.thorough
def test_a_mean_is_rounded_once(ranks: RanksFixture) -> None:
    report(f for rank in ranks(3).run(mean_job) for f in rank)
