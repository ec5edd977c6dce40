"""Groups release descriptors and memory, forks cannot use them, and the interpreter exits."""

from __future__ import annotations

import contextlib
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
Resources = tuple[int, int]  # number of descriptors and of mapped workspaces


def _count_resources() -> Resources:
    """Count the open descriptors and the mappings of our shared memory."""
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), maps.count("memfd:tpkernels")


def group_lifetimes_job(count: int, how: str) -> tuple[Resources, Resources]:
    """Return the resources in use after one group and after ``count`` more. Each group is used and
    ended, or its setup fails."""

    def fail(*_: object) -> None:
        raise ArithmeticError("simulated")

    def use_group() -> None:
        group = faults.new_group()
        x = tpkernels.empty(60, 48, group=group)
        tpkernels.all_gather(x, group)
        # The workspace must grow for this call.
        faults.run_op("matmul_all_reduce", group, "pipelined", rows=600)
        del x
        if how == "finalize":
            tpkernels.finalize()
        dist.destroy_process_group(group)

    def fail_setup() -> None:
        group = faults.require_group(dist.new_group())
        nbytes = 1 << 50 if how == "memory" else faults.WORKSPACE_BYTES
        if how != "timeout" or group.rank() != 1:
            timeout = 0.1 if how == "timeout" else faults.PATIENCE
            ending = faults.record_ending(lambda: tpkernels.init(group, timeout, nbytes))
            assert ending.error, "no failure"
        dist.barrier()
        dist.destroy_process_group(group)

    if how == "exception" and dist.get_rank() == 1:
        rendezvous._ArenaSetup._map = fail  # type: ignore[assignment]
    act = use_group if how in ("finalize", "destroy") else fail_setup
    act()
    first = _count_resources()
    for _ in range(count):
        act()
    return first, _count_resources()


@pytest.mark.parametrize(
    "how", sweep(["finalize", "exception", "timeout", "memory", "destroy"], 2, num_thorough=3)
)
def test_groups_release_their_resources(how: str) -> None:
    with faults.watched_ranks(3) as ranks:
        for first, last in ranks.run(group_lifetimes_job, 3, how):
            assert last == first, "descriptors, mappings"
            assert last[1] == 0


@on_ranks(2)
def test_shared_memory_has_no_name_and_only_the_workspace_a_descriptor() -> None:
    """`tpkernels stuck` finds the workspace by its descriptor."""
    group = faults.new_group()
    x = tpkernels.empty(100, group=group)
    tpkernels.all_reduce(x, group)
    lines = Path("/proc/self/maps").read_text().splitlines()
    mappings = [line for line in lines if "/memfd:tpkernels" in line]
    assert all("rw-s" in line and line.endswith(" (deleted)") for line in mappings), mappings
    files = {line.split("memfd:")[1] for line in mappings}
    assert files >= {"tpkernels-workspace (deleted)", "tpkernels-empty (deleted)"}, mappings
    descriptors = {}
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            descriptors[int(link.name)] = os.readlink(link)
    stacks = "/memfd:tpkernels-stack "  # of the launcher
    ours = {fd: name for fd, name in descriptors.items() if "memfd:tpkernels" in name}
    ours = {fd: name for fd, name in ours.items() if not name.startswith(stacks)}
    assert set(ours.values()) == {"/memfd:tpkernels-workspace (deleted)"}, ours
    assert not any(os.get_inheritable(fd) for fd in ours), ours


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
    first = faults.record_ending(lambda: tpkernels.all_gather(shard, group))
    then = faults.record_ending(lambda: faults.run_op("all_gather", group))
    assert first.error == "CollectiveMismatchError", first
    assert "passes a symmetric tensor that this rank has released" in first.message, first
    assert first.seconds < faults.PROMPT, first
    assert then.error == "GroupBrokenError", then


# Exit of the interpreter. The script imports torch once and forks the ranks, which saves time.
# Forked ranks exit like any process.

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
    start = time.monotonic()
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
    assert time.monotonic() - start < 40
    # The ranks print nothing, so stdout has only the exit codes.
    codes = [[0, 0, -9 if "killed" in end else 0] for end in _ENDS]
    assert ended.stdout.splitlines() == [str(exit_codes) for exit_codes in codes], ended.stdout


# Forks of a rank: they cannot use the group, and their exit does not disturb the rank.


WORLD = 2


def check_refused(call: Callable[[], object]) -> str:
    """Return "" if the group belongs to another process and refuses the call, else the error."""
    ending = faults.record_ending(call)
    if ending.error != "GroupBrokenError" or "was forked from it" not in ending.message:
        return str(ending)
    return "" if f"belongs to process {os.getppid()}" in ending.message else ending.message


def group_calls(group: dist.ProcessGroup) -> list[Callable[[], object]]:
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
    """The child of rank 0 cannot use the group, and may finalize. Then the ranks run more calls."""
    group, rank = faults.require_group(dist.new_group()), dist.get_rank()
    if used_before:
        faults.run_op("all_reduce", group)

    def child() -> str:
        errors = "".join(check_refused(call) for call in group_calls(group))
        if ends:
            tpkernels.finalize()
            gc.collect()
        return errors

    if rank == 0:
        outcome = faults.run_in_child(child)
        assert outcome == "fine", outcome
    for _ in range(3):
        got = tpkernels.all_reduce(torch.ones(9), group)
        assert torch.equal(got, torch.full((9,), float(WORLD))), f"wrong: {got}"
        faults.run_op("all_gather", group)


@on_ranks(WORLD)
def test_a_fork_can_drop_a_destroyed_process_group() -> None:
    """The gloo destructor would wait for threads that do not exist in the fork."""
    destroyed = [faults.new_group()]
    faults.run_op("all_reduce", destroyed[0])
    dist.destroy_process_group(destroyed[0])

    def free() -> str:
        destroyed.clear()
        gc.collect()
        return ""

    assert (outcome := faults.run_in_child(free)) == "fine", outcome


@on_ranks(WORLD)
def test_a_fork_during_a_call_of_another_thread() -> list[str]:
    """A thread of rank 0 waits in a call, so the fork inherits a locked group lock. Calls in the
    fork are refused."""
    group, rank = faults.new_group(), dist.get_rank()
    faults.run_op("all_reduce", group)
    if rank == 1:
        time.sleep(0.5)
        faults.run_op("all_reduce", group)
        return []
    failures: list[str] = []
    call_thread = threading.Thread(target=lambda: faults.run_op("all_reduce", group))
    call_thread.start()
    while not groups.get(group.group_name).in_call:
        time.sleep(0.001)
    outcome = faults.run_in_child(
        lambda: "".join(check_refused(call) for call in group_calls(group))
    )
    call_thread.join()
    return failures + ([outcome] if outcome != "fine" else [])
