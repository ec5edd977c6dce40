"""Ops with packed weights and custom matmuls, against float64: exact for integers, otherwise within
the derived bound of ops/reference.py.

Unsupported uses are refused at the call. A custom matmul that fails breaks the group.
"""

from __future__ import annotations

import functools
import itertools
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import tpkernels
from tests.support.cases import (
    DTYPES,
    MATMUL_ALGORITHMS,
    PACKABLE,
    QUICK_WORLDS,
    Case,
    RanksFixture,
    expand_cases,
)
from tests.support.ranked import (
    SMALLEST_WORKSPACE,
    collect_messages,
    fresh_group,
    on_ranks,
    run_cases,
)
from tests.support.tiers import sweep
from tpkernels import CustomMatmul, groups
from tpkernels.common.shards import shard_sizes
from tpkernels.local.matmul import allocating_matmul

F32, BF16 = torch.float32, torch.bfloat16
GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
OPS = (GATHER, SCATTER, REDUCE)
NORMED = "matmul_all_reduce_rms_norm"


@pytest.mark.parametrize("world", QUICK_WORLDS)
@pytest.mark.parametrize("op", sweep([*OPS, NORMED]))
@pytest.mark.parametrize("weights", ["packed", "caller's"])
def test_every_dtype_by_every_algorithm(
    ranks: RanksFixture, world: int, op: str, weights: str
) -> None:
    """Weights are packed on all ranks, or on even ranks only. Few and many rows, uneven shards,
    leading dims, epilogues."""
    dtypes = PACKABLE if weights == "packed" else DTYPES
    weight_dims: dict[str, Any] = {"n": (7, 300)} if op == GATHER else {"k": (33, 1, 40)}
    cases = []
    for rows, n in ((world, 5), (31, 37), (200, 70)):
        sizes = None if op in (REDUCE, NORMED) else tuple(shard_sizes(rows, world))
        shape = (rows, 33) if op == GATHER else (rows, n)
        cases.append(Case(op=op, shape=shape, sizes=sizes, weight_layout=weights, **weight_dims))
    blocks = (2, 12, 9) if op == GATHER else (12, 3, 9)
    cases.append(replace(cases[0], shape=blocks, sizes=None, dim=blocks.index(12)))
    if op == GATHER:
        cases.append(replace(cases[1], n_by_rank=True, return_gathered=True))
    else:
        cases.append(replace(cases[1], biases=(F32,)))
    if weights == "packed":
        cases.append(replace(cases[1], weight_layout="packed_on_even_ranks"))
        cases += [replace(cases[3], layout=layout) for layout in ("transposed", "symmetric")]
    expanded = expand_cases(*cases, dtypes=dtypes, algorithms=MATMUL_ALGORITHMS)
    for dtype in dtypes if op in (SCATTER, REDUCE) else ():
        full = replace(cases[1], biases=(dtype,), residual=dtype, out_dtype=F32)
        expanded += expand_cases(full, dtypes=(dtype,))
    run_cases(ranks, world, expanded)


def test_the_last_dim_is_gathered(ranks: RanksFixture) -> None:
    case = Case(op=GATHER, shape=(5, 24), dim=1, n=(7, 2), weight_layout="packed")
    run_cases(
        ranks, 2, expand_cases(case, dtypes=PACKABLE, algorithms=("unfused", "direct", "auto"))
    )


@pytest.mark.parametrize("op", sweep(OPS))
def test_steps_through_a_small_workspace(ranks: RanksFixture, op: str) -> None:
    weight_dims: dict[str, Any] = {"n": (7, 300)} if op == GATHER else {"k": (24,)}
    case = Case(op=op, shape=(1500, 200), weight_layout="packed", **weight_dims)
    run_cases(ranks, 2, expand_cases(case, dtypes=PACKABLE, integers=(True,)), SMALLEST_WORKSPACE)


@on_ranks(3)
def test_int8_weights() -> None:
    """Results are bitwise identical to local matmuls, by every algorithm and with cached plans."""
    with fresh_group() as group, torch.no_grad():
        world, rank = group.size(), group.rank()
        rows = slice(6 * rank, 6 * rank + 6)
        for dtype in PACKABLE:
            generator = torch.Generator().manual_seed(0)
            xs = torch.randn(world, 6 * world, 40, generator=generator).to(dtype)
            ws = torch.randn(world, 40, 70, generator=generator)
            weights = [tpkernels.pack(w, torch.int8) for w in ws]
            partials = [allocating_matmul(x, w) for x, w in zip(xs, weights, strict=True)]
            total = functools.reduce(torch.add, [partial.float() for partial in partials]).to(dtype)
            cases = {
                GATHER: (xs[0, rows], allocating_matmul(xs[0], weights[rank])),
                SCATTER: (xs[rank], total[rows]),
                REDUCE: (xs[rank], total),
            }
            for op, algorithm, attempt in itertools.product(cases, MATMUL_ALGORITHMS, range(3)):
                x, expected = cases[op]
                result = getattr(tpkernels, op)(x, weights[rank], group, algorithm=algorithm)
                assert torch.equal(result, expected), (
                    f"{op} by {algorithm} in {dtype}, call {attempt}"
                )


# Packed weights: compiled, under autocast, and without gradients.


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@on_ranks(2, timeout=240)
def test_compiled(backend: str) -> None:
    """A compiled function, with a rectangular and a square weight."""
    ops: Any = torch.ops.tpkernels
    with fresh_group() as group, torch.no_grad():
        name = group.group_name
        torch.manual_seed(group.rank())
        calls: dict[str, Callable[..., torch.Tensor]] = {
            GATHER: lambda x, w: ops.all_gather_matmul(x * 2, [w, w], name)[1][1],
            SCATTER: lambda x, w: ops.matmul_reduce_scatter(x * 2, w, name),
            REDUCE: lambda x, w: ops.matmul_all_reduce(x * 2, w, name),
            "column_matmul": lambda x, w: ops.column_matmul(x * 2, [w], name)[0],
        }
        for (op, call), columns in [(item, n) for item in calls.items() for n in (32, 48)]:
            torch._dynamo.reset()
            x, w = torch.randn(4, 48), torch.randn(48, columns)

            def function(x: torch.Tensor, w: torch.Tensor, call: Any = call) -> torch.Tensor:
                y = call(x, w)
                return y + torch.arange(y.shape[-1])

            result = torch.compile(function, backend=backend, fullgraph=True)(x, tpkernels.pack(w))
            assert torch.allclose(result, function(x, w), rtol=1e-4, atol=1e-4), (
                f"{op} with {columns} columns"
            )


@on_ranks(2)
def test_a_gradient_is_refused_at_the_call() -> None:
    """The forward raises if a gradient would be needed, and only then."""
    with fresh_group() as group:
        x, w = torch.ones(4, 6), torch.ones(6, 6)
        factor, needs = tpkernels.pack(w), x.clone().requires_grad_()
        bias = torch.zeros(6, requires_grad=True)
        learnt = torch.nn.Parameter(factor)

        def call_under_no_grad() -> None:
            with torch.no_grad():
                tpkernels.matmul_all_reduce(needs, learnt, group)

        messages = collect_messages(
            [
                lambda: tpkernels.matmul_all_reduce(needs, factor, group),
                lambda: tpkernels.matmul_all_reduce(x, learnt, group),
                lambda: tpkernels.matmul_reduce_scatter(x, factor, group, bias=bias),
                lambda: tpkernels.all_gather_matmul(x, [factor, w.clone().requires_grad_()], group),
                call_under_no_grad,
                lambda: tpkernels.matmul_all_reduce(x, factor, group),
            ]
        )
        *refused, under_no_grad, no_leaves = messages
        ops = (REDUCE, REDUCE, SCATTER, GATHER)
        assert [message.partition(" with a packed weight;")[0] for message in refused] == [
            f"NotImplementedError: tpkernels.{op} has no gradient" for op in ops
        ]
        assert (under_no_grad, no_leaves) == ("nothing", "nothing")


@on_ranks(2)
def test_autocast() -> None:
    """A packed weight is not cast. It must have the autocast dtype."""
    with fresh_group() as group, torch.autocast("cpu", torch.bfloat16):
        x, w = torch.ones(4, 6), torch.ones(6, 8)
        messages = collect_messages(
            [
                lambda: tpkernels.matmul_all_reduce(x, tpkernels.pack(w), group),
                lambda: tpkernels.all_gather_matmul(x, tpkernels.pack(w), group),
            ]
        )
        result = tpkernels.matmul_all_reduce(x, tpkernels.pack(w.bfloat16()), group)
        assert result.dtype == torch.bfloat16
        assert (result == 6 * group.size()).all()
    pattern = "is float32 but x is bfloat16; they must be equal: pack it in bfloat16"
    assert messages == [f"TypeError: w {pattern}", f"TypeError: weights[0] {pattern}"]


# Custom matmuls.


@pytest.mark.parametrize("op", sweep(OPS))
@on_ranks(3)
def test_rows_of_each_call_of_a_custom_matmul(op: str) -> None:
    """Each call of the function receives all rows, or the rows of one rank."""
    with fresh_group() as group, torch.inference_mode():
        world = group.size()
        total_rows = 8 * world
        x = torch.randn(8 if op == GATHER else total_rows, 6)
        w, seen = torch.randn(6, 4), list[int]()

        def function(x: torch.Tensor) -> torch.Tensor:
            seen.append(x.shape[0])
            return x @ w

        matmul = CustomMatmul(function, (6, 4), F32)
        run: Callable[..., Any] = getattr(tpkernels, op)
        for algorithm, expected in (
            ("direct", [total_rows]),
            ("unfused", [total_rows]),
            ("pipelined", [8] * world),
            ("ring", [8] * world),
        ):
            for attempt in range(2):
                seen.clear()
                result = run(x, matmul, group, algorithm=algorithm)
                assert seen == expected, f"{algorithm}, {attempt}: {seen} rows, not {expected}"
                assert torch.allclose(result, run(x, w, group, algorithm=algorithm), atol=1e-5)


@on_ranks(2)
def test_layers_as_custom_matmuls() -> None:
    """A layer is passed with plain and packed weights. A second layer of the same shape needs no
    new plan."""
    torch.manual_seed(0)
    with fresh_group() as group:
        linears = [nn.Linear(6, 4, bias=False) for _ in range(4)]
        x = torch.randn(2, 3, 6)
        with torch.no_grad():
            weights: list[Any] = [linear.weight.t() for linear in linears]
            expected = tpkernels.all_gather_matmul(x, weights, group)
            mixed_weights = [*weights[:1], tpkernels.pack(weights[1])]
            mixed_weights += [CustomMatmul(linear, (6, 4), F32) for linear in linears[2:]]
            for result in (tpkernels.all_gather_matmul(x, mixed_weights, group) for _ in range(2)):
                torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
        planned = groups.get(group.group_name).planned_calls
        before = len(planned())
        for linear in linears:  # their weights require a gradient
            result = tpkernels.matmul_all_reduce(x, CustomMatmul(linear, (6, 4), F32), group)
            gathered = tpkernels.all_gather_matmul(x, CustomMatmul(linear, (6, 4), F32), group)
            assert not gathered.requires_grad and not result.requires_grad, "a gradient"
            assert torch.allclose(result, linear(x) * group.size(), atol=1e-5), "another sum"
        assert len(planned()) == before + 2, f"planned {len(planned()) - before} times, not twice"


@on_ranks(2)
def test_negative_views_and_zeros_without_memory_are_resolved() -> None:
    """The dispatcher resolves negative views and zeros without memory in every argument."""
    with fresh_group() as group, torch.no_grad():
        x, w, bias, residual = (torch.randn(*s) for s in ((4, 6), (6, 8), (8,), (4, 8)))
        matmul = CustomMatmul(lambda x: x @ w, (6, 8), F32)
        ops: dict[str, tuple[Callable[..., Any], dict[str, torch.Tensor]]] = {
            GATHER: (
                lambda x, other: tpkernels.all_gather_matmul(x, [matmul, other], group)[1],
                {"x": x, "other": w},
            ),
            SCATTER: (
                functools.partial(tpkernels.matmul_reduce_scatter, w=matmul, group=group),
                {"x": x, "bias": bias, "residual": residual[:2]},
            ),
            REDUCE: (
                functools.partial(tpkernels.matmul_all_reduce, w=matmul, group=group),
                {"x": x, "bias": bias, "residual": residual},
            ),
        }
        for op, (run, tensors) in ops.items():
            expected = run(**tensors)
            for name, tensor in tensors.items():
                for _ in range(2):  # the second call has a cached plan
                    result = run(**{**tensors, name: torch._neg_view(-tensor)})
                    assert torch.allclose(result, expected, atol=1e-5), (
                        f"{op}: the sign of {name} is lost"
                    )
                zeros = run(**{**tensors, name: torch.zeros_like(tensor)})
                result = run(**{**tensors, name: torch._efficientzerotensor(tensor.shape)})
                assert torch.equal(result, zeros), f"{op}: {name} of zeros"


@on_ranks(2)
def test_a_custom_matmul_breaks_the_graph() -> list[str]:
    torch._dynamo.reset()
    with fresh_group() as group, torch.no_grad():
        x, w = torch.randn(4, 6), torch.randn(6, 4)
        matmul = CustomMatmul(lambda x: x @ w, (6, 4), F32)

        def function(x: torch.Tensor) -> torch.Tensor:
            return tpkernels.matmul_all_reduce(x * 2, matmul, group) + 1

        expected = tpkernels.matmul_all_reduce(x * 2, w, group) + 1
        compiled = torch.compile(function, backend="aot_eager")
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the compiler would warn if it traced the call
            results = [compiled(x) for _ in range(2)]
        failures = [
            f"{y}, not {expected}" for y in results if not torch.allclose(y, expected, atol=1e-5)
        ]
        torch._dynamo.reset()
        full_graph = torch.compile(function, backend="aot_eager", fullgraph=True)
        (message,) = collect_messages([lambda: full_graph(x)])
        assert message.startswith("Unsupported: "), message
    return failures


def wrong_results() -> dict[str, tuple[Callable[[torch.Tensor], Any], str]]:
    w = torch.ones(6, 4)

    def raises(x: torch.Tensor) -> torch.Tensor:
        raise OSError("no such weight")

    end = r"for \[4, 6\] float32 on cpu; it must return \[4, 4\] float32 on cpu"
    return {
        "rows": (lambda x: (x @ w)[1:], rf"ValueError: .* returned \[3, 4\] float32 on cpu {end}"),
        "columns": (lambda x: x, rf"ValueError: .* returned \[4, 6\] float32 on cpu {end}"),
        "dtype": (lambda x: (x @ w).half(), rf"ValueError: .* returned \[4, 4\] float16 .* {end}"),
        "device": (lambda x: (x @ w).to("meta"), rf"ValueError: .* float32 on meta {end}"),
        "type": (lambda x: [x], "TypeError: .* returned list for"),
        "error": (raises, "OSError: no such weight"),
    }


@pytest.mark.parametrize("fault", sweep(wrong_results()))
@on_ranks(2)
def test_a_wrong_result_breaks_the_group(fault: str) -> None:
    function, pattern = wrong_results()[fault]
    with fresh_group() as group:
        rank, x, w = group.rank(), torch.ones(4, 6), torch.ones(6, 4)
        weight: Any = w if rank else CustomMatmul(function, (6, 4), F32)
        error, next_error = collect_messages(
            [
                lambda: tpkernels.matmul_all_reduce(x, weight, group, algorithm="direct"),
                lambda: tpkernels.matmul_all_reduce(x, w, group),
            ]
        )
    assert re.match("PeerLostError: " if rank else pattern, error), error
    assert rank or next_error.startswith("GroupBrokenError: "), next_error


def test_arguments() -> None:
    make: Callable[..., Any] = functools.partial(CustomMatmul, dtype=F32)
    with pytest.raises(TypeError, match="function must be callable, not Tensor"):
        make(torch.ones(3, 3), (3, 3))
    for shape in ((3,), (3, 0), (1, 2, 3)):
        with pytest.raises(ValueError, match=r"it must be \(K, N\), both at least 1"):
            make(print, shape)
    with pytest.raises(NotImplementedError, match="dtype has dtype int8; supported"):
        CustomMatmul(print, (3, 3), torch.int8)
