"""Asynchronous collectives: a thread per group runs them in the order of their start."""

from __future__ import annotations

import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.futures import Future

from tpkernels.errors import CollectiveTimeoutError, GroupBrokenError
from tpkernels.groups.c10d import bridge

_logger = logging.getLogger("tpkernels")
_CLOSE_SECONDS = 5.0  # limit of the wait for pending collectives when the group is destroyed


class CallWork(dist.Work):
    """A collective that is pending or has run. Its outputs are the value of its future."""

    def __init__(self, name: str, outputs: list[Any]) -> None:
        super().__init__()
        self._name, self._outputs = name, outputs
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._future: Future[list[Any]] = Future()
        self.thread: threading.Thread | None = None  #: that runs it

    @classmethod
    def completed(cls, name: str, outputs: list[Any]) -> CallWork:
        """Return the work of a collective that has run."""
        work = cls(name, outputs)
        work.finish(None)
        work.finish_future()
        return work

    def finish(self, error: BaseException | None) -> None:
        """Wake the threads that wait for the work. ``error``: the error of the collective."""
        self._error = error
        self._done.set()

    def finish_future(self) -> None:
        """Complete the future. Its callbacks run on this thread."""
        try:
            if self._error is None:
                self._future.set_result(self._outputs)
            else:
                bridge.fail_future(self._future, self._error)
        except Exception:
            _logger.exception("the future of %s cannot be completed", self._name)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the collective, and raise its error.

        Raises:
            CollectiveTimeoutError: the collective is still pending after ``timeout``. Zero: no
                limit other than the timeout of the group. The group remains usable.
        """
        seconds = timeout.total_seconds() or None
        if threading.current_thread() is self.thread and not self._done.is_set():
            raise RuntimeError(
                f"a callback of a future waits for {self._name}, which runs after the callback on "
                "the same thread; wait for it outside the callback"
            )
        if not self._done.wait(seconds):
            raise CollectiveTimeoutError(f"{self._name} has not completed after {seconds:g} s")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Any]:
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Future[list[Any]]:
        return self._future


class AsyncCalls:
    """The thread of a group, which starts at the first asynchronous collective."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._num_pending, self._change = 0, threading.Condition()
        self._closed = False
        self._pid = os.getpid()

    @property
    def pending(self) -> bool:
        """Return whether a collective has not run yet. False in a fork, which has no thread."""
        return self._num_pending > 0 and self._pid == os.getpid()

    def on_thread(self) -> bool:
        """Return whether the current thread is the thread of the group: a callback of a future."""
        return threading.current_thread() is self._thread

    def check_open(self, group: str) -> None:
        """Raise ``GroupBrokenError`` after `close`."""
        if self._closed:
            raise GroupBrokenError(f"process group '{group}' has been shut down")

    def submit(
        self, work: CallWork, run: Callable[[], None], on_pending: Callable[[bool], None]
    ) -> None:
        """Run a collective after the pending ones. ``on_pending`` is called with True now, and with
        False once none is pending."""

        def job() -> None:
            try:
                run()
            except BaseException as error:
                work.finish(error)
            else:
                work.finish(None)
            # While callbacks run, the collectives of other threads wait in the queue, because a
            # callback may start a collective.
            work.finish_future()
            with self._change:
                self._num_pending -= 1
                if self._num_pending == 0:
                    on_pending(False)
                    self._change.notify_all()

        if self._pid != os.getpid():
            self._reset()
        with self._change:
            if self._thread is None:
                thread = threading.Thread(target=_serve, args=(self._jobs,), daemon=True)
                thread.start()
                self._thread = thread
                weakref.finalize(self, self._jobs.put, None).atexit = False
            work.thread = self._thread
            self._num_pending += 1
            on_pending(True)
        self._jobs.put(job)

    def drain(self, seconds: float | None = None) -> None:
        """Wait until no collective is pending, for at most ``seconds``. Returns at once on the
        thread of the group."""
        if self.pending and not self.on_thread():
            with self._change:
                self._change.wait_for(lambda: self._num_pending == 0, seconds)

    def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Refuse further collectives, and end the thread after the pending ones. Waits for them for
        at most ``seconds``."""
        self._closed = True
        self.drain(seconds)
        self._jobs.put(None)


def _serve(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # frees the tensors while the thread is idle
