"""The ops with packed weights on real ranks against float64: exact for integers, else within the
derived bound of support/reference.py. Eager, compiled, under autocast; never with a gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import tpkernels
from tests.support.cases import MATMUL_ALGORITHMS, QUICK_WORLDS, Case, RanksFixture, each
from tests.support.ranked import (
    SMALLEST_WORKSPACE,
    fresh_group,
    messages_of,
    report,
    run_cases,
)
from tests.support.refusals import packable
from tests.support.tiers import sweep
from tpkernels.shards import shard_sizes

F32 = torch.float32
GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
OPS = (GATHER, SCATTER, REDUCE)


@pytest.mark.parametrize("world", QUICK_WORLDS)
@pytest.mark.parametrize("op", sweep(OPS))
def test_every_dtype_by_every_algorithm(ranks: RanksFixture, world: int, op: str) -> None:
    """On all ranks, and on even ranks alone; few rows and many, uneven shards, leading dims."""
    cases = []
    for rows, n in ((world, 5), (31, 37), (200, 70)):
        sizes = None if op == REDUCE else tuple(shard_sizes(rows, world))
        if op == GATHER:
            cases.append(Case(op=op, shape=(rows, 33), sizes=sizes, n=(n, 3), n_by_rank=True))
        else:
            cases.append(Case(op=op, shape=(rows, n), sizes=sizes, k=(33, 1, 40)))
    lead = (2, 12, 9) if op == GATHER else (12, 3, 9)
    cases.append(Case(op=op, shape=lead, dim=lead.index(12), **_factors(op)))
    packed = [replace(case, weight_layout="packed") for case in cases]
    packed.append(replace(cases[1], weight_layout="packed_on_even_ranks"))
    dtypes = packable()
    run_cases(ranks, world, each(*packed, dtypes=dtypes, algorithms=MATMUL_ALGORITHMS))


def _factors(op: str) -> dict[str, Any]:
    return {"n": (7, 300)} if op == GATHER else {"k": (24,)}


@pytest.mark.thorough
@pytest.mark.parametrize("world", QUICK_WORLDS)
@pytest.mark.parametrize("op", sweep(OPS))
def test_bias_residual_and_layouts(ranks: RanksFixture, world: int, op: str) -> None:
    cases = []
    for dtype in packable():
        case = Case(op=op, shape=(24, 17), weight_layout="packed", **_factors(op))
        if op == GATHER:
            some = [replace(case, n=(7, 5), biases=(dtype, None)), replace(case, biases=(F32, F32))]
            some.append(replace(case, return_gathered=True))
        else:
            full = replace(case, biases=(F32,), residual=dtype)
            some = [replace(case, biases=(dtype,)), full, replace(full, out_dtype=F32)]
        some += [replace(case, layout=layout) for layout in ("transposed", "sliced", "symmetric")]
        cases += each(*some, dtypes=(dtype,))
    run_cases(ranks, world, cases)


def test_the_last_dim_is_gathered(ranks: RanksFixture) -> None:
    case = Case(op=GATHER, shape=(5, 24), dim=1, n=(7, 2), weight_layout="packed")
    run_cases(ranks, 2, each(case, dtypes=packable(), algorithms=("unfused", "direct", "auto")))


@pytest.mark.parametrize("op", sweep(OPS))
def test_steps_through_a_small_workspace(ranks: RanksFixture, op: str) -> None:
    case = Case(op=op, shape=(1500, 200), weight_layout="packed", **_factors(op))
    run_cases(ranks, 2, each(case, dtypes=packable(), integers=(True,)), SMALLEST_WORKSPACE)


def modes_job(backend: str) -> list[str]:
    """In a compiled function, of a weight [K, N] and a square one."""
    failures = []
    ops: Any = torch.ops.tpkernels
    with fresh_group() as group, torch.no_grad():
        name = group.group_name
        torch.manual_seed(group.rank())
        calls: dict[str, Callable[..., torch.Tensor]] = {
            GATHER: lambda x, w: ops.all_gather_matmul(x * 2, [w, w], name)[1][1],
            SCATTER: lambda x, w: ops.matmul_reduce_scatter(x * 2, w, name),
            REDUCE: lambda x, w: ops.matmul_all_reduce(x * 2, w, name),
            "_column_matmul": lambda x, w: ops._column_matmul(x * 2, [w], name)[0],
        }
        for (op, call), columns in [(one, n) for one in calls.items() for n in (32, 48)]:
            torch._dynamo.reset()
            x, w = torch.randn(4, 48), torch.randn(48, columns)

            def shifted(x: torch.Tensor, w: torch.Tensor, call: Any = call) -> torch.Tensor:
                y = call(x, w)
                return y + torch.arange(y.shape[-1])

            got = torch.compile(shifted, backend=backend, fullgraph=True)(x, tpkernels.pack(w))
            if not torch.allclose(got, shifted(x, w), rtol=1e-4, atol=1e-4):
                failures.append(f"{op} with {columns} columns")
    return failures


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(ranks: RanksFixture, backend: str) -> None:
    results = ranks(2).run(modes_job, backend, timeout=240)
    report(f"{backend}: {failure}" for rank in results for failure in rank)


def gradients_job() -> list[str]:
    """A gradient that would be needed is refused in the forward; one that is not needed is not."""
    with fresh_group() as group:
        x, w = torch.ones(4, 6), torch.ones(6, 6)
        factor, needs = tpkernels.pack(w), x.clone().requires_grad_()
        bias = torch.zeros(6, requires_grad=True)
        learnt = torch.nn.Parameter(factor)

        def without_a_gradient() -> None:
            with torch.no_grad():
                tpkernels.matmul_all_reduce(needs, learnt, group)

        return messages_of(
            [
                lambda: tpkernels.matmul_all_reduce(needs, factor, group),
                lambda: tpkernels.matmul_all_reduce(x, learnt, group),
                lambda: tpkernels.matmul_reduce_scatter(x, factor, group, bias=bias),
                lambda: tpkernels.all_gather_matmul(x, [factor, w.clone().requires_grad_()], group),
                without_a_gradient,
                lambda: tpkernels.matmul_all_reduce(x, factor, group),
            ]
        )


def test_a_gradient_is_refused_at_the_call(ranks: RanksFixture) -> None:
    for messages in ranks(2).run(gradients_job):
        *refused, one, other = messages
        ops = (REDUCE, REDUCE, SCATTER, GATHER)
        assert [message.partition(" with a packed weight;")[0] for message in refused] == [
            f"NotImplementedError: tpkernels.{op} has no gradient" for op in ops
        ]
        assert (one, other) == ("nothing", "nothing")


def autocast_job() -> list[str]:
    """A packed weight is not cast: it must be in autocast's dtype."""
    with fresh_group() as group, torch.autocast("cpu", torch.bfloat16):
        x, w = torch.ones(4, 6), torch.ones(6, 8)
        messages = messages_of(
            [
                lambda: tpkernels.matmul_all_reduce(x, tpkernels.pack(w), group),
                lambda: tpkernels.all_gather_matmul(x, tpkernels.pack(w), group),
            ]
        )
        if torch.bfloat16 in packable():
            got = tpkernels.matmul_all_reduce(x, tpkernels.pack(w.bfloat16()), group)
            assert got.dtype == torch.bfloat16
            assert (got == 6 * group.size()).all()
    return messages


def test_autocast(ranks: RanksFixture) -> None:
    for messages in ranks(2).run(autocast_job):
        pattern = "is float32 but x is bfloat16; they must be equal: pack it in x's dtype"
        assert messages == [f"TypeError: w {pattern}", f"TypeError: weights[0] {pattern}"]
