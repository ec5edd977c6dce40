"""How much memory a group's workspace takes: little at first, more when a call can use it, never
more than ``workspace_bytes``; which tensors lie in symmetric memory; and whether ranks outnumber
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
from tests.support.cuda_rehearsal import pretending
from tests.support.ranked import check, fresh_group, on_ranks
from tests.support.tiers import sweep
from tpkernels import groups
from tpkernels.cuda.layouts import LL_BYTES, ll_words
from tpkernels.planning import choose
from tpkernels.symm import host
from tpkernels.symm.host import HostSegments, is_crowded

MIB = 1 << 20
CPU = torch.device("cpu")
FEWEST_ROWS = 64  # of a rank, that `auto` splits
WORDS = 16 * mmap.PAGESIZE  # what signal words and rounding to pages may add


def huge_page() -> int:
    """Bytes of a huge page; 0 if the kernel has none."""
    file = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
    return int(file.read_text()) if file.exists() else 0


HUGE_PAGES = 2 * huge_page()  # what a kernel that uses them for shared memory may add


def shared_memory() -> dict[str, int]:
    """Bytes in use of each of our shared memory files that this process maps, by inode."""
    nbytes: dict[str, int] = {}
    inode = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):  # addresses, rights, offset, device, inode, name
            inode = words[4] if "memfd:tpkernels" in line else ""
        elif inode and words[0] == "Rss:":
            nbytes[inode] = nbytes.get(inode, 0) + int(words[1]) * 1024
    return nbytes


def taken(group: dist.ProcessGroup, others: dict[str, int]) -> int:
    """Bytes of shared memory that each rank of the group uses, without those of other groups:
    ranks of earlier tests have workspaces too."""
    return sum(n for inode, n in shared_memory().items() if inode not in others) // group.size()


@pytest.mark.parametrize("nbytes", sweep([1 << 16, 16 * MIB, 3 * MIB + 5]))
@on_ranks(2)
def test_it_grows_up_to_workspace_bytes(nbytes: int) -> list[str]:
    """Calls of growing size on one group, by every algorithm that uses the buffers."""
    group, failures = faults.group_of(dist.new_group()), []
    others = shared_memory()
    tpkernels.init(group, 20.0, nbytes)
    workspace = faults.workspace_of(group)
    first = taken(group, others)
    assert 0 < first <= 2 * host._FIRST_BUFFER + WORDS + HUGE_PAGES, f"{first} bytes at first"
    before = workspace.channel.capacity
    for rows in (3, 300, 3000):
        whole = rows * group.size()
        for case in (
            Case(op="all_gather", shape=(whole, 64)),
            Case(op="reduce_scatter", shape=(whole, 64)),
            Case(op="all_reduce", shape=(rows, 500)),
            Case(op="all_gather_matmul", shape=(whole, 512), n=(3,)),
            Case(op="matmul_reduce_scatter", shape=(whole, 512), k=(3,)),
            Case(op="matmul_all_reduce", shape=(rows, 512), k=(3,)),
        ):
            for way in ("direct", "pipelined")[: 2 if "matmul" in case.op else 1]:
                failures += check(replace(case, algorithm=way, integers=True), group)
        assert before <= workspace.channel.capacity <= nbytes, (rows, nbytes)
        before = workspace.channel.capacity
    assert (used := taken(group, others)) <= 2 * nbytes + WORDS + HUGE_PAGES, (used, nbytes)
    assert nbytes <= host._FIRST_BUFFER or before != host._FIRST_BUFFER, "it did not grow"
    dist.destroy_process_group(group)
    return failures


def wide_job(nbytes: int, width: int) -> tuple[list[str], str, str]:
    """Rows so long that few of them fit, or none: a vocabulary in a small workspace."""
    group = faults.group_of(dist.new_group())
    others = shared_memory()
    tpkernels.init(group, 20.0, nbytes)
    rows = FEWEST_ROWS * group.size()
    case = Case(op="matmul_reduce_scatter", shape=(rows, width), k=(2,), integers=True)
    with mock.patch.object(choose, "PIPELINED_MIN_ROWS", FEWEST_ROWS):
        failures = check(case, group)  # by auto
    auto = groups.get(group.group_name).planned_calls()[0].plan
    refused = ""
    try:
        failures += check(replace(case, algorithm="pipelined"), group)
    except NotImplementedError as error:
        refused = str(error)
    if (used := taken(group, others)) > 2 * nbytes + WORDS + HUGE_PAGES:
        failures.append(f"{used} bytes of {nbytes}")
    dist.destroy_process_group(group)
    return failures, f"{auto.algorithm}: {auto.reason}", refused


def test_auto_does_not_split_what_hardly_fits(ranks: RanksFixture) -> None:
    """One row of each of the two ranks takes 16 KB here: many of them do not fit into 1 MiB."""
    for failures, auto, refused in ranks(2).run(wide_job, MIB, 2048, timeout=100):
        assert not failures and not refused, (failures, refused)
        assert auto == f"direct: the workspace holds 63 rows per rank < {FEWEST_ROWS}", auto


@pytest.mark.thorough
def test_a_row_that_does_not_fit_is_refused(ranks: RanksFixture) -> None:
    for failures, auto, refused in ranks(2).run(wide_job, 1 << 16, 20_000, timeout=100):
        assert not failures and auto.startswith("direct: pipelined needs 160000 bytes"), auto
        assert (
            "workspace_bytes is 65536; pass a larger workspace_bytes to tpkernels.init" in refused
        ), refused


@pytest.mark.parametrize("lacks", sweep(["looks", "commits"]))
@pytest.mark.parametrize("poor", sweep([1, 0]))
@on_ranks(2)
def test_without_memory_calls_take_more_steps(poor: int, lacks: str) -> None:
    """The group goes on with the memory that it has, and one rank warns once. One rank finds that
    memory is short before the workspace grows, or fails to commit it."""
    group, others = faults.group_of(dist.new_group()), shared_memory()
    tpkernels.init(group, 20.0, 16 * MIB)
    workspace = faults.workspace_of(group)
    commit, failures = workspace._commit, []

    def commit_in_vain(parts: Any) -> str:
        commit(parts)
        return "simulated shortage of memory"

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        if group.rank() == poor and lacks == "looks":
            patch.setattr(host, "short_of_memory", lambda *_: "simulated shortage of memory")
        elif group.rank() == poor:
            patch.setattr(workspace, "_commit", commit_in_vain)
        warnings.simplefilter("always")
        for rows in (800, 900, 800):
            shape = rows * group.size(), 2048
            case = Case(op="all_gather_matmul", shape=shape, n=(3,), integers=True)
            failures += check(case, group)
    texts = [str(one.message) for one in caught]
    rank = dist.get_rank()
    capacity, used = workspace.channel.capacity, taken(group, others)
    assert not failures, failures
    assert capacity == host._FIRST_BUFFER
    assert used <= 2 * host._FIRST_BUFFER + WORDS + HUGE_PAGES, used
    assert len(texts) == (rank == 0), texts
    assert all(f"rank {poor}: simulated shortage of memory" in text for text in texts), texts


@on_ranks(2)
def test_nobody_takes_memory_before_all_have_checked_for_it() -> None:
    group = faults.group_of(dist.new_group())
    tpkernels.init(group, 20.0, 16 * MIB)
    workspace, look = faults.workspace_of(group), host.short_of_memory
    commit, at = workspace._commit, {"look": 0.0, "commit": 0.0}

    def look_late(nbytes: int, world: int) -> str | None:
        time.sleep(0.3 if group.rank() else 0.0)
        at["look"] = time.monotonic()
        return look(nbytes, world)

    def commit_now(parts: Any) -> str | None:
        at["commit"] = time.monotonic()
        return commit(parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "short_of_memory", look_late)
        patch.setattr(workspace, "_commit", commit_now)
        tpkernels.all_reduce(torch.ones(MIB), group, algorithm="direct")
    dist.all_gather_object(times := [{}, {}], at)
    looks, commits = ([each[what] for each in times] for what in ("look", "commit"))
    assert 0 < max(looks) < min(commits), times


class _Region(SimpleNamespace):
    """A region as `HostSegments` sees it."""


def test_segments_are_told_apart() -> None:
    segments = HostSegments()
    memory = torch.zeros(10_000, dtype=torch.uint8)
    base = memory.data_ptr()
    regions: dict[int, Any] = {}
    for begin in (4000, 0, 8000, 2000):  # of 1000 bytes each
        region: Any = _Region(address=base + begin, nbytes=1000)
        regions[segments.register(region)] = region
    where = {identity: region.address - base for identity, region in regions.items()}
    for at in range(0, 10_000, 50):
        identity, offset = segments.find(memory[at : at + 100])
        inside = [i for i, begin in where.items() if begin <= at and at + 100 <= begin + 1000]
        assert [identity] == (inside or [0]), at
        assert not inside or where[identity] + offset == at
    del regions[1], region
    assert segments.find(memory[4000:4100]) == (0, 0)
    assert segments.find(memory[2000:2100]) == (4, 0)
    assert len(segments) == 3


@on_ranks(2)
def test_values_larger_than_a_buffer_are_exchanged() -> None:
    """Values of several buffers, of different sizes, then small ones, under random delays."""
    group = faults.new_group()
    workspace, rank = faults.workspace_of(group), group.rank()
    workspace.set_chaos(seed=rank + 1, max_delay_us=2000)
    right = []
    for lengths in ([200_000, 3], [0, 70_000], [5, 5]):
        wanted = [[peer, "x" * length] for peer, length in enumerate(lengths)]
        right.append(workspace.exchange("values of a test", wanted[rank]) == wanted)
    assert right == [True] * 3


# On GPUs.


@on_ranks(2)
def test_what_is_too_small_grows() -> None:
    """All workspaces together take less than twice the largest. Calls that need ever more words,
    then ever more bytes, then more of both."""
    with pretending(), fresh_group() as group:
        workspace = faults.workspace_of(group)
        workspace.open_cuda(CPU, "fused", None)
        needs = [(1 << n, 1) for n in range(3, 12)] + [(1, 1 << n) for n in range(12, 20)]
        needs += [(1 << 15, 1 << 21), (1, 1)]
        for words, nbytes in needs:
            before = workspace.on_gpus[CPU].current
            memory = workspace.cuda(CPU, words, nbytes, "a call")
            after = memory.current
            case = f"{words} words, {nbytes} bytes"
            assert after.holds(words, nbytes), f"{case}: too small"
            assert not before.holds(words, nbytes) or after is before, f"{case}: it grew"
            if after is not before:
                assert before.words < words or after.words == before.words, case
                assert before.buffer_bytes < nbytes or after.buffer_bytes == before.buffer_bytes, (
                    f"{case}: its buffers grew to {after.buffer_bytes}"
                )
                assert after.nbytes >= 2 * before.nbytes, (case, before.nbytes, after.nbytes)
        total = sum(space.nbytes for space in memory.spaces)
        assert len(memory.spaces) >= 5 and total < 2 * memory.current.nbytes, total


def test_calls_by_ll_fit_at_first() -> None:
    assert ll_words(LL_BYTES) <= host._FIRST_WORDS


# Cores.


def bound_job(pids: list[int], cores: list[int]) -> bool:
    """Whether it is crowded where rank r is bound to core ``cores[r]``."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cores[dist.get_rank()]})
    try:
        dist.barrier()
        crowded = is_crowded(pids)
        dist.barrier()
        return crowded
    finally:
        os.sched_setaffinity(0, before)


def test_ranks_with_a_core_each_are_not_crowded(ranks: RanksFixture) -> None:
    """As vLLM binds its workers."""
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        pytest.skip("needs 2 cores")
    two = ranks(2)
    assert two.run(bound_job, two.pids, usable[:2]) == [False, False]
    assert two.run(bound_job, two.pids, usable[:1] * 2) == [True, True]


def test_processes_that_cannot_be_asked_do_not_count() -> None:
    alone = len(os.sched_getaffinity(0))
    assert not is_crowded([os.getpid()])
    assert is_crowded([os.getpid(), *[2**22] * alone])
