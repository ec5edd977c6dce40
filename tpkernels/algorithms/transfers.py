"""What `ring` and `hierarchical` share, which transfer shards and partials.

gather      shards arrive, in parts, and are put in their places, or multiplied meanwhile
reduce      this rank's partials, each computed meanwhile, go to where they are added; for a sum
            that all ranks keep, of their parts of the elements or rows, then a gather
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from tpkernels.algorithms.parts import (
    Partials,
    Products,
    SplitProducts,
    partials_of,
    partials_of_product,
    shard_counts,
)
from tpkernels.algorithms.reduction import Reduction
from tpkernels.groups.call import Call
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


def operations(kind: Callable[[Call], Transfers]) -> tuple[Callable[..., None], ...]:
    """Return an algorithm's `gather` and `reduce`, whose calls transfer by ``kind``."""

    def gather(call: Call, x: torch.Tensor, products: Products) -> None:
        _gather(kind(call), x, products)

    def reduce(
        call: Call, x: torch.Tensor, w: Weight | None, out: torch.Tensor, reduction: Reduction
    ) -> None:
        _reduce(kind(call), x, w, out, reduction)

    return gather, reduce


def _gather(transfers: Transfers, x: torch.Tensor, products: Products) -> None:
    """Carry out a call that gathers."""
    call = transfers.call
    problem, counts, rank = call.problem, shard_counts(call.problem), call.group.rank
    if products.weights:
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

        shards[rank] = x.contiguous().view(-1)
        transfers.gather(shards, counts, made.split.step * width, multiply)
        transfers.end()
        made.finish()
        return
    out = products.memory(call, x)
    places, whole = out.split(list(problem.sizes), problem.dim), list(out.view(-1).split(counts))
    if problem.outer == 1:
        whole[rank].copy_(x.reshape(-1))
    else:  # shards are not contiguous in the output
        whole = [empty([0 if r == rank else n], x.dtype, x.device) for r, n in enumerate(counts)]
        whole[rank] = x.contiguous().view(-1)

    def put(owner: int) -> None:
        if problem.outer != 1:
            places[owner].copy_(whole[owner].view(places[owner].shape))

    transfers.gather_flat(whole, put)
    transfers.end()


def _reduce(
    transfers: Transfers,
    x: torch.Tensor,
    w: Weight | None,
    out: torch.Tensor,
    reduction: Reduction,
) -> None:
    """Carry out a call that reduces. ``out`` may be ``x``: a part is overwritten with its sum,
    which is complete only when the partials of all ranks have been read or received."""
    call = transfers.call
    if w is None:
        partials = partials_of(call, x, transfers.chunk)
    else:
        partials = partials_of_product(call, x, w, transfers.room)
    if call.problem.spec.scatters:
        transfers.reduce(partials, out.view(-1), reduction)
    else:
        sums = out.view(-1).tensor_split(list(partials.split.begins[1:]))
        transfers.reduce(partials, sums[call.group.rank], reduction)
        transfers.gather_flat(sums)
    transfers.end()
