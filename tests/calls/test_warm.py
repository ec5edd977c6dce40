"""Calls with a cached plan run in the extension only, and match Python execution bitwise."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.cases import PACKABLE, Case
from tests.support.ranked import call, disable_bound_calls, fresh_group, functions_called, on_ranks
from tests.support.tiers import sweep
from tpkernels import groups
from tpkernels.ops.all_reduce import OP as ALL_REDUCE
from tpkernels.planning.op_spec import OPS as SPECS

WORLD = 3
OPS = (
    "all_reduce_",
    "all_reduce",
    "all_reduce_rms_norm",
    "all_gather",
    "reduce_scatter",
    "all_gather_matmul",
    "matmul_all_reduce",
    "matmul_all_reduce_rms_norm",
    "matmul_reduce_scatter",
)


def arguments(op: str, packed: bool, group: dist.ProcessGroup, rows: int = 2) -> list[Any]:
    """Return arguments of the op, with ``rows`` of x per rank."""
    x = torch.ones(rows * group.size(), 8)
    name, w = group.group_name, torch.full((8, 6), 0.5)
    if packed:
        w = tpkernels.pack(w)
    if op == "all_gather_matmul":
        return [x, [w], name]
    tensor_args = [x, w] if "matmul" in op else [x]
    if op.endswith("_rms_norm"):
        tensor_args.append(torch.ones(6 if "matmul" in op else 8))
    return [*tensor_args, name]


@pytest.mark.parametrize("world", [WORLD, 1])
@on_ranks()
def test_a_warm_call_runs_no_python() -> list[str]:
    failures = []
    ops = [(op, False) for op in OPS] + [(op, True) for op in OPS if "matmul" in op]
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with fresh_group(autotune=False) as group, context():
            for op, packed in ops:
                overload = getattr(torch.ops.tpkernels, op).default
                first, second = arguments(op, packed, group), arguments(op, packed, group)
                with functions_called("tpkernels") as cold:
                    overload(*first)
                with functions_called("tpkernels") as warm:
                    overload(*second)
                call = f"{op}, {packed=}, {context.__name__}"
                assert cold, f"{call}: nothing was seen of the first call"
                failures += [f"{call}: {name}" for name in warm]
    return failures


@pytest.mark.parametrize("op", sweep(OPS, 3, 2))
@on_ranks(WORLD)
def test_a_warm_call_with_a_large_result_runs_no_python(op: str) -> list[str]:
    """The result is larger than 4 MiB."""
    overload = getattr(torch.ops.tpkernels, op).default
    with fresh_group() as group:
        first, second = (arguments(op, False, group, 3 << 16) for _ in range(2))
        overload(*first, algorithm="direct")
        with functions_called("tpkernels") as warm:
            overload(*second, algorithm="direct")
    return [f"{op}: {name}" for name in warm]


def variants(op: str, dtype: torch.dtype) -> list[Case]:
    """Return cases. Only some of them can run in the extension."""
    spec, n = SPECS[op.removesuffix("_")], 2 * WORLD
    high_precision = torch.float64 if dtype == torch.float64 else torch.float32
    weight_dims: dict[str, Any] = {}
    if spec.has_matmul:
        weight_dims = {"n": (n, 4)} if spec.gathers else {"k": (4,)}
    cases = []
    for leading_dims in ((WORLD,), (2 * WORLD, 3), (40 * WORLD,)):
        case = Case(op=op, shape=(*leading_dims, n), dtype=dtype, **weight_dims)
        more = [replace(case, layout=layout) for layout in ("transposed", "sliced")]
        if not spec.keeps_sum:
            more.append(replace(case, dim=len(leading_dims), return_gathered=spec.gathers))
        if spec.has_matmul:
            more += [replace(case, weight_layout="linear"), replace(case, biases=(dtype,))]
            more += [replace(case, out_dtype=high_precision)] if not spec.normed else []
            if dtype in PACKABLE:
                mixed = "packed_on_even_ranks"
                more += [replace(more[-2], weight_layout=layout) for layout in ("packed", mixed)]
        if spec.reduces and (spec.has_matmul or spec.normed):
            biases = (high_precision,) * spec.has_matmul
            more.append(replace(case, residual=dtype, norm=high_precision, biases=biases))
        cases += [case, *more]
    return cases


def flatten(results: Any) -> list[torch.Tensor]:
    if isinstance(results, torch.Tensor):
        return [results]
    return [tensor for result in results for tensor in flatten(result)]


@pytest.mark.parametrize("op", sweep(OPS, 3, 2))
@on_ranks(WORLD)
def test_results_match_python_bitwise(op: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        with fresh_group() as group:
            for case in variants(op, dtype):
                with disable_bound_calls():
                    expected = call(case, group)
                for attempt in range(3):  # the first attempt plans
                    got = call(case, group)
                    assert all(map(torch.equal, got, expected)), (str(case), attempt)


@on_ranks(2)
def test_strided_operands_of_a_contiguous_x() -> None:
    torch.manual_seed(0)
    x, w, strided = torch.randn(6, 6), torch.randn(6, 6), torch.randn(6, 12)[:, ::2]
    normed, reduce = tpkernels.all_reduce_rms_norm, tpkernels.matmul_all_reduce
    with fresh_group() as group:
        calls: list[Callable[[], Any]] = [
            lambda: normed(x, strided[0], group),
            lambda: normed(x, x[0], group, residual=strided),
            lambda: reduce(x, w, group, bias=strided[0]),
            lambda: reduce(x, w, group, residual=strided),
        ]
        for run in calls:
            with disable_bound_calls():
                expected = flatten(run())
            for _ in range(3):
                assert all(map(torch.equal, flatten(run()), expected))


@on_ranks(2)
def test_plain_and_packed_weights_have_separate_plans() -> None:
    """A square weight has the same shape plain and packed, and both calls are correct."""
    with fresh_group() as group:
        x, w = torch.randn(4, 6), torch.randn(6, 6)
        second_weight, factor = torch.randn(6, 6), tpkernels.pack(w)
        for attempt in range(3):
            for op in ("matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul"):
                function: Callable[..., Any] = getattr(tpkernels, op)
                expected, got = function(x, w, group), function(x, factor, group)
                assert torch.allclose(got, expected, atol=1e-5), (op, attempt, got, expected)
                pairs = (
                    function(x, second_weight, group),
                    function(x, tpkernels.pack(second_weight), group),
                )
                assert torch.allclose(*pairs, atol=1e-5), (op, attempt, pairs)
        tpkernels.matmul_all_reduce(
            x, tpkernels.CustomMatmul(lambda x: x @ w, (6, 6), w.dtype), group
        )
        half = tpkernels.CustomMatmul(lambda x: x @ w, (6, 6), torch.bfloat16)
        with pytest.raises(TypeError, match="bfloat16"):
            tpkernels.matmul_all_reduce(x, half, group)


@on_ranks(WORLD)
def test_a_warm_call_on_a_destroyed_group() -> None:
    """A cached plan is not used once its group is destroyed."""
    x = torch.ones(3)
    group = faults.new_group()
    name = group.group_name
    for _ in range(3):
        torch.ops.tpkernels.all_reduce_(x, name)
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match=r"process group '.*' does not exist on this rank"):
        torch.ops.tpkernels.all_reduce_(x, name)
    assert x[0] == dist.get_world_size() ** 3, f"{x} after the calls"


@on_ranks(WORLD)
def test_a_warm_call_after_finalize() -> list[str]:
    """After `finalize` the same arguments are planned again, on a new workspace."""
    x, y = torch.ones(3), torch.ones(3)
    with fresh_group() as group:
        for _ in range(2):
            tpkernels.all_reduce_(x, group)
        dist.barrier(group)
        tpkernels.finalize()
        for _ in range(2):
            tpkernels.all_reduce_(y, group)
    return [] if torch.equal(x, y) else [f"{x}, then {y}"]


@on_ranks(1)
def test_invalid_arguments() -> None:
    """The kernel of the extension reports arguments that are missing or not in the schema."""
    overload = torch.ops.tpkernels.all_reduce.default
    kernel = ALL_REDUCE._kernel
    with fresh_group() as group:
        x, name = torch.ones(3), group.group_name
        overload(x, name)
        for args, options, message in (
            ((x,), {}, "is missing the argument group"),
            ((x, name, None), {}, "got unexpected arguments"),
            ((x, name), {"colour": "red"}, "got unexpected arguments"),
        ):
            with pytest.raises(TypeError, match=re.escape(message)):
                kernel(*args, **options)


class _Finalizer:
    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    def __del__(self) -> None:
        self.act()


@on_ranks(2)
def test_calls_in_finalizers() -> None:
    """Finalizers make calls while a call looks up its plan and while plans are destroyed."""
    with fresh_group() as group:
        state, x, y = groups.get(group.group_name), torch.ones(3), torch.ones(5, 2)
        nested: list[Callable[[], object]] = []

        def process_group() -> dist.ProcessGroup:  # replaces the weak reference
            while nested:
                nested.pop()()
            return group

        state.register_group(group.group_name, process_group)
        for _ in range(2):
            tpkernels.all_reduce(x, group, algorithm="direct")
            tpkernels.all_gather(y, group, algorithm="direct")
        nested.append(lambda: tpkernels.all_gather(y, group, algorithm="direct"))
        got = tpkernels.all_reduce(x, group, algorithm="direct")
        assert torch.equal(got, x * group.size()), f"the plan of another call: {got}"
        call = next(
            planned_call
            for planned_call in state.planned_calls()
            if planned_call.problem.op == "all_gather"
        )
        act = functools.partial(tpkernels.all_reduce, torch.ones(7), group)
        call.cache["last"] = _Finalizer(act)
        del call
        state.clear_planned_calls()
        planned = [planned_call.problem.shape for planned_call in state.planned_calls()]
        assert planned == [(7,)], f"planned while the others were forgotten: {planned}"
