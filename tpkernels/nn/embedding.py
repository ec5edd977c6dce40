"""The two ends of a language model, split by vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from tpkernels.groups import GroupLike
from tpkernels.nn import check
from tpkernels.nn.column import ColumnParallelLinear
from tpkernels.nn.sharding import ShardedModule
from tpkernels.nn.split import Split
from tpkernels.ops.all_reduce import all_reduce
from tpkernels.ops.reduce_scatter import reduce_scatter


def local_ids(
    ids: torch.Tensor, split: Split, allowed: torch.Tensor | None, what: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(``ids`` relative to this rank's part of the vocabulary, 0 for those of other ranks; whether
    they are of this rank).

    Raises:
        RuntimeError: an id is outside the vocabulary, and not ``allowed``. On a GPU it comes when
            the device is waited for, as torch's own does.
    """
    valid = (ids >= 0) & (ids < split.total)
    if allowed is not None:
        valid = valid | allowed
    torch._assert_async(valid.all(), f"{what} outside the vocabulary of {split.total}")
    local = ids - split.offset
    here = (local >= 0) & (local < split.size)
    return local.masked_fill(~here, 0), here


class VocabParallelEmbedding(ShardedModule):
    """``nn.Embedding`` with the vocabulary split over the ranks.

    Args:
        num_embeddings, embedding_dim: of the unsharded embedding.
        group: a ProcessGroup, a DeviceMesh (dimension) or a group's name.
        padding_idx: an id of which the vector gets no gradient, and is zero at first.
        sequence_parallel: each rank gets its rows of the sequence; otherwise all get all.
        sequence_dim: the dim of the output that is split then.

    ``weight`` is [ids of this rank, embedding_dim]; balanced (`tpkernels.shard_sizes`).
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        group: GroupLike,
        *,
        padding_idx: int | None = None,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx {padding_idx} is outside {num_embeddings} embeddings")
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        split = Split.of(0, num_embeddings, None, self.rank, self.world, "num_embeddings")
        self.add_sharded("weight", (num_embeddings, embedding_dim), split, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        def draw(whole: torch.Tensor) -> None:
            nn.init.normal_(whole)
            if self.padding_idx is not None:
                whole[self.padding_idx].zero_()

        if self.weight.device.type != "meta":
            self.fill("weight", draw)

    @classmethod
    def from_embedding(
        cls,
        embedding: nn.Embedding,
        group: GroupLike,
        *,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
    ) -> VocabParallelEmbedding:
        """The layer with a copy of this rank's shard of ``embedding``'s vectors.

        Raises:
            TypeError: not an ``nn.Embedding``.
            NotImplementedError: its weight is quantised, or an option is not supported.
        """
        check.embedding(embedding, "embedding")
        layer = cls(
            embedding.num_embeddings,
            embedding.embedding_dim,
            group,
            padding_idx=embedding.padding_idx,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            device="meta",
        )
        layer.adopt(embedding)
        return layer

    def forward(
        self, ids: torch.Tensor, *, shard_sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        """ids, of any shape [...] and the same on all ranks -> [..., embedding_dim]; this rank's
        rows of it with sequence parallelism (``shard_sizes`` of each where not all equal).

        Raises:
            RuntimeError: an id is outside the vocabulary.
        """
        split = self.splits["weight"]
        local, here = local_ids(ids, split, None, "an id is")
        weight = self.weight if split.size else F.pad(self.weight, (0, 0, 0, 1))
        own_padding = None
        if self.padding_idx is not None and 0 <= self.padding_idx - split.offset < split.size:
            own_padding = self.padding_idx - split.offset
        # One rank has each vector, the others zeros: the sum is exact in any dtype.
        partial = F.embedding(local, weight, own_padding).masked_fill(~here.unsqueeze(-1), 0)
        if not self.sequence_parallel:
            return all_reduce(partial, self.group)
        return reduce_scatter(partial, self.group, self.sequence_dim, shard_sizes=shard_sizes)

    def extra_repr(self) -> str:
        return (
            f"num_embeddings={list(self.splits['weight'].sizes)}, "
            f"embedding_dim={self.embedding_dim}, sequence_parallel={self.sequence_parallel}, "
            f"rank={self.rank}"
        )


class ParallelLMHead(ColumnParallelLinear):
    """The projection to the vocabulary, split by vocabulary as `VocabParallelEmbedding` is, so that
    the two can share a weight (`tie`). `vocab_parallel_cross_entropy` takes the logits as they are;
    ``gather_output`` gathers them.

    Args: those of `ColumnParallelLinear`; leave ``out_sizes`` balanced for the cross-entropy.
    """

    def tie(self, embedding: VocabParallelEmbedding) -> None:
        """Makes the embedding's weight this layer's too.

        Raises:
            ValueError: they are of other sizes or groups, or split otherwise.
        """
        theirs, mine = (
            (list(layer.splits["weight"].sizes), layer.weight.shape[1], layer.group)
            for layer in (embedding, self)
        )
        if theirs != mine:
            raise ValueError(
                f"an embedding {theirs} does not fit a head {mine}: (vocabulary of each rank, "
                "width, group)"
            )
        self.weight = embedding.weight
