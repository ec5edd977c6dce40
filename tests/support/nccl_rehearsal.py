"""Dry run of the code path of CUDA tensors with NCCL, on CPU tensors.

Collectives are built from gloo collectives. The kernels of csrc/cuda run on the emulated driver.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from tests.support import emulated
from tests.support.cuda_rehearsal import ALL_QUALIFIED, cuda_code_path
from tpkernels.algorithms import reduction, unfused
from tpkernels.cuda import image
from tpkernels.groups.group import Group
from tpkernels.planning.qualification import Qualification
from tpkernels.planning.table import Table


class NcclLikeGroup:
    """A process group that supports lists of tensors of any sizes.

    Reductions accumulate in the communication dtype and round after each addition.
    """

    def __init__(self, pg: dist.ProcessGroup) -> None:
        self.pg = pg

    def _allgather_base(self, out: torch.Tensor, shard: torch.Tensor, _: Any) -> Any:
        return self.pg._allgather_base(out, shard.clone())  # the shard may be a view of out

    def allgather(self, outs: list[list[torch.Tensor]], shards: list[torch.Tensor], _: Any) -> None:
        shard = shards[0].clone()
        for rank, out in enumerate(outs[0]):
            if rank == self.pg.rank():
                out.copy_(shard)
            if out.numel():
                dist.broadcast(out, group=self.pg, group_src=rank)

    def allreduce(self, xs: list[torch.Tensor], _: Any) -> None:
        (x,) = xs
        gathered = [torch.empty_like(x) for _ in range(self.pg.size())]
        dist.all_gather(gathered, x, group=self.pg)
        x.copy_(functools.reduce(operator.add, gathered))

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
def nccl_code_path(
    driver: str = "", qualification: Qualification | None = ALL_QUALIFIED
) -> Iterator[Any]:
    """Let CPU tensors use the code path of CUDA tensors in groups with NCCL.

    No timing table is loaded. ``driver``: the emulated driver, if it is not loaded yet.
    ``qualification``: see `cuda_code_path`.
    """
    if driver:
        emulated.load(driver)
    image._loads.cache_clear()
    with cuda_code_path(qualification=qualification) as patch:
        patch.setattr(Group, "uses_gloo", lambda self, device: device != "cuda")
        patch.setattr(Group, "timing_table", lambda self, device: Table())
        patch.setattr(reduction, "_on_gpu", lambda _: True)
        patch.setattr(unfused, "_pg", lambda call: NcclLikeGroup(call.group.pg))
        yield patch
