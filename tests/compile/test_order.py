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
from tests.support.ranked import fresh_group, report
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


def test_no_rank_pads_its_matmuls() -> None:
    assert inductor_config.shape_padding
    fusion = tpkernels.compile.fuse_collectives()
    with fusion:
        assert not inductor_config.shape_padding
    assert inductor_config.shape_padding
    function = torch.compile(torch.relu, options=fusion.options)
    assert function.get_compiler_config()["shape_padding"] is False
