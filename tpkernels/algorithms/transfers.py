"""Base class of `ring` and `hierarchical`: transfers of shards and partial sums.

gather      Shards arrive in chunks. Each chunk is copied to the output or multiplied while the next
            chunk is in flight.
reduce      Partial sums are sent to the ranks that add them. Meanwhile the next partial sums are
            computed. An all-reduce sums slices of the elements or rows, then gathers them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from tpkernels.algorithms.chunks import (
    ChunkedMatmuls,
    GatherOutputs,
    Partials,
    input_partials,
    matmul_partials,
    shard_counts,
)
from tpkernels.algorithms.reduction import Reduction
from tpkernels.groups.call import Call
from tpkernels.local.memory import empty
from tpkernels.local.weight import Weight


class Transfers(ABC):
    """The transfers of one call.

    Attributes:
        recv_ranks: ranks whose shards this rank receives into local memory.
        buffer_bytes: size of a shared data buffer. None: the ranks share no memory.
        chunk_bytes: size of a chunk of a shard if the op has no matmul. None: the full shard.
    """

    call: Call
    recv_ranks: Sequence[int]
    buffer_bytes: int | None = None
    chunk_bytes: int | None = None

    @abstractmethod
    def gather(
        self,
        shards: dict[int, torch.Tensor],
        counts: Sequence[int],
        chunk_numel: int,
        consume: Callable[[int, int, torch.Tensor], None],
    ) -> None:
        """Pass the shards of all ranks to ``consume``, ``chunk_numel`` elements at a time.

        Args:
            shards: the flat local shard, and memory for the shards of ``recv_ranks``.
            counts: number of elements of each shard.
            consume: ``consume(owner, begin, chunk)`` is called for each chunk of each shard. The
                chunk starts at element ``begin`` of the shard. It may be in shared memory: do
                not keep it.
        """

    @abstractmethod
    def reduce(self, partials: Partials, out: torch.Tensor, reduction: Reduction) -> None:
        """Fill the flat tensor ``out`` with the local shard of the sum."""

    @abstractmethod
    def end(self) -> None:
        """End the call."""

    def gather_flat(
        self,
        flat_shards: Sequence[torch.Tensor],
        on_complete: Callable[[int], None] = lambda owner: None,
    ) -> None:
        """Gather flat shards in place.

        Args:
            flat_shards: one flat tensor per rank. Only the local shard holds its data before.
            on_complete: ``on_complete(owner)`` is called when a shard is complete.
        """
        rank = self.call.group.rank
        shards = {owner: flat_shards[owner] for owner in (*self.recv_ranks, rank)}

        def store(owner: int, begin: int, chunk: torch.Tensor) -> None:
            if owner not in shards:
                flat_shards[owner][begin : begin + chunk.numel()].copy_(chunk)
            if begin + chunk.numel() == counts[owner]:
                on_complete(owner)

        counts = [shard.numel() for shard in flat_shards]
        chunk_numel = (
            max(counts)
            if self.chunk_bytes is None
            else self.chunk_bytes // flat_shards[rank].itemsize
        )
        self.gather(shards, counts, max(1, chunk_numel), store)


def make_functions(transfers_class: Callable[[Call], Transfers]) -> tuple[Callable[..., None], ...]:
    """Return the `gather` and `reduce` of an algorithm that uses ``transfers_class``."""

    def gather(call: Call, x: torch.Tensor, outputs: GatherOutputs) -> None:
        _gather(transfers_class(call), x, outputs)

    def reduce(
        call: Call, x: torch.Tensor, w: Weight | None, out: torch.Tensor, reduction: Reduction
    ) -> None:
        _reduce(transfers_class(call), x, w, out, reduction)

    return gather, reduce


def _gather(transfers: Transfers, x: torch.Tensor, outputs: GatherOutputs) -> None:
    """Run a call that gathers."""
    call = transfers.call
    problem, counts, rank = call.problem, shard_counts(call.problem), call.group.rank
    if outputs.weights:
        matmuls = ChunkedMatmuls(call, x, outputs, transfers.buffer_bytes)
        gathered_shards, width = None, problem.shape[-1]
        if matmuls.gathered is not None and problem.outer == 1:  # gathered shards are contiguous
            gathered_shards = matmuls.gathered.view(-1).split(counts)
        shards = {
            owner: empty([counts[owner]], x.dtype, x.device)
            if gathered_shards is None
            else gathered_shards[owner]
            for owner in transfers.recv_ranks
        }

        def multiply(owner: int, begin: int, chunk: torch.Tensor) -> None:
            in_place = gathered_shards is not None and owner in transfers.recv_ranks
            matmuls.consume(owner, begin // width, chunk.view(-1, width), in_place)

        shards[rank] = x.contiguous().view(-1)
        transfers.gather(shards, counts, matmuls.chunk_plan.chunk_rows * width, multiply)
        transfers.end()
        matmuls.finish()
        return
    out = outputs.gather_buffer(call, x)
    out_shards, flat_shards = (
        out.split(list(problem.sizes), problem.dim),
        list(out.view(-1).split(counts)),
    )
    if problem.outer == 1:
        flat_shards[rank].copy_(x.reshape(-1))
    else:  # shards are not contiguous in the output
        flat_shards = [
            empty([0 if r == rank else n], x.dtype, x.device) for r, n in enumerate(counts)
        ]
        flat_shards[rank] = x.contiguous().view(-1)

    def copy_to_output(owner: int) -> None:
        if problem.outer != 1:
            out_shards[owner].copy_(flat_shards[owner].view(out_shards[owner].shape))

    transfers.gather_flat(flat_shards, copy_to_output)
    transfers.end()


def _reduce(
    transfers: Transfers,
    x: torch.Tensor,
    w: Weight | None,
    out: torch.Tensor,
    reduction: Reduction,
) -> None:
    """Run a call that reduces.

    ``out`` may be ``x``: a slice is overwritten with its sum only after the partial sums of all
    ranks have been read or received.
    """
    call = transfers.call
    if w is None:
        partials = input_partials(call, x, transfers.chunk_bytes)
    else:
        partials = matmul_partials(call, x, w, transfers.buffer_bytes)
    if call.problem.spec.scatters:
        transfers.reduce(partials, out.view(-1), reduction)
    else:
        sums = out.view(-1).tensor_split(list(partials.chunk_plan.offsets[1:]))
        transfers.reduce(partials, sums[call.group.rank], reduction)
        transfers.gather_flat(sums)
    transfers.end()
