"""Calls and streams of the object that every rank holds, whatever carries the messages.

Problem: a sharded model lives in several processes, and its user wants to call it like an object in
one. Calls must be quick, cost nothing while idle, carry tensors, and end with an error that names
the rank, whatever happens to it.

Algorithm: a `Job` is a message to all ranks and a last reply of each (`tpkernels.launch.worker`).
The executor receives replies until none is pending, a rank is lost, or time is up. `Ranks` and
`GroupExecutor` are its transports.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from tpkernels.launch import messages
from tpkernels.launch.messages import Message

TIMEOUT = 300.0  # s, for a call
STREAM_AHEAD = 8  # steps that ranks may be ahead of the consumer of a stream
GRACE_SECONDS = 5.0  # for the other ranks to report after the first error
LOST_GRACE_SECONDS = 0.2  # for the other ranks to report after one was lost
_E = TypeVar("_E", bound="Executor")


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
    """A job failed on some ranks; the message contains the traceback of each."""

    def __init__(self, message: str, outcomes: Sequence[Outcome]) -> None:
        super().__init__(message)
        self.outcomes = list(outcomes)


class GiveUp(Exception):
    """A transfer ended early: time is up, or a rank was lost. The job has recorded which."""


@dataclass
class Job:
    """A call, a stream or a function under way.

    Args:
        after_error, after_death: seconds for the other ranks to report after the first error, and
            after a rank was lost.
        pickled: a function, which `Ranks` sends after the message.
    """

    what: str
    world: int
    timeout: float
    after_error: float = field(default_factory=lambda: GRACE_SECONDS)
    after_death: float = field(default_factory=lambda: LOST_GRACE_SECONDS)
    pickled: bytes = b""

    def __post_init__(self) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self.pending = set(range(self.world))  # ranks that have not given their last reply
        self.lost = False  # a rank ended without it
        self.begun = time.monotonic()
        self.deadline = self.begun + self.timeout

    @property
    def failed(self) -> bool:
        return any(not outcome.ok for outcome in self.outcomes.values())

    def left(self) -> float:
        """Return the seconds until the deadline."""
        return self.deadline - time.monotonic()

    def note(self, rank: int, reply: tuple[Any, ...]) -> None:
        """Record the last reply of a rank."""
        kind, *fields = reply
        if kind == "error":
            text, name, seconds = fields
            outcome = Outcome(rank, error=text, error_type=name, seconds=seconds)
            self._record(outcome, self.after_error)
        else:
            value = fields[0] if kind == "result" else None
            self._record(Outcome(rank, value=value, seconds=fields[-1]))

    def lose(self, outcome: Outcome) -> None:
        """Record the end of a rank that has given no last reply."""
        seconds = time.monotonic() - self.begun
        self._record(replace(outcome, seconds=seconds), self.after_death)
        self.lost = True

    def by_rank(self) -> list[Outcome]:
        """Return all outcomes; ranks that have not answered have timed out."""
        seconds = time.monotonic() - self.begun
        late = {rank: Outcome(rank, timed_out=True, seconds=seconds) for rank in self.pending}
        return [(self.outcomes | late)[rank] for rank in range(self.world)]

    def _record(self, outcome: Outcome, grace: float = math.inf) -> None:
        self.outcomes[outcome.rank] = outcome
        self.pending.discard(outcome.rank)
        self.deadline = min(self.deadline, time.monotonic() + grace)


class Executor(ABC):
    """Calls methods of an object that every rank holds."""

    _ahead = STREAM_AHEAD

    def __init__(self, world: int, timeout: float) -> None:
        self.world = world
        self._timeout = checked(timeout)
        self._methods: frozenset[str] = frozenset()
        self._why_closed: str | None = None
        self._pid = os.getpid()
        self._turn = threading.Lock()  # held during a call, and while a stream is open
        self._streaming: int | None = None  # the thread that opened the stream

    def call(
        self,
        method: str,
        *args: Any,
        timeout: float | None = None,
        rank: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call a method on every rank, and return the results by rank.

        Arguments and results are None, numbers, strings, bytes, CPU tensors, and lists, tuples and
        dicts of them. A call of another thread waits for its turn.

        Args:
            timeout: seconds for the call on all ranks; by default the executor's.
            rank: returns the result of this rank alone; those of others are not sent.

        Raises:
            AttributeError: there is no such public method. Nothing was sent.
            TypeError, ValueError: an argument cannot be sent. Nothing was sent.
            TimeoutError: calls of other threads took all the time. Nothing was sent.
            RankError: the method raised, a rank died, or it took too long. The executor stays open
                if every rank has answered, and is closed otherwise. Groups whose collectives the
                method left on some ranks only may be broken even if it stays open.
        """
        timeout = self._timeout if timeout is None else checked(timeout)
        self._check(method, rank)
        message = request("call", method, args, kwargs, rank)
        with self._my_turn(timeout):
            outcomes = self._run(Job(method, self.world, timeout), message)
        return outcomes[rank].value if rank is not None else [one.value for one in outcomes]

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
        generators on all ranks after the same step, at most as many steps later. Until it is
        exhausted or closed, other calls wait, and those of the same thread are refused.

        Args:
            timeout: seconds for each item; by default the executor's.

        Raises:
            AttributeError, TypeError, ValueError, TimeoutError, RankError: as `call` does.
        """
        timeout = self._timeout if timeout is None else checked(timeout)
        self._check(method, rank)
        message = request("stream", method, args, kwargs, rank, self._ahead)
        return self._items(method, message, rank, timeout)

    def close(self) -> None:
        """End the ranks' part in this executor. Idempotent; without effect in a forked child."""
        self._close("it was closed")

    def _close(self, why: str) -> None:
        if self._why_closed is None and self._pid == os.getpid():
            self._why_closed = why
            idle = self._turn.acquire(blocking=False)
            try:
                self._end(idle)
            finally:
                if idle:
                    self._turn.release()

    def __enter__(self: _E) -> _E:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What transports implement.

    @abstractmethod
    def _send(self, message: Message, job: Job) -> None:
        """Send to all ranks. Raises GiveUp."""

    @abstractmethod
    def _receive(self, job: Job) -> tuple[int, tuple[Any, ...]] | None:
        """Return the next reply of a pending rank; None or GiveUp if none comes in time."""

    @abstractmethod
    def describe(self, outcome: Outcome) -> str:
        """Return what went wrong on a rank, for an error's message."""

    def _check_idle(self) -> None:  # noqa: B027
        """Refuse while ranks are at work on a function; not every transport runs them."""

    @abstractmethod
    def _end(self, idle: bool) -> None:
        """End the ranks; those of an idle executor read messages."""

    # Jobs.

    def _make(self, name: str, message: Message) -> None:
        """Make the object on every rank."""
        with self._my_turn(self._timeout):
            outcomes = self._run(Job(name, self.world, self._timeout), message, close_on_error=True)
        self._methods = frozenset.intersection(*(frozenset(one.value) for one in outcomes))

    def _run(self, job: Job, message: Message, close_on_error: bool = False) -> list[Outcome]:
        with self._closing_on_interrupt():
            with contextlib.suppress(GiveUp):
                self._send(message, job)
                self._drain(job)
            return self._finish(job, close_on_error)

    def _items(self, what: str, message: Message, rank: int, timeout: float) -> Iterator[Any]:
        half = max(1, self._ahead // 2)
        with self._my_turn(timeout):
            self._streaming = threading.get_ident()
            job, taken = Job(what, self.world, timeout), 0
            try:
                with self._closing_on_interrupt(), contextlib.suppress(GiveUp):
                    self._send(message, job)
                    while (arrived := self._receive(job)) is not None:
                        source, reply = arrived
                        if reply[0] != "item":
                            job.note(source, reply)
                            if source != rank and not job.failed:
                                continue  # items may be on their way
                            self._stop(job)
                            break
                        yield reply[1]
                        self._check_open()
                        job.deadline = time.monotonic() + timeout
                        taken += 1
                        if taken % half == 0:
                            self._send(messages.encode(("more", half)), job)
                self._finish(job)
            except GeneratorExit:
                if self._why_closed is None:
                    job.deadline = time.monotonic() + timeout
                    with self._closing_on_interrupt(), contextlib.suppress(GiveUp):
                        self._stop(job)
                    self._finish(job)
                raise
            finally:
                self._streaming = None

    def _stop(self, job: Job) -> None:
        if job.pending:
            self._send(messages.encode(("stop",)), job)
            self._drain(job)

    def _drain(self, job: Job) -> None:
        """Wait for the last replies."""
        while job.pending and (arrived := self._receive(job)) is not None:
            source, reply = arrived
            if reply[0] != "item":
                job.note(source, reply)

    def _finish(self, job: Job, close_on_error: bool = False) -> list[Outcome]:
        """Return the outcomes by rank. Raise if a rank failed, and close if one did not answer."""
        outcomes = job.by_rank()
        failed = [outcome for outcome in outcomes if not outcome.ok]
        if not failed:
            return outcomes
        parts = [f"{job.what} failed on {len(failed)} of {self.world} ranks"]
        for outcome in failed:
            quiet = outcome.timed_out and job.lost  # the cause is known: skip the stacks
            parts.append(f"rank {outcome.rank}: no answer" if quiet else self.describe(outcome))
        if job.pending or job.lost or close_on_error:
            parts.append("The executor is closed: start a new one.")
            self._close(f"{job.what} failed")
        raise RankError("\n\n".join(parts), outcomes)

    @contextlib.contextmanager
    def _closing_on_interrupt(self) -> Iterator[None]:
        """Close after Ctrl-C, or any error that leaves the ranks at work."""
        try:
            yield
        except (GeneratorExit, RankError):
            raise
        except BaseException as error:
            self._close(f"a call was left with {type(error).__name__}")
            raise

    # Checks.

    @contextlib.contextmanager
    def _my_turn(self, timeout: float, collecting: bool = False) -> Iterator[None]:
        self._check_open()
        if self._streaming == threading.get_ident():
            raise RuntimeError("a stream is open; exhaust or close its iterator first")
        if not self._turn.acquire(timeout=timeout):
            raise TimeoutError(f"calls of other threads took longer than {timeout:g} s")
        try:
            self._check_open()
            if not collecting:
                self._check_idle()
            yield
        finally:
            self._turn.release()

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise RuntimeError("this process is a fork and cannot use its parent's executor")
        if self._why_closed is not None:
            raise RuntimeError(f"this executor is closed ({self._why_closed}); start a new one")

    def _check(self, method: str, rank: int | None) -> None:
        self._check_open()
        if rank is not None and not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is not one of {self.world} ranks")
        if method in self._methods:
            return
        close = difflib.get_close_matches(method, self._methods, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise AttributeError(
            f"the ranks' object has no public method {method!r}{hint}; it has "
            f"{', '.join(sorted(self._methods)) or 'none'}"
        )


def request(kind: str, name: str, args: Sequence[Any], kwargs: Any, *rest: Any) -> Message:
    """Return a message of `tpkernels.launch.worker`."""
    what = ["", "", f"{name}: args", f"{name}: kwargs", *[""] * len(rest)]
    return messages.encode((kind, name, args, kwargs, *rest), what)


def checked(timeout: float) -> float:
    """Return a timeout that threads and locks take."""
    if not (timeout > 0 and math.isfinite(timeout)):
        raise ValueError(f"timeout must be a number of seconds above 0, got {timeout}")
    return float(min(timeout, threading.TIMEOUT_MAX))
