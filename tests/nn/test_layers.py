"""Each layer has the output and gradients of the torch layer that it is created from. No size is a
multiple of the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tpkernels
from tests.support.nn_reference import F64, SWEEP, find_mismatch, shard
from tests.support.ranked import find_unexpected_messages, fresh_group, on_ranks
from tpkernels import nn as tnn
from tpkernels.nn.sharding import Sharding

ROWS, BATCH, WIDTH = 7, 2, 5
HEADS, KV_HEADS, HEAD_DIM = 8, 4, 2
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Check:
    """A comparison: ``layer`` applied to the local shard of ``x`` gives the local shards of
    ``plain(x)``. A split of None means that the tensor is replicated."""

    plain: nn.Module
    layer: nn.Module
    x: torch.Tensor
    x_split: Sharding | None
    y_splits: list[Sharding | None]


def checks(group: dist.ProcessGroup, sequence: bool) -> Iterator[Check]:
    torch.manual_seed(11)
    x = torch.randn(ROWS, BATCH, WIDTH, dtype=F64)
    rows = Sharding.of(0, ROWS, group.group_name, "rows") if sequence else None
    options: dict[str, Any] = {"sequence_parallel": sequence}

    def linear(inner: int, outer: int, bias: bool = True) -> nn.Linear:
        return nn.Linear(inner, outer, bias=bias, dtype=F64)

    def features(layer: nn.Module) -> Sharding:
        return replace(layer.shardings["weight"], dim=2)  # type: ignore[index]

    for bias in (True, False):
        plain = linear(WIDTH, 10, bias)
        column = tnn.ColumnParallelLinear.from_linear(plain, group, **options)
        yield Check(plain, column, x, rows, [features(column)])
        row = tnn.RowParallelLinear.from_linear(plain, group, **options)
        yield Check(plain, row, x, features(row), [rows])
    plain = linear(WIDTH, 2)  # fewer features than ranks
    head = tnn.ParallelLMHead.from_linear(plain, group, gather_output=True, **options)
    yield Check(plain, head, x, rows, [None])

    gate_up = nn.ModuleDict({"gate_proj": linear(WIDTH, 2), "up_proj": linear(WIDTH, 7)})
    merged = tnn.MergedColumnParallelLinear.from_linear(dict(gate_up.items()), group, **options)  # type: ignore[arg-type]
    yield Check(gate_up, merged, x, rows, [features(layer) for layer in merged.layers])

    sizes = {"q_proj": HEADS, "k_proj": KV_HEADS, "v_proj": KV_HEADS}
    projections = nn.ModuleDict({name: linear(WIDTH, n * HEAD_DIM) for name, n in sizes.items()})
    qkv = tnn.QKVParallelLinear.from_linear(
        projections["q_proj"],
        projections["k_proj"],
        projections["v_proj"],
        HEAD_DIM,
        group,
        **options,
    )
    yield Check(projections, qkv, x, rows, [features(layer) for layer in qkv.layers])

    vectors = nn.Embedding(13, WIDTH, padding_idx=3, dtype=F64)
    embedding = tnn.VocabParallelEmbedding.from_embedding(vectors, group, **options)
    ids = torch.randint(0, 13, (ROWS, BATCH))
    ids[0] = 3
    yield Check(vectors, embedding, ids, None, [rows])


def outputs(module: nn.Module, x: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    if isinstance(module, nn.ModuleDict):
        return [layer(x) for layer in module.values()]
    result = module(x, **options)
    return [result] if isinstance(result, torch.Tensor) else list(result)


def take_shard(x: torch.Tensor, split: Sharding | None) -> torch.Tensor:
    return x if split is None else split.shard(x)


def verify(check: Check, sizes: list[int] | None) -> None:
    check.plain.zero_grad()
    needs_grad = check.x.is_floating_point()
    full = check.x.clone().requires_grad_(needs_grad)
    local = take_shard(check.x, check.x_split).clone().requires_grad_(needs_grad)
    wants = outputs(check.plain, full)
    gots = outputs(check.layer, local, **({} if sizes is None else {"shard_sizes": sizes}))
    grads = [torch.randn_like(want) for want in wants]
    pairs: dict[str, tuple[torch.Tensor | None, torch.Tensor]] = {}
    sums: list[torch.Tensor] = []
    for i, (got, want, split) in enumerate(zip(gots, wants, check.y_splits, strict=True)):
        local_want = take_shard(want, split)
        width = local_want.shape[-1]
        # A rank without heads returns zeros for one group.
        is_headless = isinstance(check.layer, tnn.QKVParallelLinear) and not width
        assert not got[..., width:].any(), f"{check.layer}: output {i} has values of no head"
        pairs[f"output {i}"] = (got[..., :width] if is_headless else got, local_want)
        sums.append((got[..., :width] * take_shard(grads[i], split)).sum())
    torch.autograd.backward(wants, grads)
    torch.stack(sums).sum().backward()
    if needs_grad:
        assert full.grad is not None
        pairs["x"] = (local.grad, take_shard(full.grad, check.x_split))
    plain_parameters, layer_parameters = (
        dict(m.named_parameters()) for m in (check.plain, check.layer)
    )
    assert plain_parameters.keys() == layer_parameters.keys()
    for name, parameter in layer_parameters.items():
        grad = plain_parameters[name].grad
        assert grad is not None
        pairs[name] = (parameter.grad, shard(check.layer, name, grad))
    for quantity, (actual, expected) in pairs.items():
        assert (difference := find_mismatch(actual, expected)) is None, (
            f"{check.layer}: {quantity}: {difference}"
        )


@pytest.mark.parametrize("world", SWEEP)
@on_ranks()
def test_layers_match_the_torch_layers() -> None:
    with fresh_group() as group:
        for sequence in (True, False):
            sizes = tpkernels.shard_sizes(ROWS, group.size()) if sequence else None
            for check in checks(group, sequence):
                verify(check, sizes)


@on_ranks(2)
def test_refusals() -> list[str]:
    with fresh_group() as group:
        quantised = nn.Linear(4, 4)
        quantised.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
        column = partial(tnn.ColumnParallelLinear, 4, 6, group)
        embedding = partial(tnn.VocabParallelEmbedding, 6, group=group)
        attention = partial(tnn.ParallelAttention, 8, 2, 1, 4, group)
        head = partial(tnn.ParallelLMHead, 4, 6, group, bias=False)
        one, other = column(), column(sequence_parallel=True)
        from_embedding, special = (
            tnn.VocabParallelEmbedding.from_embedding,
            nn.Embedding(4, 4, max_norm=1.0),
        )
        from_linear = tnn.ColumnParallelLinear.from_linear
        qkv, merged = tnn.QKVParallelLinear, tnn.MergedColumnParallelLinear.from_linear
        linear, gate_up = nn.Linear(8, 6), {"gate": nn.Linear(8, 6), "up": nn.Linear(7, 6)}
        hidden, mask, x = torch.zeros(3, 1, 8), torch.ones(3, 3), torch.zeros(5)
        split, gather = tnn.split_over_ranks, tnn.gather_from_ranks
        return find_unexpected_messages(
            {
                "the shard sizes [5, 2] of out_features sum to 7; expected 6": lambda: column(
                    out_sizes=[5, 2]
                ),
                "ValueError: shard_sizes has 1 entries": lambda: column(out_sizes=[6]),
                "linear.weight is a Tensor of int8": lambda: from_linear(quantised, group),
                "TypeError: linear is a tpkernels.nn": lambda: from_linear(one, group),
                "NotImplementedError: embedding has max_norm=1.0, sparse=False": lambda: (
                    from_embedding(special, group)
                ),
                "heads=9 must be divisible by kv_heads=2": lambda: qkv(8, 9, 2, 4, group),
                "to a head ([3, 3], 4": lambda: head().tie(embedding(5)),
                "a head ([5, 1], 4": lambda: head(out_sizes=[5, 1]).tie(embedding(4)),
                "layers that share an input must have the same": lambda: tnn.column_parallel(
                    x[:4], [one, other]
                ),
                "token id 7 at position [1] is out of range; expected 0 to 5 (vocabular": lambda: (
                    embedding(4)(torch.tensor([0, 7]))
                ),
                "ids of ranks [1] of the group differ": lambda: embedding(4)(
                    torch.tensor([4, group.rank()])
                ),
                "ranks [1] of the group differ from those of rank 0": lambda: embedding(4)(
                    torch.tensor([[4, 3], [3, 4]][group.rank()])
                ),
                "[4, 3], but x of shape [2, 5] needs [5, N]": lambda: one(torch.zeros(2, 5)),
                "ValueError: sequence_dim is 2": lambda: attention(sequence_dim=2),
                "padding_idx is 6; expected -6 to 5": lambda: embedding(4, padding_idx=6),
                "attn_mask and is_causal=True were both passed": lambda: attention()(
                    hidden, attn_mask=mask, is_causal=True
                ),
                "the shard sizes [2, 2] of dim 0 sum to 4; expected 5": lambda: split(
                    x, group, 0, [2, 2]
                ),
                "dim is -1; x has 1 dims, so dim must be 0 to 0": lambda: split(x, group, -1),
                f"x has size 5 in dim 0, but sizes[{group.rank()}] of this rank is 3": lambda: (
                    gather(x, group, 0, [3, 3])
                ),
                "q_proj has 6 output features, which is not divisible by head_dim=4": lambda: (
                    qkv.from_linear(linear, linear, linear, 4, group)
                ),
                "ValueError: up: Linear(in_features=7": lambda: merged(gate_up, group),
            }
        )


@on_ranks(2)
def test_autocast() -> None:
    with fresh_group() as group:
        for sequence in (False, True):
            layer = tnn.ParallelMLP(8, 12, group, sequence_parallel=sequence)
            x = torch.randn(6, 8)
            with torch.autocast("cpu", dtype=BF16):
                y = layer(x)
            y.float().sum().backward()
            assert y.dtype == BF16 and layer.gate_proj.weight.grad.dtype == torch.float32, sequence
            stream = 1e3 + torch.rand(6, 8)  # bf16 would round this to multiples of 4
            with torch.autocast("cpu", dtype=BF16), torch.no_grad():
                added, unadded = layer(x, residual=stream), layer(x)
            assert added.dtype == torch.float32 and (added - unadded - stream).abs().max() <= 0.02


@on_ranks(2)
def test_masks_and_mixed_biases() -> None:
    """A causal mask gives the result of `is_causal`, and a full mask the result of
    `is_causal=False`. A projection has a bias only if its linear has a bias."""
    with fresh_group() as group:
        torch.manual_seed(4)
        x, tables = torch.randn(5, 2, 8, dtype=BF16), torch.randn(2, 5, 4)
        attention = tnn.ParallelAttention(8, 2, 2, 4, group, dtype=BF16)
        future = torch.ones(5, 5, dtype=torch.bool).tril()
        rotary = (tables[0], tables[1])  # rotary tables usually stay in fp32
        causal = attention(x, rotary=rotary)
        assert torch.equal(attention(x, rotary=rotary, attn_mask=future), causal)
        everything = attention(x, rotary=rotary, attn_mask=torch.ones_like(future))
        assert torch.equal(everything, attention(x, rotary=rotary, is_causal=False))
        assert not torch.equal(everything, causal), "the future is not seen where it may be"
        linears = [nn.Linear(8, 8, bias=has) for has in (True, False, True)]
        qkv = tnn.QKVParallelLinear.from_linear(*linears, 4, group)
        rows = torch.randn(3, 8)
        for layer, linear, y in zip(qkv.layers, linears, qkv(rows), strict=True):
            want = layer.shardings["weight"].shard(linear(rows).t()).t()
            assert (y - want).abs().max() <= 1e-5 and set(layer.shardings) == set(
                linear._parameters
            ) - (set() if linear.bias is not None else {"bias"}), f"{layer!r} is not {linear!r}"
