"""Training steps: data parallelism, ZeRO, FSDP, and 8-bit gradients and parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import tpkernels
from examples.parallel_kernel_bench.collectives import FP8, root_sizes
from examples.parallel_kernel_bench.gallery import Case, Setup, problem
from examples.parallel_kernel_bench.plain import all_gather, all_reduce, broadcast, reduce_scatter

RATE, BETA1, BETA2, EPS, DECAY, STEP = 1e-3, 0.9, 0.999, 1e-8, 0.01, 3
Step = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Mlp:
    """Two linear layers with a flat parameter tensor, local data and the state of Adam."""

    def __init__(self, setup: Setup) -> None:
        self.width, self.hidden = 512, setup.size(1024)
        self.x, self.y = (setup.normal(setup.size(256), self.width) for _ in range(2))
        self.sizes = [self.width * self.hidden, self.hidden, self.hidden * self.width, self.width]
        w, first, second = (setup.normal(sum(self.sizes), shared=True) / 32 for _ in range(3))
        self.state = [w, first, 1 + second.square()]
        self.shard = [x.chunk(setup.world)[setup.rank] for x in self.state]

    @torch.enable_grad()
    def gradient(self, w: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the mean squared error with respect to the parameters."""
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
def ddp(setup: Setup) -> Case:
    mlp, rows = Mlp(setup), root_sizes(3, setup)

    def reference():
        w, *moments = (broadcast(x) for x in mlp.state)
        return adam(w, *moments, all_reduce(mlp.gradient(w)) / setup.world)

    def ours():
        local_state = torch.stack(mlp.state)[: rows[setup.rank]]
        w, *moments = tpkernels.all_gather(local_state, setup.group, shard_sizes=rows)
        return adam(w, *moments, tpkernels.all_reduce_(mlp.gradient(w), setup.group) / setup.world)

    return Case(reference, ours, depth=len(mlp.x) * setup.world)


def zero(setup: Setup, reduce_to_shard) -> Case:
    """Make a step with a sharded optimizer. The root broadcasts the parameters."""
    mlp = Mlp(setup)
    (w_shard, *moments), rows = mlp.shard, root_sizes(sum(mlp.sizes), setup)

    def reference():
        gradient = reduce_to_shard(mlp.gradient(broadcast(mlp.state[0])))
        new_w, *new_moments = adam(w_shard, *moments, gradient / setup.world)
        return all_gather(new_w), *new_moments

    def ours():  # a rank needs only its shard of the sum
        w = tpkernels.all_gather(mlp.state[0][: rows[setup.rank]], setup.group, shard_sizes=rows)
        gradient = tpkernels.reduce_scatter(mlp.gradient(w), setup.group)
        new_w, *new_moments = adam(w_shard, *moments, gradient / setup.world)
        return tpkernels.all_gather(new_w, setup.group), *new_moments

    return Case(reference, ours, depth=len(mlp.x) * setup.world)


@problem(41, "a step of ZeRO-1: gradients summed, Adam on a shard")
def zero1_optimizer_shard(setup: Setup) -> Case:
    return zero(setup, lambda gradient: all_reduce(gradient).chunk(setup.world)[setup.rank])


@problem(42, "a step of ZeRO-2: a shard of the summed gradients, Adam on it")
def zero2_optimizer_shard_grad(setup: Setup) -> Case:
    return zero(setup, reduce_scatter)


@problem(43, "Adam on a shard, and all parameters gathered")
def fused_adam_grad_unshard_allgather(setup: Setup) -> Case:
    w, first, second, grad = (1 + setup.normal(setup.size(1 << 20)).square() for _ in range(4))
    return Case(
        lambda: all_gather(adam(w, first, second, grad)[0]),
        lambda: tpkernels.all_gather(adam(w, first, second, grad)[0], setup.group),
    )


@problem(47, "a step of FSDP: parameters gathered, gradients scattered, AdamW")
def fsdp_step_e2e(setup: Setup) -> Case:
    mlp = Mlp(setup)

    def reference():
        gradient = reduce_scatter(mlp.gradient(all_gather(mlp.shard[0])))
        return adam(*mlp.shard, gradient / setup.world)

    def ours():
        gradient = mlp.gradient(tpkernels.all_gather(mlp.shard[0], setup.group))
        return adam(*mlp.shard, tpkernels.reduce_scatter(gradient, setup.group) / setup.world)

    return Case(reference, ours, depth=len(mlp.x) * setup.world)


def make_representable(setup: Setup, blocks: int, peak: float, max_value: int) -> torch.Tensor:
    """Return blocks of 128 integers with an exact 8-bit form. ``peak`` is the block maximum."""
    x = setup.integers(blocks, 128, max_value=max_value)
    x[:, 0] = peak
    return x


@problem(44, "the mean of gradients, each rounded to 8 bits in blocks")
def quantized_grad_allreduce(setup: Setup) -> Case:
    grad = make_representable(setup, setup.size(16384), 127, 100)

    def quantize_dequantize():
        scale = grad.abs().amax(1, keepdim=True) / 127
        return (grad / scale).round().to(torch.int8) * scale

    return Case(
        lambda: all_reduce(quantize_dequantize()) / setup.world,
        lambda: tpkernels.all_reduce_(quantize_dequantize(), setup.group) / setup.world,
    )


def quantize_fp8(x: torch.Tensor, history: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x to fp8. Returns it and its scale [1].

    The scale follows from the largest element of x and of earlier steps (``history``).
    """
    scale = x.abs().amax().clamp(min=history) / torch.finfo(FP8).max
    return (x / scale).to(FP8), scale[None]


@problem(52, "the local shard of the mean of gradients, each rounded to fp8")
def fp8_reduce_scatter_grads(setup: Setup) -> Case:
    grad = make_representable(setup, setup.size(16384) * setup.world, 448, 16)

    def quantize_dequantize():
        elements, scale = quantize_fp8(grad)
        return elements.to(grad.dtype) * scale

    return Case(
        lambda: reduce_scatter(quantize_dequantize()) / setup.world,
        lambda: tpkernels.reduce_scatter(quantize_dequantize(), setup.group) / setup.world,
    )


@problem(53, "all parameters, rounded to fp8 on each rank")
def fp8_allgather_params(setup: Setup) -> Case:
    w = setup.normal(setup.size(16384) * 128)

    def reference():
        elements, scale = quantize_fp8(w)
        return all_gather(elements.to(w.dtype) * scale)

    def ours():  # gathers fp8, then dequantizes
        elements, scale = quantize_fp8(w)
        whole = tpkernels.all_gather(elements.view(torch.int32), setup.group).view(FP8)
        scales = tpkernels.all_gather(scale, setup.group)
        return (whole.to(w.dtype).view(setup.world, -1) * scales[:, None]).flatten()

    return Case(reference, ours)
