"""The communicator of csrc/nccl with a fake libnccl that fails on demand: calls, set-up, and how it
ends: closed, dropped, aborted by another thread, with a call that does not return, in a fork."""

from __future__ import annotations

import itertools
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
from tpkernels import dtypes
from tpkernels._C.nccl import Communicator, Library, Operation
from tpkernels.errors import CollectiveTimeoutError, PeerLostError, TpkernelsError

SHORT, LONG = 0.3, 30.0
AWAY = 3  # seconds for which NCCL does not come back
BUFFER = torch.zeros(64, dtype=torch.float64)


@pytest.fixture
def fake(fake_nccl: Build) -> Fake:
    return fake_nccl()


def make(fake: Fake, timeout: float = LONG, name: str = "tp") -> Communicator:
    library = Library(fake.path)
    return Communicator(library, library.unique_id(), 0, 1, name=name, timeout=timeout)


def operation(kind: str = "all_reduce", count: int = 8, peer: int = 0) -> Operation:
    address = BUFFER.data_ptr()
    return Operation(kind, address, address, count, 0, peer, 5)


# Every call of a communicator that NCCL may fail to complete.
PAIR = ("send", "recv")
KINDS = {"all_gather": "AllGather", "reduce_scatter": "ReduceScatter", "all_reduce": "AllReduce"}
KINDS |= {"broadcast": "Broadcast", "send": "Send", "recv": "Recv"}
CALLS: dict[str, tuple[str, Callable[[Communicator], object]]] = {
    **{
        kind: (f"nccl{name}", lambda c, kind=kind: c.enqueue([operation(kind)]))
        for kind, name in KINDS.items()
    },
    "group": ("ncclGroupEnd", lambda c: c.enqueue([*map(operation, PAIR)])),
    "in group": ("ncclRecv", lambda c: c.enqueue([*map(operation, PAIR)])),
    "first in group": ("ncclSend", lambda c: c.enqueue([*map(operation, PAIR)])),
    "group start": ("ncclGroupStart", lambda c: c.enqueue([*map(operation, PAIR)])),
    "close": ("ncclCommFinalize", lambda c: c.close()),
}


def asking(communicator: Communicator, fake: Fake, call: str = "all_reduce") -> Future[Ending]:
    """A call in another thread, which has begun."""
    function, ask = CALLS[call]
    ending = ThreadPoolExecutor(1).submit(faults.ending_of, lambda: ask(communicator))
    deadline = time.monotonic() + 5
    while not fake.calls(function) and time.monotonic() < deadline:
        time.sleep(0.001)
    return ending


def require_broken(fake: Fake, communicator: Communicator, by: str) -> None:
    """NCCL's communicator was aborted once, and later calls report that without calling NCCL."""
    assert (fake.calls("ncclCommAbort"), fake.alive(), fake.misuse(), fake.depth()) == (1, 0, 0, 0)
    asked = fake.calls("ncclCommGetAsyncError"), fake.calls("ncclAllReduce")
    for again in (lambda: communicator.enqueue([operation()]), communicator.check):
        ending = faults.ending_of(again)
        assert ending.error == "GroupBrokenError" and ending.seconds < LONG / 2, ending
        assert "is broken and can run no more calls; make a new one" in ending.text, ending
        assert by in ending.text, ending
    communicator.close()  # nothing is left to close
    communicator.abort("again")
    assert asked == (fake.calls("ncclCommGetAsyncError"), fake.calls("ncclAllReduce"))
    assert fake.calls("ncclCommAbort") == 1


# Calls arrive at NCCL.


def test_the_config_and_the_id_arrive(fake: Fake) -> None:
    library, unique_id = Library(fake.path), bytes(range(128))
    Communicator(library, unique_id, 0, 1, name="tp", timeout=LONG)
    # Size, magic, version, not blocking, six fields that are not set.
    fields = " ".join(map(str, (72, 0xCAFEBEEF, 22700, 0, *[-(2**31)] * 6)))
    assert fake.config() == [f"tp {fields}"]
    assert bytes(map(int, fake.id()[0].split())) == unique_id
    with pytest.raises(ValueError, match="a unique id has 128 bytes, not 5"):
        Communicator(library, b"short", 0, 1, name="tp", timeout=LONG)


def test_operations_arrive(fake: Fake) -> None:
    """But empty ones."""
    communicator, codes = make(fake), dtypes.CODES
    nccl_types = {torch.float32: 7, torch.float16: 6, torch.bfloat16: 9, torch.float64: 8}
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
    for dtype, kind in itertools.product(codes, kinds):
        x, out = torch.arange(3, dtype=dtype), torch.zeros(3, dtype=dtype)
        addresses = x.data_ptr(), out.data_ptr()
        communicator.enqueue([Operation(kind, *addresses, 3, codes[dtype], 0, 9)])
        assert torch.equal(out, x)
        fields = f"dtype={nccl_types[dtype]} peer={0 if kind == 'broadcast' else -1}"
        assert fake.log()[-1] == f"{KINDS[kind]} count=3 {fields} stream=9 group=0"
    with pytest.raises(ValueError, match="no operation 'scan'"):
        operation("scan")
    before = len(fake.log())
    communicator.enqueue([])
    communicator.enqueue([operation(count=0)])
    communicator.enqueue([operation("send", 0), operation("send", 4), operation("recv", 0)])
    assert fake.log()[before:] == ["Send count=4 dtype=7 peer=0 stream=5 group=0"]


# Waiting and failing.


@pytest.mark.parametrize("code", [SUCCESS, IN_PROGRESS])
def test_a_call_in_progress_is_waited_for(fake_nccl: Build, code: int) -> None:
    for function, ask in CALLS.values():
        fake = fake_nccl()
        fake.progress(20)
        communicator = make(fake)
        if function != "ncclGroupStart":
            fake.result(function, code)
        before = fake.calls("ncclCommGetAsyncError")
        ask(communicator)
        assert fake.calls("ncclCommGetAsyncError") - before >= 21, function
        assert (fake.calls(function), fake.calls("ncclCommAbort"), fake.misuse()) == (1, 0, 0)


@pytest.mark.parametrize("call", ["all_reduce", "group", "close"])  # one of each kind
def test_a_call_that_never_ends_is_given_up(fake: Fake, call: str) -> None:
    communicator = make(fake, SHORT)
    fake.progress(-1)
    ending = faults.ending_of(lambda: CALLS[call][1](communicator))
    assert ending.error == "CollectiveTimeoutError" and SHORT <= ending.seconds < LONG / 2, ending
    assert "NCCL communicator 'tp', rank 0 of 1: " in ending.text, ending
    assert "did not complete within 0.30 s: a rank did not join" in ending.text, ending
    require_broken(fake, communicator, "did not complete within 0.30 s")


ERRORS = {
    REMOTE_ERROR: PeerLostError,
    TIMEOUT: CollectiveTimeoutError,
    INVALID_ARGUMENT: TpkernelsError,
}


@pytest.mark.parametrize(
    ("call", "code"),
    [*((call, REMOTE_ERROR) for call in CALLS), *(("all_reduce", code) for code in ERRORS)],
)
def test_a_call_that_fails(fake: Fake, call: str, code: int) -> None:
    communicator = make(fake)
    function, ask = CALLS[call]
    fake.result(function, code)
    with pytest.raises(TpkernelsError) as caught:
        ask(communicator)
    assert caught.type is ERRORS[code]
    assert f"failed: fake error {code}; last message: {function} broke" in str(caught.value)
    require_broken(fake, communicator, f"fake error {code}")


@pytest.mark.parametrize("polls", [0, 20])
def test_an_error_that_comes_later(fake: Fake, polls: int) -> None:
    communicator, other = make(fake), make(fake)
    communicator.enqueue([operation()])
    communicator.check()
    fake.asynchronous(REMOTE_ERROR)
    fake.progress(polls)
    with pytest.raises(PeerLostError, match=r"fake error 6; last message: a link went down"):
        if polls:
            communicator.enqueue([operation()])
        else:
            communicator.check()
    fake.asynchronous(SUCCESS)
    assert (fake.calls("ncclCommAbort"), fake.alive()) == (1, 1)
    other.enqueue([operation()])  # another communicator still works
    other.close()
    require_broken(fake, communicator, "a link went down")


def test_check_passes_over_a_call_in_progress(fake: Fake) -> None:
    communicator = make(fake)
    fake.progress(-1)
    waiter = asking(communicator, fake)
    communicator.check()
    communicator.abort("the test is over")
    waiter.result(5)


# Set-up.


@pytest.mark.parametrize("code", [SUCCESS, IN_PROGRESS])
def test_set_up_is_waited_for(fake: Fake, code: int) -> None:
    fake.progress(50)
    fake.result("ncclCommInitRankConfig", code)
    make(fake).check()
    assert fake.calls("ncclCommGetAsyncError") == 52
    fake.progress(-1)
    with pytest.raises(CollectiveTimeoutError, match=r"set-up did not complete within 0.30 s"):
        make(fake, SHORT)
    deadline = time.monotonic() + LONG  # a busy machine may start the thread that aborts late
    while fake.alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (fake.calls("ncclCommAbort"), fake.alive(), fake.misuse()) == (2, 0, 0)


def test_set_up_that_fails(fake: Fake) -> None:
    fake.asynchronous(REMOTE_ERROR)
    with pytest.raises(PeerLostError, match=r"rank 0 of 1: set-up failed: fake error 6"):
        make(fake)
    assert (fake.calls("ncclCommAbort"), fake.alive()) == (1, 0)
    fake.result("ncclCommInitRankConfig", INVALID_ARGUMENT)
    with pytest.raises(TpkernelsError, match=r"set-up failed: fake error 4"):
        make(fake)
    assert fake.calls("ncclCommAbort") == 1  # NCCL made nothing
    assert fake.misuse() == 0


# Endings.


def test_close_waits_for_the_peers_and_frees(fake: Fake) -> None:
    communicator = make(fake)
    fake.progress(30)
    communicator.close()
    communicator.close()
    counts = [fake.calls(f"nccl{name}") for name in ("CommFinalize", "CommDestroy", "CommAbort")]
    assert (counts, fake.alive(), fake.misuse()) == ([1, 1, 0], 0, 0)
    for call in set(CALLS) - {"close"}:
        ending = faults.ending_of(lambda name=call: CALLS[name][1](communicator))
        assert ending.error == "GroupBrokenError" and "after it was closed" in ending.text, ending
    communicator.abort("late")
    assert fake.calls("ncclCommAbort") == 0


def test_an_abort_that_does_not_come_back(fake: Fake) -> None:
    communicator, dropped, aborted = (make(fake, SHORT) for _ in range(3))
    fake.delay("ncclCommAbort", 1000 * AWAY)
    fake.progress(-1)
    ending = faults.ending_of(lambda: communicator.enqueue([operation()]))
    assert ending.error == "CollectiveTimeoutError" and ending.seconds < AWAY, ending
    assert "; ncclCommAbort did not return and was abandoned" in ending.text
    start = time.monotonic()
    assert not aborted.abort("a test")
    del dropped
    assert time.monotonic() - start < AWAY
    assert (fake.calls("ncclCommAbort"), fake.misuse()) == (3, 0)


def test_a_destroy_that_does_not_come_back(fake: Fake) -> None:
    communicator = make(fake, SHORT)
    fake.delay("ncclCommDestroy", 1000 * AWAY)
    start = time.monotonic()
    with pytest.raises(CollectiveTimeoutError, match=r"ncclCommDestroy did not return within 0.3"):
        communicator.close()
    assert time.monotonic() - start < AWAY
    assert fake.calls("ncclCommAbort") == 0


# Threads.


def test_an_abort_ends_the_wait_of_another_thread(fake: Fake) -> None:
    communicator = make(fake)
    fake.progress(-1)
    waiter = asking(communicator, fake)
    assert communicator.abort("the test says so")
    ending = waiter.result(10)
    assert ending.error == "GroupBrokenError" and "the test says so" in ending.text, ending
    require_broken(fake, communicator, "the test says so")


def test_threads_take_turns(fake: Fake) -> None:
    """NCCL forbids a call while another is in progress; the fake counts those."""
    communicator = make(fake)
    fake.progress(100)  # tens of milliseconds
    calls = ("all_reduce", "send", "group")
    for thread in [asking(communicator, fake, call) for call in calls]:
        assert not thread.result(10).error, thread
    assert (fake.calls("ncclAllReduce"), fake.misuse()) == (1, 0)


@pytest.mark.thorough
def test_a_call_that_is_stuck_within_nccl(fake: Fake) -> None:
    """Other threads do not wait for it forever, and it finds the abort when it returns."""
    communicator = make(fake, SHORT)
    fake.delay("ncclAllReduce", 1000 * AWAY)
    stuck = asking(communicator, fake)
    late = faults.ending_of(lambda: communicator.enqueue([operation("send")]))
    assert late.error == "CollectiveTimeoutError" and late.seconds < AWAY / 2, late
    assert "waited 0.30 s for another thread's call" in late.text
    start = time.monotonic()
    assert communicator.abort("stuck")
    assert time.monotonic() - start < AWAY / 2
    assert stuck.result(10).error == "GroupBrokenError"
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
from tests.nccl.test_native import make, operation
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
    assert (fake.calls("ncclCommAbort"), fake.calls("ncclAllReduce"), fake.alive()) == (0, 0, 1)
    own = make(fake)  # the library goes on in the child
    own.enqueue([operation()])
    own.close()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
communicator.enqueue([operation()])
communicator.close()
assert fake.alive() == 0
"""


@pytest.mark.thorough
def test_a_fork_leaves_the_parents_communicator_alone(fake: Fake) -> None:
    code = FORKING.format(root=str(ROOT), path=fake.path)
    ended = python("-c", code)
    assert ended.returncode == 0, ended.stderr
