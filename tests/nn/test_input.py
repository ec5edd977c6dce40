"""What the layers refuse, and what they accept: dtypes, autocast, torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support.cases import RanksFixture
from tests.support.nn_reference import far
from tests.support.ranked import fresh_group, messages_of, report
from tpkernels import nn as tnn
from tpkernels.ops.column_matmul import column_matmul

BF16, F64 = torch.bfloat16, torch.float64


def refusals_job() -> list[str]:
    with fresh_group() as group:
        quantised = nn.Linear(4, 4)
        quantised.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
        head = tnn.ParallelLMHead(4, 6, group)
        one = tnn.ColumnParallelLinear(4, 6, group)
        other = tnn.ColumnParallelLinear(4, 6, group, sequence_parallel=True)
        embedding = tnn.VocabParallelEmbedding(6, 4, group)
        lopsided = tnn.ParallelLMHead(4, 6, group, bias=False, out_sizes=[5, 1])
        attention = tnn.ParallelAttention(8, 2, 1, 4, group)
        column = tnn.ColumnParallelLinear
        attempts: list[Any] = [
            lambda: column(4, 6, group, out_sizes=[5, 2]),
            lambda: column(4, 6, group, out_sizes=[6]),
            lambda: column.from_linear(quantised, group),
            lambda: column.from_linear(one, group),  # type: ignore[arg-type]
            lambda: tnn.VocabParallelEmbedding.from_embedding(
                nn.Embedding(4, 4, max_norm=1.0), group
            ),
            lambda: tnn.QKVParallelLinear(8, 9, 2, 4, group),
            lambda: head.tie(tnn.VocabParallelEmbedding(6, 5, group)),
            lambda: tnn.column_parallel(torch.zeros(2, 4), [one, other]),
            lambda: embedding(torch.tensor([0, 6])),
            lambda: one(torch.zeros(2, 5)),
            lambda: tnn.ParallelAttention(8, 2, 1, 4, group, sequence_dim=2),
            lambda: tnn.VocabParallelEmbedding(6, 4, group, padding_idx=6),
            lambda: lopsided.tie(embedding),
            lambda: attention(torch.zeros(3, 1, 8), attn_mask=torch.ones(3, 3), is_causal=True),
            lambda: tnn.split_over_ranks(torch.zeros(5), group, 0, [2, 2]),
            lambda: tnn.split_over_ranks(torch.zeros(5), group, -1),
            lambda: tnn.gather_from_ranks(torch.zeros(2), group, 0, [3, 3]),
            lambda: tnn.QKVParallelLinear.from_linear(*[nn.Linear(8, 6)] * 3, 4, group),
            lambda: tnn.MergedColumnParallelLinear.from_linear(
                {"gate": nn.Linear(8, 6), "up": nn.Linear(7, 6)}, group
            ),
        ]
        return messages_of(attempts)


def test_refusals(ranks: RanksFixture) -> None:
    expected = [
        "ValueError: the split [5, 2] of out_features does not add up to 6",
        "ValueError: shard_sizes has 1 entries",
        "NotImplementedError: linear.weight is a Tensor of int8; a quantised",
        "TypeError: linear is a tpkernels.nn.linear.ColumnParallelLinear, not an nn.Linear",
        "NotImplementedError: embedding has max_norm",
        "ValueError: heads=9 must be a multiple of kv_heads=2",
        "ValueError: an embedding ([3, 3], 5",
        "ValueError: layers of one input differ",
        "RuntimeError: an id is outside the vocabulary of 6",
        "ValueError: weights[0] has shape [4, 3], but x of shape [2, 5] needs [5, N]",
        "ValueError: sequence_dim is 2",
        "ValueError: padding_idx 6 is outside 6 embeddings",
        "does not fit a head ([5, 1], 4",
        "ValueError: give attn_mask or is_causal=True",
        "ValueError: the split [2, 2] of dim 0 does not add up to 5",
        "ValueError: dim is -1; x has 1 dims",
        "has a shard of size 2 in dim 0, but sizes are (3, 3)",
        "ValueError: q_proj has 6 output features, which is not a whole number of heads of 4",
        "ValueError: up: Linear(in_features=7",
    ]
    for messages in ranks(2).run(refusals_job):
        for message, part in zip(messages, expected, strict=True):
            assert part in message, message


def column_job() -> list[str]:
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


def test_column_products_and_their_gradients(ranks: RanksFixture) -> None:
    report(failure for rank in ranks(2).run(column_job) for failure in rank)


def autocast_job() -> list[str]:
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


def test_autocast(ranks: RanksFixture) -> None:
    report(failure for rank in ranks(2).run(autocast_job) for failure in rank)


def masked_job() -> list[str]:
    """A causal mask gives the result of `is_causal`, a full mask that of `is_causal=False`. Each
    projection has a bias if its linear has one."""
    failures = []
    with fresh_group() as group:
        torch.manual_seed(4)
        x, tables = torch.randn(5, 2, 8, dtype=BF16), torch.randn(2, 5, 4)
        attention = tnn.ParallelAttention(8, 2, 2, 4, group, dtype=BF16)
        future = torch.ones(5, 5, dtype=torch.bool).tril()
        rotary = (tables[0], tables[1])  # usually kept in fp32
        causal = attention(x, rotary=rotary)
        if not torch.equal(attention(x, rotary=rotary, attn_mask=future), causal):
            failures.append("a causal mask is not causal")
        everything = attention(x, rotary=rotary, attn_mask=torch.ones_like(future))
        if not torch.equal(everything, attention(x, rotary=rotary, is_causal=False)):
            failures.append("a mask of all is not what is_causal=False is")
        if torch.equal(everything, causal):
            failures.append("the future is not seen where it may be")
        linears = [nn.Linear(8, 8, bias=has) for has in (True, False, True)]
        qkv = tnn.QKVParallelLinear.from_linear(*linears, 4, group)
        rows = torch.randn(3, 8)
        for layer, linear, y in zip(qkv.layers, linears, qkv(rows), strict=True):
            want = layer.splits["weight"].shard(linear(rows).t()).t()
            if (y - want).abs().max() > 1e-5 or set(layer.splits) != set(linear._parameters) - (
                set() if linear.bias is not None else {"bias"}
            ):
                failures.append(f"{layer!r} is not {linear!r}")
    return failures


def test_masks_and_mixed_biases(ranks: RanksFixture) -> None:
    report(failure for rank in ranks(2).run(masked_job) for failure in rank)
