"""What groups leave behind: no descriptors, no memory, no hang when the interpreter exits."""

from __future__ import annotations

import fcntl
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.ranked import on_ranks
from tests.support.tiers import sweep
from tpkernels import _C, groups
from tpkernels.symm import rendezvous

F_ADD_SEALS, F_GET_SEALS = 1033, 1034
SEAL_SEAL, SEAL_SHRINK, SEAL_GROW = 1, 2, 4
Held = tuple[int, int]  # descriptors, and mappings of workspaces


def _held() -> Held:
    """Open descriptors, and mappings of our shared memory."""
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), maps.count("memfd:tpkernels")


def groups_job(count: int, how: str) -> tuple[Held, Held]:
    """What is held after one group, and after ``count`` more, each of which is used and ends, or
    fails to be set up."""

    def fail(*_: object) -> None:
        raise ArithmeticError("simulated")

    def use_one() -> None:
        group = faults.new_group()
        x = tpkernels.empty(60, 48, group=group)
        tpkernels.all_gather(x, group)
        faults.run_op("matmul_all_reduce", group, "pipelined", rows=600)  # the workspace grows
        del x
        if how == "finalize":
            tpkernels.finalize()
        dist.destroy_process_group(group)

    def fail_one() -> None:
        group = faults.group_of(dist.new_group())
        nbytes = 1 << 50 if how == "memory" else faults.WORKSPACE_BYTES
        if how != "timeout" or group.rank() != 1:
            timeout = 0.1 if how == "timeout" else faults.PATIENCE
            ending = faults.ending_of(lambda: tpkernels.init(group, timeout, nbytes))
            assert ending.error, "no failure"
        dist.barrier()
        dist.destroy_process_group(group)

    if how == "exception" and dist.get_rank() == 1:
        rendezvous._Arena._map = fail  # type: ignore[assignment]
    act = use_one if how in ("finalize", "destroy") else fail_one
    act()
    first = _held()
    for _ in range(count):
        act()
    return first, _held()


@pytest.mark.parametrize(
    "how", sweep(["finalize", "exception", "timeout", "memory", "destroy"], 2, later=3)
)
def test_groups_leave_nothing_behind(how: str) -> None:
    with faults.watched_ranks(3) as ranks:
        for first, last in ranks.run(groups_job, 3, how):
            assert last == first, "descriptors, mappings"
            assert last[1] == 0


@on_ranks(2)
def test_shared_memory_has_no_name_and_no_open_descriptor() -> None:
    group = faults.new_group()
    x = tpkernels.empty(100, group=group)
    tpkernels.all_reduce(x, group)
    lines = Path("/proc/self/maps").read_text().splitlines()
    links = [os.readlink(f) for f in Path("/proc/self/fd").iterdir() if f.is_symlink()]
    lines = [line for line in lines if "memfd:tpkernels (" in line] + [
        f"open: {link}" for link in links if "memfd:tpkernels (" in link
    ]
    assert len(lines) >= 2, lines  # workspace, symmetric tensor
    for line in lines:
        assert "rw-s" in line and line.endswith("/memfd:tpkernels (deleted)"), line


def test_shared_memory_is_private_and_sealed() -> None:
    fd = _C.host.Arena.create(8192, 2)
    try:
        assert os.fstat(fd).st_mode & 0o777 == 0o600
        assert os.fstat(fd).st_nlink == 0
        assert not os.get_inheritable(fd)
        seals = fcntl.fcntl(fd, F_GET_SEALS)
        assert seals & (SEAL_SEAL | SEAL_SHRINK | SEAL_GROW) == SEAL_SEAL | SEAL_SHRINK | SEAL_GROW
        for size in (0, 8192, 1 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, F_ADD_SEALS, 0)
    finally:
        os.close(fd)


@on_ranks(3)
def test_a_released_symmetric_tensor_is_an_error_on_all_ranks() -> None:
    group = faults.new_group()
    x = tpkernels.empty(6, 8, group=group)
    shard: torch.Tensor | None = x.fill_(1)
    if group.rank() == 1:
        shard = torch.ones(6, 8)
        del x
    dist.barrier()
    first = faults.ending_of(lambda: tpkernels.all_gather(shard, group))
    then = faults.ending_of(lambda: faults.run_op("all_gather", group))
    assert first.error == "CollectiveMismatchError", first
    assert "passes a symmetric tensor that this rank has released" in first.text, first
    assert first.seconds < faults.PROMPT, first
    assert then.error == "GroupBrokenError", then


# The exit of the interpreter. The ranks are forks, which save the import, of a process that ends as
# any other does.

_RANKS = """
import os, signal, sys, threading, time
import torch
import torch.distributed as dist
import tpkernels

def ranks_of(number, end):
    pids = []
    for rank in range(3):
        if (pid := os.fork()) == 0:
            begin(number, rank)
            exec(end, globals())
            sys.exit()
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]

def begin(number, own):
    global rank, x
    rank, x = own, torch.ones(4, 4)
    where = f"file://{sys.argv[1]}-{number}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=3)
    tpkernels.init(timeout=5.0)
    tpkernels.all_reduce(x, dist.group.WORLD)

for number, end in enumerate(sys.argv[2:]):
    print(ranks_of(number, end), flush=True)
"""

_ENDS = {
    "with all in use": "symmetric = tpkernels.empty(4, 4, group=dist.group.WORLD)",
    "when names have gone": """
        # What the interpreter does to modules before it frees what they held.
        callback = tpkernels.groups.get("0")._pg.__callback__
        names = tpkernels.groups
        for name in list(vars(names)):
            setattr(names, name, None)
        callback(None)
    """,
    "after a fork has ended": """
        if rank == 0:
            child = os.fork()
            if child == 0:
                sys.exit(0)
            os.waitpid(child, 0)
        time.sleep(0.1)
        for _ in range(3):
            tpkernels.all_reduce(x, dist.group.WORLD)
    """,
    "after a peer was killed": """
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            tpkernels.all_reduce(x, dist.group.WORLD)
        except tpkernels.PeerLostError as error:
            assert error.peer == 2
        else:
            raise AssertionError("no error")
    """,
    "with a thread in a call": """
        def wait():
            try:
                tpkernels.all_reduce(x, dist.group.WORLD)
            except tpkernels.TpkernelsError:
                pass
        if rank == 0:
            threading.Thread(target=wait, daemon=True).start()
        time.sleep(0.3)
    """,
}


@pytest.mark.slow
def test_the_interpreter_exits_in_time(tmp_path: Path) -> None:
    begin = time.monotonic()
    ends = map(textwrap.dedent, _ENDS.values())
    ended = subprocess.run(
        [sys.executable, "-c", _RANKS, str(tmp_path / "store"), *ends],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )
    assert time.monotonic() - begin < 40
    # The ranks say nothing.
    codes = [[0, 0, -9 if "killed" in end else 0] for end in _ENDS]
    assert ended.stdout.splitlines() == [str(each) for each in codes], ended.stdout


# Forks of a rank: they cannot take its place in a call, and their exit does it no harm.


WORLD = 2


def refused(use: Callable[[], object]) -> str:
    """Returns "" if the group says that it belongs to another process."""
    ending = faults.ending_of(use)
    if ending.error != "GroupBrokenError" or "was forked from it" not in ending.text:
        return str(ending)
    return "" if f"belongs to process {os.getppid()}" in ending.text else ending.text


def uses(group: dist.ProcessGroup) -> list[Callable[[], object]]:
    return [
        lambda: tpkernels.all_reduce(torch.full((9,), 100.0), group),
        lambda: tpkernels.all_gather(torch.ones(2, 3), group, algorithm="unfused"),
        lambda: tpkernels.matmul_all_reduce(torch.ones(9, 9), torch.ones(9, 9), group),
        lambda: tpkernels.empty(4, group=group),
        lambda: tpkernels.init(group, timeout=5.0),
    ]


@pytest.mark.parametrize(("used_before", "ends"), sweep([(True, True), (False, False)]))
@on_ranks(WORLD)
def test_a_fork_is_not_a_rank(used_before: bool, ends: bool) -> None:
    """Rank 0's child tries to use the group and finalizes; then the ranks go on."""
    group, rank = faults.group_of(dist.new_group()), dist.get_rank()
    if used_before:
        faults.run_op("all_reduce", group)

    def child() -> str:
        errors = "".join(refused(use) for use in uses(group))
        if ends:
            tpkernels.finalize()
            gc.collect()
        return errors

    if rank == 0:
        outcome = faults.in_child(child)
        assert outcome == "fine", outcome
    for _ in range(3):
        got = tpkernels.all_reduce(torch.ones(9), group)
        assert torch.equal(got, torch.full((9,), float(WORLD))), f"wrong: {got}"
        faults.run_op("all_gather", group)


@on_ranks(WORLD)
def test_a_fork_frees_no_destroyed_process_group() -> None:
    """Gloo's destructor waits for threads that a fork has not."""
    kept = [faults.new_group()]
    faults.run_op("all_reduce", kept[0])
    dist.destroy_process_group(kept[0])

    def free() -> str:
        kept.clear()
        gc.collect()
        return ""

    assert (outcome := faults.in_child(free)) == "fine", outcome


@on_ranks(WORLD)
def test_a_fork_during_a_call_of_another_thread() -> list[str]:
    """A thread of rank 0 waits in a call, so the fork inherits the lock in its locked state."""
    group, rank = faults.new_group(), dist.get_rank()
    faults.run_op("all_reduce", group)
    if rank == 1:
        time.sleep(0.5)
        faults.run_op("all_reduce", group)
        return []
    failures: list[str] = []
    call = threading.Thread(target=lambda: faults.run_op("all_reduce", group))
    call.start()
    while not groups.get(group.group_name).in_call:
        time.sleep(0.001)
    outcome = faults.in_child(lambda: "".join(refused(use) for use in uses(group)))
    call.join()
    return failures + ([outcome] if outcome != "fine" else [])
