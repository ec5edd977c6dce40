"""Worker processes on this machine, for the command line, the benchmarks, the tests and users.

Problem: working with real process groups requires ranks that start fast, run functions and hold
objects, report failures (an exception, a death, a hang) and never outlive the parent.

Algorithm: a fork server imports torch once, and every rank is forked from it. The parent hosts the
``TCPStore``. It has no rank: it sends messages and waits for replies through mailboxes in shared
memory (`csrc/host/mailbox.h`) in slices, and looks for dead ranks in between. Functions and their
results, which are pickled, travel through a pipe for each rank, so nothing that is read from
shared memory is unpickled.

Lifetime: each rank leads its own process group, so a Ctrl-C in the terminal reaches only the
parent, and killing a rank also kills the processes it started. However the parent dies, the kernel
kills the ranks (`worker.die_with_parent`). Closing asks idle ranks to leave, within a time limit,
and kills all others. The mailboxes have no name and need no clean-up.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tpkernels._C.host import Arena, Mailbox
from tpkernels.launch import executor, messages, worker
from tpkernels.launch.executor import TIMEOUT, Executor, GiveUp, Job, Outcome, request
from tpkernels.launch.messages import Message

_PRELOAD = ["torch", "torch.distributed", "tpkernels.launch.worker"]
_RUN = messages.encode(("run",))
_SLICE_S = 0.1  # between two looks at the ranks
_MESSAGE_S = 1.0  # for the rest of a reply that has begun to arrive
_REAP_S = 5.0  # from a rank's death to its exit code, through the fork server


def loopback_store() -> dist.TCPStore:
    """Host a store that only processes of this machine reach; by itself it would listen on all
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


class Ranks(Executor):
    """``world`` processes that form the default process group, run functions (`run`), and hold an
    object each if there is a ``factory`` (`call`, `stream`).

    Args:
        world: number of ranks, at least 1.
        factory: makes the object on each rank: a class or function at the top of a module, or its
            name as "module:Class". With a name, only the ranks import the module.
        args, kwargs: of the factory; what `call` can send.
        backend: for ``init_process_group``. With NCCL, rank r uses device r modulo their count.
        threads: intra-op threads of each rank (torch, OpenMP).
        env: added to the environment of the ranks, which is otherwise a copy of the parent's. It is
            set after torch is imported, so it does not affect what torch reads on import.
        timeout: seconds for the factory, and for a call or function that has no other.
        start_timeout: seconds within which all ranks must join the group.
        shared: an object that may hold descriptors, pickled by multiprocessing as the ranks start.
            Every function gets it as the keyword ``shared``.

    Raises:
        RankError: a rank did not start, or the factory failed.
        TypeError, ValueError: the factory or an argument cannot be sent.
    """

    def __init__(
        self,
        world: int,
        factory: str | Callable[..., Any] | None = None,
        *args: Any,
        backend: str = "gloo",
        threads: int = 1,
        env: Mapping[str, str] | None = None,
        timeout: float = TIMEOUT,
        start_timeout: float = 60.0,
        shared: Any = None,
        **kwargs: Any,
    ) -> None:
        if world < 1 or threads < 1:
            raise ValueError(f"world and threads must be at least 1, got {world=}, {threads=}")
        if env and "OMP_NUM_THREADS" in env:
            raise ValueError(f"pass threads={env['OMP_NUM_THREADS']}, not OMP_NUM_THREADS in env")
        super().__init__(world, timeout)
        if factory is not None:
            factory = worker.name_of(factory)
            making = request("make", factory, args, kwargs)
        self.exitcodes: list[int | None] = []  #: of the ranks, once they are closed
        self._processes: list[ForkServerProcess] = []
        self._pipes: list[connection.Connection] = []
        self._looking = threading.Lock()  # around the processes, which threads must not share
        self._store = loopback_store()
        # All ranks are on this machine: use loopback, whatever the host name resolves to.
        environ = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, **(env or {})}
        environ["OMP_NUM_THREADS"] = str(threads)
        self._job = Job("start", world, start_timeout)
        region_bytes = Mailbox.region_bytes(worker.RING_BYTES, world)
        with connection.Connection(Arena.create(region_bytes, world + 1)) as memory:
            self._out, self._in = worker.mailboxes(memory.fileno(), world, commit=True)
            setup = worker.Setup(
                world, backend, threads, environ, self._store.port, start_timeout, memory, shared
            )
            atexit.register(self.close)
            try:
                context = fork_server()
                for rank in range(world):
                    self._start(context, rank, setup)
            except BaseException:
                self.close()
                raise
        self._run(self._job, messages.encode(("join",)), close_on_error=True)
        if factory is not None:
            self._make(factory, making)

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call ``function(*args, **kwargs)`` on every rank, and return the results by rank.

        Functions and arguments are pickled, functions by reference: they must be importable in the
        ranks, which adopt the parent's ``sys.path`` with every call.

        Raises:
            RankError: it raised, a rank died, or one took longer than ``timeout`` seconds. The
                ranks' collectives may be out of step then, so they are closed.
        """
        timeout = self._timeout if timeout is None else executor.checked(timeout)
        data = pickle.dumps(sys.path) + pickle.dumps((function, args, kwargs))
        what = getattr(function, "__qualname__", repr(function))
        with self._my_turn(timeout):
            self._job = Job(
                what, self.world, timeout, after_death=executor.GRACE_SECONDS, pickled=data
            )
            return [one.value for one in self._run(self._job, _RUN, close_on_error=True)]

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Start ``function(*args, **kwargs)`` on every rank and return at once.

        Ranks that have died are skipped; `collect` reports them.
        """
        data = pickle.dumps(sys.path) + pickle.dumps((function, args, kwargs))
        with self._my_turn(self._timeout), self._closing_on_interrupt():
            self._job = Job("submit", self.world, self._timeout, math.inf, math.inf, data)
            try:
                self._send(_RUN, self._job)
            except GiveUp:
                self._finish(self._job)

    def collect(self, timeout: float) -> list[Outcome]:
        """Wait for the outcomes of the last `submit`, in rank order. Failed ones do not raise.

        Ranks that do not answer within ``timeout`` seconds are reported as timed out and keep
        running: a later call waits for them again, and closing kills them.
        """
        with self._my_turn(self._timeout, collecting=True):
            self._job.deadline = time.monotonic() + timeout
            try:
                self._drain(self._job)
            except GiveUp:
                self._close("a rank stopped in the middle of its answer")
            return self._job.by_rank()

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid for process in self._processes if process.pid is not None]

    @property
    def healthy(self) -> bool:
        """Return whether this is open, every rank is alive, and none is at work on what was
        submitted. Any thread may ask, at any time."""
        with self._looking:
            alive = all(process.exitcode is None for process in self._processes)
            return self._why_closed is None and alive and not self._job.pending

    def describe(self, outcome: Outcome) -> str:
        """Return what went wrong on a rank, for an error's message."""
        process = self._processes[outcome.rank]
        head = f"rank {outcome.rank} (pid {process.pid}), after {outcome.seconds:.1f} s"
        return f"{head}: {_cause(process, outcome)}"

    # The transport.

    def _start(self, context: ForkServerContext, rank: int, setup: worker.Setup) -> None:
        ours, theirs = context.Pipe(duplex=True)
        process = context.Process(
            target=worker.main, args=(rank, setup, theirs), name=f"tpkernels-rank-{rank}"
        )
        with theirs:
            try:
                process.start()
            except BaseException as error:
                ours.close()
                if isinstance(error, EOFError):
                    raise RuntimeError("the fork server died; see stderr for the cause") from error
                raise
        self._processes.append(process)
        self._pipes.append(ours)

    def _check_idle(self) -> None:
        if self._job.pending:
            raise RuntimeError(f"ranks {sorted(self._job.pending)} are still busy; collect() first")

    def _send(self, message: Message, job: Job) -> None:
        def check() -> None:
            if self._lose_dead(job, job.pending) or job.left() <= 0:
                raise GiveUp

        for part in message.parts:
            worker.transfer(self._out.write, part, _SLICE_S, check)
        for pipe in self._pipes if job.pickled else ():
            with contextlib.suppress(OSError):  # a dead rank
                pipe.send_bytes(job.pickled)

    def _receive(self, job: Job) -> tuple[int, tuple[Any, ...]] | None:
        while job.pending:
            left = job.left()
            if (rank := self._arrived(job, max(0.0, min(_SLICE_S, left)))) is not None:
                if (reply := self._read(rank, job)) is not None:
                    return rank, reply
            elif not self._lose_dead(job, job.pending) and left <= 0:
                break
        return None

    def _arrived(self, job: Job, seconds: float) -> int | None:
        """Return a pending rank that has sent something."""
        pending = sorted(job.pending)
        found = Mailbox.wait_any([self._in[rank] for rank in pending], seconds)
        return None if found < 0 else pending[found]

    def _read(self, rank: int, job: Job) -> tuple[Any, ...] | None:
        """Return the reply of a rank, or None if the rank died meanwhile."""
        until = max(job.deadline, time.monotonic() + _MESSAGE_S)

        def check() -> None:
            if self._lose_dead(job, [rank]) or time.monotonic() > until:
                raise GiveUp

        move = partial(self._in[rank].read, 0)
        reply: tuple[Any, ...]
        try:
            reply = messages.receive(lambda out: worker.transfer(move, out, _SLICE_S, check))
            if reply[0] != "pickled":
                return reply
            data = self._pipes[rank].recv_bytes()
        except (GiveUp, EOFError, OSError) as error:
            if not isinstance(error, GiveUp):  # it died while sending
                self._processes[rank].join(_REAP_S)
                self._lose_dead(job, [rank])
            if rank in job.pending:
                raise GiveUp from error
            return None
        try:
            return "result", pickle.loads(data), reply[1]
        except Exception as error:  # an object of a class that only the rank can import
            return "error", worker.describe(error), type(error).__name__, reply[1]

    def _lose_dead(self, job: Job, ranks: Collection[int]) -> bool:
        """Record the deaths among ``ranks``, and return whether there were any."""
        with self._looking:
            if self._why_closed is not None:
                raise RuntimeError("the executor was closed during a call")
            codes = {rank: self._processes[rank].exitcode for rank in ranks}
        dead = [rank for rank, code in codes.items() if code is not None]
        for rank in dead:
            job.lose(Outcome(rank, exitcode=codes[rank]))
        return bool(dead)

    def _end(self, idle: bool) -> None:
        with self._looking:
            atexit.unregister(self.close)
            for rank, process in enumerate(self._processes):
                if not idle or rank in self._job.pending:
                    _kill(process)
            deadline = time.monotonic() + worker.LEAVE_SECONDS + 1.0
            if idle:
                for part in messages.encode(worker.CLOSE).parts:
                    self._out.write(part, worker.LEAVE_SECONDS)
            for process, pipe in zip(self._processes, self._pipes, strict=True):
                process.join(max(0.0, deadline - time.monotonic()))
                _kill(process)
                process.join(_REAP_S)
                self.exitcodes.append(process.exitcode)
                pipe.close()
                with contextlib.suppress(ValueError):  # not reaped: the fork server is gone
                    process.close()
            self._processes, self._pipes = [], []
            del self._store


def fork_server(preload: Sequence[str] = ()) -> ForkServerContext:
    """Start the fork server if it is not running, and return its context.

    Args:
        preload: additional modules for the server to import, so that ranks need not.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOAD, *preload])
    # OpenMP and BLAS size their thread pools when they load, and a forked child cannot shrink a
    # pool that has started. Ranks raise the number through torch.set_num_threads.
    saved = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        if saved is not None:
            os.environ["OMP_NUM_THREADS"] = saved
    return context


def _kill(process: ForkServerProcess) -> None:
    """Send SIGKILL to a rank and the processes it started, even if they are stopped."""
    if process.exitcode is None and process.pid is not None:
        with contextlib.suppress(ProcessLookupError):  # has no group yet, or just exited
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()


def _cause(process: ForkServerProcess, outcome: Outcome) -> str:
    """Return what went wrong; for a rank that does not answer, its stacks (`worker.STACK_FILE`)."""
    if outcome.error is not None:
        return outcome.error.strip()
    if not outcome.timed_out:
        code = outcome.exitcode or 0
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    assert process.pid is not None
    proc = Path(f"/proc/{process.pid}")
    try:
        if (proc / "stat").read_text().rpartition(")")[2].split()[0] == "T":
            return "no answer: stopped by a signal"
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.1)
        links = {file: os.readlink(file) for file in (proc / "fd").iterdir()}
        stacks = [file.read_text() for file, to in links.items() if worker.STACK_FILE in to]
        return "\n".join(["no answer: still running", *stacks]).strip()
    except OSError as error:
        return f"no answer: {error}"
