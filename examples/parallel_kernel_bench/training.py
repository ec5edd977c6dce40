"""Steps of training: data parallelism, ZeRO, FSDP, and gradients and parameters in 8 bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import tpkernels
from examples.parallel_kernel_bench.collectives import FP8, at_root
from examples.parallel_kernel_bench.gallery import Case, Setup, problem
from examples.parallel_kernel_bench.plain import broadcast, gathered, scattered_sum, summed

RATE, BETA1, BETA2, EPS, DECAY, STEP = 1e-3, 0.9, 0.999, 1e-8, 0.01, 3
Step = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Mlp:
    """Two linear layers, whose parameters are one flat tensor, this rank's data, Adam's state."""

    def __init__(self, at: Setup) -> None:
        self.width, self.hidden = 512, at.size(1024)
        self.x, self.y = (at.normal(at.size(256), self.width) for _ in range(2))
        self.sizes = [self.width * self.hidden, self.hidden, self.hidden * self.width, self.width]
        w, first, second = (at.normal(sum(self.sizes), shared=True) / 32 for _ in range(3))
        self.state = [w, first, 1 + second.square()]
        self.shard = [x.chunk(at.world)[at.rank] for x in self.state]

    @torch.enable_grad()
    def gradient(self, w: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the mean squared error by the parameters."""
        leaf = w.detach().requires_grad_()
        w1, b1, w2, b2 = leaf.split(self.sizes)
        h = F.relu(F.linear(self.x, w1.view(self.hidden, -1), b1))
        loss = F.mse_loss(F.linear(h, w2.view(self.width, -1), b2), self.y)
        return torch.autograd.grad(loss, leaf)[0]


def adam(w: torch.Tensor, first: torch.Tensor, second: torch.Tensor, grad: torch.Tensor) -> Step:
    """Return the parameters and both moments after a step of AdamW."""
    first, second = first.lerp(grad, 1 - BETA1), second.lerp(grad.square(), 1 - BETA2)
    size = (second / (1 - BETA2**STEP)).sqrt() + EPS
    return w - RATE * (first / (1 - BETA1**STEP) / size + DECAY * w), first, second


@problem(40, "a step of data parallelism: broadcast, sum of gradients, Adam")
def ddp(at: Setup) -> Case:
    mlp, rows = Mlp(at), at_root(3, at)

    def reference():
        w, *moments = (broadcast(x) for x in mlp.state)
        return adam(w, *moments, summed(mlp.gradient(w)) / at.world)

    def ours():
        mine = torch.stack(mlp.state)[: rows[at.rank]]
        w, *moments = tpkernels.all_gather(mine, at.group, shard_sizes=rows)
        return adam(w, *moments, tpkernels.all_reduce_(mlp.gradient(w), at.group) / at.world)

    return Case(reference, ours, depth=len(mlp.x) * at.world)


def zero(at: Setup, shard_of_sum) -> Case:
    """A step whose optimizer is sharded; the parameters are one rank's."""
    mlp = Mlp(at)
    (part, *moments), rows = mlp.shard, at_root(sum(mlp.sizes), at)

    def reference():
        gradient = shard_of_sum(mlp.gradient(broadcast(mlp.state[0])))
        after, *moments_after = adam(part, *moments, gradient / at.world)
        return gathered(after), *moments_after

    def ours():  # a rank needs no more than its part of the sum
        w = tpkernels.all_gather(mlp.state[0][: rows[at.rank]], at.group, shard_sizes=rows)
        gradient = tpkernels.reduce_scatter(mlp.gradient(w), at.group)
        after, *moments_after = adam(part, *moments, gradient / at.world)
        return tpkernels.all_gather(after, at.group), *moments_after

    return Case(reference, ours, depth=len(mlp.x) * at.world)


@problem(41, "a step of ZeRO-1: gradients summed, Adam on a shard")
def zero1_optimizer_shard(at: Setup) -> Case:
    return zero(at, lambda gradient: summed(gradient).chunk(at.world)[at.rank])


@problem(42, "a step of ZeRO-2: a shard of the summed gradients, Adam on it")
def zero2_optimizer_shard_grad(at: Setup) -> Case:
    return zero(at, scattered_sum)


@problem(43, "Adam on a shard, and all parameters gathered")
def fused_adam_grad_unshard_allgather(at: Setup) -> Case:
    w, first, second, grad = (1 + at.normal(at.size(1 << 20)).square() for _ in range(4))
    return Case(
        lambda: gathered(adam(w, first, second, grad)[0]),
        lambda: tpkernels.all_gather(adam(w, first, second, grad)[0], at.group),
    )


@problem(47, "a step of FSDP: parameters gathered, gradients scattered, AdamW")
def fsdp_step_e2e(at: Setup) -> Case:
    mlp = Mlp(at)

    def reference():
        gradient = scattered_sum(mlp.gradient(gathered(mlp.shard[0])))
        return adam(*mlp.shard, gradient / at.world)

    def ours():
        gradient = mlp.gradient(tpkernels.all_gather(mlp.shard[0], at.group))
        return adam(*mlp.shard, tpkernels.reduce_scatter(gradient, at.group) / at.world)

    return Case(reference, ours, depth=len(mlp.x) * at.world)


def representable(at: Setup, blocks: int, peak: float, most: int) -> torch.Tensor:
    """Return blocks of 128 integers that 8 bits hold exactly; the largest of each is ``peak``."""
    x = at.integers(blocks, 128, most=most)
    x[:, 0] = peak
    return x


@problem(44, "the mean of gradients, each rounded to 8 bits in blocks")
def quantized_grad_allreduce(at: Setup) -> Case:
    grad = representable(at, at.size(16384), 127, 100)

    def rounded():
        scale = grad.abs().amax(1, keepdim=True) / 127
        return (grad / scale).round().to(torch.int8) * scale

    return Case(
        lambda: summed(rounded()) / at.world,
        lambda: tpkernels.all_reduce_(rounded(), at.group) / at.world,
    )


def in_fp8(x: torch.Tensor, history: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x in fp8 and its scale [1], by the largest element of now and of earlier steps."""
    scale = x.abs().amax().clamp(min=history) / torch.finfo(FP8).max
    return (x / scale).to(FP8), scale[None]


@problem(52, "the local shard of the mean of gradients, each rounded to fp8")
def fp8_reduce_scatter_grads(at: Setup) -> Case:
    grad = representable(at, at.size(16384) * at.world, 448, 16)

    def rounded():
        elements, scale = in_fp8(grad)
        return elements.to(grad.dtype) * scale

    return Case(
        lambda: scattered_sum(rounded()) / at.world,
        lambda: tpkernels.reduce_scatter(rounded(), at.group) / at.world,
    )


@problem(53, "all parameters, rounded to fp8 on each rank")
def fp8_allgather_params(at: Setup) -> Case:
    w = at.normal(at.size(16384) * 128)

    def reference():
        elements, scale = in_fp8(w)
        return gathered(elements.to(w.dtype) * scale)

    def ours():  # gathers the bytes, and scales them afterwards
        elements, scale = in_fp8(w)
        whole = tpkernels.all_gather(elements.view(torch.int32), at.group).view(FP8)
        scales = tpkernels.all_gather(scale, at.group)
        return (whole.to(w.dtype).view(at.world, -1) * scales[:, None]).flatten()

    return Case(reference, ours)
