"""A transformer MLP with tensor and sequence parallelism, built from two ops.

Compares the output and the gradients with a single process.

    torchrun --standalone --nproc-per-node 2 examples/eager_ops.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tpkernels

TOKENS, WIDTH, HIDDEN = 256, 128, 384


def reference_mlp(
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
    """x: local tokens; gate, up: local rows of the weights; down: local columns."""
    g, u = tpkernels.all_gather_matmul(x, [gate.t(), up.t()], group)  # one gather for both
    return tpkernels.matmul_reduce_scatter(F.silu(g) * u, down.t(), group, residual=x)


def main() -> None:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    rank, world = group.rank(), group.size()

    torch.manual_seed(0)  # identical tensors on all ranks
    full = [
        torch.randn(TOKENS, WIDTH),
        torch.randn(HIDDEN, WIDTH) * WIDTH**-0.5,
        torch.randn(HIDDEN, WIDTH) * WIDTH**-0.5,
        torch.randn(WIDTH, HIDDEN) * HIDDEN**-0.5,
    ]
    shard_dims = (0, 0, 0, 1)  # sharded dim per tensor
    local = [t.chunk(world, dim)[rank].clone() for t, dim in zip(full, shard_dims, strict=True)]
    for t in (*full, *local):
        t.requires_grad_()

    expected = reference_mlp(*full)
    (expected**2).sum().backward()
    y = parallel_mlp(*local, group)
    (y**2).sum().backward()  # local contribution to the loss

    error = (y - expected.chunk(world)[rank]).abs().max().item()
    for t, w, dim in zip(local, full, shard_dims, strict=True):
        assert t.grad is not None and w.grad is not None
        grad = w.grad.chunk(world, dim)[rank]
        error = max(error, ((t.grad - grad).abs().max() / grad.abs().max()).item())
    print(
        f"rank {rank}: tokens {list(y.shape)}; result and gradients differ by at most {error:.1e}"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
