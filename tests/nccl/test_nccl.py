"""`tpkernels.nccl.Communicator`: how ranks create one, what it refuses, and what it passes to NCCL.
The ranks have a fake libnccl, and CPU tensors in place of CUDA tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.support import faults
from tests.support.cases import RanksFixture
from tests.support.fake_nccl import Build, Fake
from tests.support.faults import PROMPT, Ending
from tests.support.tiers import sweep
from tpkernels.nccl import Communicator, communicator

WORLD = 3
SHORT = 0.6
CPU = torch.device("cpu")
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@contextlib.contextmanager
def pretending() -> Iterator[None]:
    """Makes the CPU the current CUDA device."""
    with (
        mock.patch.object(communicator, "_current_device", lambda: CPU),
        mock.patch.object(communicator, "_current_stream", lambda device: 7),
    ):
        yield


def group_of(group: object = None) -> dist.ProcessGroup:
    made = dist.new_group() if group is None else group
    assert isinstance(made, dist.ProcessGroup)
    return made


# Set-up.


@pretending()
def ids_job(path: str) -> list[bytes]:
    fake, group = Fake(path), group_of()
    mesh = DeviceMesh.from_group(group, "cpu")
    seen = []
    for group_like in (group, group.group_name, mesh, (mesh, 0)):
        with Communicator(group_like, library=path) as comm:
            assert (comm.rank, comm.world, comm.device) == (dist.get_rank(), WORLD, CPU)
            assert fake.name == group.group_name and fake.config.blocking == 0
        seen.append(fake.unique_id)
    assert fake.calls("ncclGetUniqueId") == (len(seen) if dist.get_rank() == 0 else 0)
    assert (fake.calls("ncclCommDestroy"), fake.alive, fake.misuse) == (len(seen), 0, 0)
    return seen


def test_all_ranks_get_rank_0s_id(ranks: RanksFixture, fake_nccl: Build) -> None:
    first, *others = ranks(WORLD).run(ids_job, fake_nccl().path)
    assert len(set(first)) == len(first) and set(map(len, first)) == {128}
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
    assert fake.log == expected
    rows, own = [1, 2, 3], rank + 1
    out = comm.all_to_all(x, send_rows=rows, recv_rows=[own] * WORLD)
    first = sum(rows[:rank])
    assert out.shape == (own * WORLD, 3)
    assert out[own * rank : own * own].equal(x[first : first + own])  # what stays on this rank
    for peer in range(WORLD):
        expected += [f"Send count={3 * rows[peer]} {fields.format(peer, 1)}"]
        expected += [f"Recv count={3 * own} {fields.format(peer, 1)}"]
    assert fake.log == expected
    comm.close()


def test_counts_and_pieces(ranks: RanksFixture, fake_nccl: Build) -> None:
    ranks(WORLD).run(counts_job, fake_nccl().path)


def failing_job(path: str, failing: int, how: str) -> tuple[Ending, Ending]:
    fake, group = Fake(path), group_of()
    options: dict[str, Any] = {"library": path}
    if dist.get_rank() == failing:
        if how == "id":
            fake.result("ncclGetUniqueId", 2)
        elif how == "library":
            options["library"] = "/nowhere/libnccl.so.2"
        elif how == "version":
            fake.version(22200)
        elif how == "timeout":
            options["timeout"] = 19
    with contextlib.ExitStack() as pretence:
        if dist.get_rank() != failing or how != "device":
            pretence.enter_context(pretending())
        first = faults.ending_of(lambda: Communicator(group, **{"timeout": 20, **options}))
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
    ],
)
def test_a_rank_that_cannot_take_part_is_an_error_on_all(
    ranks: RanksFixture, fake_nccl: Build, failing: int, how: str, error: str, text: str
) -> None:
    endings = ranks(WORLD).run(failing_job, fake_nccl().path, failing, how)
    for rank, (first, then) in enumerate(endings):
        assert first.seconds < PROMPT, first
        if rank == failing:
            assert (first.error, first.peer) == (error, None) and text in first.text, first
        else:
            assert (first.error, first.peer) == ("TpkernelsError", failing), first
            assert f"rank {failing} cannot take part: " in first.text, first
            assert text in first.text, first
        assert not then.error, then


@pytest.mark.parametrize(
    ("how", "error"), [("timeout", "ValueError"), ("version", "TpkernelsError")]
)
def test_ranks_that_differ(ranks: RanksFixture, fake_nccl: Build, how: str, error: str) -> None:
    expected = {"timeout": "19", "version": "has NCCL 2."}[how]
    for first, then in ranks(WORLD).run(failing_job, fake_nccl().path, 1, how):
        assert first.error == error and first.seconds < PROMPT, first
        assert expected in first.text and "all ranks must" in first.text, first
        assert "rank 1" in first.text, first
        assert not then.error, then


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


def no_cuda_job() -> Ending:
    group = group_of()
    return faults.ending_of(lambda: Communicator(group, timeout=5))


@NO_GPU
def test_without_a_gpu_it_says_what_is_missing(ranks: RanksFixture) -> None:
    for ending in ranks(WORLD).run(no_cuda_job):
        assert ending.error == "NotImplementedError" and ending.seconds < PROMPT, ending
        assert f"needs a CUDA device, and torch {torch.__version__} sees none; " in ending.text
