"""Mixtures of experts whose experts are sharded: routing, dispatch, combination, whole layers.

The experts of a rank follow one another, and each rank has as many.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import tpkernels
from examples.parallel_kernel_bench import plain
from examples.parallel_kernel_bench.gallery import Case, Setup, problem
from examples.parallel_kernel_bench.lookups import sent
from examples.parallel_kernel_bench.plain import stacked, summed

TOP, WIDTH = 2, 256


class Routing:
    """Which two experts each of this rank's tokens has chosen; a row for each, by expert."""

    def __init__(self, at: Setup, experts: int, tokens: int) -> None:
        weights, chosen = at.normal(tokens, experts).softmax(1).topk(TOP)
        order = chosen.flatten().argsort(stable=True)
        self.counts = chosen.flatten().bincount(minlength=experts)
        self.tokens, self.weights = order // TOP, weights.flatten()[order]  # of each row
        self.mine = slice(at.rank * experts // at.world, (at.rank + 1) * experts // at.world)

    def per_rank(self, at: Setup) -> torch.Tensor:
        return self.counts.view(at.world, -1).sum(1)

    def combined(self, rows: torch.Tensor) -> torch.Tensor:
        total = rows.new_zeros(len(rows) // TOP, rows.shape[1])
        return total.index_add_(0, self.tokens, rows * self.weights[:, None])


@problem(26, "number of tokens from each rank to each local expert")
def moe_token_preprocess(at: Setup) -> Case:
    routing = Routing(at, 8 * at.world, at.size(4096))

    def counted(table):  # [from, expert]
        mine = table[:, routing.mine]
        return routing.per_rank(at), mine.sum(1), mine, mine.sum(0)

    return Case(
        lambda: counted(stacked(routing.counts)),
        lambda: counted(tpkernels.all_gather(routing.counts[None], at.group)),
    )


@problem(27, "send rows to the ranks of their experts")
def moe_all2all_primitive(at: Setup) -> Case:
    routing = Routing(at, 8 * at.world, at.size(4096))
    rows, counts = at.normal(len(routing.tokens), WIDTH), routing.per_rank(at)
    return Case(lambda: plain.sent(rows, counts)[0], lambda: sent(rows, counts, at))


@problem(28, "send tokens to the ranks of their experts, sorted by expert")
def moe_pre_all2all(at: Setup) -> Case:
    routing, x = Routing(at, 8 * at.world, at.size(4096)), at.normal(at.size(4096), WIDTH)

    def by_expert(rows, table):
        """rows: by rank, then expert; table: their counts."""
        chunks, experts = rows.split(table.flatten().tolist()), table.shape[1]
        return torch.cat([part for e in range(experts) for part in chunks[e::experts]])

    def reference():
        table = stacked(routing.counts)[:, routing.mine]
        return by_expert(plain.sent(x[routing.tokens], routing.per_rank(at))[0], table)

    def ours():
        table = tpkernels.all_gather(routing.counts[None], at.group)[:, routing.mine]
        return by_expert(sent(x[routing.tokens], routing.per_rank(at), at), table)

    return Case(reference, ours)


@problem(29, "return expert outputs to their tokens, and compute weighted sums")
def moe_post_all2all(at: Setup) -> Case:
    routing = Routing(at, 8 * at.world, at.size(4096))
    table = stacked(routing.counts)  # [from, expert]
    mine = table[:, routing.mine].t()
    y = at.normal(int(mine.sum()), WIDTH)  # by expert, then rank

    def reference():
        chunks = y.split(mine.flatten().tolist())
        rows = torch.cat([part for r in range(at.world) for part in chunks[r :: at.world]])
        back = plain.sent_known(rows, mine.sum(0).tolist(), routing.per_rank(at).tolist())
        return routing.combined(back)

    def ours():  # gathers the results; they are sorted by expert, as this rank's rows are
        sizes = table.view(at.world, at.world, -1).sum((0, 2)).tolist()
        rows = tpkernels.all_gather(y, at.group, shard_sizes=sizes)
        chunks = rows.split(table.t().flatten().tolist())
        return routing.combined(torch.cat(chunks[at.rank :: at.world]))

    return Case(reference, ours)


@problem(30, "sums of the gradients of three LoRA matrices")
def moe_epgroupgemm_lora_backward(at: Setup) -> Case:
    grads = [at.integers(*shape) for shape in ((16, 2048), (16, 2048), (2048, 16))]
    return Case(
        lambda: tuple(summed(g) for g in grads),
        lambda: tuple(tpkernels.all_reduce(g, at.group) for g in grads),
    )


def layer(at: Setup, *, experts: int, lora: int = 0) -> Case:
    """Make a layer whose experts share an MLP on each rank; ``lora``: the rank of its adapters."""
    x, router = at.normal(at.size(2048), WIDTH), at.normal(WIDTH, experts, shared=True)
    gate, up, down = (
        (at.normal(n, k) / n**0.5, at.normal(n, lora) / n**0.5, at.normal(lora, k) / 8)
        for n, k in ((WIDTH, 512), (WIDTH, 512), (512, WIDTH))
    )

    def product(x, weights):
        return x @ weights[0] + x @ weights[1] @ weights[2] if lora else x @ weights[0]

    def mlp(x):
        return product(F.silu(product(x, gate)) * product(x, up), down)

    def routed(x):
        """Return weights [tokens, W, experts of a rank], zero but for the two that are chosen."""
        weights, chosen = (x @ router).softmax(1).topk(TOP)
        weights = x.new_zeros(len(x), experts).scatter_(1, chosen, weights)
        return weights.unflatten(1, (at.world, -1))

    def reference():
        weights = routed(x)
        ranks, tokens, expert = (weights > 0).transpose(0, 1).nonzero().t()
        counts = ranks.bincount(minlength=at.world)
        rows, received = plain.sent(x[tokens], counts)
        back = plain.sent_known(mlp(rows), received, counts.tolist())
        back *= weights[tokens, ranks, expert][:, None]
        return torch.zeros_like(x).index_add_(0, tokens, back)

    def ours():
        whole = tpkernels.all_gather(x, at.group)
        weights = routed(whole)[:, at.rank].sum(1, keepdim=True)
        mine = weights.squeeze(1).nonzero().squeeze(1)  # a token once, however many it chose
        rows = mlp(whole[mine]) * weights[mine]
        return tpkernels.reduce_scatter(whole.zero_().index_copy_(0, mine, rows), at.group)

    return Case(reference, ours, depth=512)


@problem(31, "an MoE layer, 4 experts per rank, top-2")
def fused_moe_fwd(at: Setup) -> Case:
    return layer(at, experts=4 * at.world)


@problem(32, "an MoE layer, 4 experts per rank, top-2, with LoRA adapters")
def fused_moe_fwd_lora(at: Setup) -> Case:
    return layer(at, experts=4 * at.world, lora=16)


@problem(49, "an MoE layer, 1 expert per rank, top-2")
def moe_ep_balanced(at: Setup) -> Case:
    return layer(at, experts=at.world)


@problem(50, "an MoE layer, 2 experts per rank, top-2")
def moe_ep_wide(at: Setup) -> Case:
    return layer(at, experts=2 * at.world)
