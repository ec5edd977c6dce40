"""Norms, losses and statistics over sharded rows, channels or vocabulary columns."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tpkernels
from examples.parallel_kernel_bench.gallery import Case, Setup, problem
from examples.parallel_kernel_bench.plain import (
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
    ring_shift,
)

WIDTH, EPS, LOW, HIGH = 2048, 1e-5, dist.ReduceOp.MIN, dist.ReduceOp.MAX


@problem(9, "gradients of the weight and bias of a layer norm; rows are sharded")
def layernorm_backward(setup: Setup) -> Case:
    normed, grad = (setup.integers(setup.size(2048), WIDTH) for _ in range(2))

    def ours():
        sums = torch.stack([(grad * normed).sum(0), grad.sum(0)])
        return tpkernels.all_reduce_(sums, setup.group).unbind()

    return Case(lambda: (all_reduce((grad * normed).sum(0)), all_reduce(grad.sum(0))), ours)


@problem(18, "an RMS norm; channels are sharded")
def tp_rms_norm(setup: Setup) -> Case:
    x, weight = setup.integers(setup.size(2048), WIDTH), setup.normal(WIDTH)

    def normalize(reduce):
        mean = reduce(x.square().sum(1, keepdim=True)) / (WIDTH * setup.world)
        return x * torch.rsqrt(mean + EPS) * weight

    return Case(
        lambda: normalize(all_reduce),
        lambda: normalize(lambda s: tpkernels.all_reduce_(s, setup.group)),
    )


@problem(21, "clip sharded gradients by their norm")
def clip_grad_norm_no_ep(setup: Setup) -> Case:
    grads = [setup.integers(setup.size(256), 1024) for _ in range(4)]

    def clip(reduce):
        norm = reduce(torch.stack([g.square().sum() for g in grads]).sum()).sqrt()
        return norm, *(g * (1.0 / norm).clamp(max=1.0) for g in grads)

    return Case(
        lambda: clip(all_reduce), lambda: clip(lambda s: tpkernels.all_reduce_(s, setup.group))
    )


@problem(25, "a policy-gradient loss, and five metrics of its ratios and tokens")
def importance_sampling_loss(setup: Setup) -> Case:
    x, head = setup.normal(setup.size(1024), 256), setup.normal(4096, 256, shared=True) / 16
    target = setup.ids(4096, len(x)).masked_fill(
        setup.ids(8, len(x)) == 0, -100
    )  # ignores some targets
    old, advantage = -setup.normal(len(x)).abs() - 8, setup.normal(len(x))

    def statistics():
        """Return sums [5] over the valid tokens, and the smallest [1] and largest [1] ratio."""
        entropy, valid = F.cross_entropy(x @ head.t(), target, reduction="none"), target >= 0
        delta = (-entropy - old)[valid].clamp(-20, 20)
        ratio, loss = delta.exp(), -delta.exp() * advantage[valid]
        sums = [valid, loss, ratio, ratio - delta - 1, entropy]
        return torch.stack([values.sum().to(x.dtype) for values in sums]), *ratio.aminmax(
            dim=0, keepdim=True
        )

    def reference():
        sums, min_ratio, max_ratio = statistics()
        count, *sums = (all_reduce(values) for values in sums)
        return (
            torch.stack(sums) / count,
            all_reduce(min_ratio, op=LOW),
            all_reduce(max_ratio, op=HIGH),
        )

    def ours():  # one message instead of seven
        every = tpkernels.all_gather(torch.cat(statistics())[None], setup.group)
        sums = every[:, :5].sum(0)
        return sums[1:] / sums[0], every[:, 5].amin(0, True), every[:, 6].amax(0, True)

    return Case(reference, ours, depth=setup.world)


@problem(45, "the local rows of a mean over the ranks, normalized")
def reducescatter_fused_rmsnorm(setup: Setup) -> Case:
    x, weight = (
        setup.integers(setup.size(1024) * setup.world, WIDTH),
        setup.normal(WIDTH, shared=True),
    )

    def normalize(total):
        return F.rms_norm(total / setup.world, (WIDTH,), weight, EPS)

    return Case(
        lambda: normalize(reduce_scatter(x)),
        lambda: normalize(tpkernels.reduce_scatter(x, setup.group)),
    )


@problem(58, "the SigLIP loss of the local images and all texts")
def openclip_contrastive_loss(setup: Setup) -> Case:
    n, width = setup.size(1024), 512
    images, texts = (F.normalize(setup.normal(n, width)) for _ in range(2))

    def loss(logits, local):
        signs = torch.full_like(logits, -1.0)
        signs[local].fill_diagonal_(1.0)
        return -F.logsigmoid(signs * (10.0 * logits - 10.0)).sum() / n

    def reference():
        total, remote_texts = loss(texts @ images.t(), slice(n)), texts
        for _ in range(setup.world - 1):
            (remote_texts,) = ring_shift(remote_texts)
            total = total + loss(remote_texts @ images.t(), slice(0))
        return total

    def ours():
        logits = tpkernels.all_gather_matmul(
            texts, images.t(), setup.group
        )  # all texts, local images
        return loss(logits, slice(setup.rank * n, (setup.rank + 1) * n))

    return Case(reference, ours, depth=width)


@problem(73, "cross-entropy; the vocabulary is sharded")
def vocab_parallel_cross_entropy_loss(setup: Setup) -> Case:
    columns, vocabulary = 8192, 8192 * setup.world
    logits, target = (
        setup.normal(setup.size(1024), columns),
        setup.ids(vocabulary, setup.size(1024), shared=True),
    )

    def reference():
        shifted = logits - all_reduce(logits.amax(1), op=HIGH)[:, None]
        chosen = shifted.gather(1, (target % columns)[:, None]).squeeze(1)
        chosen = all_reduce(chosen.masked_fill(target // columns != setup.rank, 0))
        return all_reduce(shifted.exp().sum(1)).log() - chosen

    def ours():
        loss = tpkernels.nn.vocab_parallel_cross_entropy
        return loss(logits, target, setup.group, vocabulary, reduction="none")

    return Case(reference, ours, depth=vocabulary)


def mask_unlikely(logits: torch.Tensor) -> torch.Tensor:
    """Set logits to -inf except for top-k (50), then top-p (0.9)."""
    top = logits.topk(50).values
    before = F.pad(top.softmax(-1).cumsum(-1)[..., :-1], (1, 0))
    threshold = top.gather(-1, (before < 0.9).sum(-1, keepdim=True) - 1)
    return logits.masked_fill(logits < threshold, -torch.inf)


def log_probability(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return mask_unlikely(logits).log_softmax(-1).gather(-1, target[:, None]).squeeze(-1)


def make_logits(setup: Setup, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits of 8192 local columns, and targets. Logits of targets are large."""
    logits, target = setup.normal(tokens, 8192), setup.ids(8192 * setup.world, tokens, shared=True)
    large = 9.0 * (target // 8192 == setup.rank).to(logits.dtype)
    return logits.scatter_add(1, (target % 8192)[:, None], large[:, None]), target


def log_probabilities(setup: Setup, chunk: int) -> Case:
    logits, target = make_logits(setup, setup.size(1024))
    chunks = list(zip(logits.split(chunk), target.split(chunk), strict=True))

    def reference():
        local = [
            log_probability(all_to_all(x, 1, 0), t.chunk(setup.world)[setup.rank])
            for x, t in chunks
        ]
        return torch.cat([all_gather(values) for values in local])

    def ours():
        results = []
        for x, targets in chunks:
            full = tpkernels.all_to_all(x, setup.group, gather_dim=1, scatter_dim=0)
            local = log_probability(full, targets.chunk(setup.world)[setup.rank])
            results.append(tpkernels.all_gather(local, setup.group))
        return torch.cat(results)

    return Case(reference, ours)


@problem(82, "log-probabilities after top-k and top-p sampling; columns are sharded")
def vocab_parallel_log_prob_topk(setup: Setup) -> Case:
    return log_probabilities(setup, setup.size(1024))


@problem(83, "log-probabilities after top-k and top-p sampling, in four chunks of tokens")
def vocab_parallel_log_prob_topk_chunked(setup: Setup) -> Case:
    return log_probabilities(setup, setup.size(1024) // 4)


@problem(84, "gradient of log-probabilities after top-k and top-p sampling")
def vocab_parallel_log_prob_topk_chunked_backward(setup: Setup) -> Case:
    logits, target = make_logits(setup, setup.size(512))
    target, grad = (
        x.chunk(setup.world)[setup.rank] for x in (target, setup.normal(len(target), shared=True))
    )

    def reference():
        share = mask_unlikely(all_to_all(logits, 1, 0)).softmax(1)
        return all_to_all((F.one_hot(target, share.shape[1]) - share) * grad[:, None], 0, 1)

    @torch.enable_grad()
    def ours():
        x = logits.detach().requires_grad_()
        full = tpkernels.all_to_all(x, setup.group, gather_dim=1, scatter_dim=0)
        return torch.autograd.grad(log_probability(full, target), x, grad)[0]

    return Case(reference, ours, depth=8192 * setup.world)
