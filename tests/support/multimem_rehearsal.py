"""Emulate the multimem ops of torch between processes of one host.

They repeat the checks of torch, and read and write symmetric memory as the torch kernels do. No GPU
has confirmed this.
"""

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
    """Replaces `torch.ops.symm_mem`.

    Args:
        has_barrier: end each call only after all ranks have read and stored. False is a negative
            control.

    Attributes:
        memory: by address of the local tensor and name of the group, a function that returns the
            symmetric tensors of all ranks.
    """

    def __init__(self, has_barrier: bool = True) -> None:
        self.calls: list[str] = []
        self.memory: dict[tuple[int, str], Callable[[], Iterator[torch.Tensor]]] = {}
        self.has_barrier = has_barrier

    def multimem_all_reduce_(self, x: torch.Tensor, op: str, name: str) -> None:
        unit = self._alignment(x) // x.element_size()
        with self._together("multimem_all_reduce_", op, x, name) as (rank, ranks):
            slice_numel = math.ceil(x.numel() / (unit * len(ranks))) * unit
            rank_slice = slice(rank * slice_numel, (rank + 1) * slice_numel)
            total = _sum([peer_x[rank_slice] for peer_x in ranks])
            for peer_x in ranks:
                peer_x[rank_slice].copy_(total)

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
            for peer_out in ranks:
                peer_out.view(len(ranks), -1)[rank].copy_(x.view(-1))

    @contextlib.contextmanager
    def _together(
        self, call: str, op: str | None, x: torch.Tensor, name: str
    ) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Begin and end a call together with all ranks.

        Yields this rank, and the region of ``x`` in the memory of each rank.
        """
        group = _resolve_process_group(name)
        assert x.is_contiguous() and x.numel()
        assert op is None or (op == "sum" and x.dtype in SUMMED), (op, x.dtype)
        # KeyError: torch has not mapped the memory for this group.
        regions = self.memory[x.untyped_storage().data_ptr(), name]
        self.calls.append(call)
        # The torch kernels deadlock if the numbers of blocks differ between ranks.
        local_call, calls = (call, x.dtype, x.numel(), self._alignment(x)), [None] * group.size()
        dist.all_gather_object(calls, local_call, group)
        assert calls == [local_call] * group.size(), calls
        time.sleep(random.uniform(0, 1e-3))
        begin = x.storage_offset() * x.element_size()
        yield (
            group.rank(),
            [region[begin : begin + x.nbytes].view(x.dtype) for region in regions()],
        )
        if self.has_barrier:
            dist.barrier(group)

    @staticmethod
    def _alignment(x: torch.Tensor) -> int:
        """Return the bytes per access of a thread. torch derives them from offset and size."""
        begin = x.storage_offset() * x.element_size()
        alignment = next(unit for unit in (16, 8, 4, 2, 1) if begin % unit == x.nbytes % unit == 0)
        assert alignment >= max(4, x.element_size()), alignment
        return alignment


def _sum(partials: list[torch.Tensor]) -> torch.Tensor:
    """Sum in fp32 but not in rank order, like a switch."""
    total = torch.zeros(partials[0].shape)
    for partial in reversed(partials):
        total += partial
    return total.to(partials[0].dtype)
