"""``tpkernels.check`` on CPUs, and which timeout a group has on which device."""

from __future__ import annotations

import functools
import os
import signal
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tpkernels
from tests.support import emulated, faults
from tests.support.cuda_rehearsal import pretending, space_of
from tests.support.faults import Ending
from tests.support.ranked import apart, on_ranks
from tests.support.tiers import sweep
from tpkernels import groups
from tpkernels.common import defaults
from tpkernels.groups.group import timeout_on_gpus


@on_ranks(2)
def test_a_healthy_group_passes() -> list[str]:
    """Before the first call, after it, and while a peer waits in the next call already."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    group = mesh.get_group()
    endings = [faults.ending_of(lambda: tpkernels.check(group))]
    for _ in range(3):
        faults.run_op("all_gather", group, "direct")
        if group.rank() == 0:
            time.sleep(0.2)
        ways = [group, group.group_name, mesh, (mesh, "tp"), None]
        endings += [faults.ending_of(lambda way=way: tpkernels.check(way)) for way in ways]
        dist.barrier()
    with apart():
        away = faults.new_group()
    faults.run_op("all_gather", away)
    endings.append(faults.ending_of(lambda: tpkernels.check(away)))
    return [each.text for each in endings if each.error]


def killed_job() -> list[Ending]:
    group = faults.new_group()
    faults.run_op("all_gather", group)
    others = faults.new_group(ranks=[0, 1]) if group.rank() < 2 else None
    if group.rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    endings = [faults.ending_of(lambda: tpkernels.check(group)) for _ in range(2)]
    assert others is not None
    return [*endings, faults.ending_of(lambda: tpkernels.check(others))]


def test_a_lost_peer_is_reported_between_calls() -> None:
    with faults.watched_ranks(3) as ranks:
        outcomes = faults.collect(ranks, killed_job)
        for first, again, others in faults.values(outcomes, 2).values():
            assert first.error == "PeerLostError" and first.peer == 2, first
            assert f"pid {ranks.pids[2]}" in first.text or "rank 2" in first.text, first
            assert again.error == "GroupBrokenError" and not others.error, (again, others)


@on_ranks(2)
def test_a_peer_that_failed_is_reported() -> None:
    """Rank 1 leaves a call; rank 0 checks without making another."""
    group = faults.new_group()
    faults.run_op("all_gather", group)
    if group.rank() == 1:
        groups.get(group.group_name).mark_broken(MemoryError("of a test"))
    dist.barrier()
    ending = faults.ending_of(lambda: tpkernels.check(group))
    if group.rank() == 1:
        assert ending.error == "GroupBrokenError", ending
    else:
        assert ending.error == "PeerLostError" and ending.peer == 1, ending
        assert "rank 1" in ending.text and "of a test" in ending.text, ending


@pytest.mark.parametrize("algorithm", sweep(["check", "unfused"]))
@emulated.on_ranks(2)
def test_what_failed_in_a_kernel_is_reported(algorithm: str) -> None:
    """A kernel's wait fails: `check` says so, or a call that queues no kernels of ours."""
    with pretending():
        group = faults.new_group(timeout=1.0)
        faults.run_op("all_gather", group, "direct")
        if group.rank() == 0:
            faults.ending_of(lambda: faults.run_op("all_gather", group, "direct"))
            look = functools.partial(tpkernels.check, group)
            call = functools.partial(faults.run_op, "all_gather", group, algorithm)
            first = faults.ending_of(look if algorithm == "check" else call)
            again = faults.ending_of(look)
            assert first.error == "CollectiveTimeoutError" and first.peer == 1, first
            assert ("(detected by tpkernels.check)" in first.text) == (algorithm == "check"), first
            assert again.error == "GroupBrokenError", again
        dist.barrier()


@emulated.on_ranks(2)
def test_on_gpus_the_process_groups_timeout_is_the_default() -> None:
    """(on CPUs, on GPUs, in kernels) by default, then as `init` says later, or from the start."""
    default, found = defaults.TIMEOUT, []
    with pretending():
        for explicit in (None, 12.5):
            group = faults.group_of(dist.new_group(timeout=timedelta(seconds=77)))
            if explicit is not None:
                tpkernels.init(group, timeout=explicit)
            for again in (False, True):
                if again and explicit is None:
                    tpkernels.init(group, timeout=defaults.TIMEOUT)
                faults.run_op("all_gather", group, "direct")
                made, space = groups.get(group.group_name), space_of(group).current
                assert made.workspace is not None
                assert made.workspace.channel.timeout == made.timeout_on("cpu")
                times = made.timeout_on("cpu"), made.timeout_on("cuda")
                found.append((*times, space.timeout_ns / 1e9))
    assert found == [(default, 77.0, 77.0), (default,) * 3, *[(12.5, 12.5, 12.5)] * 2], found


def test_without_a_backend_for_gpus_it_is_that_of_nccl() -> None:
    class NoBackend:
        def _get_backend(self, device: object) -> object:
            raise RuntimeError("no backend")

    pg: object = NoBackend()
    assert timeout_on_gpus(pg) == 600.0  # type: ignore[arg-type]


@pytest.mark.thorough
@emulated.on_ranks(2)
def test_hosts_wait_as_long_as_kernels_do() -> list[str]:
    """Rank 1's host is away for longer than a wait on CPUs may take, before each step that the
    hosts take together for a call on GPUs."""
    with pretending() as patch:
        patch.setattr(defaults, "TIMEOUT", 0.4)
        group = faults.group_of(dist.new_group(timeout=timedelta(seconds=60)))
        endings = []
        for op, rows in (("all_gather", 12), ("all_gather", 2000), ("all_reduce", 12)):
            if group.rank() == 1:
                time.sleep(0.9)
            call = functools.partial(faults.run_op, op, group, "direct", rows)
            endings.append(faults.ending_of(call))
        return [each.text for each in endings if each.error]
