"""MoE with expert parallelism: routing, dispatch, combine and full layers.

The experts of a rank are contiguous, and all ranks hold the same number of experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import tpkernels
from examples.parallel_kernel_bench import plain
from examples.parallel_kernel_bench.gallery import Case, Setup, problem
from examples.parallel_kernel_bench.lookups import send_rows
from examples.parallel_kernel_bench.plain import all_gather_stacked, all_reduce

TOP, WIDTH = 2, 256


class Routing:
    """Top-2 assignments of the local tokens, sorted by expert."""

    def __init__(self, setup: Setup, experts: int, tokens: int) -> None:
        weights, chosen = setup.normal(tokens, experts).softmax(1).topk(TOP)
        order = chosen.flatten().argsort(stable=True)
        self.counts = chosen.flatten().bincount(minlength=experts)
        self.tokens, self.weights = order // TOP, weights.flatten()[order]  # per row
        self.local_experts = slice(
            setup.rank * experts // setup.world, (setup.rank + 1) * experts // setup.world
        )

    def per_rank(self, setup: Setup) -> torch.Tensor:
        return self.counts.view(setup.world, -1).sum(1)

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        total = rows.new_zeros(len(rows) // TOP, rows.shape[1])
        return total.index_add_(0, self.tokens, rows * self.weights[:, None])


@problem(26, "number of tokens from each rank to each local expert")
def moe_token_preprocess(setup: Setup) -> Case:
    routing = Routing(setup, 8 * setup.world, setup.size(4096))

    def make_counts(table):  # [source rank, expert]
        local = table[:, routing.local_experts]
        return routing.per_rank(setup), local.sum(1), local, local.sum(0)

    return Case(
        lambda: make_counts(all_gather_stacked(routing.counts)),
        lambda: make_counts(tpkernels.all_gather(routing.counts[None], setup.group)),
    )


@problem(27, "send rows to the ranks of their experts")
def moe_all2all_primitive(setup: Setup) -> Case:
    routing = Routing(setup, 8 * setup.world, setup.size(4096))
    rows, counts = setup.normal(len(routing.tokens), WIDTH), routing.per_rank(setup)
    return Case(lambda: plain.send_rows(rows, counts)[0], lambda: send_rows(rows, counts, setup))


@problem(28, "send tokens to the ranks of their experts, sorted by expert")
def moe_pre_all2all(setup: Setup) -> Case:
    routing, x = (
        Routing(setup, 8 * setup.world, setup.size(4096)),
        setup.normal(setup.size(4096), WIDTH),
    )

    def sort_by_expert(rows, table):
        """Sort rows by expert. They are sorted by rank, then expert; ``table`` has their counts."""
        chunks, experts = rows.split(table.flatten().tolist()), table.shape[1]
        return torch.cat([chunk for e in range(experts) for chunk in chunks[e::experts]])

    def reference():
        table = all_gather_stacked(routing.counts)[:, routing.local_experts]
        return sort_by_expert(plain.send_rows(x[routing.tokens], routing.per_rank(setup))[0], table)

    def ours():
        table = tpkernels.all_gather(routing.counts[None], setup.group)[:, routing.local_experts]
        return sort_by_expert(send_rows(x[routing.tokens], routing.per_rank(setup), setup), table)

    return Case(reference, ours)


@problem(29, "return expert outputs to their tokens, and compute weighted sums")
def moe_post_all2all(setup: Setup) -> Case:
    routing = Routing(setup, 8 * setup.world, setup.size(4096))
    table = all_gather_stacked(routing.counts)  # [source rank, expert]
    local = table[:, routing.local_experts].t()
    y = setup.normal(int(local.sum()), WIDTH)  # rows by expert, then rank

    def reference():
        chunks = y.split(local.flatten().tolist())
        rows = torch.cat([chunk for r in range(setup.world) for chunk in chunks[r :: setup.world]])
        returned = plain.send_rows_with_counts(
            rows, local.sum(0).tolist(), routing.per_rank(setup).tolist()
        )
        return routing.combine(returned)

    def ours():  # gathers all outputs, sorted by expert like the local rows
        sizes = table.view(setup.world, setup.world, -1).sum((0, 2)).tolist()
        rows = tpkernels.all_gather(y, setup.group, shard_sizes=sizes)
        chunks = rows.split(table.t().flatten().tolist())
        return routing.combine(torch.cat(chunks[setup.rank :: setup.world]))

    return Case(reference, ours)


@problem(30, "sums of the gradients of three LoRA matrices")
def moe_epgroupgemm_lora_backward(setup: Setup) -> Case:
    grads = [setup.integers(*shape) for shape in ((16, 2048), (16, 2048), (2048, 16))]
    return Case(
        lambda: tuple(all_reduce(g) for g in grads),
        lambda: tuple(tpkernels.all_reduce(g, setup.group) for g in grads),
    )


def layer(setup: Setup, *, experts: int, lora: int = 0) -> Case:
    """Make an MoE layer. The experts of a rank share an MLP. ``lora`` is the adapter rank."""
    x, router = setup.normal(setup.size(2048), WIDTH), setup.normal(WIDTH, experts, shared=True)
    gate, up, down = (
        (setup.normal(n, k) / n**0.5, setup.normal(n, lora) / n**0.5, setup.normal(lora, k) / 8)
        for n, k in ((WIDTH, 512), (WIDTH, 512), (512, WIDTH))
    )

    def linear(x, weights):
        return x @ weights[0] + x @ weights[1] @ weights[2] if lora else x @ weights[0]

    def mlp(x):
        return linear(F.silu(linear(x, gate)) * linear(x, up), down)

    def route(x):
        """Return weights [tokens, W, experts per rank], zero except for the top 2."""
        weights, chosen = (x @ router).softmax(1).topk(TOP)
        weights = x.new_zeros(len(x), experts).scatter_(1, chosen, weights)
        return weights.unflatten(1, (setup.world, -1))

    def reference():
        weights = route(x)
        ranks, tokens, expert = (weights > 0).transpose(0, 1).nonzero().t()
        counts = ranks.bincount(minlength=setup.world)
        rows, received = plain.send_rows(x[tokens], counts)
        returned = plain.send_rows_with_counts(mlp(rows), received, counts.tolist())
        returned *= weights[tokens, ranks, expert][:, None]
        return torch.zeros_like(x).index_add_(0, tokens, returned)

    def ours():
        all_x = tpkernels.all_gather(x, setup.group)
        weights = route(all_x)[:, setup.rank].sum(1, keepdim=True)
        tokens = weights.squeeze(1).nonzero().squeeze(1)  # each token once
        rows = mlp(all_x[tokens]) * weights[tokens]
        return tpkernels.reduce_scatter(all_x.zero_().index_copy_(0, tokens, rows), setup.group)

    return Case(reference, ours, depth=512)


@problem(31, "an MoE layer, 4 experts per rank, top-2")
def fused_moe_fwd(setup: Setup) -> Case:
    return layer(setup, experts=4 * setup.world)


@problem(32, "an MoE layer, 4 experts per rank, top-2, with LoRA adapters")
def fused_moe_fwd_lora(setup: Setup) -> Case:
    return layer(setup, experts=4 * setup.world, lora=16)


@problem(49, "an MoE layer, 1 expert per rank, top-2")
def moe_ep_balanced(setup: Setup) -> Case:
    return layer(setup, experts=setup.world)


@problem(50, "an MoE layer, 2 experts per rank, top-2")
def moe_ep_wide(setup: Setup) -> Case:
    return layer(setup, experts=2 * setup.world)
