"""Ranks on this machine: processes that run functions, and methods of an object that each holds.

Problem: working with real process groups requires ranks that start fast, carry tensors, cost
nothing while idle, report failures (an exception, a death, a hang) and never outlive the parent.

Algorithm: a fork server imports torch once, and every rank is forked from it. The parent hosts the
``TCPStore`` and has no rank. A `Job` is a message to all ranks and one last reply of each
(`tpkernels.launch.worker`), through a pair of sockets for each rank (`tpkernels.launch.messages`).
The parent sends and waits for replies in slices, and looks for dead ranks in between.

Lifetime: each rank leads its own process group, so a Ctrl-C in the terminal reaches only the
parent, and killing a rank also kills the processes it started. However the parent dies, the kernel
kills the ranks (`worker.die_with_parent`). Closing asks idle ranks to leave, within a time limit,
and kills all others.
"""

from __future__ import annotations

import atexit
import contextlib
import difflib
import math
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver, spawn
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tpkernels.launch import messages, worker
from tpkernels.launch.messages import Message

TIMEOUT = 300.0  # s, for a call
STREAM_AHEAD = 8  # steps that ranks may be ahead of the consumer of a stream
GRACE_SECONDS = 5.0  # for the other ranks to report after the first error
LOST_GRACE_SECONDS = 0.2  # for the other ranks to report after one was lost in a call
_PRELOAD = ["torch", "torch.distributed", "tpkernels.launch.worker"]
_SLICE_S = 0.1  # between two looks at the ranks
_MESSAGE_S = 1.0  # for the rest of a reply that has begun to arrive
_REAP_S = 5.0  # from a rank's death to its exit code, through the fork server
_starting = threading.RLock()  # what a start changes in the process for a moment


@dataclass(frozen=True)
class Outcome:
    """The outcome of one job on one rank."""

    rank: int
    value: Any = None
    error: str | None = None  #: the traceback, as text
    error_type: str | None = None  #: the exception's class name
    exitcode: int | None = None  #: of a rank that died; negative: the signal
    timed_out: bool = False  #: no answer by the deadline
    seconds: float = 0.0  #: run time; after a death or timeout, since the job was sent

    @property
    def ok(self) -> bool:
        """Return whether the function returned `value`."""
        return self.error is None and self.exitcode is None and not self.timed_out


class RankError(RuntimeError):
    """A job failed on some ranks; the message contains the traceback of each, once if equal."""

    def __init__(self, message: str, outcomes: Sequence[Outcome]) -> None:
        super().__init__(message)
        self.outcomes = list(outcomes)


class _GiveUp(Exception):
    """A transfer ended early: time is up, or a rank was lost. The job has recorded which."""


class Job:
    """A call, a stream or a function under way.

    Args:
        grace: seconds for the other ranks to report after the first error, and after a rank was
            lost; by default `GRACE_SECONDS` and `LOST_GRACE_SECONDS`.
    """

    def __init__(
        self, what: str, world: int, timeout: float, grace: tuple[float, float] | None = None
    ) -> None:
        self.what = what
        self._grace = grace or (GRACE_SECONDS, LOST_GRACE_SECONDS)
        self._outcomes: dict[int, Outcome] = {}
        self.pending = set(range(world))  # ranks that have not given their last reply
        self.lost = False  # a rank ended without it
        self._begin = time.monotonic()
        self.deadline = self._begin + timeout

    @property
    def failed(self) -> bool:
        return any(not outcome.ok for outcome in self._outcomes.values())

    def record(self, outcome: Outcome) -> None:
        """Record the last reply of a rank, or its end without one; a failure starts a grace."""
        self._outcomes[outcome.rank] = outcome
        self.pending.discard(outcome.rank)
        dead = outcome.exitcode is not None
        self.lost |= dead
        if not outcome.ok:
            self.deadline = min(self.deadline, time.monotonic() + self._grace[dead])

    def without_reply(self, rank: int, **cause: Any) -> Outcome:
        """Return the outcome of a rank that has given no last reply."""
        return Outcome(rank, seconds=time.monotonic() - self._begin, **cause)

    def by_rank(self) -> list[Outcome]:
        """Return all outcomes; ranks that have not answered have timed out."""
        late = {rank: self.without_reply(rank, timed_out=True) for rank in self.pending}
        return [outcome for _, outcome in sorted((self._outcomes | late).items())]


@contextlib.contextmanager
def _without_main_script() -> Iterator[None]:
    """Start processes that do not import the main script."""
    prepare = spawn.get_preparation_data

    def without_main(name: str) -> dict[str, Any]:
        data = prepare(name).items()
        return {key: value for key, value in data if not key.startswith("init_main_from_")}

    spawn.get_preparation_data = without_main
    try:
        yield
    finally:
        spawn.get_preparation_data = prepare


class Ranks:
    """An executor: ``world`` processes that form the default process group, run functions (`run`)
    and, given a ``factory``, hold an object each (`call`, `stream`).

    Args:
        world: number of ranks, at least 1.
        factory: makes the object on each rank; it and its arguments are pickled, as `run` does.
        args, kwargs: of the factory.
        backend: for ``init_process_group``. With NCCL, rank r uses device r modulo their count.
        threads: intra-op threads of each rank (torch, OpenMP).
        env: added to the environment of the ranks, which is otherwise a copy of the parent's. It is
            set after torch is imported, so it does not affect what torch reads on import.
        timeout: seconds for the factory, and for a call or function that has no other.
        start_timeout: seconds within which all ranks must join the group.
        lost_grace: seconds that the other ranks have in `run` to report after one has died.
        shared: an object that may hold descriptors, pickled by multiprocessing as the ranks start.
            Every function gets it as the keyword ``shared``.
        import_main: whether the ranks import the main script. What it defines can only then be
            called there.

    Raises:
        RankError: a rank did not start, or the factory failed.
    """

    def __init__(
        self,
        world: int,
        factory: Callable[..., Any] | None = None,
        *args: Any,
        backend: str = "gloo",
        threads: int = 1,
        env: Mapping[str, str] | None = None,
        timeout: float = TIMEOUT,
        start_timeout: float = 60.0,
        lost_grace: float = LOST_GRACE_SECONDS,
        shared: object = None,
        import_main: bool = True,
        **kwargs: Any,
    ) -> None:
        if world < 1 or threads < 1:
            raise ValueError(f"world and threads must be at least 1, got {world=}, {threads=}")
        if env and "OMP_NUM_THREADS" in env:
            raise ValueError(f"pass threads={env['OMP_NUM_THREADS']}, not OMP_NUM_THREADS in env")
        self.world = world
        self._timeout, self._lost_grace = _checked_timeout(timeout), lost_grace
        self._methods: frozenset[str] = frozenset()
        self._why_closed: str | None = None
        self._pid = os.getpid()
        self._turn = threading.Lock()  # held during a call, and while a stream is open
        self._streaming: int | None = None  # the thread that opened the stream
        make = [] if factory is None else _request("make", factory, args, kwargs)
        self.exitcodes: list[int | None] = []  #: of the ranks, once they are closed
        self._processes: list[ForkServerProcess] = []
        self._pipes: list[socket.socket] = []
        self._processes_lock = threading.Lock()  # process objects are not thread-safe
        self._store = loopback_store()
        # All ranks are on this machine: use loopback, whatever the host name resolves to.
        with _starting:
            environ = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, **(env or {})}
        environ["OMP_NUM_THREADS"] = str(threads)
        self._job = Job("start", world, start_timeout)
        setup = worker.Setup(
            world, backend, threads, environ, self._store.port, start_timeout, shared
        )
        atexit.register(self.close)
        try:
            context = fork_server()
            for rank in range(world):
                self._start(context, rank, setup, import_main)
            self._run(self._job, messages.encode(("join",)), close_on_error=True)
        except BaseException:
            self.close()
            raise
        if factory is not None:
            with self._my_turn(self._timeout):
                job = Job(_name_of(factory), world, self._timeout)
                made = self._run(job, make, close_on_error=True)
            self._methods = frozenset.intersection(*(frozenset(outcome.value) for outcome in made))

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call ``function(*args, **kwargs)`` on every rank, and return the results by rank.

        Functions and arguments are pickled, functions by reference: they must be importable in the
        ranks, which adopt the parent's ``sys.path`` with every call.

        Raises:
            RankError: it raised, a rank died, or one took longer than ``timeout`` seconds. The
                executor is then closed, since the ranks' collectives may be out of step.
        """
        timeout = self._timeout if timeout is None else _checked_timeout(timeout)
        message = _request("run", function, args, kwargs)
        with self._my_turn(timeout):
            job = self._job = Job(
                _name_of(function), self.world, timeout, (GRACE_SECONDS, self._lost_grace)
            )
            outcomes = self._run(job, message, close_on_error=True)
        return [outcome.value for outcome in outcomes]

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Start ``function(*args, **kwargs)`` on every rank and return at once.

        Ranks that have died are skipped; `collect` reports them.
        """
        message = _request("run", function, args, kwargs)
        with self._my_turn(self._timeout):
            self._job = Job("submit", self.world, self._timeout, (math.inf, math.inf))
            try:
                self._send(self._job, message)
            except _GiveUp:
                self._finish(self._job)

    def collect(self, timeout: float) -> list[Outcome]:
        """Wait for the outcomes of the last `submit`, in rank order. Failed ones do not raise.

        Ranks that do not answer within ``timeout`` seconds are reported as timed out and keep
        running: a later call waits for them again, and closing kills them.
        """
        with self._my_turn(self._timeout, busy=True):
            self._job.deadline = time.monotonic() + timeout
            try:
                self._drain(self._job)
            except _GiveUp:
                self._close("a rank stopped while it was sending its result")
            return self._job.by_rank()

    def call(
        self,
        method: str,
        *args: Any,
        timeout: float | None = None,
        rank: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call a method on every rank, and return the results by rank.

        Arguments and results are pickled, and arrive as copies. A call of another thread waits for
        its turn.

        Args:
            timeout: seconds for the call on all ranks; by default the executor's.
            rank: if given, only this rank's result is sent and returned.

        Raises:
            AttributeError: there is no such public method. Nothing was sent.
            TypeError: an argument cannot be sent. Nothing was sent.
            TimeoutError: calls of other threads took all the time. Nothing was sent.
            RankError: the method raised, a rank died, or it took too long. The executor stays open
                if every rank has answered, and is closed otherwise. Groups whose collectives the
                method left on some ranks only may be broken even if it stays open.
        """
        timeout = self._timeout if timeout is None else _checked_timeout(timeout)
        self._check(method, rank)
        message = _request("call", method, args, kwargs, rank)
        with self._my_turn(timeout):
            outcomes = self._run(Job(method, self.world, timeout), message)
        return outcomes[rank].value if rank is not None else [outcome.value for outcome in outcomes]

    def stream(
        self,
        method: str,
        *args: Any,
        timeout: float | None = None,
        rank: int = 0,
        **kwargs: Any,
    ) -> Iterator[Any]:
        """Run a generator method on every rank, and yield what it yields on ``rank``.

        It starts when the first item is asked for, and must yield equally often on every rank. The
        ranks run at most `STREAM_AHEAD` steps ahead of the consumer. Closing the iterator ends the
        generators on all ranks after the same step, at most `STREAM_AHEAD` steps later. Until it is
        exhausted or closed, other calls wait, and those of the same thread are refused.

        Args:
            timeout: seconds for each item; by default the executor's.

        Raises:
            AttributeError, TypeError, TimeoutError, RankError: as `call` does.
        """
        timeout = self._timeout if timeout is None else _checked_timeout(timeout)
        self._check(method, rank)
        message = _request("stream", method, args, kwargs, rank, STREAM_AHEAD)
        return self._items(method, message, rank, timeout)

    @property
    def pids(self) -> list[int]:
        """Return process ids by rank."""
        return [process.pid for process in self._processes if process.pid is not None]

    @property
    def healthy(self) -> bool:
        """Return whether this is open, every rank is alive, and none is at work on what was
        submitted. Any thread may ask, at any time."""
        with self._processes_lock:
            alive = all(process.exitcode is None for process in self._processes)
            return self._why_closed is None and alive and not self._job.pending

    def describe(self, failed: Iterable[Outcome], stacks: bool = True) -> list[str]:
        """Return what went wrong on each rank, for an error's message.

        Args:
            stacks: show where ranks are that did not answer.
        """
        parts: list[str] = []
        first: dict[str, int] = {}  # the rank that has shown a traceback
        for outcome in failed:
            rank, process, code = outcome.rank, self._processes[outcome.rank], outcome.exitcode or 0
            if outcome.error is not None:
                cause = outcome.error.strip()
                if first.setdefault(cause, rank) != rank:
                    cause = f"same error as rank {first[cause]}"
            elif not outcome.timed_out:
                cause = (
                    f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                )
            elif stacks:
                assert process.pid is not None
                cause = f"no response: {_whereabouts(process.pid)}"
            else:
                parts.append(f"rank {rank}: no response")
                continue
            parts.append(f"rank {rank} (pid {process.pid}), after {outcome.seconds:.1f} s: {cause}")
        return parts

    def close(self) -> None:
        """End the rank processes. Idempotent; does nothing in a forked child."""
        self._close("close() was called")

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Jobs. All but the first run within `_my_turn`.

    def _run(self, job: Job, message: Message, close_on_error: bool = False) -> list[Outcome]:
        with contextlib.suppress(_GiveUp):
            self._send(job, message)
            self._drain(job)
        return self._finish(job, close_on_error)

    def _items(self, what: str, message: Message, rank: int, timeout: float) -> Iterator[Any]:
        half = STREAM_AHEAD // 2
        with self._my_turn(timeout):
            self._streaming = threading.get_ident()
            job, taken = Job(what, self.world, timeout), 0
            try:
                with contextlib.suppress(_GiveUp):
                    self._send(job, message)
                    for kind, outcome in self._replies(job):
                        if kind != "item":
                            if outcome.rank != rank and not job.failed:
                                continue  # items may be on their way
                            self._stop(job)
                            break
                        yield outcome.value
                        self._check_open()
                        job.deadline = time.monotonic() + timeout
                        taken += 1
                        if taken % half == 0:
                            self._send(job, messages.encode(("more", half)))
                self._finish(job)
            except GeneratorExit:
                if self._why_closed is None:
                    job.deadline = time.monotonic() + timeout
                    with contextlib.suppress(_GiveUp):
                        self._stop(job)
                    self._finish(job)
                raise
            finally:
                self._streaming = None

    def _stop(self, job: Job) -> None:
        if job.pending:
            self._send(job, messages.encode(("stop",)))
            self._drain(job)

    def _drain(self, job: Job) -> None:
        """Wait for the last replies."""
        for _ in self._replies(job):
            pass

    def _finish(self, job: Job, close_on_error: bool = False) -> list[Outcome]:
        """Return the outcomes by rank. Raise if a rank failed, and close if one did not answer."""
        outcomes = job.by_rank()
        failed = [outcome for outcome in outcomes if not outcome.ok]
        if not failed:
            return outcomes
        parts = [f"{job.what} failed on {len(failed)} of {self.world} ranks"]
        parts += self.describe(failed, stacks=not job.lost)  # a dead rank is cause enough
        if job.pending or job.lost or close_on_error:
            parts.insert(1, "The executor is closed: start a new one.")
            self._close(f"{job.what} failed")
        raise RankError("\n\n".join(parts), outcomes)

    def _close(self, why: str) -> None:
        if self._why_closed is None and self._pid == os.getpid():
            self._why_closed = why
            idle = self._turn.acquire(blocking=False)  # no call is under way: ranks read messages
            try:
                self._end(idle)
            finally:
                if idle:
                    self._turn.release()

    @contextlib.contextmanager
    def _my_turn(self, timeout: float, busy: bool = False) -> Iterator[None]:
        """Hold the turn. Ctrl-C, or any other error that leaves the ranks at work, closes the
        executor.

        Args:
            busy: ranks may be at work on a function, and go on if the caller leaves.
        """
        self._check_open()
        if self._streaming == threading.get_ident():
            raise RuntimeError("a stream is open; exhaust or close its iterator first")
        if not self._turn.acquire(timeout=timeout):
            raise TimeoutError(
                f"timed out after {timeout:g} s: calls of other threads hold the executor"
            )
        try:
            self._check_open()
            if self._job.pending and not busy:
                busy_ranks = sorted(self._job.pending)
                raise RuntimeError(
                    f"ranks {busy_ranks} are still running the submitted call; call collect() first"
                )
            try:
                yield
            except (GeneratorExit, RankError):
                raise
            except BaseException as error:
                if not busy:
                    self._close(f"a call was interrupted by {type(error).__name__}")
                raise
        finally:
            self._turn.release()

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise RuntimeError(
                "this process was forked and cannot use the executor of its parent; "
                "create a new one"
            )
        if self._why_closed is not None:
            raise RuntimeError(f"this executor is closed ({self._why_closed}); start a new one")

    def _check(self, method: str, rank: int | None) -> None:
        self._check_open()
        if rank is not None and not 0 <= rank < self.world:
            raise ValueError(f"rank is {rank}; expected 0 to {self.world - 1}")
        if method not in self._methods:
            close = difflib.get_close_matches(method, self._methods, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise AttributeError(
                f"the object on the ranks has no public method {method!r}{hint}; public methods: "
                f"{', '.join(sorted(self._methods)) or 'none'}"
            )

    # The transport.

    def _start(
        self, context: ForkServerContext, rank: int, setup: worker.Setup, import_main: bool
    ) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(_SLICE_S)
        process = context.Process(
            target=worker.main, args=(rank, setup, theirs), name=f"tpkernels-rank-{rank}"
        )
        with theirs, _starting:
            try:
                with contextlib.nullcontext() if import_main else _without_main_script():
                    process.start()
            except BaseException as error:
                ours.close()
                if isinstance(error, EOFError):
                    raise RuntimeError("the fork server died; see stderr for the cause") from error
                raise
        self._processes.append(process)
        self._pipes.append(ours)

    def _send(self, job: Job, message: Message) -> None:
        def check(rank: int) -> None:
            self._record_deaths(job, job.pending)
            if rank not in job.pending:
                raise BrokenPipeError
            if time.monotonic() >= job.deadline:
                raise _GiveUp

        for rank, pipe in enumerate(self._pipes):
            with contextlib.suppress(OSError):  # a dead rank
                messages.send(pipe, message, partial(check, rank))

    def _give_up_if(self, job: Job, ranks: Collection[int], deadline: float) -> None:
        """Raise if one of the ranks has died, or time is up."""
        if self._record_deaths(job, ranks) or time.monotonic() >= deadline:
            raise _GiveUp

    def _replies(self, job: Job) -> Iterator[tuple[str, Outcome]]:
        """Yield the kind and the content of each reply, and record those that are a rank's last,
        until all ranks have given theirs or time is up."""
        while job.pending:
            left, pending = job.deadline - time.monotonic(), sorted(job.pending)
            arrived = self._wait(pending, max(0.0, min(_SLICE_S, left)))
            if arrived is not None:
                if (reply := self._read(arrived, job)) is not None:
                    if reply[0] != "item":
                        job.record(reply[1])
                    yield reply
            elif not self._record_deaths(job, job.pending) and left <= 0:
                return

    def _wait(self, ranks: Sequence[int], seconds: float) -> int | None:
        """Return the first rank that has sent something, or closed its pipe by dying."""
        by_descriptor = {self._pipes[rank].fileno(): rank for rank in ranks}
        if -1 in by_descriptor:  # another thread has closed the executor
            return None
        poll = select.poll()
        for descriptor in by_descriptor:
            poll.register(descriptor, select.POLLIN)
        ready = poll.poll(seconds * 1e3)
        return min((by_descriptor[descriptor] for descriptor, _ in ready), default=None)

    def _read(self, rank: int, job: Job) -> tuple[str, Outcome] | None:
        """Return the reply of a rank, or None if the rank died meanwhile."""
        until = max(job.deadline, time.monotonic() + _MESSAGE_S)
        check = partial(self._give_up_if, job, [rank], until)
        try:
            head, content = messages.receive(self._pipes[rank], check)
        except _GiveUp:
            if rank in job.pending:  # time is up
                raise
            return None
        except (EOFError, OSError) as failure:
            if not self._record_deaths(job, [rank], _REAP_S):
                raise _GiveUp from failure
            return None
        kind, error, error_type, seconds = head
        value = None
        try:
            value = messages.loads(content)
        except Exception as failure:  # an object of a class that only the rank can import
            error, error_type = worker.describe(failure), type(failure).__name__
        return kind, Outcome(rank, value, error, error_type, seconds=seconds)

    def _record_deaths(self, job: Job, ranks: Collection[int], within: float = 0.0) -> bool:
        """Record the deaths among ``ranks``, each of which may be about to die ``within`` seconds,
        and return whether there were any."""
        with self._processes_lock:
            if self._why_closed is not None:
                raise RuntimeError("the executor was closed during a call")
            for rank in ranks if within else ():
                self._processes[rank].join(within)
            codes = {rank: self._processes[rank].exitcode for rank in ranks}
        dead = [rank for rank, code in codes.items() if code is not None]
        for rank in dead:
            job.record(job.without_reply(rank, exitcode=codes[rank]))
        return bool(dead)

    def _end(self, idle: bool) -> None:
        with self._processes_lock:
            atexit.unregister(self.close)
            for rank, process in enumerate(self._processes):
                if not idle or rank in self._job.pending:
                    _kill(process)
            deadline = time.monotonic() + worker.LEAVE_SECONDS + 1.0
            for pipe in self._pipes:
                with contextlib.suppress(OSError):  # a dead rank
                    pipe.shutdown(socket.SHUT_WR)  # idle ranks leave
            for process, pipe in zip(self._processes, self._pipes, strict=True):
                process.join(max(0.0, deadline - time.monotonic()))
                _kill(process)
                process.join(_REAP_S)
                self.exitcodes.append(process.exitcode)
                pipe.close()
                with contextlib.suppress(ValueError):  # not reaped: the fork server is gone
                    process.close()
            self._processes = []
            del self._store


def fork_server(preload: Sequence[str] = ()) -> ForkServerContext:
    """Start the fork server if it is not running, and return its context.

    Args:
        preload: additional modules for the server to import, so that ranks need not.
    """
    with _starting:
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


def loopback_store() -> dist.TCPStore:
    """Host a ``TCPStore`` that only this machine can reach; by default it listens on all
    interfaces."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return dist.TCPStore(
            "127.0.0.1",
            listening.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),  # the store closes it
        )


def _request(
    kind: str, function: Callable[..., Any] | str, args: object, kwargs: object, *rest: object
) -> Message:
    """Return a message of `tpkernels.launch.worker` that calls a function, or a method by name."""
    name = _name_of(function)
    content = messages.dumps((function, args, kwargs), f"the call of {name}")
    return messages.encode((kind, sys.path, name, *rest), content)


def _name_of(function: Callable[..., Any] | str) -> str:
    if isinstance(function, str):
        return function
    return getattr(function, "__qualname__", repr(function))


def _checked_timeout(timeout: float) -> float:
    """Return ``timeout``, at most what locks accept. Raise ``ValueError`` if it is not positive and
    finite."""
    if not (timeout > 0 and math.isfinite(timeout)):
        raise ValueError(f"timeout must be a positive, finite number of seconds, got {timeout}")
    return float(min(timeout, threading.TIMEOUT_MAX))


def _kill(process: ForkServerProcess) -> None:
    """Send SIGKILL to a rank and the processes it started, even if they are stopped."""
    if process.exitcode is None and process.pid is not None:
        with contextlib.suppress(ProcessLookupError):  # has no group yet, or just exited
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()


def _whereabouts(pid: int) -> str:
    """Return why a rank does not answer, with its Python stacks (`worker.STACK_FILE`)."""
    proc = Path(f"/proc/{pid}")
    try:
        if (proc / "stat").read_text().rpartition(")")[2].split()[0] == "T":
            return "stopped by a signal"
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.1)
        links = {file: os.readlink(file) for file in (proc / "fd").iterdir()}
        stacks = [file.read_text() for file, to in links.items() if worker.STACK_FILE in to]
        return "\n".join(["still running", *stacks]).strip()
    except OSError as error:
        return str(error)
