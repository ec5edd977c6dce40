"""Ranks on this machine: processes that run functions, and methods of an object per rank.

Problem: tools and tests need ranks that form real process groups. The ranks must start fast, accept
and return tensors, use no CPU while idle, report failures (exceptions, deaths, hangs), and never
outlive the parent.

Algorithm: a fork server imports torch once, and every rank is forked from it. The parent hosts the
``TCPStore`` and is not a rank. A `Job` is a message to all ranks and one last reply of each rank
(`tpkernels.launch.worker`), through a socket pair per rank (`tpkernels.launch.messages`). The
parent sends and receives with a short timeout, and checks for dead ranks between attempts.

Lifetime: each rank leads a process group of the operating system. A Ctrl-C in the terminal
therefore reaches only the parent, and killing a rank also kills the processes it started. If the
parent dies for any reason, the kernel kills the ranks (`worker.die_with_parent`). Closing asks idle
ranks to exit within a time limit, and kills all other ranks.
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

TIMEOUT = 300.0  # default limit for a call, in seconds
STREAM_AHEAD = 8  # maximum steps of the ranks ahead of the consumer of a stream
GRACE_SECONDS = 5.0  # time for the remaining ranks to report after the first error
LOST_GRACE_SECONDS = 0.2  # time for the remaining ranks to report after a rank died in a call
_PRELOAD = ["torch", "torch.distributed", "tpkernels.launch.worker"]
_POLL_SECONDS = 0.1  # interval between checks for dead ranks
_MESSAGE_SECONDS = 1.0  # limit for the rest of a partially received reply
_REAP_SECONDS = 5.0  # limit from the death of a rank to its exit code from the fork server
_start_lock = threading.RLock()  # guards process state that a start changes temporarily


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job on one rank."""

    rank: int
    value: Any = None
    error: str | None = None  #: the traceback, as text
    error_type: str | None = None  #: class name of the exception
    exitcode: int | None = None  #: exit code of a rank that died; negative for a signal
    timed_out: bool = False  #: no reply by the deadline
    seconds: float = 0.0  #: run time; after a death or timeout, the time since the job was sent

    @property
    def ok(self) -> bool:
        """Return whether the function returned `value`."""
        return self.error is None and self.exitcode is None and not self.timed_out


class RankError(RuntimeError):
    """A job failed on some ranks. The message contains the tracebacks, equal tracebacks once."""

    def __init__(self, message: str, outcomes: Sequence[Outcome]) -> None:
        super().__init__(message)
        self.outcomes = list(outcomes)


class _TransferAborted(Exception):
    """A transfer was aborted, at the deadline or because a rank died. A death is recorded in the
    job."""


class Job:
    """A running call, stream or function.

    Args:
        grace: seconds for the remaining ranks to report after the first error, and after the death
            of a rank; by default `GRACE_SECONDS` and `LOST_GRACE_SECONDS`.
    """

    def __init__(
        self, name: str, world: int, timeout: float, grace: tuple[float, float] | None = None
    ) -> None:
        self.name = name
        self._grace = grace or (GRACE_SECONDS, LOST_GRACE_SECONDS)
        self._outcomes: dict[int, Outcome] = {}
        self.pending = set(range(world))  # ranks without a last reply
        self.lost = False  # whether a rank died without a last reply
        self._begin = time.monotonic()
        self.deadline = self._begin + timeout

    @property
    def failed(self) -> bool:
        return any(not outcome.ok for outcome in self._outcomes.values())

    def record(self, outcome: Outcome) -> None:
        """Record the last reply of a rank or its death. A failure shortens the deadline to the
        grace time."""
        self._outcomes[outcome.rank] = outcome
        self.pending.discard(outcome.rank)
        dead = outcome.exitcode is not None
        self.lost |= dead
        if not outcome.ok:
            self.deadline = min(self.deadline, time.monotonic() + self._grace[dead])

    def missing_reply(self, rank: int, **cause: Any) -> Outcome:
        """Return the outcome of a rank without a last reply."""
        return Outcome(rank, seconds=time.monotonic() - self._begin, **cause)

    def all_outcomes(self) -> list[Outcome]:
        """Return the outcomes by rank. Pending ranks are reported as timed out."""
        late = {rank: self.missing_reply(rank, timed_out=True) for rank in self.pending}
        return [outcome for _, outcome in sorted((self._outcomes | late).items())]


@contextlib.contextmanager
def _skip_main_script() -> Iterator[None]:
    """Configure multiprocessing to start processes that do not import the main script."""
    prepare = spawn.get_preparation_data

    def get_data(name: str) -> dict[str, Any]:
        data = prepare(name).items()
        return {key: value for key, value in data if not key.startswith("init_main_from_")}

    spawn.get_preparation_data = get_data
    try:
        yield
    finally:
        spawn.get_preparation_data = prepare


class Ranks:
    """An executor of ``world`` rank processes that form the default process group.

    The ranks run functions (`run`). With a ``factory``, each rank also has an object whose methods
    can be called (`call`, `stream`).

    Args:
        world: number of ranks, at least 1.
        factory: creates the object on each rank. The factory and its arguments are pickled, as in
            `run`.
        args, kwargs: arguments of the factory.
        backend: backend for ``init_process_group``. With NCCL, rank r uses device r modulo the
            number of devices.
        threads: intra-op threads of each rank (torch, OpenMP).
        env: variables to add to the environment of the ranks, which is a copy of the environment of
            the parent. They are set after torch is imported, so variables that torch reads at
            import have no effect.
        timeout: seconds for the factory, and the default for calls and functions.
        start_timeout: seconds until all ranks must have joined the group.
        lost_grace: seconds for the remaining ranks to report in `run` after the death of a rank.
        shared: an object that may contain file descriptors, pickled by multiprocessing when the
            ranks start. Every function gets it as the keyword ``shared``.
        import_main: whether the ranks import the main script. Required to call functions that the
            main script defines.

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
        self._timeout, self._lost_grace = _check_timeout(timeout), lost_grace
        self._methods: frozenset[str] = frozenset()
        self._close_reason: str | None = None
        self._pid = os.getpid()
        self._lock = threading.Lock()  # held during a call and while a stream is open
        self._streaming: int | None = None  # id of the thread that opened the stream
        request = [] if factory is None else _request("make", factory, args, kwargs)
        self.exitcodes: list[int | None] = []  #: exit codes by rank, after `close`
        self._processes: list[ForkServerProcess] = []
        self._pipes: list[socket.socket] = []
        self._processes_lock = threading.Lock()  # process objects are not thread-safe
        self._store = loopback_store()
        # All ranks are on this machine, so use loopback instead of the address of the host name.
        with _start_lock:
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
            with self._locked(self._timeout):
                job = Job(_function_name(factory), world, self._timeout)
                outcomes = self._run(job, request, close_on_error=True)
            self._methods = frozenset.intersection(
                *(frozenset(outcome.value) for outcome in outcomes)
            )

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call ``function(*args, **kwargs)`` on every rank, and return the results by rank.

        Functions and arguments are pickled, functions by reference, so functions must be importable
        on the ranks. With every call the ranks adopt the ``sys.path`` of the parent.

        Args:
            timeout: seconds for the call on all ranks; by default the timeout of the executor.

        Raises:
            RankError: the function raised, a rank died, or a rank did not return in time. The
                executor is then closed, because the ranks may be in different collectives.
        """
        timeout = self._timeout if timeout is None else _check_timeout(timeout)
        message = _request("run", function, args, kwargs)
        with self._locked(timeout):
            job = self._job = Job(
                _function_name(function), self.world, timeout, (GRACE_SECONDS, self._lost_grace)
            )
            outcomes = self._run(job, message, close_on_error=True)
        return [outcome.value for outcome in outcomes]

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Start ``function(*args, **kwargs)`` on every rank and return immediately.

        Dead ranks are skipped; `collect` reports them.
        """
        message = _request("run", function, args, kwargs)
        with self._locked(self._timeout):
            self._job = Job("submit", self.world, self._timeout, (math.inf, math.inf))
            try:
                self._send(self._job, message)
            except _TransferAborted:
                self._finish(self._job)

    def collect(self, timeout: float) -> list[Outcome]:
        """Return the outcomes of the last `submit`, in rank order. Failed outcomes do not raise.

        Ranks that do not reply within ``timeout`` seconds are reported as timed out and keep
        running. A later call of `collect` waits for them again, and `close` kills them.
        """
        with self._locked(self._timeout, busy=True):
            self._job.deadline = time.monotonic() + timeout
            try:
                self._drain(self._job)
            except _TransferAborted:
                self._close("a rank stopped while it was sending its result")
            return self._job.all_outcomes()

    def call(
        self,
        method: str,
        *args: Any,
        timeout: float | None = None,
        rank: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call a method on every rank, and return the results by rank.

        Arguments and results are pickled, so they are copies. Calls of different threads run one
        after another.

        Args:
            timeout: seconds for the call on all ranks; by default the timeout of the executor.
            rank: if not None, return only the result of this rank.

        Raises:
            AttributeError: the object has no such public method. The method was not called.
            TypeError: an argument cannot be pickled. The method was not called.
            TimeoutError: calls of different threads used up the timeout. The method was not called.
            RankError: the method raised, a rank died, or the call timed out. If every rank has
                replied, the executor stays open; otherwise it is closed. If the method left a
                collective on some ranks only, the process group may be broken in both cases.
        """
        timeout = self._timeout if timeout is None else _check_timeout(timeout)
        self._check(method, rank)
        message = _request("call", method, args, kwargs, rank)
        with self._locked(timeout):
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
        """Run a generator method on every rank, and yield the items of ``rank``.

        The method starts with the first ``next``. It must yield the same number of items on every
        rank. The ranks run at most `STREAM_AHEAD` steps ahead of the consumer. Closing the iterator
        ends the generators on all ranks after the same step, at most `STREAM_AHEAD` steps later.
        Until the iterator is exhausted or closed, calls of different threads wait, and calls of the
        same thread are refused.

        Args:
            timeout: seconds per item; by default the timeout of the executor.
            rank: the rank whose items are yielded.

        Raises:
            AttributeError, TypeError, TimeoutError, RankError: see `call`.
        """
        timeout = self._timeout if timeout is None else _check_timeout(timeout)
        self._check(method, rank)
        message = _request("stream", method, args, kwargs, rank, STREAM_AHEAD)
        return self._items(method, message, rank, timeout)

    @property
    def pids(self) -> list[int]:
        """Return the process ids by rank."""
        return [process.pid for process in self._processes if process.pid is not None]

    @property
    def healthy(self) -> bool:
        """Return whether the executor is open, every rank is alive, and no rank runs a submitted
        function. Callable from any thread at any time."""
        with self._processes_lock:
            alive = all(process.exitcode is None for process in self._processes)
            return self._close_reason is None and alive and not self._job.pending

    def describe(self, failed: Iterable[Outcome], stacks: bool = True) -> list[str]:
        """Return a description of each failed outcome for error messages.

        Args:
            stacks: include the Python stacks of ranks that did not reply.
        """
        lines: list[str] = []
        first: dict[str, int] = {}  # first rank with each traceback
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
                cause = f"no response: {_describe_hang(process.pid)}"
            else:
                lines.append(f"rank {rank}: no response")
                continue
            lines.append(f"rank {rank} (pid {process.pid}), after {outcome.seconds:.1f} s: {cause}")
        return lines

    def close(self) -> None:
        """End the rank processes. Idempotent; does nothing in a forked child."""
        self._close("close() was called")

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Jobs. All jobs except the first hold the lock (`_locked`).

    def _run(self, job: Job, message: Message, close_on_error: bool = False) -> list[Outcome]:
        with contextlib.suppress(_TransferAborted):
            self._send(job, message)
            self._drain(job)
        return self._finish(job, close_on_error)

    def _items(self, name: str, message: Message, rank: int, timeout: float) -> Iterator[Any]:
        half = STREAM_AHEAD // 2
        with self._locked(timeout):
            self._streaming = threading.get_ident()
            job, consumed = Job(name, self.world, timeout), 0
            try:
                with contextlib.suppress(_TransferAborted):
                    self._send(job, message)
                    for kind, outcome in self._replies(job):
                        if kind != "item":
                            if outcome.rank != rank and not job.failed:
                                continue  # items of `rank` may still arrive
                            self._stop(job)
                            break
                        yield outcome.value
                        self._check_open()
                        job.deadline = time.monotonic() + timeout
                        consumed += 1
                        if consumed % half == 0:
                            self._send(job, messages.encode(("more", half)))
                self._finish(job)
            except GeneratorExit:
                if self._close_reason is None:
                    job.deadline = time.monotonic() + timeout
                    with contextlib.suppress(_TransferAborted):
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
        """Wait for the last reply of every rank."""
        for _ in self._replies(job):
            pass

    def _finish(self, job: Job, close_on_error: bool = False) -> list[Outcome]:
        """Return the outcomes by rank. Raises ``RankError`` if a rank failed, and closes the
        executor if a rank did not reply."""
        outcomes = job.all_outcomes()
        failed = [outcome for outcome in outcomes if not outcome.ok]
        if not failed:
            return outcomes
        sections = [f"{job.name} failed on {len(failed)} of {self.world} ranks"]
        sections += self.describe(failed, stacks=not job.lost)  # a death explains missing replies
        if job.pending or job.lost or close_on_error:
            sections.insert(1, "The executor is closed: start a new one.")
            self._close(f"{job.name} failed")
        raise RankError("\n\n".join(sections), outcomes)

    def _close(self, reason: str) -> None:
        if self._close_reason is None and self._pid == os.getpid():
            self._close_reason = reason
            # If the lock is free, no call is running, and the ranks wait for messages.
            idle = self._lock.acquire(blocking=False)
            try:
                self._end(idle)
            finally:
                if idle:
                    self._lock.release()

    @contextlib.contextmanager
    def _locked(self, timeout: float, busy: bool = False) -> Iterator[None]:
        """Hold the lock of the executor. An error that leaves ranks in a call, such as Ctrl-C,
        closes the executor.

        Args:
            busy: the ranks may be running a submitted function, and continue if the block raises.
        """
        self._check_open()
        if self._streaming == threading.get_ident():
            raise RuntimeError("a stream is open; exhaust or close its iterator first")
        if not self._lock.acquire(timeout=timeout):
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
            self._lock.release()

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise RuntimeError(
                "this process was forked and cannot use the executor of its parent; "
                "create a new one"
            )
        if self._close_reason is not None:
            raise RuntimeError(f"this executor is closed ({self._close_reason}); start a new one")

    def _check(self, method: str, rank: int | None) -> None:
        self._check_open()
        if rank is not None and not 0 <= rank < self.world:
            raise ValueError(f"rank is {rank}; expected 0 to {self.world - 1}")
        if method not in self._methods:
            matches = difflib.get_close_matches(method, self._methods, n=1)
            hint = f" (did you mean {matches[0]!r}?)" if matches else ""
            raise AttributeError(
                f"the object on the ranks has no public method {method!r}{hint}; public methods: "
                f"{', '.join(sorted(self._methods)) or 'none'}"
            )

    # The transport.

    def _start(
        self, context: ForkServerContext, rank: int, setup: worker.Setup, import_main: bool
    ) -> None:
        parent_end, rank_end = socket.socketpair()
        parent_end.settimeout(_POLL_SECONDS)
        process = context.Process(
            target=worker.main, args=(rank, setup, rank_end), name=f"tpkernels-rank-{rank}"
        )
        with rank_end, _start_lock:
            try:
                with contextlib.nullcontext() if import_main else _skip_main_script():
                    process.start()
            except BaseException as error:
                parent_end.close()
                if isinstance(error, EOFError):
                    raise RuntimeError("the fork server died; see stderr for the cause") from error
                raise
        self._processes.append(process)
        self._pipes.append(parent_end)

    def _send(self, job: Job, message: Message) -> None:
        def check(rank: int) -> None:
            self._record_deaths(job, job.pending)
            if rank not in job.pending:
                raise BrokenPipeError
            if time.monotonic() >= job.deadline:
                raise _TransferAborted

        for rank, pipe in enumerate(self._pipes):
            with contextlib.suppress(OSError):  # a dead rank
                messages.send(pipe, message, partial(check, rank))

    def _check_progress(self, job: Job, ranks: Collection[int], deadline: float) -> None:
        """Raise `_TransferAborted` if one of the ranks has died or the deadline has passed."""
        if self._record_deaths(job, ranks) or time.monotonic() >= deadline:
            raise _TransferAborted

    def _replies(self, job: Job) -> Iterator[tuple[str, Outcome]]:
        """Yield (kind, outcome) of each reply, and record last replies. Ends after the last reply
        of every rank or at the deadline."""
        while job.pending:
            remaining, pending = job.deadline - time.monotonic(), sorted(job.pending)
            ready_rank = self._wait(pending, max(0.0, min(_POLL_SECONDS, remaining)))
            if ready_rank is not None:
                if (reply := self._read(ready_rank, job)) is not None:
                    if reply[0] != "item":
                        job.record(reply[1])
                    yield reply
            elif not self._record_deaths(job, job.pending) and remaining <= 0:
                return

    def _wait(self, ranks: Sequence[int], seconds: float) -> int | None:
        """Wait until the pipe of a rank is readable, and return the first such rank, or None after
        ``seconds``. The pipe of a dead rank is readable."""
        by_descriptor = {self._pipes[rank].fileno(): rank for rank in ranks}
        if -1 in by_descriptor:  # a different thread has closed the executor
            return None
        poll = select.poll()
        for descriptor in by_descriptor:
            poll.register(descriptor, select.POLLIN)
        ready = poll.poll(seconds * 1e3)
        return min((by_descriptor[descriptor] for descriptor, _ in ready), default=None)

    def _read(self, rank: int, job: Job) -> tuple[str, Outcome] | None:
        """Return the reply of a rank, or None if the rank died."""
        deadline = max(job.deadline, time.monotonic() + _MESSAGE_SECONDS)
        check = partial(self._check_progress, job, [rank], deadline)
        try:
            head, content = messages.receive(self._pipes[rank], check)
        except _TransferAborted:
            if rank in job.pending:  # not dead: the deadline has passed
                raise
            return None
        except (EOFError, OSError) as failure:
            if not self._record_deaths(job, [rank], _REAP_SECONDS):
                raise _TransferAborted from failure
            return None
        kind, error, error_type, seconds = head
        value = None
        try:
            value = messages.loads(content)
        except Exception as failure:  # for example a class that only the rank can import
            error, error_type = worker.describe(failure), type(failure).__name__
        return kind, Outcome(rank, value, error, error_type, seconds=seconds)

    def _record_deaths(self, job: Job, ranks: Collection[int], within: float = 0.0) -> bool:
        """Record which of the ``ranks`` have died, after waiting up to ``within`` seconds for each.
        Returns whether a rank has died."""
        with self._processes_lock:
            if self._close_reason is not None:
                raise RuntimeError("the executor was closed during a call")
            for rank in ranks if within else ():
                self._processes[rank].join(within)
            codes = {rank: self._processes[rank].exitcode for rank in ranks}
        dead = [rank for rank, code in codes.items() if code is not None]
        for rank in dead:
            job.record(job.missing_reply(rank, exitcode=codes[rank]))
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
                    pipe.shutdown(socket.SHUT_WR)  # idle ranks exit
            for process, pipe in zip(self._processes, self._pipes, strict=True):
                process.join(max(0.0, deadline - time.monotonic()))
                _kill(process)
                process.join(_REAP_SECONDS)
                self.exitcodes.append(process.exitcode)
                pipe.close()
                with contextlib.suppress(ValueError):  # not reaped, because the fork server died
                    process.close()
            self._processes = []
            del self._store


def fork_server(preload: Sequence[str] = ()) -> ForkServerContext:
    """Start the fork server if it is not running, and return its context.

    Args:
        preload: additional modules that the server imports for all ranks.
    """
    with _start_lock:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*_PRELOAD, *preload])
        # OpenMP and BLAS size their thread pools at load time, and a forked child cannot shrink a
        # started pool. Ranks increase the number with torch.set_num_threads.
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
    """Host a ``TCPStore`` on the loopback interface. By default a store listens on all
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
    """Return a message to `tpkernels.launch.worker` that calls a function, or a method by name."""
    name = _function_name(function)
    content = messages.dumps((function, args, kwargs), f"the call of {name}")
    return messages.encode((kind, sys.path, name, *rest), content)


def _function_name(function: Callable[..., Any] | str) -> str:
    if isinstance(function, str):
        return function
    return getattr(function, "__qualname__", repr(function))


def _check_timeout(timeout: float) -> float:
    """Return ``timeout``, limited to the maximum for locks. Raise ``ValueError`` if it is not
    positive and finite."""
    if not (timeout > 0 and math.isfinite(timeout)):
        raise ValueError(f"timeout must be a positive, finite number of seconds, got {timeout}")
    return float(min(timeout, threading.TIMEOUT_MAX))


def _kill(process: ForkServerProcess) -> None:
    """Send SIGKILL to a rank and the processes it started, even if they are stopped."""
    if process.exitcode is None and process.pid is not None:
        with contextlib.suppress(ProcessLookupError):  # no process group yet, or just exited
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()


def _describe_hang(pid: int) -> str:
    """Return the state of a rank that does not reply, with its Python stacks
    (`worker.STACK_FILE`)."""
    proc = Path(f"/proc/{pid}")
    try:
        if (proc / "stat").read_text().rpartition(")")[2].split()[0] == "T":
            return "stopped by a signal"
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.1)
        links = {file: os.readlink(file) for file in (proc / "fd").iterdir()}
        stacks = [file.read_text() for file, path in links.items() if worker.STACK_FILE in path]
        return "\n".join(["still running", *stacks]).strip()
    except OSError as error:
        return str(error)
