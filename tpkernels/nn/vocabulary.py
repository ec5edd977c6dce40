"""Embedding, LM head and cross-entropy of a language model, sharded by vocabulary.

The loss does not gather the logits. Each rank reduces the local columns to three numbers per row:
their maximum m_r, the sum s_r of exp(logit - m_r), and the target logit, or 0 if the target is on a
different rank. One all-gather of these numbers and the target, 16 bytes per row and rank, gives the
loss on every rank::

    log(sum_r s_r * exp(m_r - m)) + m - target_logit,  m = max_r m_r

Sums are in rank order, so all ranks get bitwise identical losses. Megatron-LM needs three
all-reduces instead. The backward is local: softmax(local columns) - onehot, from the logits and the
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
    rank_and_world,
)
from tpkernels.ops import validation
from tpkernels.ops.all_gather import all_gather
from tpkernels.ops.all_reduce import all_reduce
from tpkernels.ops.reduce_scatter import reduce_scatter
from tpkernels.torch_private import assert_async

_REDUCTIONS = ("mean", "sum", "none")
_FACTOR = 0x1E3779B97F4A7C15  # odd multiplier of the id digest


def check_embedding(module: nn.Module, name: str) -> nn.Embedding:
    """Return ``module`` if it is an ``nn.Embedding`` that can be sharded. Otherwise raise."""
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
    ids: torch.Tensor, sharding: Sharding, allowed: torch.Tensor | None, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert ids to indices of the local vocabulary shard.

    Args:
        ids: [...] ids of the full vocabulary.
        sharding: sharding of the vocabulary.
        allowed: mask of ids that may be outside the vocabulary, or None.
        name: name of an id in messages.

    Returns:
        (local, is_local): local indices, 0 for ids of other ranks, and the mask of local ids.

    Raises:
        RuntimeError: an id is outside the vocabulary. On CPUs the message contains the id and its
            position. On GPUs it contains neither, and the error is raised at the next
            synchronization, as in torch.
    """
    valid = (ids >= 0) & (ids < sharding.total)
    if allowed is not None:
        valid = valid | allowed
    bounds = (
        f"is out of range; expected 0 to {sharding.total - 1} (vocabulary size {sharding.total})"
    )
    try:
        assert_async(valid.all(), f"a {name} {bounds}")
    except RuntimeError:
        index = (~valid).nonzero()[0].tolist()
        location = f" at position {index}" if index else ""
        raise RuntimeError(f"{name} {ids[~valid][0].item()}{location} {bounds}") from None
    local = ids - sharding.offset
    is_local = (local >= 0) & (local < sharding.size)
    return local.masked_fill(~is_local, 0), is_local


def check_ids(ids: torch.Tensor, group: str) -> None:
    """Compare a digest of ids [...] over the ranks. Raises as `_check_equal`. Collective."""
    if rank_and_world(group)[1] > 1 and not ids.is_meta:
        flat = ids.detach().reshape(-1).long()
        mixed = (flat + torch.arange(flat.shape[0], device=ids.device)) * _FACTOR
        digest = ((mixed >> 32) ^ mixed).mul(_FACTOR).sum()
        # All backends can gather float32. The gather does not change the bits.
        digests = all_gather(digest.view(1, 1).view(torch.float32), group).view(torch.int64)
        _check_equal(digests, "ids")


def _check_equal(gathered: torch.Tensor, name: str) -> None:
    """Raise ValueError if the rows of ``gathered`` [world, ...] differ.

    On GPUs and in compiled code, raise RuntimeError without rank numbers; on GPUs, at the next
    synchronization.
    """
    equal = (gathered == gathered[0]).flatten(1).all(1)
    remedy = f"pass the same {name} on all ranks, and call torch.manual_seed with the same seed"
    if (
        torch.compiler.is_compiling()
        or equal.device.type != "cpu"
        or type(equal) is not torch.Tensor
    ):
        assert_async(equal.all(), f"the {name} differ between the ranks; {remedy}")
    elif not equal.all():
        ranks = equal.logical_not().nonzero().flatten().tolist()
        raise ValueError(
            f"the {name} of ranks {ranks} of the group differ from those of rank 0; {remedy}"
        )


class VocabParallelEmbedding(ShardedModule):
    """Embedding that is sharded by vocabulary.

    Without sharding, equals ``nn.Embedding(num_embeddings, embedding_dim, padding_idx)``.

    Args:
        num_embeddings, embedding_dim: sizes of the unsharded embedding.
        group, options: see `tpkernels.nn`.
        padding_idx: id of a vector that is initialized to zero and gets no gradient.
        sequence_parallel: return the local rows of the sequence. By default all ranks return all
            rows.

    Raises:
        ValueError: ``padding_idx`` is outside the vocabulary.

    ``weight`` is [local num_embeddings, embedding_dim], split by `tpkernels.shard_sizes`.
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
        sharding = Sharding.of(0, num_embeddings, self.group, "num_embeddings")
        self.add_parameter("weight", (num_embeddings, embedding_dim), sharding)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the vectors like ``nn.Embedding``."""

        def draw(full: torch.Tensor) -> None:
            nn.init.normal_(full)
            if self.padding_idx is not None:
                full[self.padding_idx].zero_()

        self.fill("weight", draw)

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, group: GroupLike, **options: Unpack[SequenceOptions]
    ) -> Self:
        """Create a layer with a copy of the local shard of an ``nn.Embedding``.

        Raises:
            TypeError: ``embedding`` is not a plain ``nn.Embedding``.
            NotImplementedError: the weight is quantised, or an option of ``embedding`` is not
                supported.
        """
        embedding = check_embedding(embedding, "embedding")
        return cls.like(embedding, group, **options).adopt(embedding)

    @classmethod
    def like(
        cls, embedding: nn.Embedding, group: GroupLike, **options: Unpack[SequenceOptions]
    ) -> Self:
        """Create the layer of `from_embedding` on the meta device.

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
        """Look up the vectors.

        Args:
            ids: [...], identical on all ranks.
            shard_sizes: number of output rows of each rank, with ``sequence_parallel``.

        Returns:
            [..., embedding_dim], all rows or, with ``sequence_parallel``, the local rows.

        Raises:
            RuntimeError: an id is outside the vocabulary.
            ValueError: the ids differ between the ranks (RuntimeError on GPUs and in compiled
                code).
        """
        validation.tensors({"x": ids, "weight": self.weight})
        sharding = self.shardings["weight"]
        check_ids(ids, self.group)
        local, is_local = _local_ids(ids, sharding, None, "token id")
        weight = self.weight if sharding.size else F.pad(self.weight, (0, 0, 0, 1))
        padding = None
        if self.padding_idx is not None and 0 <= self.padding_idx - sharding.offset < sharding.size:
            padding = self.padding_idx - sharding.offset
        # One rank contributes the vector of an id, and all others zeros. So the sum is exact in any
        # dtype.
        partial = F.embedding(local, weight, padding).masked_fill(~is_local.unsqueeze(-1), 0)
        if not self.sequence_parallel:
            return all_reduce(partial, self.group)
        return reduce_scatter(partial, self.group, self.sequence_dim, shard_sizes=shard_sizes)

    def extra_repr(self) -> str:
        return (
            f"num_embeddings={list(self.shardings['weight'].sizes)}, "
            f"embedding_dim={self.embedding_dim}, sequence_parallel={self.sequence_parallel}, "
            f"rank={self.rank}"
        )


class ParallelLMHead(ColumnParallelLinear):
    """`ColumnParallelLinear` to a vocabulary that is sharded as in `VocabParallelEmbedding`.

    The two layers can share a weight (`tie`). `vocab_parallel_cross_entropy` accepts the local
    logits, and requires the default ``out_sizes``. With ``gather_output`` the layer returns all
    logits.
    """

    def tie(self, embedding: VocabParallelEmbedding) -> None:
        """Share the weight of an embedding.

        Raises:
            ValueError: the layers differ in size, group or vocabulary split.
        """
        embedding_layout, head_layout = (
            (list(layer.shardings["weight"].sizes), layer.weight.shape[1], layer.group)
            for layer in (embedding, self)
        )
        if embedding_layout != head_layout:
            raise ValueError(
                f"cannot tie an embedding {embedding_layout} to a head {head_layout}: (vocabulary "
                "size per rank, hidden size, group) must be equal"
            )
        self.weight = embedding.weight


def _statistics(
    logits: torch.Tensor, target: torch.Tensor, local: torch.Tensor, is_local: torch.Tensor
) -> torch.Tensor:
    """Return the statistics [4, rows] of the local columns.

    They are the maximum, the sum of exp(logit - maximum), the target logit or 0, and the target.
    """
    rows = logits.shape[0]
    if not logits.shape[1]:
        empty = logits.new_zeros(4, rows)
        empty[0].fill_(-torch.inf)
        empty[3] = target
        return empty
    maximum = logits.amax(1)
    # -inf - -inf is NaN. Subtract 0 from a row of -inf, so that its sum is 0.
    exponentials = (
        (logits - maximum.masked_fill(maximum == -torch.inf, 0).unsqueeze(1)).exp_().sum(1)
    )
    target_logit = logits.gather(1, local.unsqueeze(1)).squeeze(1).masked_fill(~is_local, 0)
    return torch.stack([maximum, exponentials, target_logit, target.to(logits.dtype)])


class _CrossEntropy(torch.autograd.Function):
    """Loss of each row, [rows]. float64 for float64 logits, otherwise float32."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        local: torch.Tensor,
        is_local: torch.Tensor,
        ignored: torch.Tensor,
        group: str,
        world: int,
    ) -> torch.Tensor:
        statistics = _statistics(
            logits.to(dtypes.accumulator(logits.dtype)), target, local, is_local
        )
        maxima, sums, target_logits, ids = (
            all_gather(statistics, group).view(world, 4, -1).unbind(1)
        )
        _check_equal(ids, "targets")
        maximum = maxima.amax(0)
        total = (sums * (maxima - maximum).exp()).sum(0)
        log_sum = total.log() + maximum
        ctx.save_for_backward(logits, local, is_local, ignored, log_sum)
        return (log_sum - target_logits.sum(0)).masked_fill(ignored, 0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "vocab_parallel_cross_entropy does not support second derivatives; call backward "
                "without create_graph=True"
            )
        logits, local, is_local, ignored, log_sum = ctx.saved_tensors
        probability = (logits.to(log_sum.dtype) - log_sum.unsqueeze(1)).exp_()
        if logits.shape[1]:
            onehot = is_local.to(log_sum.dtype).neg().unsqueeze(1)
            probability.scatter_add_(1, local.unsqueeze(1), onehot)
        factor = grad.masked_fill(ignored, 0).unsqueeze(1)
        # Fill instead of multiplying by 0: an ignored row may hold infinities.
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
    """Compute the cross-entropy of logits that are sharded by vocabulary. Collective.

    Equals ``torch.nn.functional.cross_entropy`` on the concatenated logits of all ranks.

    Args:
        logits: [..., local columns], the output of `ParallelLMHead`. The vocabulary is split by
            ``tpkernels.shard_sizes(vocab_size, world)``.
        target: [...] ids, identical on all ranks.
        group: see `tpkernels.nn`.
        vocab_size: total number of columns of all ranks.
        ignore_index: target value that is excluded from loss and gradient.
        reduction: "mean" over the targets that are not ignored, "sum", or "none".

    Returns:
        The loss, a scalar or [...], bitwise identical on all ranks. It is float64 for float64
        logits, otherwise float32, because training needs more precision of the loss than 16 bits
        hold.

    Raises:
        ValueError: shapes or devices do not fit, ``reduction`` is unknown, or the targets differ
            between the ranks (RuntimeError on GPUs and in compiled code).
        RuntimeError: a target is outside the vocabulary and not ``ignore_index``.
        TpkernelsError: a peer was lost, timed out or made a different call.
    """
    name = groups.group_name(group)
    rank, world = rank_and_world(name)
    sharding = Sharding.of(0, vocab_size, name, "vocab_size")
    if logits.device != target.device:
        raise ValueError(f"target is on {target.device} but logits are on {logits.device}")
    if logits.dim() < 1 or logits.shape[-1] != sharding.size:
        raise ValueError(
            f"logits have shape {list(logits.shape)}; rank {rank} of {world} needs {sharding.size} "
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
    ids = _local_ids(target, sharding, target == ignore_index, "target")
    local, is_local = (tensor.reshape(-1) for tensor in ids)
    columns = logits.reshape(flat.shape[0], sharding.size)
    rows: torch.Tensor = _CrossEntropy.apply(
        columns, flat, local, is_local & ~ignored, ignored, name, world
    )
    if reduction == "none":
        return rows.view(target.shape)
    total = rows.sum()
    return total if reduction == "sum" else total / (~ignored).sum()
