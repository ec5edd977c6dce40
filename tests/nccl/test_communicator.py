"""`tpkernels.nccl.Communicator`: how ranks create one, what it refuses, and what it passes to NCCL.
The ranks have a fake libnccl, and CPU tensors in place of CUDA tensors."""

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
from tests.support.faults import PROMPT, Ending
from tests.support.paths import ROOT
from tests.support.processes import python
from tests.support.ranked import on_ranks
from tests.support.tiers import sweep
from tpkernels.nccl import Communicator

WORLD = 3
SHORT = 0.6
CPU = torch.device("cpu")
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@contextlib.contextmanager
def pretending() -> Iterator[None]:
    """Makes the CPU the current CUDA device."""
    with (
        mock.patch.object(tpkernels.nccl, "_current_device", lambda: CPU),
        mock.patch("torch.cuda.current_stream", lambda device: mock.Mock(cuda_stream=7)),
    ):
        yield


def group_of(group: object = None) -> dist.ProcessGroup:
    made = dist.new_group() if group is None else group
    assert isinstance(made, dist.ProcessGroup)
    return made


# Set-up.


@pretending()
def ids_job(path: str) -> list[str]:
    fake, group = Fake(path), group_of()
    mesh = DeviceMesh.from_group(group, "cpu")
    seen = []
    for group_like in (group, group.group_name, mesh, (mesh, 0)):
        with Communicator(group_like, library=path) as comm:
            assert (comm.rank, comm.world, comm.device) == (dist.get_rank(), WORLD, CPU)
            assert fake.config()[0].startswith(f"{group.group_name} 72 ")
        seen.append(fake.id()[0])
    assert fake.calls("ncclGetUniqueId") == (len(seen) if dist.get_rank() == 0 else 0)
    assert (fake.calls("ncclCommDestroy"), fake.alive(), fake.misuse()) == (len(seen), 0, 0)
    return seen


def test_all_ranks_get_rank_0s_id(ranks: RanksFixture, fake_nccl: Build) -> None:
    first, *others = ranks(WORLD).run(ids_job, fake_nccl().path)
    assert len(set(first)) == len(first) and {len(each.split()) for each in first} == {128}
    assert all(other == first for other in others)


@pretending()
def counts_job(path: str) -> None:
    fake, rank = Fake(path), dist.get_rank()
    comm = Communicator(group_of(), library=path)
    x, fields = torch.arange(18.0).view(6, 3) + 100 * rank, "dtype=7 peer={} stream=7 group={}"
    assert comm.all_gather(x).shape == (18, 3)
    assert comm.reduce_scatter(x).shape == (2, 3)
    assert comm.all_reduce(x).shape == (6, 3)
    assert comm.broadcast(x, 2) is x
    assert comm.all_to_all(x)[2 * rank : 2 * rank + 2].equal(x[2 * rank : 2 * rank + 2])
    expected = [f"AllGather count=18 {fields.format(-1, 0)}"]
    expected += [f"ReduceScatter count=6 {fields.format(-1, 0)}"]
    expected += [f"AllReduce count=18 {fields.format(-1, 0)}"]
    expected += [f"Broadcast count=18 {fields.format(2, 0)}"]
    for peer in range(WORLD):
        expected += [f"{kind} count=6 {fields.format(peer, 1)}" for kind in ("Send", "Recv")]
    assert fake.log() == expected
    rows, own = [1, 2, 3], rank + 1
    out = comm.all_to_all(x, send_rows=rows, recv_rows=[own] * WORLD)
    first = sum(rows[:rank])
    assert out.shape == (own * WORLD, 3)
    assert out[own * rank : own * own].equal(x[first : first + own])  # what stays on this rank
    for peer in range(WORLD):
        expected += [f"Send count={3 * rows[peer]} {fields.format(peer, 1)}"]
        expected += [f"Recv count={3 * own} {fields.format(peer, 1)}"]
    assert fake.log() == expected
    comm.close()


def test_counts_and_pieces(ranks: RanksFixture, fake_nccl: Build) -> None:
    ranks(WORLD).run(counts_job, fake_nccl().path)


def failing_job(path: str, failing: int, how: str) -> tuple[Ending, Ending]:
    fake, group = Fake(path), group_of()
    options: dict[str, Any] = {"library": path, "timeout": 20}
    fails = dist.get_rank() == failing
    if fails:
        fake.result("ncclGetUniqueId", 2 if how == "id" else 0)
        fake.version(22200 if how == "version" else 23203)
        options |= {"library": "/nowhere/libnccl.so.2"} if how == "library" else {}
        options |= {"timeout": 19} if how == "timeout" else {}
    with contextlib.nullcontext() if fails and how == "device" else pretending():
        first = faults.ending_of(lambda: Communicator(group, **options))
    assert fake.calls("ncclCommInitRankConfig") == 0  # no rank waits in NCCL
    fake.result("ncclGetUniqueId", 0)
    fake.version(23203)
    with pretending():
        return first, faults.ending_of(lambda: Communicator(group, library=path).close())


@pytest.mark.parametrize(
    ("failing", "how", "error", "text"),
    [
        (0, "id", "TpkernelsError", "ncclGetUniqueId failed: fake error 2; last message: nccl"),
        (0, "library", "NotImplementedError", "cannot load '/nowhere/libnccl.so.2'"),
        (2, "library", "NotImplementedError", "cannot load '/nowhere/libnccl.so.2'"),
        pytest.param(1, "device", "NotImplementedError", "needs a CUDA device", marks=NO_GPU),
        (1, "timeout", "ValueError", "19"),
        (1, "version", "TpkernelsError", "has NCCL 2."),
    ],
)
def test_a_rank_that_cannot_take_part_or_differs_is_an_error_on_all(
    ranks: RanksFixture, fake_nccl: Build, failing: int, how: str, error: str, text: str
) -> None:
    endings = ranks(WORLD).run(failing_job, fake_nccl().path, failing, how)
    for rank, (first, then) in enumerate(endings):
        assert first.seconds < PROMPT and text in first.text and not then.error, (first, then)
        if how in ("timeout", "version"):
            assert first.error == error, first
            assert "all ranks must" in first.text and "rank 1" in first.text, first
        elif rank == failing:
            assert (first.error, first.peer) == (error, None), first
        else:
            assert (first.error, first.peer) == ("TpkernelsError", failing), first
            assert f"rank {failing} cannot take part: " in first.text, first


@pretending()
def absent_job(path: str, absent: int) -> Ending | None:
    group = group_of()
    if dist.get_rank() == absent:
        return None
    return faults.ending_of(lambda: Communicator(group, timeout=SHORT, library=path))


@pytest.mark.parametrize("absent", sweep([2, 0]))
def test_a_rank_that_does_not_come(ranks: RanksFixture, fake_nccl: Build, absent: int) -> None:
    for rank, ending in enumerate(ranks(WORLD).run(absent_job, fake_nccl().path, absent)):
        if rank != absent:
            assert ending.error == "CollectiveTimeoutError" and ending.peer == absent, ending
            assert SHORT <= ending.seconds < SHORT + PROMPT, ending
            # Its own wait, or that of the third rank, which may have given up a moment before.
            assert f"waited 0.6 s for rank {absent}, which did not arrive" in ending.text, ending


@NO_GPU
@on_ranks(WORLD)
def test_without_a_gpu_it_says_what_is_missing() -> None:
    group = group_of()
    ending = faults.ending_of(lambda: Communicator(group, timeout=5))
    assert ending.error == "NotImplementedError" and ending.seconds < PROMPT, ending
    assert f"needs a CUDA device, and torch {torch.__version__} sees none; " in ending.text


# The methods, on one rank.


def on_one_rank(job: Callable[[Fake, Communicator], None]) -> Callable[..., None]:
    """Make a test of a function that asserts on the only rank of a communicator."""

    def test(ranks: RanksFixture, fake_nccl: Build) -> None:
        ranks(1).run(_run_job, job.__name__, fake_nccl().path)

    test.__name__, test.__doc__ = job.__name__, job.__doc__
    test.job = job  # type: ignore[attr-defined]
    return test


@pretending()
def _run_job(name: str, path: str) -> None:
    group = group_of()
    try:
        globals()[name].job(Fake(path), Communicator(group, library=path, timeout=SHORT))
    finally:
        dist.destroy_process_group(group)


@on_one_rank
def test_what_the_methods_ask_for(fake: Fake, comm: Communicator) -> None:
    x, peer = torch.arange(12.0).view(4, 3), "dtype=7 peer={} stream=7 group={}"
    for name, call in [
        ("AllGather", lambda: comm.all_gather(x)),
        ("ReduceScatter", lambda: comm.reduce_scatter(x)),
        ("AllReduce", lambda: comm.all_reduce(x)),
        ("AllReduce", lambda: comm.all_reduce(x, x)),
        ("AllGather", lambda: comm.all_gather(x, torch.zeros(12))),
    ]:
        assert torch.equal(call().view(4, 3), x)
        assert fake.log()[-1] == f"{name} count=12 {peer.format(-1, 0)}"
    assert comm.broadcast(x, 0) is x
    assert fake.log()[-1] == f"Broadcast count=12 {peer.format(0, 0)}"
    assert torch.equal(comm.all_to_all(x), x) and torch.equal(comm.all_to_all(x, None, [4], [4]), x)
    assert fake.log()[-2:] == [f"{name} count=12 {peer.format(0, 1)}" for name in ("Send", "Recv")]
    before = len(fake.log())
    assert comm.all_gather(x[:0]).shape == comm.all_to_all(x[:0]).shape == (0, 3)
    assert len(fake.log()) == before
    assert comm.all_reduce(torch.tensor(2.0)).item() == 2
    assert f"rank 0 of 1 on cpu, NCCL {comm.library.version}" in repr(comm)
    comm.close()
    assert (fake.alive(), fake.misuse(), fake.calls("ncclCommAbort")) == (0, 0, 0)


@on_one_rank
def test_a_group_starts_as_one(fake: Fake, comm: Communicator) -> None:
    x, y = torch.arange(3.0), torch.zeros(3)
    with comm.group():
        comm.send(torch.arange(3.0), 0)  # kept alive until the group has started
        gc.collect()
        assert comm.recv(y, 0) is y and not fake.log()
        other = threading.Thread(target=comm.all_reduce, args=[x])  # not in a group
        other.start()
        other.join()
        assert [line.split()[0] for line in fake.log()] == ["AllReduce"]
        with pytest.raises(RuntimeError, match="this thread is already in a group"), comm.group():
            pass
    assert torch.equal(x, y) and [line.split()[0] for line in fake.log()[1:]] == ["Send", "Recv"]
    with pytest.raises(ZeroDivisionError), comm.group():
        comm.send(x, 0)
        raise ZeroDivisionError
    with comm.group():
        pass
    assert len(fake.log()) == 3 and fake.calls("ncclGroupStart") == 1
    comm.check()


@on_one_rank
def test_how_communicators_end(fake: Fake, comm: Communicator) -> None:
    group = dist.group.WORLD
    comm.abort()
    with pytest.raises(tpkernels.GroupBrokenError, match="It broke with: it was aborted"):
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


@on_one_rank
def test_a_destroyed_process_group(fake: Fake, comm: Communicator) -> None:
    group = group_of()
    other = Communicator(group, library=fake.path)
    dist.destroy_process_group(group)
    other.all_reduce(torch.ones(2))  # is independent
    other.close()
    with pytest.raises(ValueError, match=r"process group '.*' was destroyed on this rank"):
        Communicator(group, library=fake.path)
    comm.close()


LEAVING = """
import atexit
atexit.register(lambda: print(fake.calls("ncclCommAbort")))  # the first to register runs last
import sys
sys.path.insert(0, {root!r})
import torch.distributed as dist
from tests.nccl.test_communicator import Communicator, Fake, pretending
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
fake = Fake({path!r})
with pretending():
    kept = Communicator(dist.group.WORLD, library=fake.path, timeout=0.5)
fake.progress(-1)
fake.delay("ncclCommAbort", 30_000)
"""


@pytest.mark.thorough
def test_a_process_that_ends_aborts_what_is_open(fake_nccl: Build) -> None:
    """And waits for no abort that does not come back."""
    code, start = LEAVING.format(root=str(ROOT), path=fake_nccl().path), time.monotonic()
    ended = python("-c", code)
    assert (ended.returncode, ended.stdout) == (0, "1\n"), ended.stdout + ended.stderr
    assert time.monotonic() - start < 25


# Waiting for the device.

NEVER = 60.0  # seconds until an event comes to pass that nobody waits for to the end


class Event:
    """A CUDA event that completes at a given time."""

    at = 0.0

    def record(self, stream: object) -> None:
        assert stream == "current stream"

    def query(self) -> bool:
        return time.monotonic() >= self.at


@on_one_rank
def test_wait_is_bounded(fake: Fake, comm: Communicator) -> None:
    def wait(seconds: float, timeout: float | None = None) -> faults.Ending:
        with (
            mock.patch.object(torch.cuda, "Event", Event),
            mock.patch.object(torch.cuda, "current_stream", lambda device: "current stream"),
            mock.patch.object(Event, "at", time.monotonic() + seconds),
        ):
            return faults.ending_of(lambda: comm.wait(timeout))

    assert not wait(0.0).error
    ending = wait(0.2)
    assert not ending.error and 0.19 <= ending.seconds < NEVER / 2, ending
    second = Communicator(dist.group.WORLD, library=fake.path)
    late = wait(NEVER, timeout=0.1)
    assert late.error == "CollectiveTimeoutError" and 0.1 <= late.seconds < NEVER / 2, late
    assert "enqueued work was not done within 0.1 s" in late.text
    assert (fake.calls("ncclCommAbort"), fake.alive(), fake.misuse()) == (1, 1, 0)
    comm = second
    fake.asynchronous(REMOTE_ERROR)
    lost = wait(NEVER)
    assert lost.error == "PeerLostError" and lost.seconds < NEVER / 2, lost
    assert "an operation in flight failed" in lost.text and fake.alive() == 0


# Refusals.


X = torch.arange(12.0).view(4, 3)
REFUSED: list[tuple[Callable[[Communicator], object], type[Exception], str]] = [
    (lambda c: c.broadcast([1.0], 0), TypeError, "x is a list, not a tensor"),
    (lambda c: c.send(X.long(), 0), NotImplementedError, "x has dtype int64; supported"),
    (lambda c: c.recv(X.to("meta"), 0), ValueError, "x is on meta, but the communicator"),
    (lambda c: c.all_reduce(X.t()), ValueError, "strides [1, 3] is not contiguous"),
    (lambda c: c.all_gather(X, X.double()), TypeError, "x is float32 but out is float64"),
    (lambda c: c.all_reduce(X, X.t()), ValueError, "out of shape [3, 4] and strides [1, 3] is"),
    (lambda c: c.all_gather(X, torch.zeros(11)), ValueError, "out has 11 elements; the result"),
    (lambda c: c.reduce_scatter(X, torch.zeros(3)), ValueError, "out has 3 elements; the result"),
    (lambda c: c.all_reduce(X, torch.zeros(13)), ValueError, "out has 13 elements; the result has"),
    (lambda c: c.all_gather(X[0, 0]), ValueError, "x has no dims"),
    (
        lambda c: c.all_to_all(X, None, [3], [4]),
        ValueError,
        "send_rows [3] adds up to 3, not x's 4",
    ),
    (lambda c: c.all_to_all(X, X.clone(), [4], [3]), ValueError, "out has 12 elements; the result"),
    (lambda c: c.all_to_all(X, None, [2, 2]), ValueError, "send_rows is [2, 2]; it must be 1"),
    (lambda c: c.all_to_all(X, None, [4], [-4]), ValueError, "recv_rows is [-4]"),
    (lambda c: c.broadcast(X, 1), ValueError, "root is 1; it must be one of ranks 0 to 0"),
    (lambda c: c.send(X, -1), ValueError, "peer is -1; it must be one of ranks 0 to 0"),
    (lambda c: c.recv(X, 4), ValueError, "peer is 4; it must be one of ranks 0 to 0"),
]


@on_one_rank
def test_refusals_reach_no_rank(fake: Fake, comm: Communicator) -> None:
    for call, error, text in REFUSED:
        ending = faults.ending_of(lambda call=call: call(comm))
        assert ending.error == error.__name__ and text in ending.text, (text, ending)
    for timeout in (0, float("inf")):
        ending = faults.ending_of(lambda t=timeout: Communicator("no group", timeout=t))
        assert f"timeout must be in (0, 86400] seconds, not {timeout}" in ending.text, ending
    assert not fake.log()
    comm.close()
