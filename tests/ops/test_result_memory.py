"""Large results of every op come from the pool, with the bits of results in torch's memory."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.cases import COLLECTIVE_ALGORITHMS, MATMUL_ALGORITHMS, Case
from tests.support.ranked import call, fresh_group, on_ranks, planned_in_python
from tests.support.tiers import covering
from tpkernels import _C, defaults
from tpkernels.local.packed import native

WORLD, CALLS, COLUMNS = 2, 6, 1024
RESULT, PARTS = (2048, COLUMNS), (4096, COLUMNS)  # 4 MiB in bf16, on each rank
CASES = [
    Case(op="all_reduce", shape=RESULT),
    Case(op="all_gather", shape=RESULT),
    Case(op="reduce_scatter", shape=PARTS),
    Case(op="all_gather_matmul", shape=(2048, 24), n=(COLUMNS, COLUMNS)),
    Case(op="matmul_all_reduce", shape=RESULT, k=(24,)),
    Case(op="matmul_reduce_scatter", shape=PARTS, k=(24,)),
]
WAYS = [
    (case.op, algorithm, dtype)
    for case in CASES
    for algorithm in (MATMUL_ALGORITHMS if "matmul" in case.op else COLLECTIVE_ALGORITHMS)
    for dtype in (torch.bfloat16, torch.float32)
]


def runner(
    op: str, algorithm: str, dtype: torch.dtype, group: dist.ProcessGroup
) -> Callable[[], list[torch.Tensor]]:
    """Runs the op; its results."""
    (case,) = (replace(each, dtype=dtype) for each in CASES if each.op == op)
    return functools.partial(call, replace(case, algorithm=algorithm), group)


@pytest.mark.parametrize(("op", "algorithm", "dtype"), covering(WAYS))
@on_ranks(WORLD)
def test_results_come_from_the_pool(op: str, algorithm: str, dtype: torch.dtype) -> list[str]:
    failures = []
    with fresh_group() as group:
        run = runner(op, algorithm, dtype, group)
        _C.calls.limit_result_pool(0)
        with planned_in_python():
            expected = run()
        _C.calls.limit_result_pool(defaults.RESULT_POOL_BYTES)
        before = _C.calls.result_pool()["in_use"]
        kept = run()
        addresses: list[int] = []
        for _ in range(CALLS):
            results = run()
            addresses += [result.data_ptr() for result in results]
            assert not any(result.untyped_storage().resizable() for result in results)
            assert all(map(torch.equal, results, expected)), "other bits"
            del results
        assert not set(addresses) & {result.data_ptr() for result in kept}
        assert len(set(addresses)) != len(addresses), f"no memory came back: {addresses}"
        assert all(map(torch.equal, kept, expected)), "a result that was kept has changed"
        del kept
        deadline = time.monotonic() + faults.PROMPT
        while _C.calls.result_pool()["in_use"] != before:  # gloo lets go of tensors later
            if time.monotonic() > deadline:
                failures.append(f"{_C.calls.result_pool()} after the calls, {before} before")
                break
    return failures


@on_ranks(WORLD)
def test_a_sum_takes_the_place_of_its_partial() -> None:
    with fresh_group() as group:
        # bf16 is converted in further memory on processors without instructions for it.
        dtype = torch.bfloat16 if native(torch.bfloat16) else torch.float32
        run = runner("matmul_all_reduce", "direct", dtype, group)
        run()
        for limit in (0, defaults.RESULT_POOL_BYTES):
            _C.calls.limit_result_pool(limit)
        result = run()
        assert _C.calls.result_pool()["idle"] == 0, "there was a second tensor"
        del result
        assert _C.calls.result_pool()["idle"] > 0


@on_ranks(WORLD)
def test_gradients_come_from_the_pool() -> None:
    """Large gradients are in the pool too, and what a graph has saved is not handed out."""
    group = dist.group.WORLD
    assert group is not None
    x = torch.full((1024, 1024), 0.5, requires_grad=True)
    w = torch.full((1024, 1024), 2.0**-10, requires_grad=True)
    y = tpkernels.all_gather_matmul(x, w, group, save_gathered=True)  # all 0.5
    z = y.square().sum()  # saves y
    del y
    for _ in range(3):
        tpkernels.all_reduce(torch.full((2048, 1024), 7.0), group)
    z.backward()
    assert x.grad is not None and w.grad is not None
    for name, grad, value in (("x", x.grad, 1.0 * WORLD), ("w", w.grad, 1024.0)):
        assert (grad == value).all(), f"the gradient of {name} is {grad.unique()}, not {value}"
        assert not grad.untyped_storage().resizable(), name
