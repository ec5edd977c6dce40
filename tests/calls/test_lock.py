"""The group lock serializes the calls of a group."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from tests.support.faults import run_concurrently
from tpkernels import _C


def new_lock() -> _C.calls.Lock:
    return _C.calls.GroupCalls().lock


def test_the_owner_may_acquire_the_lock_again() -> None:
    lock = new_lock()
    with lock, lock:
        assert lock.acquire(blocking=False)
        lock.release()
    with pytest.raises(
        RuntimeError, match="cannot release the group lock: this thread does not hold it"
    ):
        lock.release()


def test_a_second_thread_waits_for_the_last_release() -> None:
    lock, events = new_lock(), []

    def second_thread() -> None:
        events.append(lock.acquire(blocking=False))
        with pytest.raises(
            RuntimeError, match="cannot release the group lock: this thread does not hold it"
        ):
            lock.release()
        with lock:
            events.append("taken")

    with lock:
        with lock:
            thread = threading.Thread(target=second_thread)
            thread.start()
            while not events:
                time.sleep(0.001)
        time.sleep(0.05)
        events.append("released")
    thread.join(10)
    assert events == [False, "released", "taken"]


def test_the_lock_is_mutually_exclusive() -> None:
    """Threads read a counter, yield, and write it back. No increment is lost."""
    lock, count = new_lock(), [0]

    def increment() -> None:
        for i in range(200):
            with lock:
                seen = count[0]
                if i % 10 == 0:
                    time.sleep(0)
                count[0] = seen + 1

    assert run_concurrently([increment] * 4) == [None] * 4
    assert count[0] == 4 * 200


def test_an_interrupt_ends_the_wait() -> None:
    lock, acquired, done = new_lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            acquired.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    acquired.wait(10)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        lock.acquire()
    assert time.monotonic() - start < 10
    done.set()
    thread.join(10)
    assert lock.acquire(blocking=False)
