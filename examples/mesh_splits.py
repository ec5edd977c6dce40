"""Every way to split one matrix product over a mesh of four ranks: what each rank holds and
computes, and what has to be communicated. Then two layers that need nothing between them.

    torchrun --standalone --nproc-per-node 4 examples/mesh_splits.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import tpkernels

M, K, N = 4, 8, 2  # of the halves: [2M, 2K] @ [2K, 2N]
R, S0, S1 = Replicate(), Shard(0), Shard(1)

# What is split, the axes of the mesh, and where x and w lie along them.
SPLITS: dict[str, tuple[tuple[str, ...], list[Placement], list[Placement]]] = {
    "M": (("a",), [S0], [R]),
    "K": (("a",), [S1], [S0]),
    "N": (("a",), [R], [S1]),
    "M and K": (("a", "b"), [S0, S1], [R, S0]),
    "M and N": (("a", "b"), [S0, R], [R, S1]),
    "K and N": (("a", "b"), [S1, R], [S0, S1]),
    "M, N and K": (("a", "b"), [S0, S1], [S1, S0]),
}


def on_every_rank(mine: object) -> str:
    """What each rank has, once if all have the same."""
    each: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(each, mine)
    return str(each[0]) if len(set(map(str, each))) == 1 else ", ".join(map(str, each))


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def show(name: str, mesh: DeviceMesh, of_x: list[Placement], of_w: list[Placement]) -> None:
    torch.manual_seed(0)  # the same on all ranks
    whole_x = torch.randint(-4, 5, (2 * M, 2 * K)).float()
    whole_w = torch.randint(-4, 5, (2 * K, 2 * N)).float()
    x, w = distribute_tensor(whole_x, mesh, of_x), distribute_tensor(whole_w, mesh, of_w)

    plan = tpkernels.mesh.plans(x, w)[0]
    y = tpkernels.sharded_matmul(x, w)

    held = on_every_rank([list(x.to_local().shape), list(w.to_local().shape)])
    operands = [t.redistribute(placements=p) for t, p in ((x, plan.x), (w, plan.w))]
    computed = on_every_rank(" @ ".join(str(list(t.to_local().shape)) for t in operands))
    moves = [str(step) for step in plan.steps if step.communicates]
    equal = on_every_rank(torch.equal(y.full_tensor(), whole_x @ whole_w))
    say(f"{name}: a mesh of {' x '.join(map(str, mesh.shape))}")
    say(f"  each rank holds x, w of {held}")
    say(f"  and computes {computed}")
    say(f"  communication: {'; '.join(moves) or 'none'} ({plan.nbytes} bytes in total)")
    say(
        f"  each rank holds {on_every_rank(list(y.to_local().shape))} of the result: {y.placements}"
    )
    say(f"  equal to the unsharded matmul: {equal}")


def two_layers(mesh: DeviceMesh) -> None:
    """The columns of the first weight and the rows of the second are split alike."""
    x = distribute_tensor(torch.tensor([[1.0, 2.0]]), mesh, [R])
    first = distribute_tensor(torch.tensor([[1.0, 2.0], [3.0, 1.0]]), mesh, [S1])
    second = distribute_tensor(torch.tensor([[2.0, 3.0], [5.0, 2.0]]), mesh, [S0])
    hidden = tpkernels.sharded_matmul(x, first, [S1])
    steps = [tpkernels.mesh.plans(x, first, [S1])[0], tpkernels.mesh.plans(hidden, second, [R])[0]]
    y = tpkernels.sharded_matmul(hidden, second, [R])
    say("two layers, N then K:")
    say(f"  first: {steps[0]} ({steps[0].nbytes} bytes in total); second: {steps[1]}")
    say(f"  [1 2] @ first @ second = {on_every_rank(y.to_local().int().tolist()[0])}")


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for name, (axes, of_x, of_w) in SPLITS.items():
        # One axis alone is a mesh of two ranks; both pairs do the same.
        show(name, mesh if len(axes) == 2 else mesh[axes[0]], of_x, of_w)
    two_layers(mesh["a"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
