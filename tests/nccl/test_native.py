"""Bounded calls of `tpkernels.nccl` on a fake libnccl that fails on demand: timeouts, errors,
aborts from another thread, calls that never return, and forks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from tests.support import faults
from tests.support.fake_nccl import (
    IN_PROGRESS,
    INVALID_ARGUMENT,
    REMOTE_ERROR,
    SUCCESS,
    TIMEOUT,
    Build,
    Fake,
)
from tests.support.faults import Ending
from tests.support.paths import ROOT
from tests.support.processes import python
from tpkernels import _C, nccl

SHORT, LONG = 0.3, 30.0
DELAY_SECONDS = 3  # seconds until a delayed NCCL function returns
BUFFER = torch.zeros(64, dtype=torch.float64)

Bounded = nccl._Bounded


@pytest.fixture
def fake(fake_nccl: Build) -> Fake:
    return fake_nccl()


def make(fake: Fake, timeout: float = LONG, unique_id: bytes = bytes(range(128))) -> Bounded:
    library = nccl.load(fake.path)
    native = _C.nccl.Communicator(library, unique_id, 0, 1)
    return Bounded(native, library, "NCCL communicator 'tp', rank 0 of 1", timeout)


def enqueue(communicator: Bounded, *kinds: str) -> None:
    address = BUFFER.data_ptr()
    communicator.enqueue([(kind, address, address, 8, 7, 0, 5) for kind in kinds])


# For each name: the NCCL function that fails, and the call that uses it.
CALLS: dict[str, tuple[str, Callable[[Bounded], object]]] = {
    "all_reduce": ("ncclAllReduce", lambda c: enqueue(c, "all_reduce")),
    "group start": ("ncclGroupStart", lambda c: enqueue(c, "send", "recv")),
    "first of group": ("ncclSend", lambda c: enqueue(c, "send", "recv")),
    "last of group": ("ncclRecv", lambda c: enqueue(c, "send", "recv")),
    "group end": ("ncclGroupEnd", lambda c: enqueue(c, "send", "recv")),
    "close": ("ncclCommFinalize", lambda c: c.close()),
}


def start_call(communicator: Bounded, fake: Fake, call: str = "all_reduce") -> Future[Ending]:
    """Start a call in a different thread and wait until it enters NCCL."""
    function, run = CALLS[call]
    ending = ThreadPoolExecutor(1).submit(faults.record_ending, lambda: run(communicator))
    deadline = time.monotonic() + 5
    while not fake.calls(function) and time.monotonic() < deadline:
        time.sleep(0.001)
    return ending


def require_broken(fake: Fake, communicator: Bounded, reason: str) -> None:
    """Check that NCCL aborted the communicator once and that later calls do not enter NCCL."""
    assert (fake.calls("ncclCommAbort"), fake.alive(), fake.misuse(), fake.depth()) == (1, 0, 0, 0)
    counts = fake.calls("ncclCommGetAsyncError"), fake.calls("ncclAllReduce")
    for call in (lambda: enqueue(communicator, "all_reduce"), communicator.check):
        ending = faults.record_ending(call)
        assert ending.error == "GroupBrokenError" and ending.seconds < LONG / 2, ending
        assert "cannot run more calls; create a new communicator. The reason: " in ending.message, (
            ending
        )
        assert reason in ending.message, ending
    communicator.close()  # no effect after the abort
    communicator.abort("again")
    assert counts == (fake.calls("ncclCommGetAsyncError"), fake.calls("ncclAllReduce"))
    assert fake.calls("ncclCommAbort") == 1


def test_nccl_receives_the_config_and_the_id(fake: Fake) -> None:
    make(fake)
    config, unique_id = fake.init()
    assert config == f"24 {0xCAFEBEEF} 21400 0"  # size, magic, version, blocking=0
    assert bytes(map(int, unique_id.split())) == bytes(range(128))
    with pytest.raises(ValueError, match="unique_id must have 128 bytes"):
        make(fake, unique_id=b"short")


# Waiting and failing.


@pytest.mark.parametrize("code", [SUCCESS, IN_PROGRESS])
def test_a_call_in_progress_is_waited_for(fake_nccl: Build, code: int) -> None:
    for function, run in CALLS.values():
        fake = fake_nccl()
        fake.progress(20)
        communicator = make(fake)
        if function != "ncclGroupStart":
            fake.result(function, code)
        before = fake.calls("ncclCommGetAsyncError")
        run(communicator)
        assert fake.calls("ncclCommGetAsyncError") - before >= 21, function
        assert (fake.calls(function), fake.calls("ncclCommAbort"), fake.misuse()) == (1, 0, 0)


@pytest.mark.parametrize("call", ["all_reduce", "close"])
def test_a_call_that_never_ends_is_given_up(fake: Fake, call: str) -> None:
    communicator = make(fake, SHORT)
    fake.progress(-1)
    ending = faults.record_ending(lambda: CALLS[call][1](communicator))
    assert ending.error == "CollectiveTimeoutError" and SHORT <= ending.seconds < LONG / 2, ending
    pattern = f"NCCL communicator 'tp', rank 0 of 1: {call} did not complete within 0.3 s: a rank "
    assert pattern in ending.message, ending
    require_broken(fake, communicator, "did not complete within 0.3 s")


ERRORS = {
    REMOTE_ERROR: "PeerLostError",
    TIMEOUT: "CollectiveTimeoutError",
    INVALID_ARGUMENT: "TpkernelsError",
}


@pytest.mark.parametrize(
    ("call", "code"),
    [*((call, REMOTE_ERROR) for call in CALLS), *(("all_reduce", code) for code in ERRORS)],
)
def test_a_call_that_fails(fake: Fake, call: str, code: int) -> None:
    communicator = make(fake)
    function, run = CALLS[call]
    fake.result(function, code)
    ending = faults.record_ending(lambda: run(communicator))
    assert ending.error == ERRORS[code]
    assert f"failed: fake error {code}; last message: {function} broke" in ending.message
    require_broken(fake, communicator, f"fake error {code}")


@pytest.mark.parametrize("polls", [0, 20])
def test_an_asynchronous_error(fake: Fake, polls: int) -> None:
    communicator, second = make(fake), make(fake)
    enqueue(communicator, "all_reduce")
    communicator.check()
    fake.asynchronous(REMOTE_ERROR)
    fake.progress(polls)
    ending = faults.record_ending(
        lambda: enqueue(communicator, "all_reduce") if polls else communicator.check()
    )
    assert ending.error == "PeerLostError", ending
    assert "fake error 6; last message: a link went down" in ending.message
    fake.asynchronous(SUCCESS)
    assert (fake.calls("ncclCommAbort"), fake.alive()) == (1, 1)
    enqueue(second, "all_reduce")  # the second communicator still works
    second.close()
    require_broken(fake, communicator, "a link went down")


# Setup.


@pytest.mark.parametrize("code", [SUCCESS, IN_PROGRESS])
def test_set_up_is_waited_for(fake: Fake, code: int) -> None:
    fake.progress(50)
    fake.result("ncclCommInitRankConfig", code)
    make(fake)
    assert fake.calls("ncclCommGetAsyncError") == 51
    fake.progress(-1)
    ending = faults.record_ending(lambda: make(fake, SHORT))
    assert ending.error == "CollectiveTimeoutError"
    assert "rank 0 of 1: setup did not complete within 0.3 s" in ending.message
    assert (fake.calls("ncclCommAbort"), fake.alive(), fake.misuse()) == (1, 1, 0)


def test_set_up_that_fails(fake: Fake) -> None:
    fake.asynchronous(REMOTE_ERROR)
    ending = faults.record_ending(lambda: make(fake))
    assert ending.error == "PeerLostError" and "setup failed: fake error 6" in ending.message
    assert (fake.calls("ncclCommAbort"), fake.alive()) == (1, 0)
    fake.result("ncclCommInitRankConfig", INVALID_ARGUMENT)
    ending = faults.record_ending(lambda: make(fake))
    assert ending.error == "TpkernelsError" and "setup failed: fake error 4" in ending.message
    assert fake.calls("ncclCommAbort") == 1  # NCCL created no communicator that needs an abort
    assert fake.misuse() == 0


# Endings.


def test_close_waits_for_the_peers_and_frees(fake: Fake) -> None:
    communicator = make(fake)
    fake.progress(30)
    communicator.close()
    communicator.close()
    counts = [fake.calls(f"nccl{name}") for name in ("CommFinalize", "CommDestroy", "CommAbort")]
    assert (counts, fake.alive(), fake.misuse()) == ([1, 1, 0], 0, 0)
    ending = faults.record_ending(lambda: enqueue(communicator, "all_reduce"))
    assert ending.error == "GroupBrokenError" and "The reason: it was closed" in ending.message
    communicator.abort("late")
    assert fake.calls("ncclCommAbort") == 0


def test_an_abort_that_does_not_return(fake: Fake) -> None:
    communicator = make(fake, SHORT)
    fake.delay("ncclCommAbort", 1000 * DELAY_SECONDS)
    fake.progress(-1)
    ending = faults.record_ending(lambda: enqueue(communicator, "all_reduce"))
    assert ending.error == "CollectiveTimeoutError" and ending.seconds < DELAY_SECONDS, ending
    assert "; ncclCommAbort did not return and was abandoned" in ending.message


def test_a_destroy_that_does_not_return(fake: Fake) -> None:
    communicator = make(fake, SHORT)
    fake.delay("ncclCommDestroy", 1000 * DELAY_SECONDS)
    ending = faults.record_ending(communicator.close)
    assert ending.error == "CollectiveTimeoutError" and ending.seconds < DELAY_SECONDS, ending
    assert "ncclCommDestroy did not return in time" in ending.message
    assert fake.calls("ncclCommAbort") == 0


# Threads.


def test_an_abort_ends_the_wait_of_another_thread(fake: Fake) -> None:
    communicator = make(fake)
    fake.progress(-1)
    waiter = start_call(communicator, fake)
    communicator.check()  # ignores a call in progress
    assert communicator.abort("the test says so")
    ending = waiter.result(10)
    assert ending.error == "GroupBrokenError" and "the test says so" in ending.message, ending
    require_broken(fake, communicator, "the test says so")


def test_calls_of_several_threads_are_serialized(fake: Fake) -> None:
    """Two threads enqueue while a third checks and aborts. The fake counts misuse: calls during
    another call, and calls on a freed communicator."""
    fake.progress(3)
    num_broken = 0
    for aborts in [False, True] * 10:
        communicator = make(fake)

        def check(communicator: Bounded = communicator, aborts: bool = aborts) -> None:
            for _ in range(20):
                communicator.check()
            if aborts:
                communicator.abort("a test")

        def enqueue_many(communicator: Bounded = communicator) -> None:
            for _ in range(20):
                enqueue(communicator, "all_reduce")

        with ThreadPoolExecutor(3) as pool:
            endings = list(pool.map(faults.record_ending, [enqueue_many, enqueue_many, check]))
        assert aborts or not any(ending.error for ending in endings), endings
        num_broken += sum(ending.error == "GroupBrokenError" for ending in endings)
        communicator.close()
    assert (fake.misuse(), fake.alive()) == (0, 0) and num_broken > 0


@pytest.mark.thorough
def test_a_call_that_is_stuck_within_nccl(fake: Fake) -> None:
    """A thread is stuck in NCCL. Calls of other threads time out, and the stuck call reports the
    abort when it returns."""
    communicator = make(fake, SHORT)
    fake.delay("ncclAllReduce", 1000 * DELAY_SECONDS)
    stuck = start_call(communicator, fake)
    late = faults.record_ending(lambda: enqueue(communicator, "send"))
    assert late.error == "CollectiveTimeoutError" and late.seconds < DELAY_SECONDS / 2, late
    assert "waited 0.3 s for a call on a different thread" in late.message
    start = time.monotonic()
    assert communicator.abort("stuck") and time.monotonic() - start < DELAY_SECONDS / 2
    assert stuck.result(10).error == "GroupBrokenError"
    require_broken(fake, communicator, "stuck")


class Interrupted(Exception):
    pass


def test_an_interrupt_ends_a_wait(fake: Fake) -> None:
    communicator = make(fake)

    def raise_interrupted(*_: object) -> None:
        raise Interrupted

    previous_handler = signal.signal(signal.SIGUSR1, raise_interrupted)
    try:
        fake.progress(-1)
        threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGUSR1]).start()
        ending = faults.record_ending(lambda: enqueue(communicator, "all_reduce"))
    finally:
        signal.signal(signal.SIGUSR1, previous_handler)
    assert ending.error == "Interrupted" and ending.seconds < LONG / 2, ending
    require_broken(fake, communicator, "all_reduce was interrupted by Interrupted")


# Processes.

FORKING = """
import os, sys
sys.path[:0] = [{root!r}]
from tests.support.fake_nccl import Fake
from tests.nccl.test_native import enqueue, make
from tests.support import faults

fake = Fake({path!r})
communicator = make(fake)
communicator._nccl_lock.acquire()  # by a thread that the fork does not copy
child = os.fork()
if child == 0:
    calls = (lambda: enqueue(communicator, "all_reduce"), communicator.check)
    for ending in map(faults.record_ending, calls):
        assert ending.error == "GroupBrokenError", ending
        assert f"belongs to process {{os.getppid()}}" in ending.message, ending
    assert communicator.abort("in the child")
    assert (fake.calls("ncclCommAbort"), fake.calls("ncclAllReduce"), fake.alive()) == (0, 0, 1)
    own = make(fake)  # the library goes on in the child
    enqueue(own, "all_reduce")
    own.close()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
communicator._nccl_lock.release()
enqueue(communicator, "all_reduce")
communicator.close()
assert fake.alive() == 0
"""


@pytest.mark.thorough
def test_a_fork_does_not_affect_the_communicator(fake: Fake) -> None:
    code = FORKING.format(root=str(ROOT), path=fake.path)
    ended = python("-c", code)
    assert ended.returncode == 0, ended.stderr
