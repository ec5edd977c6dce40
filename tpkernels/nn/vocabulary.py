"""Embedding, head and cross-entropy of a language model, all split by vocabulary.

The loss does not gather the logits. Each rank reduces its columns to three numbers per row: their
maximum m_r, the sum s_r of exp(logit - m_r), and the target's logit if that is among them. One
all-gather of these and of the target, 16 bytes per row and rank, gives every rank the loss:

    log(sum_r s_r * exp(m_r - m)) + m - target,  m = max_r m_r

Sums are in rank order, so every rank gets the same bits. Megatron-LM needs three all-reduces
instead. The backward is local: softmax(local columns) - onehot, from the logits and the
log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, Unpack

import torch
import torch.nn.functional as F
from torch import nn

from tpkernels import groups
from tpkernels.common import dtypes
from tpkernels.groups import GroupLike
from tpkernels.nn.linear import ColumnParallelLinear
from tpkernels.nn.sharding import (
    LayerOptions,
    SequenceOptions,
    ShardedModule,
    Sharding,
    check_parameter,
    check_plain,
    position,
)
from tpkernels.ops import validation
from tpkernels.ops.all_gather import all_gather
from tpkernels.ops.all_reduce import all_reduce
from tpkernels.ops.reduce_scatter import reduce_scatter
from tpkernels.torch_private import assert_async

_REDUCTIONS = ("mean", "sum", "none")
_FACTOR = 0x1E3779B97F4A7C15  # odd, of a digest of ids


def check_embedding(module: nn.Module, name: str) -> nn.Embedding:
    """Return ``module``, or raise if it cannot be split like an ``nn.Embedding``."""
    if type(module) is not nn.Embedding:
        raise TypeError(
            f"{name} is a {type(module).__module__}.{type(module).__qualname__}, not an "
            "nn.Embedding"
        )
    check_parameter(module.weight, f"{name}.weight")
    check_plain(module, name, ("weight",))
    if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
        raise NotImplementedError(
            f"{name} has max_norm={module.max_norm}, sparse={module.sparse}, "
            f"scale_grad_by_freq={module.scale_grad_by_freq}; a vocabulary-parallel embedding "
            "supports only the defaults None, False, False"
        )
    return module


def _local_ids(
    ids: torch.Tensor, split: Sharding, allowed: torch.Tensor | None, what: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids relative to this rank's shard of the vocabulary, 0 for those of other ranks; and
    which ids are this rank's. Raise RuntimeError if one that is not ``allowed`` is outside the
    vocabulary, with the id and its position; on a GPU, when the device is next synchronised, like
    torch's own error, without them."""
    valid = (ids >= 0) & (ids < split.total)
    if allowed is not None:
        valid = valid | allowed
    bounds = f"is out of range; expected 0 to {split.total - 1} (vocabulary size {split.total})"
    try:
        assert_async(valid.all(), f"a {what} {bounds}")
    except RuntimeError:
        position = (~valid).nonzero()[0].tolist()
        where = f" at position {position}" if position else ""
        raise RuntimeError(f"{what} {ids[~valid][0].item()}{where} {bounds}") from None
    local = ids - split.offset
    here = (local >= 0) & (local < split.size)
    return local.masked_fill(~here, 0), here


def check_ids(ids: torch.Tensor, group: str) -> None:
    """Compare a digest of ids [...] over the ranks. Collective. Raise as `_require_same` does."""
    if position(group)[1] > 1 and not ids.is_meta:
        flat = ids.detach().reshape(-1).long()
        mixed = (flat + torch.arange(flat.shape[0], device=ids.device)) * _FACTOR
        digest = ((mixed >> 32) ^ mixed).mul(_FACTOR).sum()
        # All kinds of groups gather floats; the bits travel as they are.
        digests = all_gather(digest.view(1, 1).view(torch.float32), group).view(torch.int64)
        _require_same(digests, "ids")


def _require_same(gathered: torch.Tensor, what: str) -> None:
    """Raise ValueError if the rows of ``gathered`` [world, ...] differ; on a GPU and in compiled
    code RuntimeError, which names no ranks, on a GPU when it is next synchronised."""
    same = (gathered == gathered[0]).flatten(1).all(1)
    remedy = f"pass the same {what} on all ranks, and call torch.manual_seed with the same seed"
    if torch.compiler.is_compiling() or same.device.type != "cpu" or type(same) is not torch.Tensor:
        assert_async(same.all(), f"the {what} differ between the ranks; {remedy}")
    elif not same.all():
        others = same.logical_not().nonzero().flatten().tolist()
        raise ValueError(
            f"the {what} of ranks {others} of the group differ from those of rank 0; {remedy}"
        )


class VocabParallelEmbedding(ShardedModule):
    """``nn.Embedding`` with the vocabulary split over the ranks.

    Args:
        num_embeddings, embedding_dim: of the unsharded embedding.
        group, options: see `tpkernels.nn`.
        padding_idx: an id whose vector is zero at first and gets no gradient; ValueError if it is
            outside the vocabulary.
        sequence_parallel: each rank gets its rows of the sequence, by default all rows.

    ``weight`` is [ids of this rank, embedding_dim], split as `tpkernels.shard_sizes` does.
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
            raise ValueError(
                f"padding_idx is {padding_idx}; expected {-num_embeddings} to {num_embeddings - 1}"
            )
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        split = Sharding.of(0, num_embeddings, self.group, "num_embeddings")
        self.add_parameter("weight", (num_embeddings, embedding_dim), split)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the vectors as ``nn.Embedding`` does."""

        def draw(full: torch.Tensor) -> None:
            nn.init.normal_(full)
            if self.padding_idx is not None:
                full[self.padding_idx].zero_()

        self.fill("weight", draw)

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, group: GroupLike, **options: Unpack[SequenceOptions]
    ) -> Self:
        """Make a layer with a copy of this rank's shard of ``embedding``'s vectors. Raise TypeError
        if it is not a plain ``nn.Embedding``, NotImplementedError if its weight is quantised or an
        option of it is not supported."""
        embedding = check_embedding(embedding, "embedding")
        return cls.like(embedding, group, **options).adopt(embedding)

    @classmethod
    def like(
        cls, embedding: nn.Embedding, group: GroupLike, **options: Unpack[SequenceOptions]
    ) -> Self:
        """Make the layer of `from_embedding` on the meta device.

        :meta private:
        """
        return cls(
            embedding.num_embeddings,
            embedding.embedding_dim,
            group,
            padding_idx=embedding.padding_idx,
            device="meta",
            dtype=embedding.weight.dtype,
            **options,
        )

    def forward(
        self, ids: torch.Tensor, *, shard_sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Map ids [...], the same on all ranks, to [..., embedding_dim], all rows or this rank's.
        Raise RuntimeError if an id is outside the vocabulary, ValueError (on GPUs and in compiled
        code RuntimeError) if ranks have other ids."""
        validation.tensors({"x": ids, "weight": self.weight})
        split = self.splits["weight"]
        check_ids(ids, self.group)
        local, here = _local_ids(ids, split, None, "token id")
        weight = self.weight if split.size else F.pad(self.weight, (0, 0, 0, 1))
        padding = None
        if self.padding_idx is not None and 0 <= self.padding_idx - split.offset < split.size:
            padding = self.padding_idx - split.offset
        # For each id one rank has the vector and the others zeros: the sum is exact in any dtype.
        partial = F.embedding(local, weight, padding).masked_fill(~here.unsqueeze(-1), 0)
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
    """`ColumnParallelLinear` to the vocabulary, which is split as by `VocabParallelEmbedding`, so
    that the two can share a weight (`tie`). `vocab_parallel_cross_entropy` needs the default
    ``out_sizes``, and takes the logits as they are; ``gather_output`` gathers them.
    """

    def tie(self, embedding: VocabParallelEmbedding) -> None:
        """Make this layer use the embedding's weight, of the same size, group and split."""
        theirs, ours = (
            (list(layer.splits["weight"].sizes), layer.weight.shape[1], layer.group)
            for layer in (embedding, self)
        )
        if theirs != ours:
            raise ValueError(
                f"cannot tie an embedding {theirs} to a head {ours}: (vocabulary size per rank, "
                "hidden size, group) must be equal"
            )
        self.weight = embedding.weight


def _statistics(
    logits: torch.Tensor, target: torch.Tensor, local: torch.Tensor, here: torch.Tensor
) -> torch.Tensor:
    """Return [4, rows]: the maximum, the sum of exp(logit - maximum), the target's logit or 0, and
    the target."""
    rows = logits.shape[0]
    if not logits.shape[1]:
        empty = logits.new_zeros(4, rows)
        empty[0].fill_(-torch.inf)
        empty[3] = target
        return empty
    top = logits.amax(1)
    # -inf - -inf is NaN: subtract 0 from a row of -inf, whose sum is then 0.
    exponentials = (logits - top.masked_fill(top == -torch.inf, 0).unsqueeze(1)).exp_().sum(1)
    own = logits.gather(1, local.unsqueeze(1)).squeeze(1).masked_fill(~here, 0)
    return torch.stack([top, exponentials, own, target.to(logits.dtype)])


class _CrossEntropy(torch.autograd.Function):
    """The loss of each row, [rows]; fp64 for fp64 logits, otherwise fp32."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        local: torch.Tensor,
        here: torch.Tensor,
        ignored: torch.Tensor,
        group: str,
        world: int,
    ) -> torch.Tensor:
        statistics = _statistics(logits.to(dtypes.accumulator(logits.dtype)), target, local, here)
        tops, sums, owns, ids = all_gather(statistics, group).view(world, 4, -1).unbind(1)
        _require_same(ids, "targets")
        top = tops.amax(0)
        total = (sums * (tops - top).exp()).sum(0)
        log_sum = total.log() + top
        ctx.save_for_backward(logits, local, here, ignored, log_sum)
        return (log_sum - owns.sum(0)).masked_fill(ignored, 0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "vocab_parallel_cross_entropy does not support second derivatives; call backward "
                "without create_graph=True"
            )
        logits, local, here, ignored, log_sum = ctx.saved_tensors
        probability = (logits.to(log_sum.dtype) - log_sum.unsqueeze(1)).exp_()
        if logits.shape[1]:
            onehot = here.to(log_sum.dtype).neg().unsqueeze(1)
            probability.scatter_add_(1, local.unsqueeze(1), onehot)
        factor = grad.masked_fill(ignored, 0).unsqueeze(1)
        # Filled, not multiplied by 0: an ignored row may hold infinities.
        grad_logits = probability.mul_(factor).masked_fill_(ignored.unsqueeze(1), 0)
        return grad_logits.to(logits.dtype), None, None, None, None, None, None


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    group: GroupLike,
    vocab_size: int,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """Compute ``torch.nn.functional.cross_entropy`` of logits that are split by vocabulary.
    Collective: all ranks call it.

    Args:
        logits: [..., columns of this rank], as `ParallelLMHead` returns them: the vocabulary is
            split by ``tpkernels.shard_sizes(vocab_size, world)``.
        target: [...] ids, the same on all ranks.
        group: see `tpkernels.nn`.
        vocab_size: columns of all ranks together.
        ignore_index: targets of this value are left out of loss and gradient.
        reduction: "mean" over the targets that are not ignored, "sum", or "none".

    Returns:
        The loss, a scalar or [...], with the same bits on every rank: float64 for float64 logits,
        otherwise float32, because training needs more digits of it than 16 bits hold.

    Raises:
        ValueError: shapes or devices do not fit, or ``reduction`` is unknown.
        ValueError (on GPUs and in compiled code RuntimeError): ranks have other targets.
        RuntimeError: a target is outside the vocabulary and not ``ignore_index``.
        TpkernelsError: a peer was lost, timed out or made a different call.
    """
    name = groups.name_of(group)
    rank, world = position(name)
    split = Sharding.of(0, vocab_size, name, "vocab_size")
    if logits.device != target.device:
        raise ValueError(f"target is on {target.device} but logits are on {logits.device}")
    if logits.dim() < 1 or logits.shape[-1] != split.size:
        raise ValueError(
            f"logits have shape {list(logits.shape)}; rank {rank} of {world} needs {split.size} "
            f"columns with vocab_size={vocab_size}"
        )
    if logits.shape[:-1] != target.shape:
        raise ValueError(
            f"target has shape {list(target.shape)}, but logits have shape {list(logits.shape)}; "
            f"expected a target of shape {list(logits.shape[:-1])}"
        )
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}; it must be one of {', '.join(_REDUCTIONS)}")
    flat = target.reshape(-1)
    ignored = flat == ignore_index
    ids = _local_ids(target, split, target == ignore_index, "target")
    local, here = (each.reshape(-1) for each in ids)
    columns = logits.reshape(flat.shape[0], split.size)
    rows: torch.Tensor = _CrossEntropy.apply(
        columns, flat, local, here & ~ignored, ignored, name, world
    )
    if reduction == "none":
        return rows.view(target.shape)
    total = rows.sum()
    return total if reduction == "sum" else total / (~ignored).sum()
