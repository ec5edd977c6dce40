"""The ops with a caller's product on real ranks against float64, by every algorithm. What it may
not be used for is refused at the call; what it does wrong breaks the group."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import tpkernels
from tests.support.cases import DTYPES, MATMUL_ALGORITHMS, QUICK_WORLDS, Case, RanksFixture, each
from tests.support.ranked import fresh_group, messages_of, report, run_cases
from tests.support.tiers import sweep
from tpkernels import LocalProduct, groups
from tpkernels.shards import shard_sizes

F32, BF16 = torch.float32, torch.bfloat16
GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
OPS = (GATHER, SCATTER, REDUCE)


@pytest.mark.parametrize("world", QUICK_WORLDS)
@pytest.mark.parametrize("op", sweep(OPS))
def test_every_dtype_by_every_algorithm(ranks: RanksFixture, world: int, op: str) -> None:
    cases = []
    for rows, n in ((world, 5), (31, 37)):
        sizes = None if op == REDUCE else tuple(shard_sizes(rows, world))
        factors: dict[str, Any] = {"n": (n, 3)} if op == GATHER else {"k": (33, 1, 40)}
        shape = (rows, 33) if op == GATHER else (rows, n)
        cases.append(Case(op=op, shape=shape, sizes=sizes, weight_layout="caller's", **factors))
    if op == GATHER:
        cases.append(replace(cases[0], return_gathered=True))
    else:
        cases.append(replace(cases[1], biases=(F32,), residual=F32, out_dtype=F32))
    run_cases(ranks, world, each(*cases, dtypes=DTYPES, algorithms=MATMUL_ALGORITHMS))


def calls_job(op: str) -> list[str]:
    """The rows of each call of the function: all at once, or a part for each rank."""
    failures = []
    with fresh_group() as group, torch.inference_mode():
        world = group.size()
        whole = 8 * world
        x = torch.randn(8 if op == GATHER else whole, 6)
        w, seen = torch.randn(6, 4), list[int]()

        def function(x: torch.Tensor) -> torch.Tensor:
            seen.append(x.shape[0])
            return x @ w

        product = LocalProduct(function, (6, 4), F32)
        run: Callable[..., Any] = getattr(tpkernels, op)
        for algorithm, want in (
            ("direct", [whole]),
            ("unfused", [whole]),
            ("pipelined", [8] * world),
            ("ring", [8] * world),
        ):
            for attempt in range(2):
                seen.clear()
                got = run(x, product, group, algorithm=algorithm)
                if seen != want:
                    failures.append(f"{algorithm}, {attempt}: {seen} rows, not {want}")
                if not torch.allclose(got, run(x, w, group, algorithm=algorithm), atol=1e-5):
                    failures.append(f"{algorithm}, {attempt}: another result")
    return failures


@pytest.mark.parametrize("op", sweep(OPS))
def test_the_parts_are_multiplied_one_by_one(ranks: RanksFixture, op: str) -> None:
    report(failure for rank in ranks(3).run(calls_job, op) for failure in rank)


def layers_job() -> list[str]:
    """A layer, among plain and packed weights; another product of the same shape."""
    failures = []
    torch.manual_seed(0)
    with fresh_group() as group:
        linears = [nn.Linear(6, 4, bias=False) for _ in range(4)]
        x = torch.randn(2, 3, 6)
        with torch.no_grad():
            weights: list[Any] = [linear.weight.t() for linear in linears]
            want = tpkernels.all_gather_matmul(x, weights, group)
            some = [*weights[:1], tpkernels.pack(weights[1])]
            some += [LocalProduct(linear, (6, 4), F32) for linear in linears[2:]]
            for got in (tpkernels.all_gather_matmul(x, some, group) for _ in range(2)):
                if not all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, want, strict=True)):
                    failures.append("another result")
        planned = groups.get(group.group_name).planned_calls
        before = len(planned())
        for linear in linears:  # whose weights need a gradient
            got = tpkernels.matmul_all_reduce(x, LocalProduct(linear, (6, 4), F32), group)
            gathered = tpkernels.all_gather_matmul(x, LocalProduct(linear, (6, 4), F32), group)
            if gathered.requires_grad or got.requires_grad:
                failures.append("a gradient")
            if not torch.allclose(got, linear(x) * group.size(), atol=1e-5):
                failures.append("another sum")
        if len(planned()) != before + 2:
            failures.append(f"planned {len(planned()) - before} times, not twice")
    return failures


def test_layers_are_products(ranks: RanksFixture) -> None:
    report(failure for rank in ranks(2).run(layers_job) for failure in rank)


def views_job() -> list[str]:
    """What the dispatcher would resolve or wrap: each argument once as a negative view, once as a
    tensor of zeros without memory."""
    failures, attempts = [], list[Callable[[], Any]]()
    with fresh_group() as group, torch.no_grad():
        x, w, bias, residual = (torch.randn(*s) for s in ((4, 6), (6, 8), (8,), (4, 8)))
        product = LocalProduct(lambda x: x @ w, (6, 8), F32)
        ops: dict[str, tuple[Callable[..., Any], dict[str, torch.Tensor]]] = {
            GATHER: (
                lambda x, other: tpkernels.all_gather_matmul(x, [product, other], group)[1],
                {"x": x, "other": w},
            ),
            SCATTER: (
                functools.partial(tpkernels.matmul_reduce_scatter, w=product, group=group),
                {"x": x, "bias": bias, "residual": residual[:2]},
            ),
            REDUCE: (
                functools.partial(tpkernels.matmul_all_reduce, w=product, group=group),
                {"x": x, "bias": bias, "residual": residual},
            ),
        }
        for op, (run, tensors) in ops.items():
            want = run(**tensors)
            for name, tensor in tensors.items():
                for _ in range(2):  # planned, then warm
                    got = run(**{**tensors, name: torch._neg_view(-tensor)})
                    if not torch.allclose(got, want, atol=1e-5):
                        failures.append(f"{op}: the sign of {name} is lost")
                zeros = {**tensors, name: torch._efficientzerotensor(tensor.shape)}
                attempts.append(functools.partial(run, **zeros))
        wrong = re.compile("NotImplementedError: .* takes dense tensors .* ZeroTensor")
        failures += [text for text in messages_of(attempts) if not wrong.match(text)]
        if not torch.allclose(run(**tensors), want, atol=1e-5):
            failures.append("the group does not go on")
    return failures


def test_negative_views_are_resolved_and_zeros_without_memory_refused(ranks: RanksFixture) -> None:
    report(failure for rank in ranks(2).run(views_job) for failure in rank)


def compiled_job() -> list[str]:
    torch._dynamo.reset()
    with fresh_group() as group, torch.no_grad():
        x, w = torch.randn(4, 6), torch.randn(6, 4)
        product = LocalProduct(lambda x: x @ w, (6, 4), F32)

        def function(x: torch.Tensor) -> torch.Tensor:
            return tpkernels.matmul_all_reduce(x * 2, product, group) + 1

        want = tpkernels.matmul_all_reduce(x * 2, w, group) + 1
        compiled = torch.compile(function, backend="aot_eager")
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of the compiler, if it looked into the call
            results = [compiled(x) for _ in range(2)]
        failures = [f"{y}, not {want}" for y in results if not torch.allclose(y, want, atol=1e-5)]
        torch._dynamo.reset()
        whole = torch.compile(function, backend="aot_eager", fullgraph=True)
        (message,) = messages_of([lambda: whole(x)])
        if not message.startswith("Unsupported: "):
            failures.append(message)
    return failures


def test_a_compiled_graph_breaks_there(ranks: RanksFixture) -> None:
    report(failure for rank in ranks(2).run(compiled_job) for failure in rank)


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
        "type": (lambda x: [x], "TypeError: .* returned a list for"),
        "error": (raises, "OSError: no such weight"),
    }


def wrong_job(what: str) -> list[str]:
    with fresh_group() as group:
        product = LocalProduct(wrong_results()[what][0], (6, 4), F32)
        w: Any = product if group.rank() == 0 else torch.ones(6, 4)
        x = torch.ones(4, 6)
        return messages_of(
            [
                lambda: tpkernels.matmul_all_reduce(x, w, group, algorithm="direct"),
                lambda: tpkernels.matmul_all_reduce(x, torch.ones(6, 4), group),
            ]
        )


@pytest.mark.parametrize("what", sweep(wrong_results()))
def test_a_wrong_result_breaks_the_group(ranks: RanksFixture, what: str) -> None:
    (error, later), (others, _) = ranks(2).run(wrong_job, what)
    pattern = wrong_results()[what][1]
    assert re.match(pattern, error), error
    assert later.startswith("GroupBrokenError: "), later
    assert others.startswith("PeerLostError: "), others


def test_arguments() -> None:
    make: Callable[..., Any] = functools.partial(LocalProduct, dtype=F32)
    with pytest.raises(TypeError, match="function is a Tensor, which is not callable"):
        make(torch.ones(3, 3), (3, 3))
    for shape in ((3,), (3, 0), (1, 2, 3)):
        with pytest.raises(ValueError, match=r"it must be \(K, N\), both at least 1"):
            make(print, shape)
    with pytest.raises(NotImplementedError, match="dtype has dtype int8; supported"):
        LocalProduct(print, (3, 3), torch.int8)
