"""A language model built from the layers has the logits, loss and gradients of the unsharded model.
Heads, features, vocabulary and sequence are sharded, evenly and unevenly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.nn_reference import (
    SWEEP,
    Model,
    Shape,
    find_mismatch,
    inputs,
    reference_logits,
    shard,
)
from tests.support.ranked import fresh_group, on_ranks
from tests.support.tiers import sweep
from tpkernels import nn as tnn

SHAPES = [
    Shape(),  # 3 key-value groups, which 2 or 4 ranks do not divide evenly
    Shape(heads=4, kv_heads=4, mlp=3, vocab=3, sequence=2, tied=True, bias=False),
    # Sizes below the number of ranks.
    Shape(heads=2, kv_heads=1, head_dim=2, vocab=3, mlp=2, sequence=1, batch=1),
]


def check(model: Model, rerun: bool = False) -> list[str]:
    shape, dim = model.shape, model.dim
    ids, targets, rotary = inputs(shape, dim)
    unsharded = {
        name: p.detach().requires_grad_() for name, p in tnn.full_state_dict(model).items()
    }
    if shape.tied:
        unsharded["head.weight"] = unsharded["embed.weight"]
    logits = reference_logits(unsharded, shape, ids, rotary, dim)
    want = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    want.backward()
    if rerun:
        got = checkpoint(model.loss, ids, targets, rotary, use_reentrant=False)
    else:
        got = model.loss(ids, targets, rotary)
    got.backward()
    differences = {"loss": find_mismatch(got.detach(), want.detach())}
    local_logits = model(ids, rotary)
    differences["logits"] = find_mismatch(
        local_logits, replace(model.head.shardings["weight"], dim=2).shard(logits)
    )
    for name, parameter in model.named_parameters():
        grad = unsharded[name].grad
        assert grad is not None
        differences[name] = find_mismatch(parameter.grad, shard(model, name, grad))
    return [f"{name}: {mismatch}" for name, mismatch in differences.items() if mismatch is not None]


@pytest.mark.thorough
@pytest.mark.parametrize("world", SWEEP)
@pytest.mark.parametrize("number", range(len(SHAPES)))
@pytest.mark.parametrize("sequence", sweep([True, False]), ids=["sequence", "replicated"])
@on_ranks()
def test_a_model_matches_the_unsharded_model(sequence: bool, number: int) -> list[str]:
    shape, dim = SHAPES[number], number % 2
    with fresh_group() as group:
        torch.manual_seed(0)
        model = Model(shape, group, sequence, dim)
        with torch.no_grad():  # norms of ones would hide a mix-up
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
        failures = check(model)
        model.zero_grad()
        failures += [f"again, checkpointed: {failure}" for failure in check(model, rerun=True)]
    return failures


@on_ranks(3)
def test_initial_values_match_torch() -> None:
    """Initialize with the same random state on all ranks, directly and from the meta device."""
    with fresh_group() as group:
        for torch_class, parallel_class in (
            (torch.nn.Linear, tnn.ColumnParallelLinear),
            (torch.nn.Linear, tnn.RowParallelLinear),
            (torch.nn.Embedding, tnn.VocabParallelEmbedding),
        ):
            torch.manual_seed(1)
            want = torch_class(6, 7).state_dict()
            meta = parallel_class(6, 7, group, device="meta").to_empty(device="cpu")
            torch.manual_seed(1)
            meta.reset_parameters()
            torch.manual_seed(1)
            state = tnn.full_state_dict(parallel_class(6, 7, group))
            for key, value in tnn.full_state_dict(meta).items():
                assert torch.allclose(value, want[key], atol=1e-6 * 6**-0.5), (parallel_class, key)
                assert torch.equal(value, state[key]), (parallel_class, key)
