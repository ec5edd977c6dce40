"""`tpkernels.nccl.Communicator`: its creation on all ranks, its argument checks, and its NCCL
calls. The ranks use a fake libnccl, and CPU tensors instead of CUDA tensors."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import tpkernels
from tests.support import faults
from tests.support.cases import RanksFixture
from tests.support.fake_nccl import REMOTE_ERROR, Build, Fake
from tests.support.faults import PROMPT, Ending, require_group
from tests.support.paths import ROOT
from tests.support.processes import python
from tests.support.tiers import sweep
from tpkernels.nccl import Communicator

WORLD = 3
SHORT = 0.6
CPU = torch.device("cpu")
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@contextlib.contextmanager
def cpu_as_current_device() -> Iterator[None]:
    """Make the CPU the current CUDA device."""
    with (
        mock.patch.object(tpkernels.nccl, "_current_device", lambda: CPU),
        mock.patch("torch.cuda.current_stream", lambda device: mock.Mock(cuda_stream=7)),
    ):
        yield


# Setup.


@cpu_as_current_device()
def creation_job(path: str) -> list[str]:
    """Create communicators from every kind of group, and check the NCCL calls of one of them."""
    fake, group, rank = Fake(path), require_group(dist.new_group()), dist.get_rank()
    mesh = DeviceMesh.from_group(group, "cpu")
    ids = []
    for group_like in (group, group.group_name, mesh, (mesh, 0)):
        with Communicator(group_like, library=path) as comm:
            assert (comm.rank, comm.world, comm.device) == (rank, WORLD, CPU)
        ids.append(fake.init()[1])
    assert fake.calls("ncclGetUniqueId") == (len(ids) if rank == 0 else 0)
    assert (fake.calls("ncclCommDestroy"), fake.alive(), fake.misuse()) == (len(ids), 0, 0)

    x, fields = torch.arange(18.0).view(6, 3) + 100 * rank, "dtype=7 peer={} stream=7"
    with Communicator(group, library=path) as comm:
        assert comm.all_gather(x).shape == (18, 3)
        assert comm.reduce_scatter(x).shape == (2, 3)
        assert comm.all_reduce(x).shape == (6, 3)
        assert comm.broadcast(x, 2) is x
        assert comm.all_to_all(x)[2 * rank : 2 * rank + 2].equal(x[2 * rank : 2 * rank + 2])
        expected = [f"AllGather count=18 {fields.format(-1)}"]
        expected += [f"ReduceScatter count=6 {fields.format(-1)}"]
        expected += [f"AllReduce count=18 {fields.format(-1)}"]
        expected += [f"Broadcast count=18 {fields.format(2)}"]
        for peer in range(WORLD):
            expected += [f"{kind} count=6 {fields.format(peer)}" for kind in ("Send", "Recv")]
        assert fake.log() == expected
        with pytest.raises(
            ValueError, match=r"shape \[4, 3\]; .* its number of rows must be divisible by 3"
        ):
            comm.reduce_scatter(x[:4])
    return ids


def test_all_ranks_use_the_id_of_rank_0(ranks: RanksFixture, fake_nccl: Build) -> None:
    first_rank, *other_ranks = ranks(WORLD).run(creation_job, fake_nccl().path)
    assert len(set(first_rank)) == len(first_rank) and {len(x.split()) for x in first_rank} == {128}
    assert all(ids == first_rank for ids in other_ranks)


def failure_job(path: str, failing: int, how: str) -> tuple[Ending, Ending]:
    fake, group = Fake(path), require_group(dist.new_group())
    options: dict[str, Any] = {"library": path, "timeout": 20}
    fails = dist.get_rank() == failing
    if fails:
        fake.result("ncclGetUniqueId", 2 if how == "id" else 0)
        fake.version(22200 if how == "version" else 23203)
        options |= {"library": "/nowhere/libnccl.so.2"} if how == "library" else {}
        options |= {"timeout": 19} if how == "timeout" else {}
    with contextlib.nullcontext() if fails and how == "device" else cpu_as_current_device():
        first = faults.record_ending(lambda: Communicator(group, **options))
    assert fake.calls("ncclCommInitRankConfig") == 0  # no rank enters NCCL
    fake.result("ncclGetUniqueId", 0)
    fake.version(23203)
    with cpu_as_current_device():
        return first, faults.record_ending(lambda: Communicator(group, library=path).close())


@pytest.mark.parametrize(
    ("failing", "how", "error", "message"),
    [
        (0, "id", "TpkernelsError", "ncclGetUniqueId failed: fake error 2; last message: nccl"),
        (2, "library", "NotImplementedError", "cannot load '/nowhere/libnccl.so.2'"),
        pytest.param(1, "device", "NotImplementedError", "needs a CUDA device", marks=NO_GPU),
        (1, "timeout", "ValueError", "have timeout [20, 19, 20]; all ranks must have the same"),
        (
            1,
            "version",
            "TpkernelsError",
            "have NCCL ['2.32.3', '2.22.0', '2.32.3']; all ranks must",
        ),
    ],
)
def test_a_failure_or_mismatch_of_one_rank_is_an_error_on_all(
    ranks: RanksFixture, fake_nccl: Build, failing: int, how: str, error: str, message: str
) -> None:
    endings = ranks(WORLD).run(failure_job, fake_nccl().path, failing, how)
    for rank, (first, then) in enumerate(endings):
        assert first.seconds < PROMPT and message in first.message and not then.error, (first, then)
        if rank == failing or how in ("timeout", "version"):
            assert (first.error, first.peer) == (error, None), first
        else:
            assert (first.error, first.peer) == ("TpkernelsError", failing), first
            assert f"rank {failing} cannot take part: " in first.message, first


@cpu_as_current_device()
def absent_job(path: str, absent: int) -> Ending | None:
    group = dist.new_group()
    if dist.get_rank() == absent:
        return None
    return faults.record_ending(lambda: Communicator(group, timeout=SHORT, library=path))


@pytest.mark.parametrize("absent", sweep([2, 0]))
def test_a_missing_rank(ranks: RanksFixture, fake_nccl: Build, absent: int) -> None:
    for rank, ending in enumerate(ranks(WORLD).run(absent_job, fake_nccl().path, absent)):
        if rank != absent:
            assert ending.error == "CollectiveTimeoutError" and ending.peer == absent, ending
            assert SHORT <= ending.seconds < SHORT + PROMPT, ending
            # The wait of this rank or of the third rank, which may have timed out a moment earlier.
            assert f"waited 0.6 s for rank {absent}, which did not arrive" in ending.message, ending


# The methods, on one rank.


@pytest.fixture
def fake(fake_nccl: Build) -> Iterator[Fake]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with cpu_as_current_device():
        yield fake_nccl()
    dist.destroy_process_group()


@pytest.fixture
def comm(fake: Fake) -> Communicator:
    return Communicator(require_group(dist.group.WORLD), library=fake.path, timeout=SHORT)


def test_results_of_the_methods(fake: Fake, comm: Communicator) -> None:
    codes = {torch.float32: 7, torch.float16: 6, torch.bfloat16: 9, torch.float64: 8}
    for dtype, code in codes.items():
        x = torch.arange(12).to(dtype).view(4, 3)
        for result in (
            comm.all_gather(x),
            comm.reduce_scatter(x),
            comm.all_reduce(x),
            comm.all_to_all(x),
        ):
            assert torch.equal(result.view(4, 3), x)
        assert comm.broadcast(x, 0) is x
        assert fake.log()[-1] == f"Broadcast count=12 dtype={code} peer=0 stream=7"
    before = len(fake.log())
    assert comm.all_gather(x[:0]).shape == comm.all_to_all(x[:0]).shape == (0, 3)
    assert len(fake.log()) == before
    assert comm.all_reduce(torch.tensor(2.0)).item() == 2
    comm.close()
    with pytest.raises(tpkernels.GroupBrokenError, match="it was closed"):
        comm.all_gather(x[:0])
    assert (fake.alive(), fake.misuse(), fake.calls("ncclCommAbort")) == (0, 0, 0)


def test_a_group_starts_all_its_calls_at_its_end(fake: Fake, comm: Communicator) -> None:
    x, y = torch.arange(3.0), torch.zeros(3)
    with comm.group():
        comm.send(torch.arange(3.0), 0)  # kept alive until the group starts
        gc.collect()
        assert comm.recv(y, 0) is y and not fake.log()
        other_thread = threading.Thread(target=comm.all_reduce, args=[x])  # not in a group
        other_thread.start()
        other_thread.join()
        assert [line.split()[0] for line in fake.log()] == ["AllReduce"]
        with pytest.raises(RuntimeError, match="this thread is already in a group"), comm.group():
            pass
    assert torch.equal(x, y) and [line.split()[0] for line in fake.log()[1:]] == ["Send", "Recv"]
    with pytest.raises(ZeroDivisionError), comm.group():
        comm.send(x, 0)
        raise ZeroDivisionError
    with comm.group():
        pass
    assert len(fake.log()) == 3 and fake.calls("ncclGroupStart") == 2
    comm.check()


def test_abort_exceptions_and_garbage_collection(fake: Fake, comm: Communicator) -> None:
    group = require_group(dist.group.WORLD)
    comm.abort()
    with pytest.raises(tpkernels.GroupBrokenError, match="The reason: it was aborted"):
        comm.all_reduce(torch.ones(1))
    with pytest.raises(ZeroDivisionError), Communicator(group, library=fake.path) as broken:
        raise ZeroDivisionError("of the user's")
    with pytest.raises(tpkernels.GroupBrokenError, match="ZeroDivisionError: of the user's"):
        broken.check()
    dropped = Communicator(group, library=fake.path)
    assert fake.alive() == 1
    del dropped
    gc.collect()
    assert (fake.alive(), fake.misuse(), fake.calls("ncclCommAbort")) == (0, 0, 3)


def test_a_destroyed_process_group(fake: Fake) -> None:
    group = require_group(dist.new_group())
    comm = Communicator(group, library=fake.path)
    dist.destroy_process_group(group)
    comm.all_reduce(torch.ones(2))  # does not need the process group
    comm.close()


LEAVING = """
import atexit
atexit.register(lambda: print(fake.calls("ncclCommAbort")))  # the first to register runs last
import sys
sys.path.insert(0, {root!r})
import torch.distributed as dist
from tests.nccl.test_communicator import Communicator, Fake, cpu_as_current_device
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
fake = Fake({path!r})
with cpu_as_current_device():
    kept = Communicator(dist.group.WORLD, library=fake.path, timeout=0.5)
fake.progress(-1)
fake.delay("ncclCommAbort", 30_000)
"""


@pytest.mark.thorough
def test_exit_aborts_open_communicators(fake_nccl: Build) -> None:
    """The interpreter aborts an open communicator at exit, without waiting for an abort that
    hangs."""
    code, start = LEAVING.format(root=str(ROOT), path=fake_nccl().path), time.monotonic()
    ended = python("-c", code)
    assert (ended.returncode, ended.stdout) == (0, "1\n"), ended.stdout + ended.stderr
    assert time.monotonic() - start < 25


NEVER = 60.0  # seconds; an event this late completes after the test


class Event:
    """A CUDA event that completes at `completion_time`."""

    completion_time = 0.0

    def record(self, stream: mock.Mock) -> None:
        assert stream.cuda_stream == 7

    def query(self) -> bool:
        return time.monotonic() >= self.completion_time


def test_wait_is_bounded(fake: Fake, comm: Communicator) -> None:
    def wait(communicator: Communicator, seconds: float, timeout: float | None = None) -> Ending:
        completion_time = time.monotonic() + seconds
        with (
            mock.patch.object(torch.cuda, "Event", Event),
            mock.patch.object(Event, "completion_time", completion_time),
        ):
            return faults.record_ending(lambda: communicator.wait(timeout))

    ending = wait(comm, 0.2)
    assert not ending.error and 0.19 <= ending.seconds < NEVER / 2, ending
    late = wait(comm, NEVER, timeout=0.1)
    assert late.error == "CollectiveTimeoutError" and 0.1 <= late.seconds < NEVER / 2, late
    assert "enqueued work did not complete within 0.1 s" in late.message
    assert (fake.calls("ncclCommAbort"), fake.alive(), fake.misuse()) == (1, 0, 0)
    second = Communicator(require_group(dist.group.WORLD), library=fake.path)
    fake.asynchronous(REMOTE_ERROR)
    lost = wait(second, NEVER)
    assert lost.error == "PeerLostError" and lost.seconds < NEVER / 2, lost
    assert "an operation in flight failed" in lost.message and fake.alive() == 0


X = torch.arange(12.0).view(4, 3)
REFUSED: list[tuple[Callable[[Communicator], object], type[Exception], str]] = [
    (lambda c: c.broadcast([1.0], 0), TypeError, "x is a list, not a tensor"),
    (lambda c: c.send(X.long(), 0), NotImplementedError, "x has dtype int64; supported"),
    (lambda c: c.recv(X.to("meta"), 0), ValueError, "x is on meta, but the communicator"),
    (lambda c: c.all_reduce(X.t()), ValueError, "strides [1, 3] is not contiguous"),
    (lambda c: c.all_gather(X[0, 0]), ValueError, "x has shape []; it must have at least 1 dim"),
    (lambda c: c.broadcast(X, 1), ValueError, "root is 1; it must be a rank from 0 to 0"),
    (lambda c: c.send(X, -1), ValueError, "peer is -1; it must be a rank from 0 to 0"),
    (lambda c: Communicator("no group", timeout=float("inf")), ValueError, "(0, 86400] seconds"),
]


def test_refused_calls_are_not_enqueued(fake: Fake, comm: Communicator) -> None:
    for call, error, message in REFUSED:
        ending = faults.record_ending(lambda call=call: call(comm))
        assert ending.error == error.__name__ and message in ending.message, (message, ending)
    assert not fake.log()
    comm.close()
