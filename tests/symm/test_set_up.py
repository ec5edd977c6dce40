"""The set-up of a group's shared memory: attempts that fail, strangers on the sockets, limits on
descriptors."""

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
from tests.support.faults import PATIENCE, PROMPT, Ending, shares_memory, together
from tests.support.processes import output_of
from tests.support.ranked import on_ranks
from tests.support.tiers import sweep
from tpkernels import _C, groups
from tpkernels.errors import CollectiveTimeoutError, PeerLostError
from tpkernels.launch import Ranks
from tpkernels.symm import colocation, rendezvous
from tpkernels.symm.exchange import Participant

WORLD = 3
CLONE_NEWNET = 0x40000000


# Ranks that fail unseen by the others.


def failing_job(where: str) -> tuple[Ending, Ending]:
    """Rank 2 fails before it meets the others, or while they wait for a late rank."""
    group, rank = faults.group_of(dist.new_group()), dist.get_rank()

    def fail(*_: Any, **__: Any) -> Any:
        time.sleep(0.1)
        raise ArithmeticError("no luck")

    if rank == 2:
        if where == "interrupt":
            signal.signal(signal.SIGINT, signal.default_int_handler)
            faults.disturb_later(0.3, signal.SIGINT)
        elif where == "reach":
            colocation._why_not_reached = fail  # type: ignore[assignment]
        else:
            rendezvous.connected = fail  # type: ignore[assignment]
    if rank == 3 and where == "interrupt":
        time.sleep(1.5)  # so that all others wait
    # In the interrupt, rank 3 waits in vain.
    patience = PATIENCE / 4 if where == "interrupt" else PATIENCE
    first = faults.ending_of(lambda: tpkernels.init(group, patience, faults.WORKSPACE_BYTES))
    return first, faults.ending_of(lambda: faults.run_op("all_gather", group))


@pytest.mark.parametrize("where", sweep(["connect", "interrupt", "reach"]))
def test_a_rank_that_fails_in_the_first_set_up_notifies_the_others(where: str) -> None:
    with faults.watched_ranks(4) as ranks:
        results = faults.values(faults.collect(ranks, failing_job, where))
    reason = "KeyboardInterrupt" if where == "interrupt" else "ArithmeticError"
    for rank, (first, then) in results.items():
        assert then.error == "GroupBrokenError", then
        if rank == 2:
            assert first.error == reason, first
        elif (rank, where) != (3, "interrupt"):  # which came when it was all over
            assert first.error == "PeerLostError" and first.peer == 2, first
            assert reason in first.text and "rank 2" in first.text, first
            assert first.seconds < 0.4 + PROMPT, first


def arenas_of(world: int, timeout: float, part: Callable[[Participant], Any]) -> list[Any]:
    """What ranks that are threads return or raise when each makes its ``part`` of an arena."""
    store = dist.HashStore()
    members = [Participant(store, "group", rank, world, timeout) for rank in range(world)]
    results = together([partial(part, member) for member in members])
    for made in results:
        if isinstance(made, rendezvous.MappedArena):
            rendezvous.close_all(made.pidfds)
    return results


def make_arena(participant: Participant) -> rendezvous.MappedArena:
    return rendezvous.make_arena(participant, "arena", 1 << 16, [(0, 4096)])


def test_all_name_the_rank_that_does_not_connect() -> None:
    """Rank 0 has told the others by itself when its connections close: nothing here breaks a
    group."""

    def part(participant: Participant) -> Any:
        if participant.rank < 2:
            return make_arena(participant)
        return participant.exchange("arena", {"pid": os.getpid()})

    first, second, _ = arenas_of(3, 1.0, part)
    for error in (first, second):
        assert isinstance(error, CollectiveTimeoutError) and error.peer == 2, error


@pytest.mark.parametrize("late", [{1}, {0, 1, 2}])
def test_a_rank_that_maps_late_is_the_one_that_is_named(
    monkeypatch: pytest.MonkeyPatch, late: set[int]
) -> None:
    """The exchange of errors has time of its own: where all are late, all have an arena."""
    usual = rendezvous._Arena._map

    def slow(arena: rendezvous._Arena, memory: int) -> Any:
        if arena.participant.rank in late:
            time.sleep(1.4)
        return usual(arena, memory)

    monkeypatch.setattr(rendezvous._Arena, "_map", slow)
    for made in arenas_of(3, 1.0, make_arena):
        if len(late) == 3:
            assert isinstance(made, rendezvous.MappedArena), made
        else:
            assert isinstance(made, CollectiveTimeoutError) and {made.peer} == late, made


def test_a_process_that_has_ended_is_lost_even_late() -> None:
    arena = rendezvous._Arena(Participant(dist.HashStore(), "group", 0, 2, 5.0), 0, [], 0.0)
    with subprocess.Popen(["true"]) as process:
        pidfds = [_C.host.open_pidfd(os.getpid()), _C.host.open_pidfd(process.pid)]
        process.wait()
    with pytest.raises(PeerLostError, match="rank 1, which disconnected") as error:
        arena._watch(pidfds)
    rendezvous.close_all(pidfds)
    assert error.value.peer == 1


def test_one_rank_needs_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", None)
    (made,) = arenas_of(1, 5.0, make_arena)
    assert isinstance(made, rendezvous.MappedArena) and len(made.pidfds) == 1, made


def test_the_ranks_before_share_the_time_to_reach_them(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def unreached(_: str | None, seconds: float) -> str:
        given.append(seconds)
        time.sleep(0.2)
        return "is apart"

    monkeypatch.setattr(colocation, "_why_not_reached", unreached)
    for found in arenas_of(3, 5.0, lambda rank: colocation.probe_colocation(rank, {})):
        assert found.leaders == [0, 1, 2], found
    assert len(given) == 3 and min(given) <= 4.8, given


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@on_ranks(WORLD)
def test_the_effective_user_counts() -> None:
    """Ranks whose effective user is not their real user."""
    group = faults.group_of(dist.new_group())
    os.seteuid(65534)
    try:
        tpkernels.init(group, 6.0, faults.WORKSPACE_BYTES)
    finally:
        os.seteuid(0)
    assert groups.get(group.group_name).why_not_shared is None


@on_ranks(WORLD)
def test_an_error_whose_text_cannot_be_encoded_is_reported() -> None:
    """Rank 0 leaves with an error whose text cannot be encoded; file names may be like that."""
    group = faults.new_group()
    if dist.get_rank() == 0:
        with contextlib.suppress(OSError), groups.breaking_on_error(group.group_name):
            raise OSError("no file \udcff")
    ending = faults.ending_of(lambda: faults.run_op("all_gather", group))
    assert ending.error == ("PeerLostError" if dist.get_rank() else "GroupBrokenError"), ending
    if dist.get_rank():
        assert "OSError: no file \\udcff" in ending.text and ending.seconds < PROMPT, ending


# Which ranks share memory.


def apart_job(how: str) -> tuple[bool, Ending] | str:
    """One rank lets the others reach neither its sockets nor its memory."""
    group = faults.group_of(dist.new_group())
    unshare = ctypes.CDLL(None, use_errno=True).unshare
    # Once the ranks are connected: the same boot ID, the same machine.
    if how == "namespace" and group.rank() == 1 and unshare(CLONE_NEWNET):
        return os.strerror(ctypes.get_errno())
    if how == "user" and group.rank() == 2:
        os.setresuid(65534, 65534, 0)
    tpkernels.init(group, faults.PATIENCE, faults.WORKSPACE_BYTES)
    ending = faults.ending_of(lambda: faults.run_op("matmul_all_reduce", group))
    if how == "user":
        os.setresuid(0, 0, 0)
    return groups.get(group.group_name).shared_memory, ending


@pytest.mark.skipif(os.getuid() != 0, reason="only root can leave a namespace or become another")
@pytest.mark.parametrize("how", ["namespace", "user"])
def test_ranks_that_do_not_reach_each_other_share_no_memory(how: str) -> None:
    with faults.watched_ranks(3) as ranks:
        outcomes = faults.collect(ranks, apart_job, how)
        if isinstance(outcomes[1].value, str):
            pytest.skip(f"cannot make a network namespace: {outcomes[1].value}")
        for shared, ending in faults.values(outcomes).values():
            assert not shared and not ending.error, ending


# Strangers.

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
def flood(who: str) -> Iterator[None]:
    """A process that connects to all our sockets, as often as it can."""
    command = [sys.executable, "-c", _FLOOD, who]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stranger:
        try:
            assert stranger.stdout is not None and stranger.stdout.readline() == "ready\n"
            yield
        finally:
            stranger.kill()


def flooded_job(count: int) -> list[bool]:
    warnings.simplefilter("ignore")
    made = []
    for _ in range(count):
        group = faults.new_group()
        faults.run_op("all_gather", group)
        made.append(shares_memory(group))
        dist.destroy_process_group(group)
    return made


@pytest.mark.parametrize("who", sweep(["other user", "wrong token", "same user"], 2))
def test_strangers_on_the_sockets_do_not_prevent_shared_memory(
    ranks: RanksFixture, who: str
) -> None:
    if who == "other user" and os.getuid() != 0:
        pytest.skip("only root can become another user")
    pool = ranks(2)
    with flood(who):
        for shared in pool.run(flooded_job, 5, timeout=100):
            assert all(shared), shared


def impostor_job(what: str) -> Ending:
    """Rank 0, or the memory that it hands over, is not what it should be."""
    group = faults.group_of(dist.new_group())

    def unsealed(arena: Any) -> tuple[int, None]:
        memory = _C.host.open_memfd("unsealed")
        os.ftruncate(memory, arena.region_bytes * arena.participant.world)
        return memory, None

    with pytest.MonkeyPatch.context() as patch:
        if what == "user" and group.rank() == 1:
            patch.setattr(rendezvous, "user_of", lambda _: 4321)
        if what == "memory" and group.rank() == 0:
            patch.setattr(rendezvous._Arena, "_create", unsealed)
        return faults.ending_of(lambda: tpkernels.init(group, PATIENCE, faults.WORKSPACE_BYTES))


def test_rank_0_must_be_of_the_same_user(ranks: RanksFixture) -> None:
    first, second = ranks(2).run(impostor_job, "user")
    assert "the process on the socket of rank 0 runs as user 4321" in second.text, second
    assert first.error == second.error == "PeerLostError", first
    assert max(first.seconds, second.seconds) < PROMPT, first


def test_the_size_of_memory_must_be_sealed(ranks: RanksFixture) -> None:
    for ending in ranks(2).run(impostor_job, "memory"):
        assert ending.error == "MemoryError" and "is not sealed" in ending.text, ending


# Descriptors.


def few_descriptors_job(poor: int, room: int) -> tuple[Ending, bool, list[str], Ending]:
    """A rank may open ``room`` more descriptors during the set-up of a group."""
    group = faults.group_of(dist.new_group())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers: list[int] = []
    if group.rank() == poor:
        used = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1 + room, limits[1]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = faults.ending_of(lambda: tpkernels.init(group, PATIENCE, faults.WORKSPACE_BYTES))
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for filler in fillers:
        os.close(filler)
    other = faults.new_group()
    last = faults.ending_of(lambda: faults.run_op("all_gather", other))
    return first, shares_memory(group), [str(one.message) for one in caught], last


@pytest.mark.parametrize("poor", sweep([2, 0]))
def test_a_limit_on_descriptors_reaches_all(poor: int) -> None:
    """However few there are: an error that says so, or a warning and no shared memory; never an
    error that other ranks notice late."""
    seen = set()
    with faults.watched_ranks(WORLD) as ranks:
        for room in range(14):
            results = faults.values(faults.collect(ranks, few_descriptors_job, poor, room))
            if all(shared for _, shared, _, _ in results.values()):
                break
            failed = results[poor][0].error
            for rank, (first, shared, _, last) in results.items():
                where = (room, rank, first)
                assert not last.error and not shared, (where, last)
                assert first.seconds < 2 * PROMPT, where
                allowed = {"MemoryError", "OSError"} if rank == poor else {"MemoryError"}
                allowed |= {"PeerLostError"} if rank != poor and failed == "OSError" else set()
                assert first.error in allowed if failed else not first.error, where
            texts = [results[poor][0].text] if failed else results[0][2]
            assert any("descriptors" in one or "open files" in one for one in texts), (room, texts)
            seen.add(failed or "warning")
        else:
            pytest.fail(f"14 descriptors are not enough: {results}")
    assert room > 3 and len(seen) > 1, (room, seen)


# Kernels and filters that refuse a system call; Pythons that lack the functions for one.


WRAPPERS = ("pidfd_open", "memfd_create", "MFD_CLOEXEC")


def unsupported_job(call: str, rank: int, refusal: int) -> tuple[bool, list[str], Ending, str]:
    """One rank has a kernel without a system call, or a filter that forbids it."""
    group = faults.group_of(dist.new_group())
    open_it = getattr(_C.host, call)

    def refuse(*_: Any) -> int:
        raise OSError(refusal, os.strerror(refusal))

    if group.rank() == rank:
        setattr(_C.host, call, refuse)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tpkernels.init(group, 5.0, faults.WORKSPACE_BYTES)
            ending = faults.ending_of(lambda: faults.run_op("matmul_reduce_scatter", group))
            refused = faults.ending_of(lambda: tpkernels.empty(4, group=group)).text
    finally:
        setattr(_C.host, call, open_it)
    return shares_memory(group), [str(one.message) for one in caught], ending, refused


@pytest.mark.parametrize("call", ["open_memfd", "open_pidfd"])
@pytest.mark.parametrize(("rank", "refusal"), sweep([(0, 38), (1, 1)]), ids=["ENOSYS", "EPERM"])
def test_ranks_without_a_system_call_use_the_process_group(
    ranks: RanksFixture, call: str, rank: int, refusal: int
) -> None:
    name = call.replace("open_pidfd", "pidfd_open").replace("open_memfd", "memfd_create")
    for at, (shared, caught, ending, refused) in enumerate(
        ranks(2).run(unsupported_job, call, rank, refusal)
    ):
        assert not shared and not ending.error, ending
        why = f"rank {rank} cannot share memory: {name}: {os.strerror(refusal)}"
        assert why in refused, refused
        assert len(caught) == (at == 0), caught  # rank 0 alone warns
        assert all("the ranks are on one machine" in one and why in one for one in caught)


def without_job() -> bool:
    with pytest.MonkeyPatch.context() as patch:
        for name in WRAPPERS:
            patch.delattr(os, name, raising=False)
        group = faults.new_group()
        faults.run_op("all_reduce", group)
        return shares_memory(group)


def test_a_python_without_the_functions_works_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conda's Python, and those built for old systems."""
    for name in WRAPPERS:
        monkeypatch.delattr(os, name, raising=False)
    with Ranks(2) as ranks:
        assert ranks.run(without_job) == [True, True]


@pytest.mark.thorough
def test_the_import_needs_none_of_the_functions() -> None:
    remove = f"import os; [vars(os).pop(name, None) for name in {WRAPPERS}]; import tpkernels"
    output_of("-c", remove)


def test_one_rank_needs_no_system_call(ranks: RanksFixture) -> None:
    ((shared, caught, ending, _),) = ranks(1).run(unsupported_job, "open_memfd", 0, 38)
    assert not shared and not ending.error and not caught, (ending, caught)
