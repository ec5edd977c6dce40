"""Starts rank processes on this machine: for the command line, the benchmarks and the tests.

Problem: working with real process groups requires ranks that start fast, run one function after
another, report failures (an exception, a death, a hang) and never outlive the parent.

Algorithm: a fork server imports torch once, and every rank is forked from it. The parent hosts the
``TCPStore`` and keeps one duplex pipe per rank, which carries jobs out and outcomes back.

Lifetime: each rank leads its own process group, so a Ctrl-C in the terminal reaches only the
parent, and killing a rank also kills the processes it started. However the parent dies, the kernel
kills the ranks (`worker.die_with_parent`). `Ranks.close` asks idle ranks to leave, within a time
limit, and kills all others.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing import connection
from typing import Any

import torch.distributed as dist

from tpkernels.launch import worker
from tpkernels.launch.rank_process import RankProcess, fork_server
from tpkernels.launch.worker import Outcome

__all__ = ["Outcome", "RankError", "Ranks", "fork_server"]

GRACE_SECONDS = 5.0  # for the other ranks to report after the first failure in `run`
REAP_SECONDS = 5.0  # from a rank's death to its exit code, through the fork server
_CLOSED = "these ranks are closed; start new ones"


def loopback_store() -> dist.TCPStore:
    """Hosts a store that only processes of this machine reach; by itself it would listen on all
    interfaces."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        return dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),  # the store closes it
        )


class RankError(RuntimeError):
    """A job failed on some ranks; the message contains the traceback of each."""

    def __init__(self, message: str, outcomes: Sequence[Outcome]) -> None:
        super().__init__(message)
        self.outcomes = list(outcomes)


class Ranks:
    """``world`` processes that form the default process group and run functions.

    Functions and arguments are pickled, functions by reference: they must be module-level and
    importable in the ranks, which adopt the parent's ``sys.path`` with every job.

    Args:
        world: number of ranks, at least 1.
        backend: for ``init_process_group``. With NCCL, rank r uses device r modulo their count.
        threads: intra-op threads of each rank (torch, OpenMP).
        env: added to the environment of the ranks, which is otherwise a copy of the parent's. It is
            set after torch is imported, so it does not affect what torch reads on import.
        start_timeout: seconds within which all ranks must join the group.
        shared: an object that may hold descriptors, pickled by multiprocessing as the ranks start.
            Every job gets it as the keyword ``shared``.

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
        shared: Any = None,
    ) -> None:
        if world < 1 or threads < 1:
            raise ValueError(f"world and threads must be at least 1, got {world=}, {threads=}")
        if env and "OMP_NUM_THREADS" in env:
            raise ValueError(f"pass threads={env['OMP_NUM_THREADS']}, not OMP_NUM_THREADS in env")
        self.world = world
        self.exitcodes: list[int | None] = []  # known after close()
        self._processes: list[RankProcess] = []
        self._pending: set[int] = set()
        self._outcomes: dict[int, Outcome] = {}
        self._started = time.monotonic()
        self._closed = False
        self._pid = os.getpid()
        self._store = store = loopback_store()
        # All ranks are on this machine: use loopback, whatever the host name resolves to.
        environ = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, **(env or {})}
        environ["OMP_NUM_THREADS"] = str(threads)
        setup = worker.Setup(world, backend, threads, environ, store.port, start_timeout, shared)
        atexit.register(self.close)
        try:
            context = fork_server()
            for rank in range(world):
                self._processes.append(RankProcess.start(context, rank, setup))
            self._pending = set(range(world))
            self._raise_failures("start", self.collect(start_timeout, grace=GRACE_SECONDS))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid for process in self._processes]

    @property
    def healthy(self) -> bool:
        """Whether this is open, every rank is alive and no rank is busy."""
        alive = all(process.exitcode is None for process in self._processes)
        return not self._closed and not self._pending and alive

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any) -> Any:
        """Calls ``fn(*args, **kwargs)`` on every rank and returns the results by rank.

        Raises:
            RankError: ``fn`` raised, a rank died, or a rank took longer than ``timeout`` seconds.
                The ranks' collectives may be out of step then, so `self` is closed.
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

        Ranks that have died are skipped; `collect` reports them.
        """
        if self._closed:
            raise RuntimeError(_CLOSED)
        if self._pending:
            raise RuntimeError(f"ranks {sorted(self._pending)} are still busy; collect() first")
        if per_rank is not None and len(per_rank) != self.world:
            raise ValueError(f"per_rank needs {self.world} entries, got {len(per_rank)}")
        # All jobs are pickled before the first is sent, so a pickling error reaches no rank.
        extra = per_rank if per_rank is not None else [()] * self.world
        path = pickle.dumps(sys.path)
        jobs = [path + pickle.dumps((fn, (*args, *mine), kwargs)) for mine in extra]
        self._outcomes, self._pending = {}, set(range(self.world))
        self._started = time.monotonic()
        for process, job in zip(self._processes, jobs, strict=True):
            with contextlib.suppress(OSError):
                process.pipe.send_bytes(job)

    def collect(self, timeout: float, *, grace: float | None = None) -> list[Outcome]:
        """Waits for the outcomes of the last `submit`, in rank order. Failed ones do not raise.

        Ranks that do not answer within ``timeout`` seconds, or within ``grace`` seconds of the
        first failure, are reported as timed out and keep running: a later call waits for them
        again, and `close` kills them.
        """
        if self._closed:
            raise RuntimeError(_CLOSED)
        deadline = time.monotonic() + timeout
        while self._pending:
            events: dict[Any, int] = {}
            for rank in self._pending:
                process = self._processes[rank]
                events |= {process.pipe: rank, process.sentinel: rank}
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
        """Ends every rank; idle ones leave their group first, within a time limit. Idempotent, and
        without effect in a fork of the process that started them."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        atexit.unregister(self.close)
        for rank, process in enumerate(self._processes):
            if rank in self._pending:
                process.kill()
                continue
            with contextlib.suppress(OSError):
                process.pipe.send_bytes(worker.LEAVE)
        deadline = time.monotonic() + worker.LEAVE_SECONDS + 1.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join(REAP_SECONDS)
            self.exitcodes.append(process.exitcode)
            process.close()
        self._processes, self._pending = [], set()
        del self._store

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive(self, rank: int) -> Outcome:
        """The outcome of a rank that has sent a message or died."""
        process = self._processes[rank]
        message = b""
        with contextlib.suppress(EOFError, OSError):  # it died before or while sending
            if process.pipe.poll(0):
                message = process.pipe.recv_bytes()
        if not message:
            process.join(REAP_SECONDS)
            return self._timed(Outcome(rank, exitcode=process.exitcode))
        try:
            return pickle.loads(message)
        except Exception as error:  # an object of a class that only the rank can import
            return self._timed(worker.failure(rank, error))

    def _timed(self, outcome: Outcome) -> Outcome:
        now = time.monotonic()
        return replace(outcome, seconds=now - self._started, ended=now)

    def describe(self, outcome: Outcome) -> str:
        """What went wrong on a rank, for an error's message."""
        process = self._processes[outcome.rank]
        head = f"rank {outcome.rank} (pid {process.pid}), after {outcome.seconds:.1f} s"
        return f"{head}: {process.describe(outcome)}"

    def _raise_failures(self, what: str, outcomes: Sequence[Outcome]) -> None:
        failed = [outcome for outcome in outcomes if not outcome.ok]
        if not failed:
            return
        parts = [f"{what} failed on {len(failed)} of {self.world} ranks"]
        raise RankError("\n\n".join([*parts, *map(self.describe, failed)]), outcomes)
