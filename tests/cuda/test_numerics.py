"""The numerics policy, on CPU tensors that use the code path of CUDA tensors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.cases import Case, expand_cases
from tests.support.cuda_rehearsal import cuda_code_path
from tests.support.emulated import on_ranks, require_no_failures
from tests.support.nccl_rehearsal import nccl_code_path
from tests.support.ranked import call, check_cases, fresh_group
from tests.support.tiers import sweep
from tpkernels import cuda, groups

BF16 = torch.bfloat16


def cases(world: int) -> list[Case]:
    """Create cases of every op along every kind of dim, with every epilogue.

    The shards are even, uneven or empty.
    """
    sizes = (5, *[0] * (world - 2), 3) if world > 1 else (8,)
    even = 4 * world
    return expand_cases(
        Case(op="all_gather", shape=(even, 6)),
        Case(op="all_gather", shape=(8, 6), sizes=sizes),
        Case(op="all_gather", shape=(3, 8, 6), dim=1, sizes=sizes),
        Case(op="all_gather_matmul", shape=(even, 40), n=(33, 7), return_gathered=True),
        Case(op="all_gather_matmul", shape=(3, even, 40), dim=1, n=(33,), biases=(None,)),
        Case(op="reduce_scatter", shape=(even, 6), out_dtype=torch.float32),
        Case(op="reduce_scatter", shape=(3, even, 6), dim=1, layout="transposed"),
        Case(op="reduce_scatter", shape=(3, 8, 6), dim=1, sizes=sizes),
        Case(op="matmul_reduce_scatter", shape=(even, 80), k=(20,), biases=(torch.float32,)),
        Case(op="matmul_reduce_scatter", shape=(8, 80), sizes=sizes, k=(20,)),
        Case(op="matmul_reduce_scatter", shape=(6, even), dim=1, k=(20,), biases=(torch.float32,)),
        Case(op="all_reduce", shape=(70, 71)),
        Case(op="all_reduce", shape=(3, 5), out_dtype=torch.float32, layout="sliced"),
        Case(op="all_reduce_", shape=(64, 64)),
        Case(op="all_reduce_", shape=(7, 5), layout="transposed"),
        Case(op="matmul_all_reduce", shape=(even, 80), k=(20,), wire_dtype=torch.float32),
        Case(
            op="matmul_all_reduce",
            shape=(7, 33),
            k=(20,),
            biases=(torch.float32,),
            residual=torch.float32,
            out_dtype=torch.float32,
        ),
        dtypes=(torch.float32, BF16),
        algorithms=("unfused",),
    )


@pytest.mark.parametrize("numerics", ["vendor", "ordered"])
@pytest.mark.parametrize("world", sweep([2, 1, 3]))
@on_ranks()
def test_results(numerics: str) -> None:
    """Compare results with the reference.

    Integers are exact with both policies. Random values have the usual error bound of ordered sums.
    Vendor reductions are only tested with integers.
    """
    chosen = cases(dist.get_world_size())
    if numerics == "vendor":
        chosen = [case for case in chosen if case.integers or "gather" in case.op]
    with nccl_code_path(), fresh_group(numerics=numerics) as group:
        require_no_failures(check_cases(chosen, group))


@on_ranks(3)
def test_ordered_sums_match_cpu_tensors_bitwise() -> None:
    chosen = [case for case in cases(3) if not case.integers]
    with fresh_group() as group:
        want = [call(case, group) for case in chosen]
    with nccl_code_path(), fresh_group(numerics="ordered") as group:
        got = [call(case, group) for case in chosen]
    wrong = zip(chosen, want, got, strict=True)
    require_no_failures([str(case) for case, ws, gs in wrong if not all(map(torch.equal, ws, gs))])


@on_ranks(3)
def test_vendor_sums_round_at_each_addition() -> None:
    """Compare reductions bitwise with a sum that is rounded at each step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    xs = [torch.randn(8 * world, 16, generator=torch.Generator().manual_seed(r)) for r in range(3)]
    xs = [x.to(BF16) for x in xs]
    rounded = functools.reduce(torch.add, xs)
    exact = functools.reduce(torch.add, [x.float() for x in xs]).to(BF16)
    mine = slice(8 * rank, 8 * rank + 8)
    assert not torch.equal(rounded[mine], exact[mine])  # otherwise the test is void
    for numerics, want in (("vendor", rounded), ("ordered", exact)):
        with nccl_code_path(), fresh_group(numerics=numerics) as group:
            assert torch.equal(tpkernels.reduce_scatter(xs[rank], group), want[mine]), numerics
            assert torch.equal(tpkernels.all_reduce(xs[rank], group), want), numerics


@on_ranks(2)
def test_one_kernel_sums_and_adds() -> None:
    """Count the launches of the sum kernel in one call."""
    counted: list[int] = []
    kernel = cuda.sum_partials
    x, w, bias = torch.ones(4, 8), torch.ones(8, 6), torch.ones(6)
    expected = {("vendor", False): 0, ("vendor", True): 1}
    expected |= {("ordered", False): 1, ("ordered", True): 1}
    with nccl_code_path() as patch:
        patch.setattr(cuda, "sum_partials", lambda *args: counted.append(1) or kernel(*args))
        for (numerics, has_bias), count in expected.items():
            with fresh_group(numerics=numerics) as group:
                counted.clear()
                tpkernels.matmul_reduce_scatter(x, w, group, bias=bias if has_bias else None)
                assert len(counted) == count, (numerics, has_bias)


@contextlib.contextmanager
def deterministic(on: bool) -> Iterator[None]:
    torch.use_deterministic_algorithms(on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("numerics", ["vendor", None])
@on_ranks(2)
def test_the_policy_follows_torch(numerics: str | None) -> None:
    """Change the deterministic flag between equal calls.

    The numerics follow the flag and are part of the description that identifies a call. If the
    group requests a policy, the flag has no effect.
    """
    x = torch.ones(4, 8)
    with nccl_code_path(), fresh_group(numerics=numerics) as group:
        group_state = groups.get(group.group_name)
        for on in (False, True, True, False):
            with deterministic(on):
                for _ in range(2):
                    tpkernels.all_reduce_(x, group)
            plan = group_state.planned_calls()[0].plan
            expected = "ordered" if on and numerics is None else "vendor"
            assert plan.numerics == expected and plan.description.endswith(
                f"[unfused, {expected}]"
            ), plan
            assert len(group_state.planned_calls()) == 1
            assert numerics is not None or f"numerics '{expected}'" in plan.reason, plan
        tpkernels.all_gather(x, group)
        (gather,) = (c for c in group_state.planned_calls() if c.problem.dim == 0)
        assert "numerics" not in gather.plan.reason, gather


@on_ranks(2)
def test_different_policies_raise_before_communication() -> None:
    """Request different policies on two ranks, then set the torch flag on one rank.

    Both raise on all ranks. After the torch flags differed, a later call succeeds.
    """
    x, rank = torch.ones(4, 8), dist.get_rank()
    with nccl_code_path():
        group = faults.require_group(dist.new_group())
        with pytest.raises(ValueError, match="numerics='ordered'"):
            tpkernels.init(group, timeout=20.0, numerics="ordered" if rank else None)
        group = faults.require_group(dist.new_group())
        tpkernels.init(group, timeout=20.0)
        mine, other = ("'ordered'", "'vendor'") if rank else ("'vendor'", "'ordered'")
        match = f"^rank {rank} uses numerics {mine}.*rank {1 - rank} uses {other}"
        with deterministic(rank == 1), pytest.raises(ValueError, match=match):
            tpkernels.all_reduce(x, group)
        tpkernels.all_reduce(x, group)


@on_ranks(2, driver=False)
def test_the_policy_does_not_affect_cpu_tensors() -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    x, w = torch.randn(6, 40, generator=generator), torch.randn(40, 8, generator=generator)
    results = []
    for numerics in (None, "vendor", "ordered"):
        with fresh_group(autotune=False, numerics=numerics) as group:
            y = tpkernels.matmul_all_reduce(x.to(BF16), w.to(BF16), group)
            plans = [call.plan for call in groups.get(group.group_name).planned_calls()]
        results.append((y.tolist(), [(plan.description, plan.reason) for plan in plans]))
    assert results[0] == results[1] == results[2]
    assert "numerics" not in results[0][1][0][1] and results[0][1][0][1]


@on_ranks(2, driver=False)
def test_gloo_sums_in_order() -> None:
    """CUDA tensors on gloo are reduced in order, for any requested policy."""
    with cuda_code_path(), fresh_group(numerics="vendor") as group:
        tpkernels.all_reduce(torch.ones(4, 8), group)
        (planned,) = groups.get(group.group_name).planned_calls()
    assert planned.plan.numerics == "ordered"
