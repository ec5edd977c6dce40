"""What the executors share: calls and streams, given a way to send and to receive."""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from tpkernels.launch import messages
from tpkernels.launch.job import GiveUp, Job
from tpkernels.launch.messages import Message
from tpkernels.launch.ranks import RankError
from tpkernels.launch.worker import Outcome

STREAM_AHEAD = 8  # steps that ranks may be ahead of the consumer of a stream
_D = TypeVar("_D", bound="Driver")


class Driver(ABC):
    """Calls methods of an object that every rank holds."""

    _ahead = STREAM_AHEAD

    def __init__(self, world: int, timeout: float) -> None:
        self.world = world
        self._timeout = _checked(timeout)
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
        """Calls a method on every rank, and returns the results by rank.

        Arguments and results are what `tpkernels.launch.messages` can send. A call of another
        thread waits for its turn.

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
        timeout = self._timeout if timeout is None else _checked(timeout)
        self._check_rank(rank)
        self._check_method(method)
        message = request("call", method, args, kwargs, rank)
        with self._my_turn(timeout):
            outcomes = self._run(method, message, timeout)
        return outcomes[rank].value if rank is not None else [one.value for one in outcomes]

    def stream(
        self,
        method: str,
        *args: Any,
        timeout: float | None = None,
        rank: int = 0,
        **kwargs: Any,
    ) -> Iterator[Any]:
        """Runs a generator method on every rank, and yields what it yields on ``rank``.

        It starts when the first item is asked for, and must yield equally often on every rank. The
        ranks run at most `STREAM_AHEAD` steps ahead of the consumer. Closing the iterator ends the
        generators on all ranks after the same step, at most as many steps later. Until it is
        exhausted or closed, other calls wait, and those of the same thread are refused.

        Args:
            timeout: seconds for each item; by default the executor's.

        Raises:
            AttributeError, TypeError, ValueError, TimeoutError, RankError: as `call` does.
        """
        timeout = self._timeout if timeout is None else _checked(timeout)
        self._check_rank(rank)
        self._check_method(method)
        message = request("stream", method, args, kwargs, rank, self._ahead)
        return self._items(method, message, rank, timeout)

    def close(self) -> None:
        """Ends the ranks' part in this executor. Idempotent; without effect in a forked child."""
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

    def __enter__(self: _D) -> _D:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What transports implement.

    @abstractmethod
    def _send(self, message: Message, job: Job) -> None:
        """Sends to all ranks. Raises GiveUp."""

    @abstractmethod
    def _receive(self, job: Job) -> tuple[int, tuple[Any, ...]] | None:
        """The next reply of a pending rank; None or GiveUp if there will be none in time."""

    @abstractmethod
    def _describe(self, outcome: Outcome) -> str: ...

    @abstractmethod
    def _end(self, idle: bool) -> None:
        """Ends the ranks; those of an idle executor wait for messages."""

    # Jobs.

    def _make(self, name: str, message: Message) -> None:
        """Makes the object on every rank."""
        with self._my_turn(self._timeout):
            outcomes = self._run(name, message, self._timeout, close_on_error=True)
        self._methods = frozenset.intersection(*(frozenset(one.value) for one in outcomes))

    def _run(
        self, what: str, message: Message, timeout: float, close_on_error: bool = False
    ) -> list[Outcome]:
        job = Job(what, self.world, timeout)
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
        """Waits for the last replies."""
        while job.pending and (arrived := self._receive(job)) is not None:
            source, reply = arrived
            if reply[0] != "item":
                job.note(source, reply)

    def _finish(self, job: Job, close_on_error: bool = False) -> list[Outcome]:
        """The outcomes by rank. Raises if a rank failed, and closes if one has not answered."""
        if not job.pending and not job.failed:
            return [job.outcomes[rank] for rank in range(self.world)]
        outcomes = job.by_rank(self.world)
        failed = [outcome for outcome in outcomes if not outcome.ok]
        parts = [f"{job.what} failed on {len(failed)} of {self.world} ranks"]
        for outcome in failed:
            quiet = outcome.timed_out and job.lost  # why is known: do not look at each
            parts.append(f"rank {outcome.rank}: no answer" if quiet else self._describe(outcome))
        if job.pending or job.lost or close_on_error:
            parts.append("The executor is closed: start a new one.")
            self._close(f"{job.what} failed")
        raise RankError("\n\n".join(parts), outcomes)

    @contextlib.contextmanager
    def _closing_on_interrupt(self) -> Iterator[None]:
        """Closes after Ctrl-C, or any error that leaves the ranks at work."""
        try:
            yield
        except (GeneratorExit, RankError):
            raise
        except BaseException as error:
            self._close(f"a call was left with {type(error).__name__}")
            raise

    # Checks.

    @contextlib.contextmanager
    def _my_turn(self, timeout: float) -> Iterator[None]:
        self._check_open()
        if self._streaming == threading.get_ident():
            raise RuntimeError("a stream is open; exhaust or close its iterator first")
        if not self._turn.acquire(timeout=timeout):
            raise TimeoutError(f"calls of other threads took longer than {timeout:g} s")
        try:
            self._check_open()
            yield
        finally:
            self._turn.release()

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise RuntimeError("this process is a fork and cannot use its parent's executor")
        if self._why_closed is not None:
            raise RuntimeError(f"this executor is closed ({self._why_closed}); start a new one")

    def _check_rank(self, rank: int | None) -> None:
        if rank is not None and not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is not one of {self.world} ranks")

    def _check_method(self, method: str) -> None:
        self._check_open()
        if method in self._methods:
            return
        close = difflib.get_close_matches(method, self._methods, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise AttributeError(
            f"the ranks' object has no public method {method!r}{hint}; it has "
            f"{', '.join(sorted(self._methods)) or 'none'}"
        )


def request(kind: str, name: str, args: Sequence[Any], kwargs: Any, *rest: Any) -> Message:
    """A message of `tpkernels.launch.servant`."""
    what = ["", "", f"{name}: args", f"{name}: kwargs", *[""] * len(rest)]
    return messages.encode((kind, name, args, kwargs, *rest), what)


def _checked(timeout: float) -> float:
    if not (timeout > 0 and math.isfinite(timeout)):
        raise ValueError(f"timeout must be a number of seconds above 0, got {timeout}")
    return float(min(timeout, threading.TIMEOUT_MAX))
