"""Torch's multimem ops between processes of one host: they check what torch checks, and read and
write the ranks' symmetric memory where torch's kernels do. No GPU has confirmed that."""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

SUMMED = torch.float32, torch.bfloat16


class Multimem:
    """Stands in for `torch.ops.symm_mem`. ``memory`` makes the ranks' symmetric tensors, by the
    address of this rank's and the name of the group for which torch has mapped them. ``meets``:
    whether a call ends when all ranks have read and stored; False for a negative control."""

    def __init__(self, meets: bool = True) -> None:
        self.calls: list[str] = []
        self.memory: dict[tuple[int, str], Callable[[], Iterator[torch.Tensor]]] = {}
        self.meets = meets

    def multimem_all_reduce_(self, x: torch.Tensor, op: str, name: str) -> None:
        unit = self._alignment(x) // x.element_size()
        with self._together("multimem_all_reduce_", op, x, name) as (rank, ranks):
            each = math.ceil(x.numel() / (unit * len(ranks))) * unit
            part = slice(rank * each, (rank + 1) * each)
            total = _sum([there[part] for there in ranks])
            for there in ranks:
                there[part].copy_(total)

    def multimem_one_shot_all_reduce_out(
        self, x: torch.Tensor, op: str, name: str, out: torch.Tensor
    ) -> None:
        assert out.is_contiguous() and out.shape == x.shape and out.dtype == x.dtype
        assert out.data_ptr() % self._alignment(x) == 0
        with self._together("multimem_one_shot_all_reduce_out", op, x, name) as (_, ranks):
            out.copy_(_sum(ranks))

    def multimem_all_gather_out(self, x: torch.Tensor, name: str, out: torch.Tensor) -> None:
        assert x.is_contiguous() and x.data_ptr() % self._alignment(out) == 0
        with self._together("multimem_all_gather_out", None, out, name) as (rank, ranks):
            assert out.shape[0] == x.shape[0] * len(ranks) and out.shape[1:] == x.shape[1:]
            for there in ranks:
                there.view(len(ranks), -1)[rank].copy_(x.view(-1))

    @contextlib.contextmanager
    def _together(
        self, call: str, op: str | None, x: torch.Tensor, name: str
    ) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Begin a call with all ranks and end it with them. Yield this rank, and what lies at the
        place of ``x`` in each rank's memory."""
        group = _resolve_process_group(name)
        assert x.is_contiguous() and x.numel()
        assert op is None or (op == "sum" and x.dtype in SUMMED), (op, x.dtype)
        parts = self.memory[x.untyped_storage().data_ptr(), name]  # else torch has not mapped it
        self.calls.append(call)
        # Torch waits for ever if the blocks of the ranks' kernels are not as many.
        mine, grids = (call, x.dtype, x.numel(), self._alignment(x)), [None] * group.size()
        dist.all_gather_object(grids, mine, group)
        assert grids == [mine] * group.size(), grids
        time.sleep(random.uniform(0, 1e-3))
        begin = x.storage_offset() * x.element_size()
        yield (
            group.rank(),
            [there[begin : begin + x.nbytes].view(x.dtype) for there in parts()],
        )
        if self.meets:
            dist.barrier(group)

    @staticmethod
    def _alignment(x: torch.Tensor) -> int:
        """The bytes that a thread moves at a time, which torch derives from offset and size."""
        begin = x.storage_offset() * x.element_size()
        found = next(unit for unit in (16, 8, 4, 2, 1) if begin % unit == x.nbytes % unit == 0)
        assert found >= max(4, x.element_size()), found
        return found


def _sum(partials: list[torch.Tensor]) -> torch.Tensor:
    """The sum in fp32, not in rank order, as with a switch."""
    total = torch.zeros(partials[0].shape)
    for partial in reversed(partials):
        total += partial
    return total.to(partials[0].dtype)
