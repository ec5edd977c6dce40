"""Captured graphs, rehearsed on CPU tensors: what a capture lacks is said before anything is
queued, and what a graph uses outlives its group."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import emulated, faults
from tests.support.cases import RanksFixture
from tests.support.cuda_rehearsal import pretending, space_of
from tests.support.faults import Ending
from tests.support.tiers import sweep
from tpkernels import groups
from tpkernels.symm import streams
from tpkernels.symm.device import FAILED, PEER, STATUS, TIMEOUT, DeviceWorkspace

OPS = [("all_gather", "direct"), ("all_reduce", "direct"), ("matmul_reduce_scatter", "direct"),
       ("all_gather_matmul", "pipelined"), ("matmul_all_reduce", "pipelined")]  # fmt: skip


def advised_job(driver: str, op: str, way: str) -> list[Ending]:
    """A call in a capture that lacks everything, one that lacks a larger workspace, and the same
    calls once they have been made outside, as the errors say."""
    emulated.load(driver)
    with pretending() as patch:
        group = faults.new_group()
        endings = []
        for rows in (12, 900):
            call = functools.partial(faults.run_op, op, group, way, rows)
            for captured in (True, False, True):
                patch.setattr(streams, "is_captured", lambda _, captured=captured: captured)
                endings.append(faults.ending_of(call))
        return endings


@pytest.mark.parametrize(("op", "way"), sweep(OPS))
def test_a_capture_that_lacks_something_breaks_nothing(
    ranks: RanksFixture, cuda_driver: str, op: str, way: str
) -> None:
    for endings in ranks(2).run(advised_job, cuda_driver, op, way):
        assert [each.error for each in endings] == ["CaptureError", "", ""] * 2, endings
        assert all("call" in endings[at].text and "once" in endings[at].text for at in (0, 3))


def gathers_job(driver: str) -> list[str]:
    """New rows in a workspace that is large enough, in the middle of a backward."""
    emulated.load(driver)
    with pretending() as patch:
        group = faults.new_group()
        gather = functools.partial(tpkernels.all_gather, group=group, algorithm="direct")
        gather(torch.ones(8, 4))
        tpkernels.reduce_scatter(torch.ones(16, 4), group, algorithm="direct")
        patch.setattr(streams, "is_captured", lambda _: True)
        x = torch.ones(3, 4, requires_grad=True)
        endings = [faults.ending_of(lambda: gather(x))]
        patch.setattr(streams, "is_captured", lambda _: False)
        out = gather(x)
        patch.setattr(streams, "is_captured", lambda _: True)
        endings.append(faults.ending_of(lambda: gather(torch.ones(2, 4)).sum()))
        patch.setattr(streams, "is_captured", lambda _: False)
        out.sum().backward()
        assert x.grad is not None
        return [*(each.text for each in endings), str(x.grad.unique().tolist())]


def test_new_rows_break_nothing(ranks: RanksFixture, cuda_driver: str) -> None:
    for rows, fewer, grad in ranks(2).run(gathers_job, cuda_driver):
        assert rows.startswith("rows [3, 3] are new to this group: call the op with them once")
        assert fewer.startswith("rows [2, 2]")
        assert grad == "[2.0]"


def failed_job(driver: str) -> list[Ending]:
    """A call in a capture, and one after it, when a kernel's wait has failed before."""
    emulated.load(driver)
    with pretending():
        group = faults.new_group()
        call = functools.partial(faults.run_op, "all_gather", group, "direct")
        call()
        dist.barrier()
        space = space_of(group).current
        space.state[STATUS], space.state[PEER] = TIMEOUT, 1 - dist.get_rank()
        space.control[FAILED] = 1
        with pytest.MonkeyPatch.context() as capturing:
            capturing.setattr(streams, "is_captured", lambda _: True)
            capturing.setattr(DeviceWorkspace, "failure", None)  # it cannot be read there
            within = faults.ending_of(call)
        return [within, faults.ending_of(call)]


def test_a_failure_found_in_a_capture_is_raised_after_it(
    ranks: RanksFixture, cuda_driver: str
) -> None:
    for within, after in ranks(2).run(failed_job, cuda_driver):
        assert within.error == "CaptureError" and "failed on the GPU" in within.text, within
        assert after.error == "CollectiveTimeoutError", after


def kept_job(driver: str, captured: bool, broken: bool) -> bool:
    """Whether the kernels' memory is there after the end of the group."""
    emulated.load(driver)
    with pretending() as patch:
        group = faults.new_group()
        call = functools.partial(faults.run_op, "all_gather", group, "direct")
        call()
        patch.setattr(streams, "is_captured", lambda _: captured)
        call()
        patch.setattr(streams, "is_captured", lambda _: False)
        memory = weakref.ref(space_of(group).current)
        dist.barrier()
        if broken:
            groups.get(group.group_name).mark_broken(RuntimeError("of a test"))
        else:
            tpkernels.finalize()
        gc.collect()
        dist.barrier()
        return memory() is not None


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("captured", [False, True])
def test_memory_that_a_graph_uses_is_kept(
    ranks: RanksFixture, cuda_driver: str, captured: bool, broken: bool
) -> None:
    assert ranks(2).run(kept_job, cuda_driver, captured, broken) == [captured] * 2
