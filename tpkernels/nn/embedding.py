"""The embedding and the head of a language model, both split by vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from tpkernels import validation
from tpkernels.groups import GroupLike
from tpkernels.nn import check
from tpkernels.nn.column import ColumnParallelLinear
from tpkernels.nn.sharding import LayerOptions, SequenceOptions, ShardedModule
from tpkernels.nn.split import Split
from tpkernels.ops.all_reduce import all_reduce
from tpkernels.ops.reduce_scatter import reduce_scatter

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

Embedding = TypeVar("Embedding", bound="VocabParallelEmbedding")


def local_ids(
    ids: torch.Tensor, split: Split, allowed: torch.Tensor | None, what: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids relative to this rank's shard of the vocabulary.

    Args:
        ids: ids of the whole vocabulary.
        split: of the vocabulary.
        allowed: which ids may be outside the vocabulary.
        what: subject of the error message.

    Returns:
        The relative ids, 0 for those of other ranks; and which ids are this rank's.

    Raises:
        RuntimeError: an id is outside the vocabulary and not allowed to be. On a GPU the error is
            raised when the device is next synchronised, like torch's own.
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
        padding_idx: an id whose vector is zero at first and gets no gradient.
        **options: ``device`` and ``dtype`` of the parameter; ``sequence_parallel``: each rank gets
            its rows of the sequence, by default all rows; ``sequence_dim``: the dim of the output
            that ``sequence_parallel`` splits, 0 by default.

    ``weight`` is [ids of this rank, embedding_dim], split as `tpkernels.shard_sizes` does. With the
    same random state on all ranks, the initial values are those of ``nn.Embedding``.

    Raises:
        ValueError: ``padding_idx`` is outside the vocabulary.
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        group: GroupLike,
        *,
        padding_idx: int | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(group, **options)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx {padding_idx} is outside {num_embeddings} embeddings")
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        split = Split.of(0, num_embeddings, None, self.rank, self.world, "num_embeddings")
        self.add_parameter("weight", (num_embeddings, embedding_dim), split)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the vectors as ``nn.Embedding`` does."""

        def draw(whole: torch.Tensor) -> None:
            nn.init.normal_(whole)
            if self.padding_idx is not None:
                whole[self.padding_idx].zero_()

        self.fill("weight", draw)

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, group: GroupLike, **options: Unpack[SequenceOptions]
    ) -> Self:
        """Make a layer with a copy of this rank's shard of ``embedding``'s vectors.

        Args:
            embedding: the unsharded embedding.
            group: as the constructor takes it.
            **options: ``sequence_parallel`` and ``sequence_dim``, as the constructor takes them.

        Raises:
            TypeError: ``embedding`` is not a plain ``nn.Embedding``.
            NotImplementedError: its weight is quantised, or it has an option that is not supported.
        """
        return sharded_embedding(cls, check.embedding(embedding, "embedding"), group, **options)

    def forward(
        self, ids: torch.Tensor, *, shard_sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Map ids [...] to [..., embedding_dim], all rows or this rank's.

        Args:
            ids: integers of any shape, the same on all ranks.
            shard_sizes: rows of each rank along ``sequence_dim``, unless they are all equal.

        Raises:
            RuntimeError: an id is outside the vocabulary.
        """
        validation.tensors({"x": ids, "weight": self.weight})
        split = self.splits["weight"]
        local, here = local_ids(ids, split, None, "an id is")
        weight = self.weight if split.size else F.pad(self.weight, (0, 0, 0, 1))
        own_padding = None
        if self.padding_idx is not None and 0 <= self.padding_idx - split.offset < split.size:
            own_padding = self.padding_idx - split.offset
        # For each id one rank has the vector and the others zeros: the sum is exact in any dtype.
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


def sharded_embedding(
    kind: type[Embedding], embedding: nn.Embedding, group: GroupLike, **options: Any
) -> Embedding:
    """Run ``kind.from_embedding`` for an embedding that `check.embedding` has accepted."""
    layer = kind(
        embedding.num_embeddings,
        embedding.embedding_dim,
        group,
        padding_idx=embedding.padding_idx,
        device="meta",
        dtype=embedding.weight.dtype,
        **options,
    )
    layer.adopt(embedding)
    return layer


class ParallelLMHead(ColumnParallelLinear):
    """The projection to the vocabulary. It is split as `VocabParallelEmbedding` is, so that the two
    can share a weight (`tie`).

    It takes the arguments of `ColumnParallelLinear`. `vocab_parallel_cross_entropy` needs the
    default ``out_sizes``, and takes the logits as they are; ``gather_output`` gathers them.
    """

    def tie(self, embedding: VocabParallelEmbedding) -> None:
        """Make this layer use the embedding's weight.

        Raises:
            ValueError: the two differ in size, group or split.
        """
        theirs, mine = (
            (list(layer.splits["weight"].sizes), layer.weight.shape[1], layer.group)
            for layer in (embedding, self)
        )
        if theirs != mine:
            raise ValueError(
                f"an embedding {theirs} does not fit a head {mine}; these are (vocabulary of each "
                "rank, width, group)"
            )
        self.weight = embedding.weight
