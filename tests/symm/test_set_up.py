"""Setup of the shared memory of a group: failed attempts, foreign processes on the sockets, limits
on descriptors, and missing system calls."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.cases import RanksFixture
from tests.support.faults import PATIENCE, PROMPT, Ending, run_concurrently, shares_memory
from tests.support.processes import python_output
from tests.support.ranked import on_ranks
from tests.support.tiers import sweep
from tpkernels import _C, groups
from tpkernels.errors import CollectiveTimeoutError, PeerLostError
from tpkernels.launch import Ranks
from tpkernels.symm import colocation, rendezvous
from tpkernels.symm.exchange import Participant

WORLD = 3
CLONE_NEWNET = 0x40000000


# Ranks that fail before their peers can observe it.


def setup_failure_job(where: str) -> tuple[Ending, Ending]:
    """Rank 2 fails before it connects, or while its peers wait for a late rank."""
    group, rank = faults.require_group(dist.new_group()), dist.get_rank()

    def fail(*_: Any, **__: Any) -> Any:
        time.sleep(0.1)
        raise ArithmeticError("no luck")

    if rank == 2:
        if where == "interrupt":
            signal.signal(signal.SIGINT, signal.default_int_handler)
            faults.disturb_later(0.3, signal.SIGINT)
        elif where == "reach":
            colocation._find_connect_obstacle = fail  # type: ignore[assignment]
        else:
            rendezvous.connected = fail  # type: ignore[assignment]
    if rank == 3 and where == "interrupt":
        time.sleep(1.5)  # all other ranks are waiting by then
    # With "interrupt", rank 3 arrives late and waits until the timeout.
    patience = PATIENCE / 4 if where == "interrupt" else PATIENCE
    first = faults.record_ending(lambda: tpkernels.init(group, patience, faults.WORKSPACE_BYTES))
    return first, faults.record_ending(lambda: faults.run_op("all_gather", group))


@pytest.mark.parametrize("where", sweep(["connect", "interrupt", "reach"]))
def test_a_rank_that_fails_in_the_first_setup_notifies_all(where: str) -> None:
    with faults.watched_ranks(4) as ranks:
        results = faults.values(faults.collect(ranks, setup_failure_job, where))
    reason = "KeyboardInterrupt" if where == "interrupt" else "ArithmeticError"
    for rank, (first, then) in results.items():
        assert then.error == "GroupBrokenError", then
        if rank == 2:
            assert first.error == reason, first
        elif (rank, where) != (3, "interrupt"):  # rank 3 arrives after the failure
            assert first.error == "PeerLostError" and first.peer == 2, first
            assert reason in first.message and "rank 2" in first.message, first
            assert first.seconds < 0.4 + PROMPT, first


def run_participants(
    world: int, timeout: float, run_member: Callable[[Participant], Any]
) -> list[Any]:
    """Run ``run_member`` for each participant in a thread. Return the results or exceptions."""
    store = dist.HashStore()
    members = [Participant(store, "group", rank, world, timeout) for rank in range(world)]
    results = run_concurrently([partial(run_member, member) for member in members])
    for result in results:
        if isinstance(result, rendezvous.MappedArena):
            rendezvous.close_all(result.pidfds)
    return results


def make_arena(participant: Participant) -> rendezvous.MappedArena:
    return rendezvous.make_arena(participant, "arena", 1 << 16, [(0, 4096)])


def test_all_ranks_name_the_rank_that_does_not_connect() -> None:
    """Rank 2 joins the exchange but never connects. Rank 0 notifies its peers before it closes its
    connections, although no group is broken."""

    def run_member(participant: Participant) -> Any:
        if participant.rank < 2:
            return make_arena(participant)
        return participant.exchange("arena", {"pid": os.getpid()})

    first, second, _ = run_participants(3, 1.0, run_member)
    for error in (first, second):
        assert isinstance(error, CollectiveTimeoutError) and error.peer == 2, error


@pytest.mark.parametrize("late", [{1}, {0, 1, 2}])
def test_a_rank_that_maps_late_is_named(monkeypatch: pytest.MonkeyPatch, late: set[int]) -> None:
    """A late rank is named. If all ranks are late, all get an arena, because the exchange of errors
    has a separate timeout."""
    map_memory = rendezvous._ArenaSetup._map

    def map_slowly(arena: rendezvous._ArenaSetup, memory: int) -> Any:
        if arena.participant.rank in late:
            time.sleep(1.4)
        return map_memory(arena, memory)

    monkeypatch.setattr(rendezvous._ArenaSetup, "_map", map_slowly)
    for result in run_participants(3, 1.0, make_arena):
        if len(late) == 3:
            assert isinstance(result, rendezvous.MappedArena), result
        else:
            assert isinstance(result, CollectiveTimeoutError) and {result.peer} == late, result


def test_an_ended_process_is_detected_after_the_deadline() -> None:
    arena = rendezvous._ArenaSetup(Participant(dist.HashStore(), "group", 0, 2, 5.0), 0, [], 0.0)
    with subprocess.Popen(["true"]) as process:
        pidfds = [_C.host.open_pidfd(os.getpid()), _C.host.open_pidfd(process.pid)]
        process.wait()
    with pytest.raises(PeerLostError, match="rank 1, which disconnected") as error:
        arena._watch(pidfds)
    rendezvous.close_all(pidfds)
    assert error.value.peer == 1


def test_one_rank_needs_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", None)
    (arena,) = run_participants(1, 5.0, make_arena)
    assert isinstance(arena, rendezvous.MappedArena) and len(arena.pidfds) == 1, arena


def test_probes_of_lower_ranks_share_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts: list[float] = []

    def probe_slowly(_: str | None, seconds: float) -> str:
        timeouts.append(seconds)
        time.sleep(0.2)
        return "is apart"

    monkeypatch.setattr(colocation, "_find_connect_obstacle", probe_slowly)
    for result in run_participants(3, 5.0, lambda rank: colocation.probe_colocation(rank, {})):
        assert result.first_ranks == [0, 1, 2], result
    assert len(timeouts) == 3 and min(timeouts) <= 4.8, timeouts


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@on_ranks(WORLD)
def test_the_effective_user_counts() -> None:
    """The effective user of the ranks differs from the real user. The ranks share memory."""
    group = faults.require_group(dist.new_group())
    os.seteuid(65534)
    try:
        tpkernels.init(group, 6.0, faults.WORKSPACE_BYTES)
    finally:
        os.seteuid(0)
    assert groups.get(group.group_name).unshared_reason is None


@on_ranks(WORLD)
def test_an_error_with_an_unencodable_message_is_reported() -> None:
    """Rank 0 fails with a message that UTF-8 cannot encode, as with some file names."""
    group = faults.new_group()
    if dist.get_rank() == 0:
        with contextlib.suppress(OSError), groups.breaking_on_error(group.group_name):
            raise OSError("no file \udcff")
    ending = faults.record_ending(lambda: faults.run_op("all_gather", group))
    assert ending.error == ("PeerLostError" if dist.get_rank() else "GroupBrokenError"), ending
    if dist.get_rank():
        assert "OSError: no file \\udcff" in ending.message and ending.seconds < PROMPT, ending


# Which ranks share memory.


def unreachable_job(how: str) -> tuple[bool, Ending] | str:
    """The sockets or the memory of one rank are out of reach for its peers."""
    group = faults.require_group(dist.new_group())
    unshare = ctypes.CDLL(None, use_errno=True).unshare
    # Applied after the ranks are connected. They still have the same boot ID.
    if how == "namespace" and group.rank() == 1 and unshare(CLONE_NEWNET):
        return os.strerror(ctypes.get_errno())
    if how == "user" and group.rank() == 2:
        os.setresuid(65534, 65534, 0)
    tpkernels.init(group, faults.PATIENCE, faults.WORKSPACE_BYTES)
    ending = faults.record_ending(lambda: faults.run_op("matmul_all_reduce", group))
    if how == "user":
        os.setresuid(0, 0, 0)
    return groups.get(group.group_name).shared_memory, ending


@pytest.mark.skipif(os.getuid() != 0, reason="only root can leave a namespace or become another")
@pytest.mark.parametrize("how", ["namespace", "user"])
def test_unreachable_ranks_share_no_memory(how: str) -> None:
    with faults.watched_ranks(3) as ranks:
        outcomes = faults.collect(ranks, unreachable_job, how)
        if isinstance(outcomes[1].value, str):
            pytest.skip(f"cannot make a network namespace: {outcomes[1].value}")
        for shared, ending in faults.values(outcomes).values():
            assert not shared and not ending.error, ending


# Foreign processes.

_FLOOD = """
import os, pathlib, socket, sys, time
if sys.argv[1] == "other user":
    os.setuid(65534)
print("ready", flush=True)
kept, end = [], time.monotonic() + 60
while time.monotonic() < end:
    for line in pathlib.Path("/proc/net/unix").read_text().splitlines():
        name = line.split()[-1]
        if not name.startswith("@tpkernels-"):
            continue
        for _ in range(2000):  # until the queue is full, and whenever it is not
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stranger.setblocking(False)
            if stranger.connect_ex("\\0" + name[1:]):
                stranger.close()
                continue
            if sys.argv[1] == "wrong token":
                stranger.send(b'{"token": "guessed", "rank": 1, "pid": 1}')
            kept.append(stranger)
            if len(kept) > 500:
                kept.pop(0).close()
"""


@contextlib.contextmanager
def flood_sockets(who: str) -> Iterator[None]:
    """Run a process that connects to all our sockets as often as possible."""
    command = [sys.executable, "-c", _FLOOD, who]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield
        finally:
            process.kill()


def repeated_setup_job(count: int) -> list[bool]:
    warnings.simplefilter("ignore")
    shared = []
    for _ in range(count):
        group = faults.new_group()
        faults.run_op("all_gather", group)
        shared.append(shares_memory(group))
        dist.destroy_process_group(group)
    return shared


@pytest.mark.parametrize("who", sweep(["other user", "wrong token", "same user"], 2))
def test_foreign_connections_do_not_prevent_shared_memory(ranks: RanksFixture, who: str) -> None:
    if who == "other user" and os.getuid() != 0:
        pytest.skip("only root can become another user")
    pool = ranks(2)
    with flood_sockets(who):
        for shared in pool.run(repeated_setup_job, 5, timeout=100):
            assert all(shared), shared


def impostor_job(what: str) -> Ending:
    """The user of rank 0 or the memory that it sends is not the expected one."""
    group = faults.require_group(dist.new_group())

    def unsealed(arena: Any) -> tuple[int, None]:
        memory = _C.host.open_memfd("unsealed")
        os.ftruncate(memory, arena.region_bytes * arena.participant.world)
        return memory, None

    with pytest.MonkeyPatch.context() as patch:
        if what == "user" and group.rank() == 1:
            patch.setattr(rendezvous, "get_peer_user", lambda _: 4321)
        if what == "memory" and group.rank() == 0:
            patch.setattr(rendezvous._ArenaSetup, "_create", unsealed)
        return faults.record_ending(lambda: tpkernels.init(group, PATIENCE, faults.WORKSPACE_BYTES))


def test_rank_0_must_be_of_the_same_user(ranks: RanksFixture) -> None:
    first, second = ranks(2).run(impostor_job, "user")
    assert "the process on the socket of rank 0 runs as user 4321" in second.message, second
    assert first.error == second.error == "PeerLostError", first
    assert max(first.seconds, second.seconds) < PROMPT, first


def test_the_size_of_memory_must_be_sealed(ranks: RanksFixture) -> None:
    for ending in ranks(2).run(impostor_job, "memory"):
        assert ending.error == "MemoryError" and "is not sealed" in ending.message, ending


# Descriptors.


def few_descriptors_job(poor: int, num_free: int) -> tuple[Ending, bool, list[str], Ending]:
    """One rank may open only ``num_free`` more descriptors during setup."""
    group = faults.require_group(dist.new_group())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers: list[int] = []
    if group.rank() == poor:
        used = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1 + num_free, limits[1]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = faults.record_ending(
            lambda: tpkernels.init(group, PATIENCE, faults.WORKSPACE_BYTES)
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for filler in fillers:
        os.close(filler)
    other_group = faults.new_group()
    last = faults.record_ending(lambda: faults.run_op("all_gather", other_group))
    return first, shares_memory(group), [str(warning.message) for warning in caught], last


@pytest.mark.parametrize("poor", sweep([2, 0]))
def test_a_limit_on_descriptors_is_reported_on_all_ranks(poor: int) -> None:
    """For every number of free descriptors the ranks get a prompt error that names the cause, or a
    warning and no shared memory."""
    seen = set()
    with faults.watched_ranks(WORLD) as ranks:
        for num_free in range(14):
            results = faults.values(faults.collect(ranks, few_descriptors_job, poor, num_free))
            if all(shared for _, shared, _, _ in results.values()):
                break
            failed = results[poor][0].error
            for rank, (first, shared, _, last) in results.items():
                context = (num_free, rank, first)
                assert not last.error and not shared, (context, last)
                assert first.seconds < 2 * PROMPT, context
                allowed = {"MemoryError", "OSError"} if rank == poor else {"MemoryError"}
                allowed |= {"PeerLostError"} if rank != poor and failed == "OSError" else set()
                assert first.error in allowed if failed else not first.error, context
            messages = [results[poor][0].message] if failed else results[0][2]
            assert any(
                "descriptors" in message or "open files" in message for message in messages
            ), (num_free, messages)
            seen.add(failed or "warning")
        else:
            pytest.fail(f"14 descriptors are not enough: {results}")
    assert num_free > 3 and len(seen) > 1, (num_free, seen)


# Kernels and seccomp filters that refuse a system call; Python builds without its wrapper.


WRAPPERS = ("pidfd_open", "memfd_create", "MFD_CLOEXEC")


def unsupported_job(call: str, rank: int, refusal: int) -> tuple[bool, list[str], Ending, str]:
    """On one rank a system call is missing or forbidden by a filter."""
    group = faults.require_group(dist.new_group())
    open_descriptor = getattr(_C.host, call)

    def refuse(*_: Any) -> int:
        raise OSError(refusal, os.strerror(refusal))

    if group.rank() == rank:
        setattr(_C.host, call, refuse)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tpkernels.init(group, 5.0, faults.WORKSPACE_BYTES)
            ending = faults.record_ending(lambda: faults.run_op("matmul_reduce_scatter", group))
            refused = faults.record_ending(lambda: tpkernels.empty(4, group=group)).message
    finally:
        setattr(_C.host, call, open_descriptor)
    return shares_memory(group), [str(warning.message) for warning in caught], ending, refused


@pytest.mark.parametrize("call", ["open_memfd", "open_pidfd"])
@pytest.mark.parametrize(("rank", "refusal"), sweep([(0, 38), (1, 1)]), ids=["ENOSYS", "EPERM"])
def test_ranks_without_a_system_call_use_the_process_group(
    ranks: RanksFixture, call: str, rank: int, refusal: int
) -> None:
    name = call.replace("open_pidfd", "pidfd_open").replace("open_memfd", "memfd_create")
    for index, (shared, caught, ending, refused) in enumerate(
        ranks(2).run(unsupported_job, call, rank, refusal)
    ):
        assert not shared and not ending.error, ending
        reason = f"rank {rank} cannot share memory: {name}: {os.strerror(refusal)}"
        assert reason in refused, refused
        assert len(caught) == (index == 0), caught  # only rank 0 warns
        assert all(
            "the ranks are on one machine" in message and reason in message for message in caught
        )


def missing_wrappers_job() -> bool:
    with pytest.MonkeyPatch.context() as patch:
        for name in WRAPPERS:
            patch.delattr(os, name, raising=False)
        group = faults.new_group()
        faults.run_op("all_reduce", group)
        return shares_memory(group)


def test_a_python_without_the_wrappers_shares_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python of conda lacks the wrappers, as do builds for old systems."""
    for name in WRAPPERS:
        monkeypatch.delattr(os, name, raising=False)
    with Ranks(2) as ranks:
        assert ranks.run(missing_wrappers_job) == [True, True]


@pytest.mark.thorough
def test_the_import_needs_no_wrappers() -> None:
    remove = f"import os; [vars(os).pop(name, None) for name in {WRAPPERS}]; import tpkernels"
    python_output("-c", remove)


def test_one_rank_needs_no_system_call(ranks: RanksFixture) -> None:
    ((shared, caught, ending, _),) = ranks(1).run(unsupported_job, "open_memfd", 0, 38)
    assert not shared and not ending.error and not caught, (ending, caught)
