"""Asynchronous collectives: a thread per group runs them in the order of their start."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.futures import Future

from tpkernels.errors import CollectiveTimeoutError
from tpkernels.groups.c10d import bridge

_EXIT_SECONDS = 5.0  # limit of the wait for pending collectives when the process ends


class CallWork(dist.Work):
    """A collective that is pending or has run. Its outputs are the value of its future."""

    def __init__(self, name: str, outputs: list[Any]) -> None:
        super().__init__()
        self._name, self._outputs = name, outputs
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._future: Future[list[Any]] = Future()

    def finish(self, error: BaseException | None) -> None:
        """Wake the threads that wait for the work. ``error``: the error of the collective."""
        self._error = error
        self._done.set()

    def finish_future(self) -> None:
        """Complete the future. Its callbacks run on this thread."""
        if self._error is None:
            self._future.set_result(self._outputs)
        else:
            bridge.fail_future(self._future, self._error)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the collective, and raise its error.

        Raises:
            CollectiveTimeoutError: the collective is still pending after ``timeout``. Zero: no
                limit other than the timeout of the group. The group remains usable.
        """
        seconds = timeout.total_seconds() or None
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
        self._pid = os.getpid()

    @property
    def pending(self) -> bool:
        """Return whether a collective has not run yet. A fork does not inherit the thread."""
        return self._num_pending > 0 and self._pid == os.getpid()

    def on_thread(self) -> bool:
        """Return whether the current thread is the thread of the group: a callback of a future."""
        return threading.current_thread() is self._thread

    def submit(
        self, work: CallWork, run: Callable[[], None], on_pending: Callable[[bool], None]
    ) -> None:
        """Run a collective after the pending ones. ``on_pending`` is called with True now, and with
        False once none is pending."""

        def job() -> None:
            error: BaseException | None = None
            try:
                run()
            except BaseException as raised:
                error = raised
            work.finish(error)
            with self._change:
                self._num_pending -= 1
                if self._num_pending == 0:
                    on_pending(False)
                    self._change.notify_all()
            work.finish_future()

        if self._pid != os.getpid():
            self._reset()
        with self._change:
            self._num_pending += 1
            on_pending(True)
            if self._thread is None:
                self._thread = threading.Thread(target=_serve, args=(self._jobs,), daemon=True)
                self._thread.start()
                weakref.finalize(self, _end, self._jobs, self._thread)
        self._jobs.put(job)

    def drain(self) -> None:
        """Wait until no collective is pending. Returns at once on the thread of the group."""
        if self.pending and not self.on_thread():
            with self._change:
                self._change.wait_for(lambda: self._num_pending == 0)

    def close(self) -> None:
        """End the thread after the pending collectives."""
        if self._thread is not None and self._pid == os.getpid():
            _end(self._jobs, self._thread)


def _serve(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # frees the tensors while the thread is idle


def _end(jobs: queue.SimpleQueue[Callable[[], None] | None], thread: threading.Thread) -> None:
    jobs.put(None)
    if threading.current_thread() is not thread:
        thread.join(_EXIT_SECONDS)
