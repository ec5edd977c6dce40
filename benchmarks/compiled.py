"""Time the MLP block of a transformer, eager and compiled, with and without the fusion pass.

    python -m benchmarks.compiled --nproc 2 --tokens 16,512,2048 --width 1024 --hidden 2816

Runs forward and backward on random data. Verifies each variant against the first variant, then
interleaves the timings of all variants. A repetition counts with the time of its slowest rank.
Prints the median and the minimum. Load on the machine affects the minimum less.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import tpkernels
from tpkernels.launch import Ranks
from tpkernels.parallel import FusedColwiseParallel, FusedRowwiseParallel
from tpkernels.timing import Samples, Variant, measure, summary

_SHARD = Shard(1)
_TORCH: dict[str, Any] = {
    "norm": SequenceParallel(use_local_output=True),
    "gate": ColwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(output_layouts=_SHARD),
    "gathered": PrepareModuleInput(
        input_layouts=(_SHARD,), desired_input_layouts=(Replicate(),), use_local_output=False
    ),
}
_FUSED: dict[str, Any] = {
    "norm": SequenceParallel(use_local_output=True),
    "gate": FusedColwiseParallel(input_layouts=_SHARD),
    "up": FusedColwiseParallel(input_layouts=_SHARD),
    "down": FusedRowwiseParallel(output_layouts=_SHARD),
}


class Block(nn.Module):
    """Gated MLP with a norm and a residual connection.

    ``ops_group`` is the group name for calls of the ops, or None to call the modules.
    """

    def __init__(self, width: int, hidden: int, ops_group: str | None = None) -> None:
        super().__init__()
        self.norm, self.gathered, self.ops_group = nn.RMSNorm(width), nn.Identity(), ops_group
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: local tokens, [1, tokens / ranks, width]."""
        normed = self.norm(x)
        if self.ops_group is None:
            full = self.gathered(normed)
            y: torch.Tensor = self.down(F.silu(self.gate(full)) * self.up(full))
            return x + y
        weights = [self.gate.weight.t(), self.up.weight.t()]
        gate, up = tpkernels.all_gather_matmul(normed, weights, self.ops_group, 1)
        hidden = F.silu(gate) * up
        return x + tpkernels.matmul_reduce_scatter(hidden, self.down.weight.t(), self.ops_group, 1)


def _models(mesh: DeviceMesh, width: int, hidden: int, dtype: torch.dtype) -> dict[str, Any]:
    """Build all variants with identical weights."""
    rank, world = mesh.get_local_rank(), mesh.size()
    torch.manual_seed(0)
    full = Block(width, hidden).to(dtype).state_dict()
    shard_dims = {"gate.weight": 0, "up.weight": 0, "down.weight": 1}
    local_state = {
        name: value.chunk(world, shard_dims[name])[rank] if name in shard_dims else value
        for name, value in full.items()
    }

    def build(plan: dict[str, Any] | None) -> nn.Module:
        group = mesh.get_group().group_name if plan is None else None
        block = Block(width, hidden // (world if plan is None else 1), group).to(dtype)
        block.load_state_dict(local_state if plan is None else full)
        return block if plan is None else parallelize_module(block, mesh, plan)

    options = tpkernels.compile.fuse_collectives(mesh).options
    return {
        "ops, eager": build(None),
        "ops, compiled": torch.compile(build(None)),
        "fused styles, eager": build(_FUSED),
        "fused styles, compiled": torch.compile(build(_FUSED)),
        "torch's styles, eager": build(_TORCH),
        "torch's styles, compiled": torch.compile(build(_TORCH)),
        "torch's styles, compiled with the pass": torch.compile(build(_TORCH), options=options),
    }


def _step(model: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    x.grad = None
    y: torch.Tensor = model(x)
    y.sum().backward()
    assert x.grad is not None
    return x.grad


def run(
    tokens: int, width: int, hidden: int, dtype: torch.dtype, repeat: int
) -> dict[str, Samples]:
    """Verify and time all variants. Returns the local times."""
    torch._dynamo.reset()
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    models = _models(mesh, width, hidden, dtype)
    x = torch.randn(1, tokens // world, width).to(dtype).requires_grad_()
    expected = _step(models["ops, eager"], x)
    for name, model in models.items():
        error = ((_step(model, x) - expected).abs().max() / expected.abs().max()).item()
        if not error < (1e-4 if dtype == torch.float32 else 0.05):
            raise AssertionError(
                f"{name}: the gradient of x differs by {error:.1e}, relative to its maximum"
            )
    variants = {name: Variant(lambda m=model: _step(m, x)) for name, model in models.items()}
    return measure(variants, repeat=repeat)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=int, default=2, help="number of ranks (%(default)s)")
    parser.add_argument(
        "--tokens",
        default="16,512,2048",
        help="tokens over all ranks, comma-separated (%(default)s)",
    )
    parser.add_argument("--width", type=int, default=1024, help="hidden size (%(default)s)")
    parser.add_argument("--hidden", type=int, default=2816, help="intermediate size (%(default)s)")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="dtype (%(default)s)"
    )
    parser.add_argument(
        "--repeat", type=int, default=10, help="interleaved repetitions (%(default)s)"
    )
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    print("| tokens | variant | median ms | / ops, eager | min ms | / ops, eager |")
    print("|---|---|---|---|---|---|", flush=True)
    with Ranks(args.nproc) as ranks:
        for tokens in map(int, args.tokens.split(",")):
            job = (run, tokens, args.width, args.hidden, dtype, args.repeat)
            samples = ranks.run(*job, timeout=1200)
            times = {name: summary([rank[name] for rank in samples]) for name in samples[0]}
            base = times["ops, eager"]
            for name, time in times.items():
                median = f"{time.median:.3g} | {time.median / base.median:.2f}"
                minimum = f"{time.min:.3g} | {time.min / base.min:.2f}"
                print(f"| {tokens} | {name} | {median} | {minimum} |", flush=True)


if __name__ == "__main__":
    main()
