"""All ranks run the ops in the same order, even if their shards differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor.utils import fresh_cache

import tpkernels
from tests.support.cases import RanksFixture
from tests.support.compiled import graph_runner
from tests.support.ordered import tied
from tests.support.ranked import fresh_group, messages_of, report
from tests.support.traced import gather, reduce, rewritten


def tied_job() -> list[str]:
    with fresh_group() as group:
        world, name = group.size(), group.group_name

        def function(x: torch.Tensor, w: torch.Tensor) -> Any:
            whole = gather(x, 0, world, name) @ w
            return whole, reduce(x.relu(), name), reduce(x.sin() @ w, name)

        inputs = [torch.ones(4, 6), torch.ones(6, 5)]
        traced, _ = rewritten(function, inputs)
        ties = tied(traced.graph)
        want = ["_c10d_functional.all_reduce.default", "tpkernels.matmul_all_reduce.default"]
        failures = [] if list(ties.values()) == want else [str(traced.graph)]
        first, second = ties
        if second.args[0] != (first,):
            failures.append(f"{second} runs behind {second.args[0]}")
        for got, expected in zip(traced(*inputs), function(*inputs), strict=True):
            failures += [] if torch.equal(got, expected) else [f"{got}, not {expected}"]
        return failures


def by_hand_job() -> list[str]:
    """Ops that the function calls itself, and a local matmul."""
    with fresh_group() as group:
        name = group.group_name

        def function(x: torch.Tensor, w: torch.Tensor) -> Any:
            local = torch.ops.tpkernels._matmul(x, w)
            return local, tpkernels.all_reduce(x, name), tpkernels.all_gather(w, name)

        traced, _ = rewritten(function, [torch.ones(4, 6), torch.ones(6, 5)])
        alike = list(tied(traced.graph).values()) == ["tpkernels.all_gather.default"]
        return [] if alike else [str(traced.graph)]


@pytest.mark.parametrize("job", [tied_job, by_hand_job])
def test_each_op_is_tied_to_the_collective_before_it(
    ranks: RanksFixture, job: Callable[[], list[str]]
) -> None:
    report(f for rank in ranks(2).run(job, timeout=100) for f in rank)


def _two_layers(group: str) -> Callable[..., Any]:
    def function(x: Any, y: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        first, second = gather(x, 0, 2, group) @ a, gather(y, 0, 2, group) @ b
        return reduce(first @ c, group), reduce(second @ d, group)

    return function


def uneven_job() -> list[str]:
    """7 and 8 features in two shards, of which the last is the smaller one."""
    with fresh_group() as group, fresh_cache():
        n, m = ((4, 4), (3, 4))[group.rank()]
        shapes = [(4, 6), (4, 6), (6, n), (6, m), (n, 8), (m, 8)]
        fusion = tpkernels.compile.fuse_collectives(group)
        compiled = torch.compile(_two_layers(group.group_name), options=fusion.options)
        results = compiled(*(torch.ones(shape) for shape in shapes))
        failures = [] if len(fusion.report.rewritten) == 4 else [str(fusion.report)]
        for got, width in zip(results, (7, 8), strict=True):
            if not torch.equal(got, torch.full((8, 8), 6.0 * width)):
                failures.append(f"{got}, not {6 * width}")
        return failures


@pytest.mark.slow
def test_inductor_runs_uneven_shares_in_one_order(ranks: RanksFixture) -> None:
    report(f for rank in ranks(2).run(uneven_job, timeout=280) for f in rank)


def narrow_job(least: int) -> list[str]:
    """On the rank with the smallest shard, inductor turns the matmul into an outer product."""
    with fresh_group() as group:
        k, name = (2, least)[group.rank()], group.group_name
        with tpkernels.compile.fuse_collectives(group) as pass_report:
            compiled = torch.compile(lambda x, w: reduce(x @ w, name), backend=graph_runner([]))
            got = compiled(torch.ones(4, k), torch.ones(k, 5))
        failures = [str(pass_report)] if pass_report.left_alone else []
        return (
            failures if torch.equal(got, torch.full((4, 5), 2.0 + least)) else [*failures, str(got)]
        )


@pytest.mark.parametrize("least", [1, 0])
def test_a_share_of_one_column_or_none(ranks: RanksFixture, least: int) -> None:
    report(f for rank in ranks(2).run(narrow_job, least, timeout=100) for f in rank)


def one_token_job(dynamic: bool, compiler: str) -> list[str]:
    """Rank 1 has no rows: inductor has its results read by nothing."""
    with fresh_group() as group, fresh_cache():
        sizes: Any = {"shard_sizes": [1, 0]}

        def function(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                wide = tpkernels.all_gather_matmul(x * 2, a, group, **sizes)
                x = tpkernels.matmul_reduce_scatter(wide.relu(), b, group, **sizes) + x
            return x

        inputs = [torch.ones(1 - group.rank(), 4), torch.ones(4, 6), torch.ones(6, 4)]
        leaves = [x.clone().requires_grad_() for x in inputs]
        want = function(*leaves)
        want.sum().backward()
        grads = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        torch._dynamo.reset()
        got = torch.compile(function, dynamic=dynamic, backend=compiler)(*leaves)
        got.sum().backward()
        tpkernels.all_reduce(torch.ones(3), group)  # the ranks are still in step
        pairs = zip([got, *(leaf.grad for leaf in leaves)], [want, *grads], strict=True)
        failures = [f"{got}, not {want}" for got, want in pairs if not torch.equal(got, want)]
        raw = torch.compile(
            lambda x: torch.ops.tpkernels.all_gather(x, group.group_name, **sizes),
            backend="eager",
            fullgraph=True,
        )
        (message,) = messages_of([lambda: raw(inputs[0])])
        if "with shard_sizes=[1, 0]: a rank without rows would drop or move" not in message:
            failures.append(message)
        return failures


@pytest.mark.thorough
@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_rank_without_rows_drops_and_moves_nothing(
    ranks: RanksFixture, dynamic: bool, compiler: str
) -> None:
    report(f for rank in ranks(2).run(one_token_job, dynamic, compiler, timeout=200) for f in rank)


def test_no_rank_pads_its_matmuls() -> None:
    assert inductor_config.shape_padding
    fusion = tpkernels.compile.fuse_collectives()
    with fusion:
        assert not inductor_config.shape_padding
    assert inductor_config.shape_padding
    function = torch.compile(torch.relu, options=fusion.options)
    assert function.get_compiler_config()["shape_padding"] is False
