"""Size of the workspace: small at first, larger when a call can use it, at most
``workspace_bytes``. Also covers the lookup of symmetric tensors and the detection of oversubscribed
cores."""

from __future__ import annotations

import mmap
import os
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.cases import Case, RanksFixture
from tests.support.cuda_rehearsal import cuda_code_path
from tests.support.ranked import check, fresh_group, on_ranks
from tests.support.tiers import sweep
from tpkernels import groups
from tpkernels.cuda.layouts import LL_BYTES, ll_signals
from tpkernels.planning import choose
from tpkernels.symm import host
from tpkernels.symm.host import HostSegments, is_crowded

MIB = 1 << 20
CPU = torch.device("cpu")
MIN_ROWS = 64  # smallest number of rows per rank that `auto` splits
SIGNAL_BYTES = 16 * mmap.PAGESIZE  # upper bound for signals and for rounding to pages


def huge_page_bytes() -> int:
    """Return the size of a huge page, or 0 if the kernel does not support huge pages."""
    file = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
    return int(file.read_text()) if file.exists() else 0


HUGE_PAGES = 2 * huge_page_bytes()  # upper bound for kernels that use huge pages for shared memory


def shared_memory() -> dict[str, int]:
    """Return the resident bytes of each mapped shared memory file of tpkernels, by inode."""
    nbytes: dict[str, int] = {}
    inode = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):  # fields: addresses, rights, offset, device, inode, name
            inode = fields[4] if "memfd:tpkernels" in line else ""
        elif inode and fields[0] == "Rss:":
            nbytes[inode] = nbytes.get(inode, 0) + int(fields[1]) * 1024
    return nbytes


def used_bytes(group: dist.ProcessGroup, existing: dict[str, int]) -> int:
    """Return the shared memory per rank of the group in bytes, without the ``existing`` files.
    Groups of earlier tests also have workspaces."""
    return sum(n for inode, n in shared_memory().items() if inode not in existing) // group.size()


@pytest.mark.parametrize("nbytes", sweep([1 << 16, 16 * MIB, 3 * MIB + 5]))
@on_ranks(2)
def test_the_workspace_grows_up_to_workspace_bytes(nbytes: int) -> list[str]:
    """Run calls of growing size on one group, with every algorithm that uses the buffers."""
    group, failures = faults.require_group(dist.new_group()), []
    existing = shared_memory()
    tpkernels.init(group, 20.0, nbytes)
    workspace = faults.get_workspace(group)
    first = used_bytes(group, existing)
    assert 0 < first <= 2 * host._FIRST_BUFFER + SIGNAL_BYTES + HUGE_PAGES, (
        f"{first} bytes at first"
    )
    before = workspace.channel.capacity
    for rows in (3, 300, 3000):
        total_rows = rows * group.size()
        for case in (
            Case(op="all_gather", shape=(total_rows, 64)),
            Case(op="reduce_scatter", shape=(total_rows, 64)),
            Case(op="all_reduce", shape=(rows, 500)),
            Case(op="all_gather_matmul", shape=(total_rows, 512), n=(3,)),
            Case(op="matmul_reduce_scatter", shape=(total_rows, 512), k=(3,)),
            Case(op="matmul_all_reduce", shape=(rows, 512), k=(3,)),
        ):
            for algorithm in ("direct", "pipelined")[: 2 if "matmul" in case.op else 1]:
                failures += check(replace(case, algorithm=algorithm, integers=True), group)
        assert before <= workspace.channel.capacity <= nbytes, (rows, nbytes)
        before = workspace.channel.capacity
    assert (used := used_bytes(group, existing)) <= 2 * nbytes + SIGNAL_BYTES + HUGE_PAGES, (
        used,
        nbytes,
    )
    assert nbytes <= host._FIRST_BUFFER or before != host._FIRST_BUFFER, "it did not grow"
    dist.destroy_process_group(group)
    return failures


def long_rows_job(nbytes: int, width: int) -> tuple[list[str], str, str]:
    """Run calls with very long rows, as with a vocabulary in a small workspace."""
    group = faults.require_group(dist.new_group())
    existing = shared_memory()
    tpkernels.init(group, 20.0, nbytes)
    rows = MIN_ROWS * group.size()
    case = Case(op="matmul_reduce_scatter", shape=(rows, width), k=(2,), integers=True)
    with mock.patch.object(choose, "PIPELINED_MIN_ROWS", MIN_ROWS):
        failures = check(case, group)  # algorithm="auto"
    auto = groups.get(group.group_name).planned_calls()[0].plan
    refused = ""
    try:
        failures += check(replace(case, algorithm="pipelined"), group)
    except NotImplementedError as error:
        refused = str(error)
    if (used := used_bytes(group, existing)) > 2 * nbytes + SIGNAL_BYTES + HUGE_PAGES:
        failures.append(f"{used} bytes of {nbytes}")
    dist.destroy_process_group(group)
    return failures, f"{auto.algorithm}: {auto.reason}", refused


def test_auto_does_not_split_if_few_rows_fit(ranks: RanksFixture) -> None:
    """One row per rank needs 16 KB on two ranks, so 1 MiB holds fewer rows than `auto` requires."""
    for failures, auto, refused in ranks(2).run(long_rows_job, MIB, 2048, timeout=100):
        assert not failures and not refused, (failures, refused)
        assert auto == f"direct: the workspace holds 63 rows per rank < {MIN_ROWS}", auto


@pytest.mark.thorough
def test_a_row_that_does_not_fit_is_refused(ranks: RanksFixture) -> None:
    for failures, auto, refused in ranks(2).run(long_rows_job, 1 << 16, 20_000, timeout=100):
        assert not failures and auto.startswith("direct: pipelined needs 160000 bytes"), auto
        assert (
            "workspace_bytes is 65536; pass a larger workspace_bytes to tpkernels.init" in refused
        ), refused


@pytest.mark.parametrize("lacks", sweep(["looks", "commits"]))
@pytest.mark.parametrize("poor", sweep([1, 0]))
@on_ranks(2)
def test_without_memory_the_workspace_does_not_grow(poor: int, lacks: str) -> None:
    """One rank finds too little memory before the workspace grows, or fails to commit it. Calls
    then succeed in the first buffers, and one rank warns once."""
    group, existing = faults.require_group(dist.new_group()), shared_memory()
    tpkernels.init(group, 20.0, 16 * MIB)
    workspace = faults.get_workspace(group)
    commit, failures = workspace._commit, []

    def commit_in_vain(ranges: Any) -> str:
        commit(ranges)
        return "simulated shortage of memory"

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        if group.rank() == poor and lacks == "looks":
            patch.setattr(host, "find_memory_shortage", lambda *_: "simulated shortage of memory")
        elif group.rank() == poor:
            patch.setattr(workspace, "_commit", commit_in_vain)
        warnings.simplefilter("always")
        for rows in (800, 900, 800):
            shape = rows * group.size(), 2048
            case = Case(op="all_gather_matmul", shape=shape, n=(3,), integers=True)
            failures += check(case, group)
    messages = [str(warning.message) for warning in caught]
    rank = dist.get_rank()
    capacity, used = workspace.channel.capacity, used_bytes(group, existing)
    assert not failures, failures
    assert capacity == host._FIRST_BUFFER
    assert used <= 2 * host._FIRST_BUFFER + SIGNAL_BYTES + HUGE_PAGES, used
    assert len(messages) == (rank == 0), messages
    assert all(f"rank {poor}: simulated shortage of memory" in message for message in messages), (
        messages
    )


@on_ranks(2)
def test_all_ranks_check_for_memory_before_any_rank_commits() -> None:
    group = faults.require_group(dist.new_group())
    tpkernels.init(group, 20.0, 16 * MIB)
    workspace, check_memory = faults.get_workspace(group), host.find_memory_shortage
    commit, times = workspace._commit, {"look": 0.0, "commit": 0.0}

    def check_late(nbytes: int, world: int) -> str | None:
        time.sleep(0.3 if group.rank() else 0.0)
        times["look"] = time.monotonic()
        return check_memory(nbytes, world)

    def commit_now(ranges: Any) -> str | None:
        times["commit"] = time.monotonic()
        return commit(ranges)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "find_memory_shortage", check_late)
        patch.setattr(workspace, "_commit", commit_now)
        tpkernels.all_reduce(torch.ones(MIB), group, algorithm="direct")
    dist.all_gather_object(times_by_rank := [{}, {}], times)
    checks, commits = ([times[step] for times in times_by_rank] for step in ("look", "commit"))
    assert 0 < max(checks) < min(commits), times_by_rank


class _Region(SimpleNamespace):
    """A region with the attributes that `HostSegments` reads."""


def test_segment_lookup() -> None:
    segments = HostSegments()
    memory = torch.zeros(10_000, dtype=torch.uint8)
    base = memory.data_ptr()
    regions: dict[int, Any] = {}
    for start in (4000, 0, 8000, 2000):  # offsets of segments of 1000 bytes
        region: Any = _Region(address=base + start, nbytes=1000)
        regions[segments.register(region)] = region
    offsets = {identity: region.address - base for identity, region in regions.items()}
    for begin in range(0, 10_000, 50):
        identity, offset = segments.find(memory[begin : begin + 100])
        inside = [
            i for i, start in offsets.items() if start <= begin and begin + 100 <= start + 1000
        ]
        assert [identity] == (inside or [0]), begin
        assert not inside or offsets[identity] + offset == begin
    del regions[1], region
    assert segments.find(memory[4000:4100]) == (0, 0)
    assert segments.find(memory[2000:2100]) == (4, 0)
    assert len(segments) == 3


@on_ranks(2)
def test_values_larger_than_a_buffer_are_exchanged() -> None:
    """Exchange values of different sizes, larger than several buffers, then small values, under
    random delays."""
    group = faults.new_group()
    workspace, rank = faults.get_workspace(group), group.rank()
    workspace.set_chaos(seed=rank + 1, max_delay_us=2000)
    correct = []
    for lengths in ([200_000, 3], [0, 70_000], [5, 5]):
        expected = [[peer, "x" * length] for peer, length in enumerate(lengths)]
        correct.append(workspace.exchange("values of a test", expected[rank]) == expected)
    assert correct == [True] * 3


# On GPUs.


@on_ranks(2)
def test_gpu_workspaces_grow() -> None:
    """Request ever more signals, then ever more bytes, then more of both. All workspaces together
    stay below twice the largest."""
    with cuda_code_path(), fresh_group() as group:
        workspace = faults.get_workspace(group)
        workspace.open_cuda(CPU, "fused", None)
        needs = [(1 << n, 1) for n in range(3, 12)] + [(1, 1 << n) for n in range(12, 20)]
        needs += [(1 << 15, 1 << 21), (1, 1)]
        for signals, nbytes in needs:
            before = workspace.cuda_workspaces[CPU].current
            memory = workspace.cuda_workspace(CPU, signals, nbytes, "a call")
            after = memory.current
            case = f"{signals} signals, {nbytes} bytes"
            assert after.holds(signals, nbytes), f"{case}: too small"
            assert not before.holds(signals, nbytes) or after is before, f"{case}: it grew"
            if after is not before:
                assert before.signals < signals or after.signals == before.signals, case
                assert before.buffer_bytes < nbytes or after.buffer_bytes == before.buffer_bytes, (
                    f"{case}: its buffers grew to {after.buffer_bytes}"
                )
                assert after.nbytes >= 2 * before.nbytes, (case, before.nbytes, after.nbytes)
        total = sum(grown.nbytes for grown in memory.workspaces)
        assert len(memory.workspaces) >= 5 and total < 2 * memory.current.nbytes, total


def test_the_first_signals_suffice_for_ll() -> None:
    assert ll_signals(LL_BYTES) <= host._FIRST_SIGNALS


# Cores.


def bound_cores_job(pids: list[int], cores: list[int]) -> bool:
    """Bind rank r to core ``cores[r]`` and return whether the cores are oversubscribed."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cores[dist.get_rank()]})
    try:
        dist.barrier()
        crowded = is_crowded(pids)
        dist.barrier()
        return crowded
    finally:
        os.sched_setaffinity(0, before)


def test_ranks_bound_to_different_cores_are_not_crowded(ranks: RanksFixture) -> None:
    """vLLM binds its workers like this."""
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        pytest.skip("needs 2 cores")
    two = ranks(2)
    assert two.run(bound_cores_job, two.pids, usable[:2]) == [False, False]
    assert two.run(bound_cores_job, two.pids, usable[:1] * 2) == [True, True]


def test_processes_of_unknown_affinity_add_no_cores() -> None:
    num_cores = len(os.sched_getaffinity(0))
    assert not is_crowded([os.getpid()])
    assert is_crowded([os.getpid(), *[2**22] * num_cores])
