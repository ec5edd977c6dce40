"""Every split of one matmul over a mesh of four ranks.

Prints the local operands, the local matmul and the communication of each split. Then runs two
layers that need no communication between them.

    torchrun --standalone --nproc-per-node 4 examples/mesh_splits.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import tpkernels

M, K, N = 4, 8, 2  # shard sizes: the matmul is [2M, 2K] @ [2K, 2N]
R, S0, S1 = Replicate(), Shard(0), Shard(1)

# Split dims -> mesh axes, and placements of x and w on these axes.
SPLITS: dict[str, tuple[tuple[str, ...], list[Placement], list[Placement]]] = {
    "M": (("a",), [S0], [R]),
    "K": (("a",), [S1], [S0]),
    "N": (("a",), [R], [S1]),
    "M and K": (("a", "b"), [S0, S1], [R, S0]),
    "M and N": (("a", "b"), [S0, R], [R, S1]),
    "K and N": (("a", "b"), [S1, R], [S0, S1]),
    "M, N and K": (("a", "b"), [S0, S1], [S1, S0]),
}


def gather_values(value: object) -> str:
    """Gather the values of all ranks as text. Equal values give one value."""
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return str(values[0]) if len(set(map(str, values))) == 1 else ", ".join(map(str, values))


def print_once(message: str) -> None:
    if dist.get_rank() == 0:
        print(message, flush=True)


def show(
    name: str, mesh: DeviceMesh, x_placements: list[Placement], w_placements: list[Placement]
) -> None:
    torch.manual_seed(0)  # identical tensors on all ranks
    full_x = torch.randint(-4, 5, (2 * M, 2 * K)).float()
    full_w = torch.randint(-4, 5, (2 * K, 2 * N)).float()
    x, w = (
        distribute_tensor(full_x, mesh, x_placements),
        distribute_tensor(full_w, mesh, w_placements),
    )

    plan = tpkernels.mesh.plans(x, w)[0]
    y = tpkernels.sharded_matmul(x, w)

    local_shapes = gather_values([list(x.to_local().shape), list(w.to_local().shape)])
    operands = [t.redistribute(placements=p) for t, p in ((x, plan.x), (w, plan.w))]
    computed = gather_values(" @ ".join(str(list(t.to_local().shape)) for t in operands))
    moves = [str(step) for step in plan.steps if step.communicates]
    equal = gather_values(torch.equal(y.full_tensor(), full_x @ full_w))
    print_once(f"{name}: a mesh of {' x '.join(map(str, mesh.shape))}")
    print_once(f"  each rank holds x, w of {local_shapes}")
    print_once(f"  and computes {computed}")
    print_once(f"  communication: {'; '.join(moves) or 'none'} ({plan.nbytes} bytes in total)")
    print_once(
        f"  each rank holds {gather_values(list(y.to_local().shape))} of the result: {y.placements}"
    )
    print_once(f"  equal to the unsharded matmul: {equal}")


def two_layers(mesh: DeviceMesh) -> None:
    """Shard the columns of the first weight like the rows of the second."""
    x = distribute_tensor(torch.tensor([[1.0, 2.0]]), mesh, [R])
    first = distribute_tensor(torch.tensor([[1.0, 2.0], [3.0, 1.0]]), mesh, [S1])
    second = distribute_tensor(torch.tensor([[2.0, 3.0], [5.0, 2.0]]), mesh, [S0])
    hidden = tpkernels.sharded_matmul(x, first, [S1])
    steps = [tpkernels.mesh.plans(x, first, [S1])[0], tpkernels.mesh.plans(hidden, second, [R])[0]]
    y = tpkernels.sharded_matmul(hidden, second, [R])
    print_once("two layers, N then K:")
    print_once(f"  first: {steps[0]} ({steps[0].nbytes} bytes in total); second: {steps[1]}")
    print_once(f"  [1 2] @ first @ second = {gather_values(y.to_local().int().tolist()[0])}")


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for name, (axes, x_placements, w_placements) in SPLITS.items():
        # One axis is a mesh of two ranks; both pairs of ranks compute the same result.
        show(name, mesh if len(axes) == 2 else mesh[axes[0]], x_placements, w_placements)
    two_layers(mesh["a"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
