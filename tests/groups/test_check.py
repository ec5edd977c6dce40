"""`tpkernels.check` on CPUs, and the timeouts of a group by device type."""

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
from tests.support.cuda_rehearsal import cuda_code_path, get_cuda_workspace
from tests.support.faults import Ending
from tests.support.ranked import on_ranks, separate_hosts
from tests.support.tiers import sweep
from tpkernels import groups
from tpkernels.common import defaults
from tpkernels.groups.group import timeout_on_gpus


@on_ranks(2)
def test_a_healthy_group_passes() -> list[str]:
    """Check before the first call, after it, and while a peer already waits in the next call."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    group = mesh.get_group()
    endings = [faults.record_ending(lambda: tpkernels.check(group))]
    for _ in range(3):
        faults.run_op("all_gather", group, "direct")
        if group.rank() == 0:
            time.sleep(0.2)
        arguments = [group, group.group_name, mesh, (mesh, "tp"), None]
        endings += [
            faults.record_ending(lambda argument=argument: tpkernels.check(argument))
            for argument in arguments
        ]
        dist.barrier()
    with separate_hosts():
        unshared = faults.new_group()
    faults.run_op("all_gather", unshared)
    endings.append(faults.record_ending(lambda: tpkernels.check(unshared)))
    return [ending.message for ending in endings if ending.error]


def killed_peer_job() -> list[Ending]:
    group = faults.new_group()
    faults.run_op("all_gather", group)
    survivors = faults.new_group(ranks=[0, 1]) if group.rank() < 2 else None
    if group.rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    endings = [faults.record_ending(lambda: tpkernels.check(group)) for _ in range(2)]
    assert survivors is not None
    return [*endings, faults.record_ending(lambda: tpkernels.check(survivors))]


def test_a_killed_peer_is_reported_between_calls() -> None:
    with faults.watched_ranks(3) as ranks:
        outcomes = faults.collect(ranks, killed_peer_job)
        for first, again, survivors in faults.values(outcomes, 2).values():
            assert first.error == "PeerLostError" and first.peer == 2, first
            assert f"pid {ranks.pids[2]}" in first.message or "rank 2" in first.message, first
            assert again.error == "GroupBrokenError" and not survivors.error, (again, survivors)


@on_ranks(2)
def test_a_peer_that_failed_is_reported() -> None:
    """Rank 1 breaks the group. Rank 0 detects it in `check`, without a further call."""
    group = faults.new_group()
    faults.run_op("all_gather", group)
    if group.rank() == 1:
        groups.get(group.group_name).mark_broken(MemoryError("of a test"))
    dist.barrier()
    ending = faults.record_ending(lambda: tpkernels.check(group))
    if group.rank() == 1:
        assert ending.error == "GroupBrokenError", ending
    else:
        assert ending.error == "PeerLostError" and ending.peer == 1, ending
        assert "rank 1" in ending.message and "of a test" in ending.message, ending


@pytest.mark.parametrize("algorithm", sweep(["check", "unfused"]))
@emulated.on_ranks(2)
def test_a_failed_kernel_is_reported(algorithm: str) -> None:
    """A wait in a kernel times out. `check` raises the error, as does a call that launches none of
    our kernels."""
    with cuda_code_path():
        group = faults.new_group(timeout=1.0)
        faults.run_op("all_gather", group, "direct")
        if group.rank() == 0:
            faults.record_ending(lambda: faults.run_op("all_gather", group, "direct"))
            check = functools.partial(tpkernels.check, group)
            call = functools.partial(faults.run_op, "all_gather", group, algorithm)
            first = faults.record_ending(check if algorithm == "check" else call)
            again = faults.record_ending(check)
            assert first.error == "CollectiveTimeoutError" and first.peer == 1, first
            assert ("(detected by tpkernels.check)" in first.message) == (algorithm == "check"), (
                first
            )
            assert again.error == "GroupBrokenError", again
        dist.barrier()


@emulated.on_ranks(2)
def test_the_gpu_timeout_defaults_to_the_process_group() -> None:
    """Compare the timeouts (CPU, GPU, kernel) by default, after a later `init`, and with an
    explicit timeout."""
    default, timeouts = defaults.TIMEOUT, []
    with cuda_code_path():
        for explicit in (None, 12.5):
            group = faults.require_group(dist.new_group(timeout=timedelta(seconds=77)))
            if explicit is not None:
                tpkernels.init(group, timeout=explicit)
            for again in (False, True):
                if again and explicit is None:
                    tpkernels.init(group, timeout=defaults.TIMEOUT)
                faults.run_op("all_gather", group, "direct")
                state, workspace = groups.get(group.group_name), get_cuda_workspace(group).current
                assert state.workspace is not None
                assert state.workspace.channel.timeout == state.timeout_on("cpu")
                host_timeouts = state.timeout_on("cpu"), state.timeout_on("cuda")
                timeouts.append((*host_timeouts, workspace.timeout_ns / 1e9))
    assert timeouts == [(default, 77.0, 77.0), (default,) * 3, *[(12.5, 12.5, 12.5)] * 2], timeouts


def test_without_a_gpu_backend_the_timeout_is_the_nccl_default() -> None:
    class NoBackend:
        def _get_backend(self, device: object) -> object:
            raise RuntimeError("no backend")

    pg: object = NoBackend()
    assert timeout_on_gpus(pg) == 600.0  # type: ignore[arg-type]


@pytest.mark.thorough
@emulated.on_ranks(2)
def test_host_waits_of_gpu_calls_use_the_gpu_timeout() -> list[str]:
    """Rank 1 is late by more than the CPU timeout, before each host-side step of a call on GPUs.
    All calls succeed."""
    with cuda_code_path() as patch:
        patch.setattr(defaults, "TIMEOUT", 0.4)
        group = faults.require_group(dist.new_group(timeout=timedelta(seconds=60)))
        endings = []
        for op, rows in (("all_gather", 12), ("all_gather", 2000), ("all_reduce", 12)):
            if group.rank() == 1:
                time.sleep(0.9)
            call = functools.partial(faults.run_op, op, group, "direct", rows)
            endings.append(faults.record_ending(call))
        return [ending.message for ending in endings if ending.error]
