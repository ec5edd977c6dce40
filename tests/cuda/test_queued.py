"""`direct` and `pipelined` on the way of CUDA tensors, rehearsed: CPU tensors, the kernels of
csrc/cuda run by the processor (support/emulated.py), shared memory for torch's symmetric memory."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import emulated, faults
from tests.support.cases import Case, RanksFixture, each, uneven_splits
from tests.support.cuda_rehearsal import pretending, space_of
from tests.support.faults import Ending
from tests.support.ranked import check_cases, fresh_group, report
from tests.support.tiers import sweep, thorough
from tpkernels import groups

WAYS = ("direct", "pipelined")
MATMULS = ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]
COLLECTIVES = ["all_gather", "reduce_scatter", "all_reduce"]
BF16, F32 = torch.bfloat16, torch.float32


def cases_job(
    driver: str, cases: Sequence[Case], max_delay_us: int = 0, ll: bool = True
) -> list[str]:
    emulated.load(driver)
    with pretending() as patch, fresh_group() as group:
        if not ll:
            patch.setattr("tpkernels.cuda.gather_scatter.LL_BYTES", -1)
            patch.setattr("tpkernels.cuda.calls.all_reduce_way", lambda *_: "two_shot")
        workspace = groups.get(group.group_name).workspace
        assert workspace is not None
        workspace.set_chaos(seed=group.rank(), max_delay_us=max_delay_us)
        return check_cases(cases, group)


def cases_of(world: int) -> list[Case]:
    """Uneven and empty shards, every epilogue; later ones need more memory than there is."""
    found = []
    for rows in (5, 2 * world, 90):
        for sizes in uneven_splits(rows, world):
            found += [
                Case(op="all_gather_matmul", shape=(rows, 40), sizes=sizes, n=(33, 7)),
                Case(op="matmul_reduce_scatter", shape=(rows, 70), sizes=sizes, k=(20, 9)),
            ]
        found.append(Case(op="matmul_all_reduce", shape=(rows, 70), k=(20, 9)))
    sizes = next(uneven_splits(24, world))
    shapes = {"shape": (24, 3, 66), "sizes": sizes}
    epilogue = {"biases": (F32,), "residual": F32, "out_dtype": F32}
    return [
        *each(*found, dtypes=(BF16,), algorithms=WAYS, integers=(False,)),
        *each(
            Case(op="all_gather_matmul", **shapes, n=(4, 9), biases=(F32,), return_gathered=True),
            Case(op="matmul_reduce_scatter", **shapes, k=(20,), **epilogue),
            Case(op="matmul_all_reduce", shape=(24, 3, 66), k=(20,), **epilogue),
            Case(op="matmul_all_reduce", shape=(24, 66), k=(20,), wire_dtype=F32),
            algorithms=WAYS,
            integers=(True,),
        ),
    ]


@pytest.mark.parametrize("world", sweep([3, 1, 2, 4]))
def test_products(ranks: RanksFixture, cuda_driver: str, world: int) -> None:
    told = ranks(world).run(cases_job, cuda_driver, cases_of(world), timeout=240)
    report(failure for rank in told for failure in rank)


@pytest.mark.parametrize(
    ("world", "ll"), [(4, True), (2, False), thorough(1, True), thorough(4, False)]
)
def test_collectives(ranks: RanksFixture, cuda_driver: str, world: int, ll: bool) -> None:
    found = [Case(op="all_reduce", shape=(300, 40)), Case(op="all_reduce_", shape=(7, 5))]
    for total in (1, 50):
        for sizes in uneven_splits(total, world):
            found += [
                Case(op=op, shape=shape, sizes=sizes)
                for op in ("all_gather", "reduce_scatter")
                for shape in ((total, 13), (total,))
            ]
    cases = each(*found, algorithms=("direct",))
    told = ranks(world).run(cases_job, cuda_driver, cases, 0, ll)
    report(failure for rank in told for failure in rank)


@pytest.mark.parametrize("way", sweep(WAYS))
def test_call_after_call_under_delays(ranks: RanksFixture, cuda_driver: str, way: str) -> None:
    cases = each(
        Case(op="all_gather_matmul", shape=(12, 8), sizes=(3, 0, 9), n=(5,)),
        Case(op="matmul_reduce_scatter", shape=(12, 6), sizes=(3, 0, 9), k=(5,)),
        Case(op="matmul_all_reduce", shape=(12, 6), k=(5,)),
        algorithms=(way,),
    )
    told = ranks(3).run(cases_job, cuda_driver, cases * 4, 500, timeout=240)
    report(failure for rank in told for failure in rank)


def careless_job(driver: str, way: str) -> list[str]:
    emulated.load(driver)
    with pretending(), fresh_group() as group:
        shapes = [(40 + i, 6) for i in range(20)]
        cases = [Case(op="matmul_all_reduce", shape=s, k=(5,), algorithm=way) for s in shapes]
        check_cases(cases[-1:], group)
        workspace = groups.get(group.group_name).workspace
        assert workspace is not None
        workspace.set_chaos(seed=group.rank(), max_delay_us=2000, skip_waits=True)
        return check_cases(cases, group)


@pytest.mark.parametrize("way", sweep(WAYS))
def test_calls_that_do_not_wait_are_wrong(ranks: RanksFixture, cuda_driver: str, way: str) -> None:
    """Negative control of the test above."""
    assert any(ranks(3).run(careless_job, cuda_driver, way))


def mixed_job(driver: str, ll: bool) -> list[str]:
    cases = [
        Case(op=op, shape=(12, 6), sizes=None if "all_reduce" in op else (5, 7), algorithm=way)
        for op in ("matmul_reduce_scatter", "matmul_all_reduce")
        for way in ("fused", *WAYS, "unfused")
    ]
    cases = [Case(**{**vars(case), "k": (5,)}) for case in cases]
    gathers = [
        Case(op="all_gather_matmul", shape=(12, 6), sizes=(5, 7), n=(4,), algorithm=way)
        for way in ("fused", *WAYS)
    ]
    return cases_job(driver, [*cases, *gathers, *cases], 200, ll)


@pytest.mark.thorough
@pytest.mark.parametrize("ll", [True, False])
def test_all_algorithms_share_a_workspace(
    interpreting: RanksFixture, cuda_driver: str, ll: bool
) -> None:
    told = interpreting(2).run(mixed_job, cuda_driver, ll)
    report(failure for rank in told for failure in rank)


def copied_job(driver: str, cases: Sequence[Case], max_delay_us: int) -> list[str]:
    """`fused`, with copy engines for the gather; a chunk is a row of tiles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tpkernels.algorithms.fused.COPY_ENGINE_BYTES", 0)
        patch.setattr("tpkernels.kernels.all_gather_matmul._CHUNK_BYTES", 1)
        return cases_job(driver, cases, max_delay_us)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "max_delay_us"),
    [thorough(2, 500), *(pytest.param(3, delay, marks=pytest.mark.slow) for delay in (0, 500))],
)
def test_copy_engines_gather_for_fused(
    interpreting: RanksFixture, cuda_driver: str, world: int, max_delay_us: int
) -> None:
    cases = [
        Case(op="all_gather_matmul", shape=(rows, 40), sizes=sizes, n=(33, 7), biases=(F32, None))
        for rows in (6, 150)
        for sizes in uneven_splits(rows, world)
    ]
    cases = each(*cases, dtypes=(BF16,), algorithms=("fused",), integers=(False,))
    told = interpreting(world).run(copied_job, cuda_driver, cases, max_delay_us, timeout=240)
    report(failure for rank in told for failure in rank)


def batches_of(world: int) -> list[Case]:
    """Shards of an inner dim, even and uneven, empty ones too."""
    found = []
    for total in (2 * world, 5):
        for sizes in uneven_splits(total, world):
            for lead, tail in (((3,), ()), ((2, 3), ()), ((2,), (3,))):
                split: dict[str, Any] = {"sizes": sizes, "dim": len(lead)}
                gathered, summed = (*lead, total, *tail, 12), (*lead, total, *tail, 10)
                more = {"biases": (F32,), "n": (4, 9), "return_gathered": True}
                found += [
                    Case(op="all_gather_matmul", shape=gathered, **split, n=(7,)),
                    Case(op="all_gather_matmul", shape=gathered, **split, **more),
                    Case(op="matmul_reduce_scatter", shape=summed, **split, k=(6,)),
                    Case(op="matmul_reduce_scatter", shape=summed, **split, k=(6,), residual=F32,
                         out_dtype=F32, biases=(F32,), layout="transposed"),
                ]  # fmt: skip
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("world", sweep([3, 1, 2]))
def test_shards_of_an_inner_dim(ranks: RanksFixture, cuda_driver: str, world: int) -> None:
    cases = each(*batches_of(world), algorithms=WAYS, integers=(True,))
    told = ranks(world).run(cases_job, cuda_driver, cases, timeout=240)
    report(failure for rank in told for failure in rank)


@pytest.mark.slow
def test_shards_of_an_inner_dim_by_fused(interpreting: RanksFixture, cuda_driver: str) -> None:
    """By programs of the kernel, then by copy engines."""
    cases = each(*batches_of(2)[::3], algorithms=("fused",), integers=(True,))
    for job in (cases_job, copied_job):
        told = interpreting(2).run(job, cuda_driver, cases, 0, timeout=240)
        report(failure for rank in told for failure in rank)


def suite_job(driver: str) -> list[bool]:
    """What the GPU suite does over paced links, its peers in threads."""
    from benchmarks.gpu import link as gpu_link

    emulated.load(driver)
    gather = gpu_link.Gather("cpu", 3, 96, 48, 32)
    scatter = gpu_link.Scatter("cpu", 3, 96, 48, 48)
    ways = [(gather, "pipelined"), (gather, "fused"), (scatter, "pipelined")]
    return [gpu_link.check(case, name) for case, name in ways]


@pytest.mark.slow
def test_the_gpu_suites_paced_links(interpreting: RanksFixture, cuda_driver: str) -> None:
    """They have not seen a GPU; here they run on the CPU."""
    assert interpreting(1).run(suite_job, cuda_driver) == [[True] * 3]


def refused_job(driver: str) -> list[str]:
    emulated.load(driver)
    with pretending(), fresh_group() as group:
        x, w = torch.ones(4, 8), torch.ones(8, 6)
        gather = functools.partial(tpkernels.all_gather_matmul, group=group)
        columns = functools.partial(gather, gather_dim=1)
        calls = [
            functools.partial(columns, x, torch.ones(16, 6), algorithm="direct"),
            functools.partial(gather, x.double(), w.double(), algorithm="pipelined"),
            functools.partial(tpkernels.all_gather, x, group, algorithm="pipelined"),
        ]
        return [faults.ending_of(call).text for call in calls]


def test_refusals(ranks: RanksFixture, cuda_driver: str) -> None:
    for columns, wide, plain in ranks(2).run(refused_job, cuda_driver):
        assert columns.endswith("of [4, 16] it can split any dim but the last"), columns
        assert wide.endswith("accumulates in float32 and takes no float64"), wide
        assert plain.endswith("overlaps a matmul, and this op has none"), plain


def without_kernels_job(driver: str) -> list[Ending]:
    """Rank 1 has no CUDA kernels; the others can do without, too."""
    emulated.load(driver)
    with pretending() as patch:
        group = faults.new_group()
        if group.rank() == 1:
            lacking = {"direct": "needs the CUDA kernels: none here"}
            patch.setattr(
                "tpkernels.tuning.planned_calls.unsupported", lambda name, *_: lacking.get(name)
            )
        call = functools.partial(faults.run_op, "matmul_all_reduce", group)
        return [faults.ending_of(functools.partial(call, way)) for way in ("direct", "unfused")]


def test_what_one_rank_lacks_is_refused_by_all(ranks: RanksFixture, cuda_driver: str) -> None:
    for direct, unfused in ranks(2).run(without_kernels_job, cuda_driver):
        assert direct.error == "NotImplementedError", direct
        assert "rank 1 needs the CUDA kernels: none here" in direct.text
        assert unfused.error == "", unfused


def call_of(op: str, way: str, group: dist.ProcessGroup) -> functools.partial[torch.Tensor]:
    x, w = torch.ones(12, 48), torch.ones(48, 40)
    operands = (x, w) if "matmul" in op else (w,)
    return functools.partial(getattr(tpkernels, op), *operands, group, algorithm=way)


def late_job(driver: str, op: str, way: str) -> tuple[bool, Ending] | None:
    """Rank 1 does not come: the results of rank 0 and its next call say so."""
    emulated.load(driver)
    with pretending():
        group = faults.new_group(timeout=1.0)
        call = call_of(op, way, group)
        call()
        if group.rank() == 1:
            dist.barrier()  # the other one has given up
            return None
        told = bool(call().isnan().all()), faults.ending_of(call)
        dist.barrier()
        return told


def check_late(told: tuple[bool, Ending] | None, op: str) -> None:
    assert told is not None
    spoilt, after = told
    assert spoilt
    assert after.error == "CollectiveTimeoutError" and after.peer == 1, after
    assert f"an earlier call of the group, found by {op}" in after.text, after


@pytest.mark.parametrize(
    ("op", "way"),
    sweep([*product(MATMULS, WAYS), *product(COLLECTIVES, ["direct"])]),
)
def test_a_call_that_gave_up_leaves_nan(
    ranks: RanksFixture, cuda_driver: str, op: str, way: str
) -> None:
    check_late(ranks(2).run(late_job, cuda_driver, op, way)[0], op)


def killed_job(driver: str, op: str, way: str) -> tuple[list[bool], Ending, float] | None:
    """Rank 1 is killed before its kernel starts; the thread that watches ends the others' waits.
    (Where a rank is so slow that it sees it before its kernel starts, that call raises already.)"""
    emulated.load(driver)
    with pretending():
        group = faults.new_group()
        call = call_of(op, way, group)
        call()
        space_of(group).check("a test")
        if group.rank() == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        spoilt: list[bool] = []
        begin = time.monotonic()
        ending = faults.ending_of(lambda: spoilt.append(bool(call().isnan().all())))
        if not ending.error:
            ending = faults.ending_of(call)
        return spoilt, ending, time.monotonic() - begin


def check_killed(driver: str, op: str, way: str, world: int = 2, **env: str) -> None:
    with faults.watched_ranks(world, **env) as ranks:
        outcomes = faults.collect(ranks, killed_job, driver, op, way)
        assert outcomes[1].exitcode == -signal.SIGKILL
        for spoilt, after, seconds in faults.values(outcomes, 1).values():
            assert all(spoilt)
            assert after.error == "PeerLostError" and after.peer == 1, after
            assert f"pid {ranks.pids[1]}" in after.text, after
            assert seconds < faults.PATIENCE / 2, seconds


@pytest.mark.parametrize("way", sweep(["pipelined", "direct"]))
def test_a_killed_rank_ends_the_wait(cuda_driver: str, way: str) -> None:
    check_killed(cuda_driver, "matmul_reduce_scatter", way)
