"""A transformer's MLP, tensor-parallel with sequence parallelism, by two ops. Its result and its
gradients are compared with those of one process.

    torchrun --standalone --nproc-per-node 2 examples/eager_ops.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tpkernels

TOKENS, WIDTH, HIDDEN = 256, 128, 384


def whole_mlp(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    return x + (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


def parallel_mlp(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """x: this rank's tokens; gate and up: its rows of the weights; down: its columns."""
    g, u = tpkernels.all_gather_matmul(x, [gate.t(), up.t()], group)  # one gather for both
    return tpkernels.matmul_reduce_scatter(F.silu(g) * u, down.t(), group, residual=x)


def main() -> None:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    rank, world = group.rank(), group.size()

    torch.manual_seed(0)  # the same on all ranks
    whole = [
        torch.randn(TOKENS, WIDTH),
        torch.randn(HIDDEN, WIDTH) * WIDTH**-0.5,
        torch.randn(HIDDEN, WIDTH) * WIDTH**-0.5,
        torch.randn(WIDTH, HIDDEN) * HIDDEN**-0.5,
    ]
    split = (0, 0, 0, 1)  # the sharded dim of each
    mine = [t.chunk(world, dim)[rank].clone() for t, dim in zip(whole, split, strict=True)]
    for t in (*whole, *mine):
        t.requires_grad_()

    expected = whole_mlp(*whole)
    (expected**2).sum().backward()
    y = parallel_mlp(*mine, group)
    (y**2).sum().backward()  # each rank's part of the loss

    worst = (y - expected.chunk(world)[rank]).abs().max().item()
    for t, w, dim in zip(mine, whole, split, strict=True):
        assert t.grad is not None and w.grad is not None
        grad = w.grad.chunk(world, dim)[rank]
        worst = max(worst, ((t.grad - grad).abs().max() / grad.abs().max()).item())
    print(
        f"rank {rank}: tokens {list(y.shape)}; result and gradients differ by at most {worst:.1e}"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
