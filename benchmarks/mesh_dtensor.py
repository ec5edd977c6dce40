"""DTensor layers within `tpkernels.fused_dtensor()` compared with DTensor's own way.

    python -m benchmarks.mesh_dtensor --mkn 512,1024,4096 --repeat 30

fp32, by torch's ColwiseParallel and RowwiseParallel, with x [m, k] split along its rows or
replicated: an MLP ``down(relu(up(x)))`` of width n, and causal attention of width k with heads of
64, whose three inputs are gathered once. The variants are interleaved call by call. Prints the
slowest rank's medians in ms, and in brackets the fastest repetition.

glibc may give freed memory back to the kernel in one variant and not in the other, as chance has
it. MALLOC_TRIM_THRESHOLD_=1000000000 MALLOC_MMAP_THRESHOLD_=33554432 has it keep the memory.
"""

from __future__ import annotations

import argparse
import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import wait_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

import tpkernels
from tpkernels.launch import Ranks
from tpkernels.timing import Samples, Variant, measure, summary

_HEAD = 64


class MLP(nn.Module):
    columns = ("up",)

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(k, n, bias=False), nn.Linear(n, k, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.up(x).relu())
        return y


class Attention(nn.Module):
    columns = ("q", "k", "v")

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.down = (nn.Linear(k, k, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            one(x).unflatten(-1, (-1, _HEAD)).transpose(0, 1) for one in (self.q, self.k, self.v)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: torch.Tensor = self.down(heads.transpose(0, 1).flatten(1))
        return y


LAYERS: dict[str, type[MLP] | type[Attention]] = {"MLP": MLP, "attention": Attention}


def job(layer: str, m: int, k: int, n: int, rows: bool, repeat: int) -> dict[str, Samples]:
    world = dist.get_world_size()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world,))
    layout = Shard(0) if rows else Replicate()
    model = LAYERS[layer](k, n)
    gather = PrepareModuleInput(input_layouts=layout, desired_input_layouts=Replicate())
    down = RowwiseParallel(output_layouts=layout)
    columns = {name: ColwiseParallel() for name in model.columns}
    parallelize_module(model, mesh, {"": gather, **columns, "down": down})
    x = torch.randn(m // world if rows else m, k)
    x.requires_grad_()

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return wait_tensor(model(x))  # DTensor's all-reduce may be under way

    def both() -> torch.Tensor:
        model.zero_grad()
        x.grad = None
        model(x).sum().backward()
        assert x.grad is not None
        return x.grad

    def fused(run: Variant) -> Variant:
        def within() -> object:
            with tpkernels.fused_dtensor():
                return run.run()

        return Variant(within)

    own = {"forward": Variant(forward), "forward and backward": Variant(both)}
    for name, variant in own.items():
        torch.testing.assert_close(fused(variant).run(), variant.run(), msg=name)
    pairs = {f"{name}, fused": fused(variant) for name, variant in own.items()}
    return measure({**own, **pairs}, repeat=repeat)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--mkn", nargs="+", default=["512,1024,4096"])
    parser.add_argument("--repeat", type=int, default=30)
    args = parser.parse_args()
    for shape in args.mkn:
        m, k, n = map(int, shape.split(","))
        for layer, rows in itertools.product(LAYERS, (True, False)):
            with Ranks(args.nproc) as ranks:
                results = ranks.run(job, layer, m, k, n, rows, args.repeat, timeout=600)
            times = {name: summary([one[name] for one in results]) for name in results[0]}
            for name in ("forward", "forward and backward"):
                own, fused = times[name], times[f"{name}, fused"]
                print(
                    f"{layer} ({m}, {k}, {n}), {'rows split' if rows else 'replicated'}, {name}: "
                    f"DTensor {own.median:.1f} ({own.min:.1f}), "
                    f"fused {fused.median:.1f} ({fused.min:.1f}), "
                    f"speed-up {own.median / fused.median:.2f} ({own.min / fused.min:.2f})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
