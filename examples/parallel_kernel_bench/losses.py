"""Norms, losses and statistics over all ranks' rows, channels or columns of the vocabulary."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tpkernels
from examples.parallel_kernel_bench.gallery import Case, Setup, problem
from examples.parallel_kernel_bench.plain import (
    exchanged,
    gathered,
    passed_on,
    scattered_sum,
    summed,
)

WIDTH, EPS, LOW, HIGH = 2048, 1e-5, dist.ReduceOp.MIN, dist.ReduceOp.MAX


@problem(9, "gradients of the weight and bias of a layer norm; rows are sharded")
def layernorm_backward(at: Setup) -> Case:
    normed, grad = (at.integers(at.size(2048), WIDTH) for _ in range(2))

    def ours():
        sums = torch.stack([(grad * normed).sum(0), grad.sum(0)])
        return tpkernels.all_reduce_(sums, at.group).unbind()

    return Case(lambda: (summed((grad * normed).sum(0)), summed(grad.sum(0))), ours)


@problem(18, "an RMS norm; channels are sharded")
def tp_rms_norm(at: Setup) -> Case:
    x, weight = at.integers(at.size(2048), WIDTH), at.normal(WIDTH)

    def normed(add):
        mean = add(x.square().sum(1, keepdim=True)) / (WIDTH * at.world)
        return x * torch.rsqrt(mean + EPS) * weight

    return Case(
        lambda: normed(summed), lambda: normed(lambda s: tpkernels.all_reduce_(s, at.group))
    )


@problem(21, "clip sharded gradients by their norm")
def clip_grad_norm_no_ep(at: Setup) -> Case:
    grads = [at.integers(at.size(256), 1024) for _ in range(4)]

    def clipped(add):
        norm = add(torch.stack([g.square().sum() for g in grads]).sum()).sqrt()
        return norm, *(g * (1.0 / norm).clamp(max=1.0) for g in grads)

    return Case(
        lambda: clipped(summed), lambda: clipped(lambda s: tpkernels.all_reduce_(s, at.group))
    )


@problem(25, "a policy-gradient loss, and five metrics of its ratios and tokens")
def importance_sampling_loss(at: Setup) -> Case:
    x, head = at.normal(at.size(1024), 256), at.normal(4096, 256, shared=True) / 16
    target = at.ids(4096, len(x)).masked_fill(at.ids(8, len(x)) == 0, -100)  # some are ignored
    old, advantage = -at.normal(len(x)).abs() - 8, at.normal(len(x))

    def statistics():
        """Return [5] sums over the valid tokens, and [1] the smallest and largest ratio."""
        entropy, valid = F.cross_entropy(x @ head.t(), target, reduction="none"), target >= 0
        delta = (-entropy - old)[valid].clamp(-20, 20)
        ratio, loss = delta.exp(), -delta.exp() * advantage[valid]
        sums = [valid, loss, ratio, ratio - delta - 1, entropy]
        return torch.stack([each.sum().to(x.dtype) for each in sums]), *ratio.aminmax(
            dim=0, keepdim=True
        )

    def reference():
        sums, least, most = statistics()
        count, *sums = (summed(each) for each in sums)
        return torch.stack(sums) / count, summed(least, op=LOW), summed(most, op=HIGH)

    def ours():  # one message instead of seven
        every = tpkernels.all_gather(torch.cat(statistics())[None], at.group)
        sums = every[:, :5].sum(0)
        return sums[1:] / sums[0], every[:, 5].amin(0, True), every[:, 6].amax(0, True)

    return Case(reference, ours, depth=at.world)


@problem(45, "the local rows of a mean over the ranks, normalized")
def reducescatter_fused_rmsnorm(at: Setup) -> Case:
    x, weight = at.integers(at.size(1024) * at.world, WIDTH), at.normal(WIDTH, shared=True)

    def normed(total):
        return F.rms_norm(total / at.world, (WIDTH,), weight, EPS)

    return Case(
        lambda: normed(scattered_sum(x)), lambda: normed(tpkernels.reduce_scatter(x, at.group))
    )


@problem(58, "the SigLIP loss of the local images and all texts")
def openclip_contrastive_loss(at: Setup) -> Case:
    n, width = at.size(1024), 512
    images, texts = (F.normalize(at.normal(n, width)) for _ in range(2))

    def loss(logits, own):
        signs = torch.full_like(logits, -1.0)
        signs[own].fill_diagonal_(1.0)
        return -F.logsigmoid(signs * (10.0 * logits - 10.0)).sum() / n

    def reference():
        total, passing = loss(texts @ images.t(), slice(n)), texts
        for _ in range(at.world - 1):
            (passing,) = passed_on(passing)
            total = total + loss(passing @ images.t(), slice(0))
        return total

    def ours():
        logits = tpkernels.all_gather_matmul(texts, images.t(), at.group)  # all texts, own images
        return loss(logits, slice(at.rank * n, (at.rank + 1) * n))

    return Case(reference, ours, depth=width)


@problem(73, "cross-entropy; the vocabulary is sharded")
def vocab_parallel_cross_entropy_loss(at: Setup) -> Case:
    columns, vocabulary = 8192, 8192 * at.world
    logits, target = (
        at.normal(at.size(1024), columns),
        at.ids(vocabulary, at.size(1024), shared=True),
    )

    def reference():
        shifted = logits - summed(logits.amax(1), op=HIGH)[:, None]
        chosen = shifted.gather(1, (target % columns)[:, None]).squeeze(1)
        chosen = summed(chosen.masked_fill(target // columns != at.rank, 0))
        return summed(shifted.exp().sum(1)).log() - chosen

    def ours():
        loss = tpkernels.nn.vocab_parallel_cross_entropy
        return loss(logits, target, at.group, vocabulary, reduction="none")

    return Case(reference, ours, depth=vocabulary)


def likely(logits: torch.Tensor) -> torch.Tensor:
    """Keep the 50 most likely tokens, and of these the fewest that make up 0.9; -inf elsewhere."""
    top = logits.topk(50).values
    before = F.pad(top.softmax(-1).cumsum(-1)[..., :-1], (1, 0))
    least = top.gather(-1, (before < 0.9).sum(-1, keepdim=True) - 1)
    return logits.masked_fill(logits < least, -torch.inf)


def log_probability(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return likely(logits).log_softmax(-1).gather(-1, target[:, None]).squeeze(-1)


def sampled(at: Setup, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits of this rank's 8192 columns, and targets, whose logits are large."""
    logits, target = at.normal(tokens, 8192), at.ids(8192 * at.world, tokens, shared=True)
    large = 9.0 * (target // 8192 == at.rank).to(logits.dtype)
    return logits.scatter_add(1, (target % 8192)[:, None], large[:, None]), target


def log_probabilities(at: Setup, chunk: int) -> Case:
    logits, target = sampled(at, at.size(1024))
    chunks = list(zip(logits.split(chunk), target.split(chunk), strict=True))

    def reference():
        mine = [log_probability(exchanged(x, 1, 0), t.chunk(at.world)[at.rank]) for x, t in chunks]
        return torch.cat([gathered(each) for each in mine])

    def ours():
        found = []
        for x, targets in chunks:
            whole = tpkernels.all_to_all(x, at.group, gather_dim=1, scatter_dim=0)
            mine = log_probability(whole, targets.chunk(at.world)[at.rank])
            found.append(tpkernels.all_gather(mine, at.group))
        return torch.cat(found)

    return Case(reference, ours)


@problem(82, "log-probabilities after top-k and top-p sampling; columns are sharded")
def vocab_parallel_log_prob_topk(at: Setup) -> Case:
    return log_probabilities(at, at.size(1024))


@problem(83, "log-probabilities after top-k and top-p sampling, in four chunks of tokens")
def vocab_parallel_log_prob_topk_chunked(at: Setup) -> Case:
    return log_probabilities(at, at.size(1024) // 4)


@problem(84, "gradient of log-probabilities after top-k and top-p sampling")
def vocab_parallel_log_prob_topk_chunked_backward(at: Setup) -> Case:
    logits, target = sampled(at, at.size(512))
    target, grad = (
        x.chunk(at.world)[at.rank] for x in (target, at.normal(len(target), shared=True))
    )

    def reference():
        share = likely(exchanged(logits, 1, 0)).softmax(1)
        return exchanged((F.one_hot(target, share.shape[1]) - share) * grad[:, None], 0, 1)

    @torch.enable_grad()
    def ours():
        x = logits.detach().requires_grad_()
        whole = tpkernels.all_to_all(x, at.group, gather_dim=1, scatter_dim=0)
        return torch.autograd.grad(log_probability(whole, target), x, grad)[0]

    return Case(reference, ours, depth=8192 * at.world)
