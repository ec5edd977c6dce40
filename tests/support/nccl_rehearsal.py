"""CPU tensors take the way of CUDA tensors that NCCL moves: collectives made of gloo's, and the
kernels of csrc/cuda on the emulated driver."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from tests.support import emulated
from tests.support.cuda_rehearsal import ALL_QUALIFIED, pretending
from tpkernels.algorithms import reduction, unfused
from tpkernels.cuda import image
from tpkernels.groups.group import Group
from tpkernels.planning.qualification import Qualification
from tpkernels.planning.table import Table


class LikeNccl:
    """A process group with lists of tensors of any sizes, and with sums in the wire dtype, each
    addition rounded."""

    def __init__(self, pg: dist.ProcessGroup) -> None:
        self.pg = pg

    def _allgather_base(self, out: torch.Tensor, own: torch.Tensor, _: Any) -> Any:
        return self.pg._allgather_base(out, own.clone())  # own may be a part of out

    def allgather(self, outs: list[list[torch.Tensor]], owns: list[torch.Tensor], _: Any) -> None:
        own = owns[0].clone()
        for rank, out in enumerate(outs[0]):
            if rank == self.pg.rank():
                out.copy_(own)
            if out.numel():
                dist.broadcast(out, group=self.pg, group_src=rank)

    def allreduce(self, xs: list[torch.Tensor], _: Any) -> None:
        (x,) = xs
        everyone = [torch.empty_like(x) for _ in range(self.pg.size())]
        dist.all_gather(everyone, x, group=self.pg)
        x.copy_(functools.reduce(operator.add, everyone))

    def _reduce_scatter_base(self, out: torch.Tensor, x: torch.Tensor, options: Any) -> None:
        self.reduce_scatter([out], [list(x.split(out.numel()))], options)

    def reduce_scatter(
        self, outs: list[torch.Tensor], xs: list[list[torch.Tensor]], options: Any
    ) -> None:
        for rank, x in enumerate(xs[0]):
            total = x.clone()
            self.allreduce([total], options)
            if rank == self.pg.rank():
                outs[0].copy_(total)

    def alltoall_base(self, *args: Any) -> Any:
        return self.pg.alltoall_base(*args[:-1])


@contextlib.contextmanager
def over_nccl(
    driver: str = "", qualification: Qualification | None = ALL_QUALIFIED
) -> Iterator[Any]:
    """CPU tensors are taken for CUDA tensors of groups that have NCCL; ``driver``: the emulated
    one, if it is not loaded yet. There are no measured times.
    ``qualification``: see `pretending`."""
    if driver:
        emulated.load(driver)
    image._loads.cache_clear()
    with pretending(qualification=qualification) as patch:
        patch.setattr(Group, "uses_gloo", lambda self, device: device != "cuda")
        patch.setattr(Group, "tuned", lambda self, device: Table())
        patch.setattr(reduction, "_on_gpu", lambda _: True)
        patch.setattr(unfused, "_pg", lambda call: LikeNccl(call.group.pg))
        yield patch
