"""The numerics policy, with CPU tensors that take the way of CUDA tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support.cases import Case, RanksFixture, each
from tests.support.nccl_rehearsal import over_nccl
from tests.support.ranked import call, check_cases, fresh_group, messages_of, report
from tests.support.tiers import sweep
from tpkernels import cuda, groups

BF16 = torch.bfloat16


def cases(world: int) -> list[Case]:
    """Every op along every kind of dim, with even, uneven and empty shards, and each epilogue."""
    sizes = (5, *[0] * (world - 2), 3) if world > 1 else (8,)
    even = 4 * world
    return each(
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


def cases_job(driver: str, numerics: str, given: Sequence[Case]) -> list[str]:
    with over_nccl(driver), fresh_group(numerics=numerics) as group:
        return check_cases(given, group)


@pytest.mark.parametrize("numerics", ["vendor", "ordered"])
@pytest.mark.parametrize("world", sweep([2, 1, 3]))
def test_results(ranks: RanksFixture, cuda_driver: str, world: int, numerics: str) -> None:
    """Integers are exact either way; what random numbers may be off is the tests' usual bound for
    sums in order, and for the vendor's that and a rounding by each of W - 1 additions."""
    given = cases(world)
    if numerics == "vendor":
        given = [case for case in given if case.integers or "gather" in case.op]
    told = ranks(world).run(cases_job, cuda_driver, numerics, given, timeout=120)
    report(failure for rank in told for failure in rank)


def bits_job(driver: str, given: Sequence[Case]) -> list[str]:
    """The cases whose sums in order do not have the bits of CPU tensors."""
    with fresh_group() as group:
        want = [call(case, group) for case in given]
    with over_nccl(driver), fresh_group(numerics="ordered") as group:
        got = [call(case, group) for case in given]
    wrong = zip(given, want, got, strict=True)
    return [str(case) for case, ws, gs in wrong if not all(map(torch.equal, ws, gs))]


def test_ordered_sums_have_the_bits_of_cpu_tensors(ranks: RanksFixture, cuda_driver: str) -> None:
    given = [case for case in cases(3) if not case.integers]
    report(failure for rank in ranks(3).run(bits_job, cuda_driver, given) for failure in rank)


def vendor_job(driver: str) -> tuple[list[bool], list[bool]]:
    """Which reductions have the bits of a sum rounded at each step, and which those in order."""
    rank, world = dist.get_rank(), dist.get_world_size()
    xs = [torch.randn(8 * world, 16, generator=torch.Generator().manual_seed(r)) for r in range(3)]
    xs = [x.to(BF16) for x in xs]
    rounded = functools.reduce(torch.add, xs)
    exact = functools.reduce(torch.add, [x.float() for x in xs]).to(BF16)
    mine = slice(8 * rank, 8 * rank + 8)
    found = []
    for numerics in ("vendor", "ordered"):
        with over_nccl(driver), fresh_group(numerics=numerics) as group:
            scattered = tpkernels.reduce_scatter(xs[rank], group)
            whole = tpkernels.all_reduce(xs[rank], group)
        want = rounded if numerics == "vendor" else exact
        found.append([torch.equal(scattered, want[mine]), torch.equal(whole, want)])
    assert not torch.equal(rounded[mine], exact[mine])  # else this shows nothing
    return found[0], found[1]


def test_the_vendor_sums_as_it_does(ranks: RanksFixture, cuda_driver: str) -> None:
    for found in ranks(3).run(vendor_job, cuda_driver):
        assert found == ([True, True], [True, True])


def launches_job(driver: str) -> dict[str, int]:
    """How often the kernel that sums runs in one call."""
    counted: list[int] = []
    kernel = cuda.sum_partials

    def counting(*args: Any) -> None:
        counted.append(1)
        kernel(*args)

    x, w, bias = torch.ones(4, 8), torch.ones(8, 6), torch.ones(6)
    found = {}
    with over_nccl(driver) as patch:
        patch.setattr(cuda, "sum_partials", counting)
        for numerics in ("vendor", "ordered"):
            with fresh_group(numerics=numerics) as group:
                for more in (None, bias):
                    counted.clear()
                    tpkernels.matmul_reduce_scatter(x, w, group, bias=more)
                    found[f"{numerics} {more is not None}"] = len(counted)
    return found


def test_one_kernel_sums_and_adds(ranks: RanksFixture, cuda_driver: str) -> None:
    for found in ranks(2).run(launches_job, cuda_driver):
        assert found == {"vendor False": 0, "vendor True": 1, "ordered False": 1, "ordered True": 1}


def plans_job(driver: str, numerics: str | None) -> list[tuple[str, str, str]]:
    """Numerics, reason and text of the plans of a group as torch's flag changes between calls."""
    found = []
    x = torch.ones(4, 8)
    with over_nccl(driver), fresh_group(numerics=numerics) as group:
        for deterministic in (False, True, True, False):
            torch.use_deterministic_algorithms(deterministic)
            try:
                for _ in range(2):
                    tpkernels.all_reduce_(x, group)
            finally:
                torch.use_deterministic_algorithms(False)
            (planned,) = groups.get(group.group_name).planned_calls()
            found.append((planned.plan.numerics, planned.plan.reason, planned.plan.text))
        tpkernels.all_gather(x, group)
        gather = groups.get(group.group_name).planned_calls()[-1]
        gathers = [c for c in groups.get(group.group_name).planned_calls() if c.problem.dim == 0]
        assert "numerics" not in gathers[0].plan.reason, gather
    return found


def test_the_policy_follows_torch(ranks: RanksFixture, cuda_driver: str) -> None:
    """Between calls of the same arguments, and it is part of what identifies a call. A group may
    ask for one."""
    for found in ranks(2).run(plans_job, cuda_driver, "vendor"):
        assert [numerics for numerics, *_ in found] == ["vendor"] * 4
    for found in ranks(2).run(plans_job, cuda_driver, None):
        numerics, reasons, texts = zip(*found, strict=True)
        assert numerics == ("vendor", "ordered", "ordered", "vendor")
        assert all(f"numerics '{name}'" in r for name, r in zip(numerics, reasons, strict=True))
        assert [text.rpartition("[")[2] for text in texts] == [
            "unfused, vendor]",
            "unfused, ordered]",
            "unfused, ordered]",
            "unfused, vendor]",
        ]


def unlike_job(driver: str, how: str) -> list[str]:
    """The ranks differ; then, where they only used torch's flag, they agree."""
    x, mine = torch.ones(4, 8), dist.get_rank() == 1
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    with over_nccl(driver):
        if how == "init":
            init = functools.partial(tpkernels.init, group, timeout=20.0)
            return messages_of([lambda: init(numerics="ordered" if mine else None)])
        tpkernels.init(group, timeout=20.0)
        torch.use_deterministic_algorithms(mine)
        try:
            found = messages_of([lambda: tpkernels.all_reduce(x, group)])
        finally:
            torch.use_deterministic_algorithms(False)
        return found + messages_of([lambda: tpkernels.all_reduce(x, group)])


def test_ranks_that_differ_are_told_before_anything_is_sent(
    ranks: RanksFixture, cuda_driver: str
) -> None:
    for (found,) in ranks(2).run(unlike_job, cuda_driver, "init"):
        assert found.startswith("ValueError") and "numerics='ordered'" in found, found
    for rank, (found, after) in enumerate(ranks(2).run(unlike_job, cuda_driver, "flag")):
        mine, other = ("'ordered'", "'vendor'") if rank else ("'vendor'", "'ordered'")
        assert found.startswith(f"ValueError: rank {rank} wants numerics {mine}"), found
        assert f"rank {1 - rank} {other}" in found and after == "nothing"


def cpu_job(numerics: str | None) -> tuple[bytes, list[str]]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    x, w = torch.randn(6, 40, generator=generator), torch.randn(40, 8, generator=generator)
    with fresh_group(autotune=False, numerics=numerics) as group:
        y = tpkernels.matmul_all_reduce(x.to(BF16), w.to(BF16), group)
        plans = [call.plan for call in groups.get(group.group_name).planned_calls()]
    return y.float().numpy().tobytes(), [f"{plan.text} {plan.reason}" for plan in plans]


def test_on_cpu_tensors_it_changes_nothing(ranks: RanksFixture) -> None:
    plain, vendor, ordered = (ranks(2).run(cpu_job, each) for each in (None, "vendor", "ordered"))
    assert plain == vendor == ordered
    assert "numerics" not in plain[0][1][0] and plain[0][1][0].split(" ")[-1]


def gloo_job() -> list[str]:
    """Gloo with CUDA tensors: in order, whatever was asked for."""
    from tests.support.cuda_rehearsal import pretending

    with pretending(), fresh_group(numerics="vendor") as group:
        tpkernels.all_reduce(torch.ones(4, 8), group)
        return [c.plan.numerics for c in groups.get(group.group_name).planned_calls()]


def test_gloo_sums_in_order(ranks: RanksFixture) -> None:
    assert ranks(2).run(gloo_job) == [["ordered"], ["ordered"]]
