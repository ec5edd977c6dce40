"""What the layers refuse, and what they accept: dtypes, autocast, torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import RanksFixture
from nn_reference import Model, Shape, far, inputs
from ranked import fresh_group, report
from torch import nn

import tpkernels
from tpkernels import nn as tnn
from tpkernels.ops._column_matmul import column_matmul

BF16, F64 = torch.bfloat16, torch.float64


def refusals_job() -> list[str]:
    told = []
    with fresh_group() as group:
        quantised = nn.Linear(4, 4)
        quantised.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
        head = tnn.ParallelLMHead(4, 6, group)
        one = tnn.ColumnParallelLinear(4, 6, group)
        other = tnn.ColumnParallelLinear(4, 6, group, sequence_parallel=True)
        embedding = tnn.VocabParallelEmbedding(6, 4, group)
        column = tnn.ColumnParallelLinear
        doings: list[Any] = [
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
        ]
        for do in doings:
            try:
                do()
                told.append("nothing")
            except Exception as error:
                told.append(f"{type(error).__name__}: {error}")
    return told


def test_refusals(ranks: RanksFixture) -> None:
    expected = [
        "ValueError: the split [5, 2] of out_features does not add up to 6",
        "ValueError: shard_sizes has 1 entries",
        "NotImplementedError: linear.weight is a Tensor of int8; a quantised",
        "TypeError: linear is a tpkernels.nn.column.ColumnParallelLinear, not an nn.Linear",
        "NotImplementedError: embedding has max_norm",
        "ValueError: heads=9 must be a multiple of kv_heads=2",
        "ValueError: an embedding (6, 5",
        "ValueError: layers of one input differ",
        "RuntimeError: an id is outside the vocabulary of 6",
        "ValueError: weights[0] has shape [4, 3], but x of shape [2, 5] needs [5, N]",
        "ValueError: sequence_dim is 2",
        "ValueError: padding_idx 6 is outside 6 embeddings",
    ]
    for told in ranks(2).run(refusals_job):
        for said, part in zip(told, expected, strict=True):
            assert part in said, said


def column_job() -> list[str]:
    """`column_matmul` with parts left out: gradients, and what is asked for none."""
    failures = []
    with fresh_group() as group:
        torch.manual_seed(5)
        x, wide = torch.randn(6, 4, dtype=F64), torch.randn(3, 4, 5, dtype=F64)
        for asked in ("xwb", "x", "w", "b"):
            leaf = x.clone().requires_grad_("x" in asked)
            ws = [w.clone().requires_grad_("w" in asked) for w in wide]
            bias = torch.ones(5, dtype=F64, requires_grad="b" in asked)
            outs = column_matmul(leaf, ws, group, [bias, None, None])
            (outs[0].pow(2).sum() + outs[1].sum()).backward()  # the third is not used
            first = 2 * (x @ wide[0] + 1)
            second = torch.ones(6, 5, dtype=F64)
            want_x = (first @ wide[0].t() + second @ wide[1].t()) * group.size()
            pairs = {
                "x": (leaf.grad, want_x),
                "w": (ws[0].grad, x.t() @ first),
                "b": (bias.grad, first.sum(0)),
            }
            for name, (got, want) in pairs.items():
                if name in asked:
                    said = far(got, want)
                    failures += [f"{asked}: {name}: {said}"] if said else []
                elif got is not None:
                    failures.append(f"{asked}: {name} has a gradient")
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
        return failures


def test_autocast(ranks: RanksFixture) -> None:
    report(failure for rank in ranks(2).run(autocast_job) for failure in rank)


def compile_job(sequence: bool) -> list[str]:
    """A compiled model is one graph, and computes what it does uncompiled."""
    torch._dynamo.reset()
    failures = []
    with fresh_group() as group:
        torch.manual_seed(6)
        model = Model(Shape(vocab=6), group, sequence)
        ids, targets, rotary = inputs(model.shape, 0)
        model.loss(ids, targets, rotary).backward()
        want = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
        model.zero_grad()
        step = torch.compile(model.loss, fullgraph=True, backend="aot_eager")
        step(ids, targets, rotary).backward()
        for (name, p), grad in zip(model.named_parameters(), want, strict=True):
            said = far(p.grad, grad)
            if said is not None:
                failures.append(f"{name}: {said}")
        tpkernels.all_reduce(torch.zeros(1), group)  # in step to the end
    return failures


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [True, False])
def test_compiled_layers(ranks: RanksFixture, sequence: bool) -> None:
    told = ranks(2).run(compile_job, sequence, timeout=120)
    report(failure for rank in told for failure in rank)
