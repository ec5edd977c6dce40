"""Starts rank processes on this machine: for the command line, the benchmarks and the tests.

Problem: work on real process groups needs ranks that start fast, run one function after another
and hand back what went wrong (an exception, a death, a hang), none of which outlives the parent.

How: a fork server imports torch once, and every rank is forked from it. The parent hosts the
``TCPStore`` and keeps one duplex pipe per rank: jobs go out, outcomes come back.

Who dies when: each rank leads its own process group, so a Ctrl-C in the terminal reaches the
parent alone, and killing a rank takes along what it started. When the parent goes, however it
goes, the kernel kills the ranks (`_rank.die_with_parent`). `Ranks.close` asks idle ranks to
leave, within a bound, and kills all others.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing import connection
from typing import Any

import torch.distributed as dist

from tpkernels.launch import worker as _rank
from tpkernels.launch.rank_process import RankProcess, fork_server
from tpkernels.launch.worker import Outcome

__all__ = ["Outcome", "RankError", "Ranks", "fork_server"]

GRACE_SECONDS = 5.0  # after the first failure in `run`, for the other ranks to say something too
REAP_SECONDS = 5.0  # from a rank's death to its exit code, through the fork server
_CLOSED = "these ranks are closed; start new ones"


class RankError(RuntimeError):
    """A job did not work on every rank; the message holds each failing rank's traceback."""

    def __init__(self, message: str, outcomes: Sequence[Outcome]) -> None:
        super().__init__(message)
        self.outcomes = list(outcomes)


class Ranks:
    """``world`` processes, each a rank of one default process group, that run functions.

    Functions and arguments travel by pickle, functions by reference: module level only, and
    importable in the ranks, which take over the parent's ``sys.path`` with every job.

    Args:
        world: number of ranks, at least 1.
        backend: for ``init_process_group``. With NCCL, rank r uses device r modulo their number.
        threads: intra-op threads of each rank (torch, OpenMP).
        env: added to the environment of the ranks, which is otherwise the parent's as it is now.
            It is set after torch was imported: what torch reads on import is not affected.
        start_timeout: seconds until all ranks must have joined the group.

    Raises:
        RankError: a rank did not start.
    """

    def __init__(
        self,
        world: int,
        *,
        backend: str = "gloo",
        threads: int = 1,
        env: Mapping[str, str] | None = None,
        start_timeout: float = 60.0,
    ) -> None:
        if world < 1 or threads < 1:
            raise ValueError(f"world and threads must be at least 1, got {world=}, {threads=}")
        if env and "OMP_NUM_THREADS" in env:
            raise ValueError(f"say threads={env['OMP_NUM_THREADS']}, not OMP_NUM_THREADS in env")
        self.world = world
        self.exitcodes: list[int | None] = []  # known after close()
        self._members: list[RankProcess] = []
        self._pending: set[int] = set()
        self._outcomes: dict[int, Outcome] = {}
        self._started = time.monotonic()
        self._closed = False
        self._store = store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        # One machine, so the loopback device, whatever the host's name resolves to.
        environ = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, **(env or {})}
        environ["OMP_NUM_THREADS"] = str(threads)
        setup = _rank.Setup(world, backend, threads, environ, store.port, start_timeout)
        atexit.register(self.close)
        try:
            context = fork_server()
            for rank in range(world):
                self._members.append(RankProcess.start(context, rank, setup))
            self._pending = set(range(world))
            self._raise_failures("start", self.collect(start_timeout, grace=GRACE_SECONDS))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [member.pid for member in self._members]

    @property
    def healthy(self) -> bool:
        """Open, every rank alive, none at work."""
        alive = all(member.process.exitcode is None for member in self._members)
        return not self._closed and not self._pending and alive

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any) -> Any:
        """Calls ``fn(*args, **kwargs)`` on every rank and returns the list of results by rank.

        Raises:
            RankError: ``fn`` raised, or a rank died or took longer than ``timeout`` seconds. The
                ranks' collectives may then be out of step, so all are killed: `self` is closed.
        """
        self.submit(fn, *args, **kwargs)
        try:
            outcomes = self.collect(timeout, grace=GRACE_SECONDS)
            self._raise_failures(getattr(fn, "__qualname__", repr(fn)), outcomes)
        except BaseException:
            self.close()
            raise
        return [outcome.value for outcome in outcomes]

    def submit(
        self,
        fn: Callable[..., Any],
        *args: Any,
        per_rank: Sequence[tuple[Any, ...]] | None = None,
        **kwargs: Any,
    ) -> None:
        """Starts ``fn(*args, *per_rank[rank], **kwargs)`` on every rank and returns at once.

        Ranks that have died are left out; `collect` reports them.
        """
        if self._closed:
            raise RuntimeError(_CLOSED)
        if self._pending:
            raise RuntimeError(f"ranks {sorted(self._pending)} are still at work; collect() first")
        if per_rank is not None and len(per_rank) != self.world:
            raise ValueError(f"per_rank needs {self.world} entries, got {len(per_rank)}")
        # All jobs are pickled before the first is sent: what cannot be pickled reaches no rank.
        extra = per_rank if per_rank is not None else [()] * self.world
        path = pickle.dumps(sys.path)
        jobs = [path + pickle.dumps((fn, (*args, *mine), kwargs)) for mine in extra]
        self._outcomes, self._pending = {}, set(range(self.world))
        self._started = time.monotonic()
        for member, job in zip(self._members, jobs, strict=True):
            with contextlib.suppress(OSError):
                member.pipe.send_bytes(job)

    def collect(self, timeout: float, *, grace: float | None = None) -> list[Outcome]:
        """Waits for the outcomes of the last `submit`, in rank order; raises for none of them.

        Ranks that say nothing within ``timeout`` seconds, or within ``grace`` seconds of the
        first failure, are reported as timed out and left running: a later call waits for them
        again, `close` kills them.
        """
        if self._closed:
            raise RuntimeError(_CLOSED)
        deadline = time.monotonic() + timeout
        while self._pending:
            events: dict[Any, int] = {}
            for rank in self._pending:
                member = self._members[rank]
                events |= {member.pipe: rank, member.process.sentinel: rank}
            ready = connection.wait(list(events), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in {events[event] for event in ready}:
                self._outcomes[rank] = outcome = self._receive(rank)
                self._pending.discard(rank)
                if grace is not None and not outcome.ok:
                    deadline = min(deadline, time.monotonic() + grace)
        late = {rank: self._timed(Outcome(rank, timed_out=True)) for rank in self._pending}
        return [(self._outcomes | late)[rank] for rank in range(self.world)]

    def close(self) -> None:
        """Ends every rank: idle ones leave their group first, within a bound. Idempotent."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        for rank, member in enumerate(self._members):
            if rank in self._pending:
                member.kill()
                continue
            with contextlib.suppress(OSError):
                member.pipe.send_bytes(_rank.LEAVE)
        deadline = time.monotonic() + _rank.LEAVE_SECONDS + 1.0
        for member in self._members:
            member.process.join(max(0.0, deadline - time.monotonic()))
            member.kill()
            member.process.join(REAP_SECONDS)
            self.exitcodes.append(member.process.exitcode)
            member.pipe.close()
            with contextlib.suppress(ValueError):  # not reaped: the fork server itself is gone
                member.process.close()
        self._members, self._pending = [], set()
        del self._store

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive(self, rank: int) -> Outcome:
        """The outcome of a rank of which there is news: a message, or its death."""
        member = self._members[rank]
        message = b""
        with contextlib.suppress(EOFError, OSError):  # it died before, or in, its message
            if member.pipe.poll(0):
                message = member.pipe.recv_bytes()
        if not message:
            member.process.join(REAP_SECONDS)
            return self._timed(Outcome(rank, exitcode=member.process.exitcode))
        try:
            return pickle.loads(message)
        except Exception as error:  # a class that only the rank can import
            return self._timed(_rank.failure(rank, error))

    def _timed(self, outcome: Outcome) -> Outcome:
        now = time.monotonic()
        return replace(outcome, seconds=now - self._started, ended=now)

    def _raise_failures(self, what: str, outcomes: Sequence[Outcome]) -> None:
        failed = [outcome for outcome in outcomes if not outcome.ok]
        if not failed:
            return
        parts = [f"{what} failed on {len(failed)} of {self.world} ranks"]
        for outcome in failed:
            member = self._members[outcome.rank]
            head = f"rank {outcome.rank} (pid {member.pid}), after {outcome.seconds:.1f} s"
            parts.append(f"{head}: {member.describe(outcome)}")
        raise RankError("\n\n".join(parts), outcomes)
