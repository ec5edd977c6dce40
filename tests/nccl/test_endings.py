"""How communicators end: closed, garbage-collected, aborted by another thread, with an NCCL call
that does not return, in a forked process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.nccl.test_communicator import CALLS, LONG, SHORT, make, operation, require_broken
from tests.support import faults
from tests.support.fake_nccl import Build, Fake
from tests.support.faults import Ending
from tests.support.paths import ROOT
from tpkernels._C.nccl import Communicator
from tpkernels.errors import CollectiveTimeoutError

AWAY = 6.0  # seconds for which NCCL does not come back


@pytest.fixture
def fake(fake_nccl: Build) -> Fake:
    return fake_nccl()


class Asking(threading.Thread):
    """A call in another thread; it has started when the constructor returns."""

    def __init__(self, communicator: Communicator, fake: Fake, call: str = "all_reduce") -> None:
        super().__init__(daemon=True)
        self._function, self._ask = CALLS[call]
        self._communicator = communicator
        self.ending: Ending | None = None
        self.start()
        deadline = time.monotonic() + 5
        while not fake.calls(self._function) and time.monotonic() < deadline:
            time.sleep(0.001)

    def run(self) -> None:
        self.ending = faults.ending_of(lambda: self._ask(self._communicator))

    def ended(self) -> Ending:
        self.join(10)
        assert self.ending is not None, "it still waits"
        return self.ending


def test_close_waits_for_the_peers_and_frees(fake: Fake) -> None:
    communicator = make(fake)
    fake.progress(30)
    communicator.close()
    communicator.close()
    counts = [fake.calls(f"nccl{name}") for name in ("CommFinalize", "CommDestroy", "CommAbort")]
    assert (counts, fake.alive, fake.misuse) == ([1, 1, 0], 0, 0)
    for call in set(CALLS) - {"close"}:
        ending = faults.ending_of(lambda name=call: CALLS[name][1](communicator))
        assert ending.error == "GroupBrokenError" and "after it was closed" in ending.text, ending
    communicator.abort("late")
    assert fake.calls("ncclCommAbort") == 0


def test_one_that_is_dropped_is_aborted(fake: Fake) -> None:
    communicator, closed = make(fake), make(fake)
    closed.close()
    fake.progress(-1)
    start = time.monotonic()
    del communicator, closed
    assert time.monotonic() - start < LONG / 2
    assert (fake.calls("ncclCommAbort"), fake.alive, fake.misuse) == (1, 0, 0)


def test_an_abort_that_does_not_come_back(fake: Fake) -> None:
    communicator, dropped, aborted = (make(fake, SHORT) for _ in range(3))
    fake.delay("ncclCommAbort", AWAY)
    fake.progress(-1)
    ending = faults.ending_of(lambda: communicator.enqueue([operation()]))
    assert ending.error == "CollectiveTimeoutError" and ending.seconds < AWAY, ending
    assert "; ncclCommAbort did not return and was abandoned" in ending.text
    start = time.monotonic()
    assert not aborted.abort("a test")
    del dropped
    assert time.monotonic() - start < AWAY
    assert (fake.calls("ncclCommAbort"), fake.misuse) == (3, 0)


def test_a_destroy_that_does_not_come_back(fake: Fake) -> None:
    communicator = make(fake, SHORT)
    fake.delay("ncclCommDestroy", AWAY)
    start = time.monotonic()
    with pytest.raises(CollectiveTimeoutError, match=r"ncclCommDestroy did not return within 0.3"):
        communicator.close()
    assert time.monotonic() - start < AWAY
    assert fake.calls("ncclCommAbort") == 0


# Threads.


def test_an_abort_ends_the_wait_of_another_thread(fake: Fake) -> None:
    communicator = make(fake)
    fake.progress(-1)
    waiter = Asking(communicator, fake)
    assert communicator.abort("the test says so")
    ending = waiter.ended()
    assert ending.error == "GroupBrokenError" and "the test says so" in ending.text, ending
    require_broken(fake, communicator, "the test says so")


def test_threads_take_turns(fake: Fake) -> None:
    """NCCL forbids a call while another is in progress; the fake counts those."""
    communicator = make(fake)
    fake.progress(100)  # tens of milliseconds
    threads = [
        Asking(communicator, fake, call) for call in ("all_reduce", "send", "group", "window")
    ]
    for thread in threads:
        assert not thread.ended().error, thread.ending
    assert (fake.calls("ncclAllReduce"), fake.misuse) == (1, 0)


@pytest.mark.thorough
def test_a_call_that_is_stuck_within_nccl(fake: Fake) -> None:
    """Other threads do not wait for it forever, and it finds the abort when it returns."""
    communicator = make(fake, SHORT)
    fake.delay("ncclAllReduce", AWAY)
    stuck = Asking(communicator, fake)
    late = faults.ending_of(lambda: communicator.enqueue([operation("SEND")]))
    assert late.error == "CollectiveTimeoutError" and late.seconds < AWAY / 2, late
    assert "waited 0.30 s for another thread's call" in late.text
    start = time.monotonic()
    assert communicator.abort("stuck")
    assert time.monotonic() - start < AWAY / 2
    assert stuck.ended().error == "GroupBrokenError"
    require_broken(fake, communicator, "stuck")


class Interrupted(Exception):
    pass


def test_an_interrupt_ends_a_wait(fake: Fake) -> None:
    communicator = make(fake)

    def raise_it(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, raise_it)
    try:
        fake.progress(-1)
        threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGUSR1]).start()
        ending = faults.ending_of(lambda: communicator.enqueue([operation()]))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ending.error == "Interrupted" and ending.seconds < LONG / 2, ending
    require_broken(fake, communicator, "was interrupted")


# Processes.

FORKING = """
import os, sys
sys.path[:0] = [{root!r}]
from tests.support.fake_nccl import Fake
from tests.nccl.test_communicator import make, operation
from tests.support import faults

fake = Fake({path!r})
communicator = make(fake)
child = os.fork()
if child == 0:
    endings = [faults.ending_of(lambda: communicator.enqueue([operation()]))]
    endings.append(faults.ending_of(communicator.check))
    texts = [ending.text for ending in endings]
    assert all(f"a fork of process {{os.getppid()}}" in text for text in texts), texts
    assert all(ending.error == "GroupBrokenError" for ending in endings), endings
    assert communicator.abort("in the child")
    del communicator
    assert (fake.calls("ncclCommAbort"), fake.calls("ncclAllReduce"), fake.alive) == (0, 0, 1)
    own = make(fake)  # the library goes on in the child
    own.enqueue([operation()])
    own.close()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
communicator.enqueue([operation()])
communicator.close()
assert fake.alive == 0
"""


@pytest.mark.thorough
def test_a_fork_leaves_the_parents_communicator_alone(fake: Fake) -> None:
    code = FORKING.format(root=str(ROOT), path=fake.path)
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr


LEAVING = """
import sys
sys.path[:0] = [{root!r}]
from tests.support.fake_nccl import Fake
from tests.nccl.test_communicator import make

fake = Fake({path!r})
kept = make(fake, 0.5)
fake.progress(-1)
fake.delay("ncclCommAbort", 30)
"""


@pytest.mark.thorough
def test_a_process_ends_with_a_communicator_open(fake: Fake) -> None:
    code = LEAVING.format(root=str(ROOT), path=fake.path)
    start = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", code], timeout=LONG, check=False)
    assert ended.returncode == 0
    assert time.monotonic() - start < 20
