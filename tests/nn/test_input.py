"""What the layers refuse, and what they accept: dtypes, autocast, torch.compile."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from tests.support.nn_reference import far
from tests.support.ranked import fresh_group, on_ranks, unlike
from tpkernels import nn as tnn
from tpkernels.ops.column_matmul import column_matmul

BF16, F64 = torch.bfloat16, torch.float64


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
        adopt, special = tnn.VocabParallelEmbedding.from_embedding, nn.Embedding(4, 4, max_norm=1.0)
        copied = tnn.ColumnParallelLinear.from_linear
        qkv, merged = tnn.QKVParallelLinear, tnn.MergedColumnParallelLinear.from_linear
        linear, two = nn.Linear(8, 6), {"gate": nn.Linear(8, 6), "up": nn.Linear(7, 6)}
        hidden, mask, x = torch.zeros(3, 1, 8), torch.ones(3, 3), torch.zeros(5)
        split, gather = tnn.split_over_ranks, tnn.gather_from_ranks
        return unlike(
            {
                "[5, 2] of out_features does not add up to 6": lambda: column(out_sizes=[5, 2]),
                "ValueError: shard_sizes has 1 entries": lambda: column(out_sizes=[6]),
                "linear.weight is a Tensor of int8": lambda: copied(quantised, group),
                "TypeError: linear is a tpkernels.nn": lambda: copied(one, group),
                "NotImplementedError: embedding has max_norm": lambda: adopt(special, group),
                "heads=9 must be a multiple of kv_heads=2": lambda: qkv(8, 9, 2, 4, group),
                "does not fit a head ([3, 3], 4": lambda: head().tie(embedding(5)),
                "a head ([5, 1], 4": lambda: head(out_sizes=[5, 1]).tie(embedding(4)),
                "layers of one input differ": lambda: tnn.column_parallel(x[:4], [one, other]),
                "id is outside the vocabulary of 6": lambda: embedding(4)(torch.tensor([0, 6])),
                "[4, 3], but x of shape [2, 5] needs [5, N]": lambda: one(torch.zeros(2, 5)),
                "ValueError: sequence_dim is 2": lambda: attention(sequence_dim=2),
                "padding_idx 6 is outside 6 embeddings": lambda: embedding(4, padding_idx=6),
                "give attn_mask or": lambda: attention()(hidden, attn_mask=mask, is_causal=True),
                "[2, 2] of dim 0 does not add up to 5": lambda: split(x, group, 0, [2, 2]),
                "dim is -1; x has 1 dims": lambda: split(x, group, -1),
                "size 5 in dim 0, but sizes are (3, 3)": lambda: gather(x, group, 0, [3, 3]),
                "q_proj has 6 output": lambda: qkv.from_linear(linear, linear, linear, 4, group),
                "ValueError: up: Linear(in_features=7": lambda: merged(two, group),
            }
        )


@on_ranks(2)
def test_column_products_and_their_gradients() -> list[str]:
    """`column_matmul` where only some arguments require gradients."""
    failures = []
    with fresh_group() as group:
        torch.manual_seed(5)
        x, wide = torch.randn(6, 4, dtype=F64), torch.randn(3, 4, 5, dtype=F64)
        for asked in ("xwb", "x", "w", "b"):
            leaf = x.clone().requires_grad_("x" in asked)
            first, *others = (w.clone().requires_grad_("w" in asked) for w in wide)
            bias = torch.ones(5, dtype=F64, requires_grad="b" in asked)
            outs = column_matmul(leaf, [first, *others], group, [bias, None, None])
            (outs[0].pow(2).sum() + outs[1].sum()).backward()  # the third is not used
            grad = 2 * (x @ wide[0] + 1)
            want_x = (grad @ wide[0].t() + torch.ones(6, 5, dtype=F64) @ wide[1].t()) * group.size()
            pairs = {
                "x": (leaf.grad, want_x),
                "w": (first.grad, x.t() @ grad),
                "b": (bias.grad, grad.sum(0)),
            }
            for name, (got, want) in pairs.items():
                wrong = far(got, want) if name in asked else got is not None
                failures += [f"{asked}: {name}: {wrong}"] if wrong else []
    return failures


@on_ranks(2)
def test_autocast() -> list[str]:
    with fresh_group() as group:
        failures = []
        for sequence in (False, True):
            layer = tnn.ParallelMLP(8, 12, group, sequence_parallel=sequence)
            x = torch.randn(6, 8)
            with torch.autocast("cpu", dtype=BF16):
                y = layer(x)
            y.float().sum().backward()
            if y.dtype != BF16 or layer.gate_proj.weight.grad.dtype != torch.float32:
                failures.append(f"{sequence}: {y.dtype}, {layer.gate_proj.weight.grad.dtype}")
            stream = 1e3 + torch.rand(6, 8)  # bf16 would round this to multiples of 4
            with torch.autocast("cpu", dtype=BF16), torch.no_grad():
                added, alone = layer(x, residual=stream), layer(x)
            if added.dtype != torch.float32 or (added - alone - stream).abs().max() > 0.02:
                failures.append(f"{sequence}: a residual stream becomes {added.dtype}")
        return failures


@on_ranks(2)
def test_masks_and_mixed_biases() -> None:
    """A causal mask gives the result of `is_causal`, a full mask that of `is_causal=False`. Each
    projection has a bias if its linear has one."""
    with fresh_group() as group:
        torch.manual_seed(4)
        x, tables = torch.randn(5, 2, 8, dtype=BF16), torch.randn(2, 5, 4)
        attention = tnn.ParallelAttention(8, 2, 2, 4, group, dtype=BF16)
        future = torch.ones(5, 5, dtype=torch.bool).tril()
        rotary = (tables[0], tables[1])  # usually kept in fp32
        causal = attention(x, rotary=rotary)
        assert torch.equal(attention(x, rotary=rotary, attn_mask=future), causal), (
            "a causal mask is not causal"
        )
        everything = attention(x, rotary=rotary, attn_mask=torch.ones_like(future))
        assert torch.equal(everything, attention(x, rotary=rotary, is_causal=False)), (
            "a mask of all is not what is_causal=False is"
        )
        assert not torch.equal(everything, causal), "the future is not seen where it may be"
        linears = [nn.Linear(8, 8, bias=has) for has in (True, False, True)]
        qkv = tnn.QKVParallelLinear.from_linear(*linears, 4, group)
        rows = torch.randn(3, 8)
        for layer, linear, y in zip(qkv.layers, linears, qkv(rows), strict=True):
            want = layer.splits["weight"].shard(linear(rows).t()).t()
            assert (y - want).abs().max() <= 1e-5 and set(layer.splits) == set(
                linear._parameters
            ) - (set() if linear.bias is not None else {"bias"}), f"{layer!r} is not {linear!r}"
