"""`tpkernels.nccl.Communicator` with the real NCCL, on GPUs."""

from __future__ import annotations

import signal

import pytest
import torch
import torch.distributed as dist

from tests.support import faults
from tests.support.cases import RanksFixture
from tests.support.faults import require_group
from tpkernels.nccl import Communicator

pytestmark = pytest.mark.gpu(1)


def collectives_job() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    group = require_group(dist.new_group())
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        with Communicator(group, timeout=60) as comm:
            x = torch.arange(world * 6, device="cuda", dtype=dtype).view(world * 2, 3) + rank
            inputs = [
                torch.arange(world * 6, dtype=dtype).view(world * 2, 3) + r for r in range(world)
            ]
            gathered, total = torch.cat(inputs), torch.stack(inputs).sum(0)
            local = slice(2 * rank, 2 * rank + 2)
            assert torch.equal(comm.all_gather(x).cpu(), gathered)
            assert torch.equal(comm.all_reduce(x).cpu(), total)
            assert torch.equal(comm.reduce_scatter(x).cpu(), total[local])
            assert torch.equal(
                comm.all_to_all(x).cpu(), torch.cat([tensor[local] for tensor in inputs])
            )
            assert torch.equal(comm.broadcast(x.clone(), world - 1).cpu(), inputs[-1])
            left, right = (rank - 1) % world, (rank + 1) % world
            received = torch.empty_like(x)
            with comm.group():
                comm.send(x, right)
                comm.recv(received, left)
            comm.wait()
            assert torch.equal(received.cpu(), inputs[left])


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.gpu(2))])
def test_collectives_on_gpus(ranks: RanksFixture, world: int) -> None:
    ranks(world).run(collectives_job)


def killed_peer_job() -> faults.Ending | None:
    torch.cuda.set_device(dist.get_rank())
    comm = Communicator(require_group(dist.new_group()), timeout=5)
    x = torch.ones(1 << 20, device="cuda")
    comm.all_reduce(x)
    comm.wait()
    if dist.get_rank() == 1:
        faults.disturb_now(signal.SIGKILL)

    def run_all_reduce() -> None:
        comm.all_reduce(x)
        comm.wait()

    ending = faults.record_ending(run_all_reduce)
    torch.ones(4, device="cuda").sum().item()  # the CUDA context survives
    return ending


@pytest.mark.gpu(2)
def test_a_killed_peer_is_detected() -> None:
    with faults.watched_ranks(2) as pool:
        ending = faults.values(faults.collect(pool, killed_peer_job), 1)[0]
        assert ending.error in ("PeerLostError", "CollectiveTimeoutError"), ending
        assert ending.seconds < 15, ending
