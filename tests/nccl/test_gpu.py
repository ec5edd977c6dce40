"""`tpkernels.nccl.Communicator` with the real NCCL, on GPUs."""

from __future__ import annotations

import signal

import pytest
import torch
import torch.distributed as dist

from tests.support import faults
from tests.support.cases import RanksFixture
from tests.support.faults import group_of
from tpkernels.nccl import Communicator

pytestmark = pytest.mark.gpu(1)


def moves_job() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    group = group_of(dist.new_group())
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        with Communicator(group, timeout=60) as comm:
            x = torch.arange(world * 6, device="cuda", dtype=dtype).view(world * 2, 3) + rank
            every = [
                torch.arange(world * 6, dtype=dtype).view(world * 2, 3) + r for r in range(world)
            ]
            gathered, total = torch.cat(every), torch.stack(every).sum(0)
            mine = slice(2 * rank, 2 * rank + 2)
            assert torch.equal(comm.all_gather(x).cpu(), gathered)
            assert torch.equal(comm.all_reduce(x).cpu(), total)
            assert torch.equal(comm.reduce_scatter(x).cpu(), total[mine])
            assert torch.equal(comm.all_to_all(x).cpu(), torch.cat([e[mine] for e in every]))
            assert torch.equal(comm.broadcast(x.clone(), world - 1).cpu(), every[-1])
            left, right = (rank - 1) % world, (rank + 1) % world
            received = torch.empty_like(x)
            with comm.group():
                comm.send(x, right)
                comm.recv(received, left)
            comm.wait()
            assert torch.equal(received.cpu(), every[left])


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.gpu(2))])
def test_on_gpus(ranks: RanksFixture, world: int) -> None:
    ranks(world).run(moves_job)


def lost_job() -> faults.Ending | None:
    torch.cuda.set_device(dist.get_rank())
    comm = Communicator(group_of(dist.new_group()), timeout=5)
    x = torch.ones(1 << 20, device="cuda")
    comm.all_reduce(x)
    comm.wait()
    if dist.get_rank() == 1:
        faults.disturb_now(signal.SIGKILL)

    def use() -> None:
        comm.all_reduce(x)
        comm.wait()

    ending = faults.ending_of(use)
    torch.ones(4, device="cuda").sum().item()  # the CUDA context survives
    return ending


@pytest.mark.gpu(2)
def test_a_killed_peer_is_found() -> None:
    with faults.watched_ranks(2) as pool:
        ending = faults.values(faults.collect(pool, lost_job), 1)[0]
        assert ending.error in ("PeerLostError", "CollectiveTimeoutError"), ending
        assert ending.seconds < 15, ending
