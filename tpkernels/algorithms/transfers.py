"""The ops by an algorithm that transfers shards and partials: what `ring` and `hierarchical`
share.

all_gather             shards arrive, in parts, and are put in their places
all_gather_matmul      each part is multiplied meanwhile
reduce_scatter         this rank's partials go to where they are added
matmul_reduce_scatter  each partial is computed meanwhile
all_reduce, matmul_all_reduce   a reduce-scatter of the elements or rows, then an all-gather
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from tpkernels.algorithms.parts import (
    Partials,
    Products,
    SplitProducts,
    partials_of,
    partials_of_product,
    shard_counts,
    shard_shape,
)
from tpkernels.algorithms.reduction import Reduction, behind_all_reduce, behind_matmul_all_reduce
from tpkernels.call import Call
from tpkernels.local.memory import empty
from tpkernels.local.product import Weight


class Transfers(ABC):
    """The transfers of one call.

    Attributes:
        received: the ranks whose shards this rank receives into memory of its own.
        room: bytes of a data buffer in which ranks see each other's data; None: there is none.
        chunk: bytes of each rank's elements that move at a time, without a matmul; None: all.
    """

    call: Call
    received: Sequence[int]
    room: int | None = None
    chunk: int | None = None

    @abstractmethod
    def gather(
        self,
        shards: dict[int, torch.Tensor],
        counts: Sequence[int],
        step: int,
        use: Callable[[int, int, torch.Tensor], None],
    ) -> None:
        """Make every rank see the shards of all, ``step`` elements at a time.

        Args:
            shards: the flat shard of this rank, and memory for those in ``received``.
            counts: elements of each rank's shard.
            use: ``use(owner, begin, part)`` is called for each part of each shard: the elements
                from ``begin`` on. It must not keep ``part``, which may lie in shared memory.
        """

    @abstractmethod
    def reduce(self, partials: Partials, out: torch.Tensor, reduction: Reduction) -> None:
        """Fill ``out``, flat, with the sum of this rank's part."""

    @abstractmethod
    def end(self) -> None:
        """End the call."""

    def gather_flat(
        self, whole: Sequence[torch.Tensor], arrived: Callable[[int], None] = lambda owner: None
    ) -> None:
        """Fill ``whole``, a flat tensor for each rank; this rank's own is filled already.
        ``arrived(owner)`` is called when a shard is complete."""
        own = self.call.group.rank
        shards = {owner: whole[owner] for owner in (*self.received, own)}

        def place(owner: int, begin: int, part: torch.Tensor) -> None:
            if owner not in shards:
                whole[owner][begin : begin + part.numel()].copy_(part)
            if begin + part.numel() == counts[owner]:
                arrived(owner)

        counts = [shard.numel() for shard in whole]
        step = max(counts) if self.chunk is None else self.chunk // whole[own].itemsize
        self.gather(shards, counts, max(1, step), place)


def ops_by(begin: Callable[[Call], Transfers], **others: Callable[..., Any]) -> SimpleNamespace:
    """Return the ops of an algorithm, by name, with the ``others`` that it has. ``begin`` begins a
    call."""

    def all_gather(call: Call, x: torch.Tensor) -> torch.Tensor:
        problem, counts, transfers = call.problem, shard_counts(call.problem), begin(call)
        out = empty(problem.shape, x.dtype, x.device)
        places = out.split(list(problem.sizes), problem.dim)
        whole, own = list(out.view(-1).split(counts)), call.group.rank
        if problem.outer == 1:
            whole[own].copy_(x.reshape(-1))
        else:  # shards are not contiguous in the output
            whole = [empty([0 if r == own else n], x.dtype, x.device) for r, n in enumerate(counts)]
            whole[own] = x.contiguous().view(-1)

        def put(owner: int) -> None:
            if problem.outer != 1:
                places[owner].copy_(whole[owner].view(places[owner].shape))

        transfers.gather_flat(whole, put)
        transfers.end()
        return out

    def all_gather_matmul(call: Call, x: torch.Tensor, products: Products) -> None:
        problem, counts, transfers = call.problem, shard_counts(call.problem), begin(call)
        made = SplitProducts(call, x, products, transfers.room)
        memory, width = None, problem.shape[-1]
        if made.gathered is not None and problem.outer == 1:  # shards are contiguous in it
            memory = made.gathered.view(-1).split(counts)
        shards = {
            owner: empty([counts[owner]], x.dtype, x.device) if memory is None else memory[owner]
            for owner in transfers.received
        }

        def multiply(owner: int, begin: int, part: torch.Tensor) -> None:
            in_place = memory is not None and owner in transfers.received
            made.use(owner, begin // width, part.view(-1, width), in_place)

        shards[call.group.rank] = x.contiguous().view(-1)
        transfers.gather(shards, counts, made.split.step * width, multiply)
        transfers.end()
        made.finish()

    def scatter(
        transfers: Transfers, partials: Partials, reduction: Reduction, device: torch.device
    ) -> torch.Tensor:
        call = transfers.call
        out = empty(shard_shape(call.problem, call.group.rank), reduction.out_dtype, device)
        transfers.reduce(partials, out.view(-1), reduction)
        transfers.end()
        return out

    def reduce(
        transfers: Transfers, partials: Partials, out: torch.Tensor, reduction: Reduction
    ) -> None:
        sums = out.view(-1).tensor_split(list(partials.split.begins[1:]))
        transfers.reduce(partials, sums[transfers.call.group.rank], reduction)
        transfers.gather_flat(sums)
        transfers.end()

    def reduce_scatter(call: Call, x: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        transfers = begin(call)
        return scatter(transfers, partials_of(call, x, transfers.chunk), reduction, x.device)

    def matmul_reduce_scatter(
        call: Call, x: torch.Tensor, w: Weight, reduction: Reduction
    ) -> torch.Tensor:
        transfers = begin(call)
        partials = partials_of_product(call, x, w, transfers.room)
        return scatter(transfers, partials, reduction, x.device)

    def all_reduce(call: Call, x: torch.Tensor, out: torch.Tensor, reduction: Reduction) -> None:
        """``out`` may be ``x``: a part is overwritten with its sum, which is complete only when the
        partials of all ranks have been read or received."""
        transfers = begin(call)
        reduce(transfers, partials_of(call, x, transfers.chunk), out, reduction)

    def matmul_all_reduce(
        call: Call, x: torch.Tensor, w: Weight, reduction: Reduction
    ) -> torch.Tensor:
        transfers = begin(call)
        out = empty(call.problem.shape, reduction.out_dtype, x.device)
        reduce(transfers, partials_of_product(call, x, w, transfers.room), out, reduction)
        return out

    ops = (
        all_gather,
        all_gather_matmul,
        reduce_scatter,
        matmul_reduce_scatter,
        all_reduce,
        matmul_all_reduce,
        behind_all_reduce(all_reduce),
        behind_matmul_all_reduce(matmul_all_reduce),
    )
    for function in ops:
        function.__module__ = begin.__module__  # where the reader of a trace finds the algorithm
    return SimpleNamespace(**{function.__name__: function for function in ops}, **others)
