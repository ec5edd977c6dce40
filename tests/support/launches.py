"""Count the work that a rank would queue on its GPU, with fake CUDA tensors.

It counts kernels, collectives and the bytes that they move. It runs no kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tpkernels import cuda

aten = torch.ops.aten
_ALLOCATIONS = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}


@dataclass
class Queue:
    """Queued work: names in order, bytes that kernels read and write, bytes received from peers."""

    launches: list[str] = field(default_factory=list)
    touched: int = 0
    received: float = 0.0

    def kernel(self, name: str, tensors: Sequence[torch.Tensor | None]) -> None:
        self.launches.append(name)
        self.touched += sum(_bytes(x) for x in tensors if x is not None)


def _bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


class _Kernels(TorchDispatchMode):
    """Adds torch kernels to a queue."""

    def __init__(self, queue: Queue) -> None:
        super().__init__()
        self.queue = queue

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        name = func._schema.name.removeprefix("aten::")
        if func._schema.is_mutable:  # its fake kernel may need a GPU
            self.queue.kernel(name, inputs)
            return kwargs.get("out", args[0])
        if func is aten.mm.dtype:  # has no fake kernel
            out = args[0].new_empty((args[0].shape[0], args[1].shape[1]), dtype=args[2])
            self.queue.kernel(name, [*inputs, out])
            return out
        result = func(*args, **kwargs)
        outputs = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        memory = {x.untyped_storage()._cdata for x in inputs}
        is_view = all(x.untyped_storage()._cdata in memory for x in outputs)
        if name not in _ALLOCATIONS and not is_view:
            self.queue.kernel(name, [*inputs, *outputs])
        return result


class Collectives:
    """A process group that counts calls and moves no data. A group of NCCL calls is one launch."""

    def __init__(self, queue: Queue, rank: int, world: int) -> None:
        self.queue, self.rank, self.world = queue, rank, world

    def _add(self, name: str, received: float) -> None:
        self.queue.launches.append(name)
        self.queue.received += received

    def _allgather_base(self, out: torch.Tensor, shard: torch.Tensor, options: Any) -> None:
        assert out.numel() == self.world * shard.numel() and out.is_contiguous()
        assert shard.is_contiguous() and out.dtype == shard.dtype and not options.asyncOp
        self._add("all_gather", _bytes(out) - _bytes(shard))

    def allgather(
        self, outs: list[list[torch.Tensor]], shards: list[torch.Tensor], options: Any
    ) -> None:
        (chunks,), (shard,) = outs, shards
        assert all(out.is_contiguous() for out in chunks) and shard.is_contiguous()
        assert chunks[self.rank].numel() == shard.numel() and not options.asyncOp
        self._add("all_gather of a list", sum(map(_bytes, chunks)) - _bytes(shard))

    def _reduce_scatter_base(self, out: torch.Tensor, x: torch.Tensor, options: Any) -> None:
        assert x.numel() == self.world * out.numel() and x.is_contiguous()
        assert out.is_contiguous() and x.dtype == out.dtype and not options.asyncOp
        self._add("reduce_scatter", (self.world - 1) * _bytes(out))

    def reduce_scatter(
        self, outs: list[torch.Tensor], xs: list[list[torch.Tensor]], options: Any
    ) -> None:
        (out,), (chunks,) = outs, xs
        assert all(x.is_contiguous() for x in chunks) and out.is_contiguous()
        assert chunks[self.rank].numel() == out.numel() and not options.asyncOp
        share = (self.world - 1) / self.world  # each reduction passes along a chain of ranks
        self._add("reduce_scatter of a list", share * sum(map(_bytes, chunks)))

    def allreduce(self, xs: list[torch.Tensor], options: Any) -> None:
        (x,) = xs
        assert x.is_contiguous() and not options.asyncOp
        self._add("all_reduce", 2 * (self.world - 1) / self.world * _bytes(x))

    def alltoall_base(
        self, out: torch.Tensor, x: torch.Tensor, received: list[int], sent: list[int], options: Any
    ) -> None:
        assert out.is_contiguous() and x.is_contiguous() and not options.asyncOp
        if sent:
            assert sum(sent) == x.numel() and sum(received) == out.numel()
        self._add("all_to_all", _bytes(out) * (self.world - 1) / self.world)


@contextlib.contextmanager
def queued(rank: int, world: int) -> Iterator[tuple[Queue, Any]]:
    """Yield a queue, and a group for calls on fake CUDA tensors within the block."""
    queue = Queue()

    def sum_partials(out: torch.Tensor, partials: Sequence[torch.Tensor], *more: Any) -> None:
        queue.kernel("sum_partials", [out, *partials, *more[:2]])

    def rms_norm(
        rows: torch.Tensor, normed: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> None:
        queue.kernel("rms_norm", [rows, normed, weight])

    def copy_(dst: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
        queue.kernel("copy_", [dst, src])  # the torch version queries the device
        return dst

    def sliced(x: torch.Tensor, index: int | slice | tuple[slice, ...]) -> torch.Tensor:
        """Slice x. The torch version queries the device."""
        if isinstance(index, int):
            return x.select(0, index)
        for dim, dim_slice in enumerate(index if isinstance(index, tuple) else (index,)):
            x = torch.ops.aten.slice(x, dim, *dim_slice.indices(x.shape[dim]))
        return x

    group = SimpleNamespace(
        numerics=None,
        rank=rank,
        world=world,
        timeout_on=lambda device: 30.0,
        pg=Collectives(queue, rank, world),
        collectives_on=lambda device: group.pg,
        uses_gloo=lambda device: False,
        workspace=None,
    )
    with (
        mock.patch.object(cuda, "available", lambda device: True),
        mock.patch.object(cuda, "sum_partials", sum_partials),
        mock.patch.object(cuda, "rms_norm", rms_norm),
        mock.patch.object(torch.Tensor, "copy_", copy_),
        mock.patch.object(torch.Tensor, "__getitem__", sliced),
        FakeTensorMode(),
        _Kernels(queue),
    ):
        yield queue, group
