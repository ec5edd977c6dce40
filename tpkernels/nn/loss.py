"""Cross-entropy of logits that are split by vocabulary, without gathering them.

Each rank reduces its columns to three numbers per row: their maximum m_r, the sum s_r of
exp(logit - m_r), and the target's logit if that is among them. One all-gather of these, 12 bytes
per row and rank, gives every rank the loss:

    log(sum_r s_r * exp(m_r - m)) + m - target,  m = max_r m_r

Sums are in rank order, so every rank gets the same bits. Megatron-LM needs three all-reduces
instead. The backward is local: softmax(own columns) - onehot, from the logits and the log-sum-exp.
"""

from __future__ import annotations

from typing import Any

import torch

from tpkernels import dtypes, groups
from tpkernels.groups import GroupLike
from tpkernels.nn.embedding import local_ids
from tpkernels.nn.split import Split, position
from tpkernels.ops.all_gather import all_gather

_REDUCTIONS = ("mean", "sum", "none")


def _statistics(logits: torch.Tensor, local: torch.Tensor, here: torch.Tensor) -> torch.Tensor:
    """Return [3, rows]: the maximum, the sum of exp(logit - maximum), the target's logit or 0."""
    rows = logits.shape[0]
    if not logits.shape[1]:
        empty = logits.new_zeros(3, rows)
        empty[0].fill_(-torch.inf)
        return empty
    top = logits.amax(1)
    # -inf - -inf is NaN: subtract 0 from a row of -inf, whose sum is then 0.
    exponentials = (logits - top.masked_fill(top == -torch.inf, 0).unsqueeze(1)).exp_().sum(1)
    target = logits.gather(1, local.unsqueeze(1)).squeeze(1).masked_fill(~here, 0)
    return torch.stack([top, exponentials, target])


class _CrossEntropy(torch.autograd.Function):
    """The loss of each row, [rows]; fp64 for fp64 logits, otherwise fp32."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        local: torch.Tensor,
        here: torch.Tensor,
        ignored: torch.Tensor,
        group: str,
        world: int,
    ) -> torch.Tensor:
        mine = _statistics(logits.to(dtypes.accumulator(logits.dtype)), local, here)
        all_ranks = all_gather(mine, group).view(world, 3, -1)
        tops, sums, targets = all_ranks.unbind(1)
        top = tops.amax(0)
        total = (sums * (tops - top).exp()).sum(0)
        log_sum = total.log() + top
        ctx.save_for_backward(logits, local, here, ignored, log_sum)
        return (log_sum - targets.sum(0)).masked_fill(ignored, 0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "vocab_parallel_cross_entropy has no second derivative; call backward without "
                "create_graph=True"
            )
        logits, local, here, ignored, log_sum = ctx.saved_tensors
        probability = (logits.to(log_sum.dtype) - log_sum.unsqueeze(1)).exp_()
        if logits.shape[1]:
            own = here.to(log_sum.dtype).neg().unsqueeze(1)
            probability.scatter_add_(1, local.unsqueeze(1), own)
        factor = grad.masked_fill(ignored, 0).unsqueeze(1)
        # Filled, not multiplied by 0: an ignored row may hold infinities.
        grad_logits = probability.mul_(factor).masked_fill_(ignored.unsqueeze(1), 0)
        return grad_logits.to(logits.dtype), None, None, None, None, None


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
        group: a ProcessGroup, a DeviceMesh (dimension) or a group's name.
        vocab_size: columns of all ranks together.
        ignore_index: targets of this value are left out of loss and gradient.
        reduction: "mean" over the targets that are not ignored, "sum", or "none".

    Returns:
        The loss, with the same bits on every rank: a scalar, or [...] for "none". It is float64 for
        float64 logits, otherwise float32, because training needs more digits of the loss than 16
        bits hold.

    Raises:
        ValueError: shapes or devices do not fit, or ``reduction`` is unknown.
        RuntimeError: a target is outside the vocabulary and not ``ignore_index``.
        TpkernelsError: a peer was lost, timed out or made a different call.
    """
    name = groups.name_of(group)
    rank, world = position(name)
    split = Split.of(0, vocab_size, None, rank, world, "vocab_size")
    if logits.device != target.device:
        raise ValueError(f"target is on {target.device} but logits are on {logits.device}")
    if logits.dim() < 1 or logits.shape[-1] != split.size:
        raise ValueError(
            f"logits have shape {list(logits.shape)}; rank {rank} of {world} has "
            f"{split.size} columns of a vocabulary of {vocab_size}"
        )
    if logits.shape[:-1] != target.shape:
        raise ValueError(
            f"target has shape {list(target.shape)}, logits {list(logits.shape)}: all but the last "
            "dim must agree"
        )
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}; it must be one of {', '.join(_REDUCTIONS)}")
    flat = target.reshape(-1)
    ignored = flat == ignore_index
    local, here = local_ids(flat, split, ignored, "a target is")
    columns = logits.reshape(flat.shape[0], split.size)
    here = here & ~ignored
    rows: torch.Tensor = _CrossEntropy.apply(columns, local, here, ignored, name, world)
    if reduction == "none":
        return rows.view(target.shape)
    total = rows.sum()
    return total if reduction == "sum" else total / (~ignored).sum()
