"""The communicator of csrc/nccl, with a fake libnccl that fails on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

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
from tests.support.tiers import thorough
from tpkernels import dtypes
from tpkernels._C.nccl import Communicator, Library, Operation, OperationKind
from tpkernels.errors import (
    CollectiveTimeoutError,
    PeerLostError,
    TpkernelsError,
)

SHORT, LONG = 0.3, 30.0
UNSET = -(2**31)
BUFFER = torch.zeros(64, dtype=torch.float64)


@pytest.fixture
def fake(fake_nccl: Build) -> Fake:
    return fake_nccl()


def make(fake: Fake, timeout: float = LONG, name: str = "tp") -> Communicator:
    library = Library(fake.path)
    return Communicator(library, library.unique_id(), 0, 1, name=name, timeout=timeout)


def operation(kind: str = "ALL_REDUCE", count: int = 8, peer: int = 0) -> Operation:
    address = BUFFER.data_ptr()
    return Operation(getattr(OperationKind, kind), address, address, count, 0, peer, 5)


# Every call of a communicator that NCCL may fail to complete.
CALLS: dict[str, tuple[str, Callable[[Communicator], object]]] = {
    "all_gather": ("ncclAllGather", lambda c: c.enqueue([operation("ALL_GATHER")])),
    "reduce_scatter": ("ncclReduceScatter", lambda c: c.enqueue([operation("REDUCE_SCATTER")])),
    "all_reduce": ("ncclAllReduce", lambda c: c.enqueue([operation()])),
    "broadcast": ("ncclBroadcast", lambda c: c.enqueue([operation("BROADCAST")])),
    "send": ("ncclSend", lambda c: c.enqueue([operation("SEND")])),
    "recv": ("ncclRecv", lambda c: c.enqueue([operation("RECV")])),
    "group": ("ncclGroupEnd", lambda c: c.enqueue([operation("SEND"), operation("RECV")])),
    "in group": ("ncclRecv", lambda c: c.enqueue([operation("SEND"), operation("RECV")])),
    "group start": ("ncclGroupStart", lambda c: c.enqueue([operation("SEND"), operation("RECV")])),
    "window": ("ncclCommWindowRegister", lambda c: c.register_window(16, 16)),
    "no window": ("ncclCommWindowDeregister", lambda c: c.deregister_window(16)),
    "close": ("ncclCommFinalize", lambda c: c.close()),
}


def require_broken(fake: Fake, communicator: Communicator, by: str) -> None:
    """NCCL's communicator was aborted once, and later calls report that without calling NCCL."""
    assert (fake.calls("ncclCommAbort"), fake.alive, fake.misuse, fake.depth) == (1, 0, 0, 0)
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
    config = fake.config
    assert (config.size, config.magic, config.version) == (72, 0xCAFEBEEF, 22700)
    assert (config.blocking, config.net_name, fake.name) == (0, None, "tp")
    unset = ("cga_cluster_size", "min_ctas", "max_ctas", "split_share", "cta_policy", "nvls_ctas")
    assert {getattr(config, name) for name in unset} == {UNSET}
    assert fake.unique_id == unique_id
    with pytest.raises(ValueError, match="a unique id has 128 bytes, not 5"):
        Communicator(library, b"short", 0, 1, name="tp", timeout=LONG)


@pytest.mark.parametrize("dtype", dtypes.CODES, ids=str)
def test_operations_arrive(fake: Fake, dtype: torch.dtype) -> None:
    nccl_type = {torch.float32: 7, torch.float16: 6, torch.bfloat16: 9, torch.float64: 8}[dtype]
    communicator, fields = make(fake), f"count=3 dtype={nccl_type}"
    x, out = torch.arange(3, dtype=dtype), torch.zeros(3, dtype=dtype)
    for kind, name, peer in [
        ("ALL_GATHER", "AllGather", -1),
        ("REDUCE_SCATTER", "ReduceScatter", -1),
        ("ALL_REDUCE", "AllReduce", -1),
        ("BROADCAST", "Broadcast", 0),
    ]:
        out.zero_()
        addresses = x.data_ptr(), out.data_ptr()
        code = dtypes.CODES[dtype]
        communicator.enqueue([Operation(getattr(OperationKind, kind), *addresses, 3, code, 0, 9)])
        assert torch.equal(out, x)
        assert fake.log[-1] == f"{name} {fields} peer={peer} stream=9 group=0"


def test_empty_operations_are_left_out(fake: Fake) -> None:
    communicator = make(fake)
    communicator.enqueue([])
    communicator.enqueue([operation(count=0)])
    communicator.enqueue([operation("SEND", 0), operation("SEND", 4), operation("RECV", 0)])
    assert fake.log == ["Send count=4 dtype=7 peer=0 stream=5 group=0"]


# Waiting and failing.


@pytest.mark.parametrize("code", [SUCCESS, IN_PROGRESS])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_in_progress_is_waited_for(fake: Fake, call: str, code: int) -> None:
    fake.progress(20)
    function, ask = CALLS[call]
    communicator = make(fake)
    if function != "ncclGroupStart":
        fake.result(function, code)
    before = fake.calls("ncclCommGetAsyncError")
    ask(communicator)
    assert fake.calls("ncclCommGetAsyncError") - before >= 21
    assert (fake.calls(function), fake.calls("ncclCommAbort"), fake.misuse) == (1, 0, 0)


QUICK = {"all_reduce", "group", "window", "close"}  # one of each kind


@pytest.mark.parametrize("call", [call if call in QUICK else thorough(call) for call in CALLS])
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
    assert (fake.calls("ncclCommAbort"), fake.alive) == (1, 1)
    other.enqueue([operation()])  # another communicator still works
    other.close()
    require_broken(fake, communicator, "a link went down")


def test_check_passes_over_a_call_in_progress(fake: Fake) -> None:
    communicator, (_, ask) = make(fake), CALLS["all_reduce"]
    fake.progress(-1)
    waiter = threading.Thread(target=faults.ending_of, args=[lambda: ask(communicator)])
    waiter.start()
    time.sleep(0.05)
    communicator.check()
    communicator.abort("the test is over")
    waiter.join(5)
    assert not waiter.is_alive()


# Set-up.


@pytest.mark.parametrize("code", [SUCCESS, IN_PROGRESS])
def test_set_up_is_waited_for(fake: Fake, code: int) -> None:
    fake.progress(50)
    fake.result("ncclCommInitRankConfig", code)
    make(fake).check()
    assert fake.calls("ncclCommGetAsyncError") == 52


def test_set_up_that_never_ends(fake: Fake) -> None:
    fake.progress(-1)
    ending = faults.ending_of(lambda: make(fake, SHORT))
    assert ending.error == "CollectiveTimeoutError" and ending.seconds < LONG / 2, ending
    assert "set-up did not complete within 0.30 s" in ending.text, ending
    assert (fake.calls("ncclCommAbort"), fake.alive, fake.misuse) == (1, 0, 0)


def test_set_up_that_fails(fake: Fake) -> None:
    fake.asynchronous(REMOTE_ERROR)
    with pytest.raises(PeerLostError, match=r"rank 0 of 1: set-up failed: fake error 6"):
        make(fake)
    assert (fake.calls("ncclCommAbort"), fake.alive) == (1, 0)
    fake.result("ncclCommInitRankConfig", INVALID_ARGUMENT)
    with pytest.raises(TpkernelsError, match=r"set-up failed: fake error 4"):
        make(fake)
    assert fake.calls("ncclCommAbort") == 1  # NCCL made nothing
    assert fake.misuse == 0
