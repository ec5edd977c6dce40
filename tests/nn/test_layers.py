"""Each layer has the output and the gradients of the torch layer it was made from. No size is a
multiple of the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tpkernels
from tests.support.nn_reference import F64, SWEEP, far, shard
from tests.support.ranked import fresh_group, on_ranks
from tpkernels import nn as tnn
from tpkernels.nn.sharding import Split

ROWS, BATCH, WIDTH = 7, 2, 5
HEADS, KV_HEADS, HEAD_DIM = 8, 4, 2


@dataclass(frozen=True)
class Check:
    """``layer`` of this rank's shard of ``x`` is this rank's shards of ``plain`` of ``x``. A split
    of None: all ranks have the whole."""

    plain: nn.Module
    layer: nn.Module
    x: torch.Tensor
    x_split: Split | None
    y_splits: list[Split | None]


def checks(group: dist.ProcessGroup, sequence: bool) -> Iterator[Check]:
    torch.manual_seed(11)
    x = torch.randn(ROWS, BATCH, WIDTH, dtype=F64)
    rows = Split.of(0, ROWS, group.group_name, "rows") if sequence else None
    how: dict[str, Any] = {"sequence_parallel": sequence}

    def linear(inner: int, outer: int, bias: bool = True) -> nn.Linear:
        return nn.Linear(inner, outer, bias=bias, dtype=F64)

    def features(layer: nn.Module) -> Split:
        return replace(layer.splits["weight"], dim=2)  # type: ignore[index]

    for bias in (True, False):
        plain = linear(WIDTH, 10, bias)
        column = tnn.ColumnParallelLinear.from_linear(plain, group, **how)
        yield Check(plain, column, x, rows, [features(column)])
        row = tnn.RowParallelLinear.from_linear(plain, group, **how)
        yield Check(plain, row, x, features(row), [rows])
    plain = linear(WIDTH, 2)  # fewer features than ranks
    head = tnn.ParallelLMHead.from_linear(plain, group, gather_output=True, **how)
    yield Check(plain, head, x, rows, [None])

    both = nn.ModuleDict({"gate_proj": linear(WIDTH, 2), "up_proj": linear(WIDTH, 7)})
    merged = tnn.MergedColumnParallelLinear.from_linear(dict(both.items()), group, **how)  # type: ignore[arg-type]
    yield Check(both, merged, x, rows, [features(one) for one in merged.layers])

    sizes = {"q_proj": HEADS, "k_proj": KV_HEADS, "v_proj": KV_HEADS}
    three = nn.ModuleDict({name: linear(WIDTH, n * HEAD_DIM) for name, n in sizes.items()})
    qkv = tnn.QKVParallelLinear.from_linear(
        three["q_proj"], three["k_proj"], three["v_proj"], HEAD_DIM, group, **how
    )
    yield Check(three, qkv, x, rows, [features(one) for one in qkv.layers])

    vectors = nn.Embedding(13, WIDTH, padding_idx=3, dtype=F64)
    embedding = tnn.VocabParallelEmbedding.from_embedding(vectors, group, **how)
    ids = torch.randint(0, 13, (ROWS, BATCH))
    ids[0] = 3
    yield Check(vectors, embedding, ids, None, [rows])


def outputs(module: nn.Module, x: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    if isinstance(module, nn.ModuleDict):
        return [one(x) for one in module.values()]
    result = module(x, **options)
    return [result] if isinstance(result, torch.Tensor) else list(result)


def part(x: torch.Tensor, split: Split | None) -> torch.Tensor:
    return x if split is None else split.shard(x)


def wrong(check: Check, sizes: list[int] | None) -> Iterator[str]:
    check.plain.zero_grad()
    learns = check.x.is_floating_point()
    whole = check.x.clone().requires_grad_(learns)
    mine = part(check.x, check.x_split).clone().requires_grad_(learns)
    wants = outputs(check.plain, whole)
    gots = outputs(check.layer, mine, **({} if sizes is None else {"shard_sizes": sizes}))
    grads = [torch.randn_like(want) for want in wants]
    differences: dict[str, str | None] = {}
    sums: list[torch.Tensor] = []
    for i, (got, want, split) in enumerate(zip(gots, wants, check.y_splits, strict=True)):
        here = part(want, split)
        width = here.shape[-1]
        # A rank without heads returns zeros for one group.
        extra = isinstance(check.layer, tnn.QKVParallelLinear) and not width
        differences[f"output {i}"] = far(got[..., :width] if extra else got, here)
        if got[..., width:].any():
            differences[f"output {i}"] = "has values of no head"
        sums.append((got[..., :width] * part(grads[i], split)).sum())
    torch.autograd.backward(wants, grads)
    torch.stack(sums).sum().backward()
    if learns:
        assert whole.grad is not None
        differences["x"] = far(mine.grad, part(whole.grad, check.x_split))
    theirs = dict(check.plain.named_parameters())
    for name, parameter in check.layer.named_parameters():
        grad = theirs.pop(name).grad
        assert grad is not None
        differences[name] = far(parameter.grad, shard(check.layer, name, grad))
    differences["parameters"] = f"there is no {sorted(theirs)}" if theirs else None
    for what, difference in differences.items():
        if difference is not None:
            yield f"{type(check.layer).__name__}: {what}: {difference}"


@pytest.mark.parametrize("world", SWEEP)
@on_ranks()
def test_layers_are_the_unsharded_ones() -> list[str]:
    failures = []
    with fresh_group() as group:
        for sequence in (True, False):
            sizes = tpkernels.shard_sizes(ROWS, group.size()) if sequence else None
            for check in checks(group, sequence):
                failures += [f"{sequence=} {failure}" for failure in wrong(check, sizes)]
    return failures
