"""The lock that gives a group's turns."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from tests.support.faults import together
from tpkernels import _C


def new_lock() -> _C.calls.Lock:
    return _C.calls.Turns().lock


def test_its_thread_may_take_it_again() -> None:
    lock = new_lock()
    with lock, lock:
        assert lock.acquire(blocking=False)
        lock.release()
    with pytest.raises(
        RuntimeError, match="cannot release the group lock: this thread does not hold it"
    ):
        lock.release()


def test_another_thread_waits_for_the_last_release() -> None:
    lock, events = new_lock(), []

    def other() -> None:
        events.append(lock.acquire(blocking=False))
        with pytest.raises(
            RuntimeError, match="cannot release the group lock: this thread does not hold it"
        ):
            lock.release()
        with lock:
            events.append("taken")

    with lock:
        with lock:
            thread = threading.Thread(target=other)
            thread.start()
            while not events:
                time.sleep(0.001)
        time.sleep(0.05)
        events.append("released")
    thread.join(10)
    assert events == [False, "released", "taken"]


def test_no_two_threads_have_it_at_once() -> None:
    """A counter that is read, and written after other threads have run, loses nothing."""
    lock, count = new_lock(), [0]

    def work() -> None:
        for i in range(200):
            with lock:
                seen = count[0]
                if i % 10 == 0:
                    time.sleep(0)
                count[0] = seen + 1

    assert together([work] * 4) == [None] * 4
    assert count[0] == 4 * 200


def test_an_interrupt_ends_the_wait() -> None:
    lock, held, done = new_lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        lock.acquire()
    assert time.monotonic() - begin < 10
    done.set()
    thread.join(10)
    assert lock.acquire(blocking=False)
