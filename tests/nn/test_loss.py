"""Vocabulary-parallel cross-entropy against torch: values, gradients, and inputs for which the loss
must stay finite."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.cases import RanksFixture
from tests.support.nn_reference import F64, SWEEP, find_mismatch
from tests.support.ranked import find_unexpected_messages, fresh_group, on_ranks, record_calls
from tpkernels import nn as tnn
from tpkernels.nn.sharding import Sharding

ROWS = (3, 5)


def samples(vocab: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(vocab)
    logits = torch.randn(*ROWS, vocab, dtype=F64)
    target = torch.randint(0, vocab, ROWS)
    some, none = target.clone(), torch.full(ROWS, -100)
    some[1, 1:4] = -100
    masked = logits.clone()
    masked[..., : vocab // 2] = -math.inf  # entire columns; for some splits, all columns of a rank
    ignored = logits.clone()
    ignored[1, 1:4] = math.inf
    return {
        "plain": (logits, target),
        "ignored": (logits, some),
        "none counts": (logits, none),
        "large": (logits * 1e4 + 3e4, target),
        "masked": (masked, target.clamp(min=vocab // 2)),
        "ignored infinities": (ignored, some),
    }


@pytest.mark.parametrize("world", SWEEP)
@pytest.mark.parametrize("vocab", [11, 3])  # with 3 columns, the last of 4 ranks is empty
@on_ranks()
def test_loss_matches_torch(vocab: int) -> None:
    with fresh_group() as group:
        split = Sharding.of(2, vocab, group.group_name, "vocab")
        for name, (logits, target) in samples(vocab).items():
            for reduction in ("mean", "sum", "none"):
                full = logits.clone().requires_grad_()
                local = split.shard(logits).clone().requires_grad_()
                want = F.cross_entropy(full.flatten(0, 1), target.flatten(), reduction=reduction)
                want = want.view(ROWS) if reduction == "none" else want
                got = tnn.vocab_parallel_cross_entropy(
                    local, target, group, vocab, reduction=reduction
                )
                weights = torch.linspace(1, 2, want.numel(), dtype=F64).view(want.shape)
                (want * weights).sum().backward()
                (got * weights).sum().backward()
                case = f"{name}, {reduction}, vocabulary {vocab}"
                if want.isnan().any():  # the mean over zero targets
                    assert got.isnan().all(), f"{case}: {got}, expected nan"
                    continue
                assert full.grad is not None
                # torch returns nan if an ignored row has infinities.
                exact = full.grad.masked_fill((target == -100).unsqueeze(-1), 0)
                pairs = {"loss": (got, want), "gradient": (local.grad, split.shard(exact))}
                for quantity, (actual, expected) in pairs.items():
                    difference = find_mismatch(actual, expected)
                    assert difference is None, f"{case}: {quantity} {difference}"


class Largest(TorchDispatchMode):
    """Record the size of the largest tensor that an operator returns, in elements."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [
            x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor)
        ]
        self.elements = max(self.elements, *(x.numel() for x in tensors), 0)
        return result


def low_precision_job() -> str:
    """Compute the loss of bfloat16 logits and check that it matches float64. Ranks send four values
    per row, and no tensor is larger than the local logits. Return the loss as hex."""
    with fresh_group() as group:
        torch.manual_seed(1)
        logits = torch.randn(64, 1000 * group.size())
        target = torch.randint(0, logits.shape[1], (64,))
        split = Sharding.of(1, logits.shape[1], group.group_name, "vocab")
        local = split.shard(logits).bfloat16().requires_grad_()
        with record_calls() as calls, Largest() as largest:
            loss = tnn.vocab_parallel_cross_entropy(local, target, group, logits.shape[1])
            loss.backward()
        assert local.grad is not None and local.grad.dtype == torch.bfloat16
        assert loss.dtype == torch.float32 and calls == ["all_gather"]
        assert largest.elements == 64 * 1000
        assert abs(F.cross_entropy(logits.bfloat16().double(), target) - loss) < 1e-6 * 8
        return loss.item().hex()


def test_16_bit_logits_never_gathered(ranks: RanksFixture) -> None:
    assert len(set(ranks(3).run(low_precision_job))) == 1


@on_ranks(2)
def test_refusals() -> list[str]:
    with fresh_group() as group:
        logits, target = torch.randn(4, 5), torch.zeros(4, dtype=torch.long)
        total = 5 * group.size()
        leaf = logits.clone().requires_grad_()
        loss = functools.partial(tnn.vocab_parallel_cross_entropy, group=group)
        shifted = functools.partial(loss, vocab_size=total)
        return find_unexpected_messages(
            {
                "needs 6 columns with vocab_size=12": lambda: loss(logits, target, vocab_size=12),
                "expected a target of shape [4]": lambda: shifted(logits, target[:3]),
                "target is on cpu but logits are on meta": lambda: shifted(
                    logits.to("meta"), target
                ),
                "reduction is 'avg'; it must be one of mean, sum, none": lambda: shifted(
                    logits, target, reduction="avg"
                ),
                "target 10 at position [0] is out of range; expected 0 to 9 (vocabulary": lambda: (
                    shifted(logits, target + total)
                ),
                "target -1 at position [0] is out of range": lambda: shifted(logits, target - 1),
                "the targets of ranks [1] of the group differ from those of rank 0": lambda: (
                    shifted(logits, target + group.rank())
                ),
                "does not support second derivatives": lambda: torch.autograd.grad(
                    shifted(leaf, target), leaf, create_graph=True
                ),
            }
        )
