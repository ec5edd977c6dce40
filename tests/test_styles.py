"""The fused styles beside torch's own and beside the unsharded module: every layout, with uneven
shards, in ``parallelize_module`` with other styles; what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp_state
from cases import RanksFixture
from ranked import report
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

from tpkernels.parallel import FusedColwiseParallel, FusedRowwiseParallel

WHOLE = Replicate()


class Ops(TorchDispatchMode):
    """The names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))

    @property
    def collective(self) -> set[str]:
        """What communicates. ``_matmul`` is the local product."""
        return {
            n.partition("::")[2] for n in self.names if n.startswith(("tpkernels", "_c10d"))
        } - {
            "_matmul",
            "wait_tensor",
        }


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def _whole(x: torch.Tensor, mesh: DeviceMesh, layout: Placement) -> torch.Tensor:
    """The tensor that this rank has its part of."""
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [layout])
    assert x.placements == (layout,)
    return x.full_tensor()


def _one(
    style: Any, shape: tuple[int, ...], given: Placement, as_dtensor: bool, output: Placement
) -> list[str]:
    """One Linear under the style, its input laid out as ``given``."""
    mesh = _mesh()
    world = mesh.size()
    torch.manual_seed(1)
    whole = nn.Linear(shape[-1], 6 * world)
    linear = nn.Linear(shape[-1], 6 * world)
    linear.load_state_dict(whole.state_dict())
    parallelize_module(linear, mesh, style)
    x = torch.randn(shape, requires_grad=True)
    mine: Any = distribute_tensor(x.detach(), mesh, [given])
    mine = (mine if as_dtensor else mine.to_local()).requires_grad_()

    expected = whole(x)
    cotangent = torch.randn(expected.shape)
    expected.backward(cotangent)
    with Ops() as ops:
        y = linear(mine)
    told = f"{style}, {given}"
    if isinstance(y, DTensor) == style.use_local_output:
        return [f"{told}: gives {type(y)}"]
    part: Any = distribute_tensor(cotangent, mesh, [output])
    y.backward(part if isinstance(y, DTensor) else part.to_local())
    pairs = {"y": (_whole(y.detach(), mesh, output), expected)}
    pairs["x"] = (_whole(mine.grad, mesh, given), x.grad)
    for name, p in linear.named_parameters():
        grad: Any = p.grad
        pairs[name] = (grad.full_tensor(), getattr(whole, name).grad)
    found = [
        f"{told}: {name} differs by {(got - want).abs().max()}"
        for name, (got, want) in pairs.items()
        if not torch.allclose(got, want, rtol=1e-4, atol=1e-5)
    ]
    row = isinstance(style, FusedRowwiseParallel)
    op = "all_gather_matmul"
    if row:
        op = (
            "matmul_all_reduce"
            if style.output_layouts[0].is_replicate()
            else "matmul_reduce_scatter"
        )
    return found + ([] if op in ops.collective else [f"{told}: {ops.collective}"])


def layouts_job() -> list[str]:
    world = dist.get_world_size()
    failures = []
    k, even = 4 * world, 2 * world
    for dim, local in ((0, True), (1, True), (1, False), (-2, True)):
        shape = (even, 3, k) if dim == 0 else (3, even, k)
        at = Shard(dim % 3)
        column = FusedColwiseParallel(input_layouts=Shard(dim), use_local_output=local)
        row = FusedRowwiseParallel(output_layouts=Shard(dim), use_local_output=local)
        for as_dtensor in (True, False):
            failures += _one(column, shape, at, as_dtensor, Shard(2))
            failures += _one(row, shape, Shard(2), as_dtensor, at)
    shape, spread = (3, even, k), FusedColwiseParallel(input_layouts=Shard(1), output_layouts=WHOLE)
    failures += _one(spread, shape, Shard(1), False, WHOLE)
    failures += _one(FusedRowwiseParallel(), shape, Shard(2), False, WHOLE)
    failures += _one(FusedRowwiseParallel(input_layouts=WHOLE), shape, WHOLE, False, WHOLE)
    failures += _one(
        FusedRowwiseParallel(output_layouts=Shard(-1)), shape, Shard(2), True, Shard(2)
    )
    # Uneven: DTensors know the size of the whole.
    for rows in (even + 1, 1):
        column = FusedColwiseParallel(input_layouts=Shard(1), use_local_output=False)
        failures += _one(column, (3, rows, k), Shard(1), True, Shard(2))
        row = FusedRowwiseParallel(output_layouts=Shard(1), use_local_output=False)
        failures += _one(row, (3, rows, k), Shard(2), True, Shard(1))
    return failures


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.head = nn.Linear(8, 12, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        x = x + self.down(self.up(self.norm(x)).relu())
        return self.head(x)


def plan(fused: bool) -> dict[str, Any]:
    """torch's own styles, or the fused ones where there are such."""
    column: Any = FusedColwiseParallel if fused else ColwiseParallel
    row: Any = FusedRowwiseParallel if fused else RowwiseParallel
    return {
        "norm": SequenceParallel(),
        "up": column(input_layouts=Shard(1)),
        "down": row(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=WHOLE),
    }


def mixed_job() -> list[str]:
    """Beside torch's styles: the unsharded gradients, the unsharded state dict, one optimizer
    step."""
    mesh = _mesh()
    torch.manual_seed(2)
    whole, model = Block(), Block()
    model.load_state_dict(whole.state_dict())
    parallelize_module(model, mesh, plan(fused=True))
    x = torch.randn(2, 4 * mesh.size(), 8)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (whole, model)]
    for module, given in ((whole, x), (model, x.chunk(mesh.size(), 1)[mesh.get_local_rank()])):
        (module(given) ** 2).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    state = dcp_state.get_model_state_dict(
        model, options=dcp_state.StateDictOptions(full_state_dict=True)
    )
    if list(state) != list(whole.state_dict()):
        return [f"the state dict has {list(state)}"]
    return [
        f"{name} differs by {(state[name] - want).abs().max()} after a step"
        for name, want in whole.state_dict().items()
        if not torch.allclose(state[name], want, rtol=1e-4, atol=1e-4)
    ]


def torch_s_own_job() -> list[str]:
    """Layouts with nothing to fuse are torch's own: the same bits, by the same ops."""
    mesh, failures = _mesh(), []
    x = torch.randn(2, 4, 8)
    dist.broadcast(x, 0)
    pairs = [
        (FusedColwiseParallel(), ColwiseParallel()),
        (FusedColwiseParallel(output_layouts=WHOLE), ColwiseParallel(output_layouts=WHOLE)),
    ]
    for fused, plain in pairs:
        torch.manual_seed(3)
        linear = nn.Linear(8, 6)
        results = []
        for style in (fused, plain):
            copy = nn.Linear(8, 6)
            copy.load_state_dict(linear.state_dict())
            parallelize_module(copy, mesh, style)
            results.append(copy(x))
        if not torch.equal(*results):
            failures.append(f"{fused}: {results}")
    return failures


def refusals_job() -> list[str]:
    mesh, failures = _mesh(), []
    square = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("dp", "tp"))
    column, row = FusedColwiseParallel(input_layouts=Shard(1)), FusedRowwiseParallel()

    class Special(nn.Linear):
        pass

    done = parallelize_module(nn.Linear(8, 8), mesh, column)
    integers = nn.Linear(8, 8)
    integers.weight = nn.Parameter(torch.ones(8, 8, dtype=torch.int8), requires_grad=False)
    pair: Any = (Shard(1), Shard(1))
    cases: list[tuple[Any, nn.Module, DeviceMesh, type[Exception], list[str]]] = [
        (
            column,
            nn.Linear(8, 8),
            square,
            ValueError,
            ["Linear(in_features=8", "2 dims", "mesh['tp']"],
        ),
        (row, nn.Embedding(8, 8), mesh, NotImplementedError, ["Embedding(8, 8)", "torch's styles"]),
        (row, Special(8, 8), mesh, NotImplementedError, ["Special(in_features=8"]),
        (column, done, mesh, ValueError, ["_ColwiseLinear(in_features=8", "DTensor"]),
        (row, integers, mesh, NotImplementedError, ["Linear(in_features=8", "weight", "int8"]),
        (column, nn.Linear(8, 1), mesh, ValueError, ["out_features 1", "2 ranks"]),
        (row, nn.Linear(1, 8), mesh, ValueError, ["in_features 1", "2 ranks"]),
        (
            FusedColwiseParallel(input_layouts=pair),
            nn.Linear(8, 8),
            mesh,
            TypeError,
            ["one placement"],
        ),
    ]
    own = nn.Linear(8, 8)
    parallelize_module(own, mesh, ColwiseParallel())
    cases.append((row, own, mesh, ValueError, ["weight is a DTensor", "before fully_shard"]))
    for style, module, on, kind, words in cases:
        try:
            parallelize_module(module, on, style)
        except kind as error:
            missing = [word for word in words if word not in str(error)]
            failures += [f"{style} of {module}: {error}: no {missing}"] if missing else []
        else:
            failures.append(f"{style} of {module} was taken")
    outside = parallelize_module(
        nn.Linear(8, 8), mesh, FusedColwiseParallel(input_layouts=Shard(3))
    )
    try:
        outside(torch.ones(2, 8))
    except ValueError as error:
        failures += [] if "splits no dim" in str(error) else [str(error)]
    else:
        failures.append("Shard(3) of two dims was taken")
    return failures


@pytest.mark.parametrize("world", [2, 3])
def test_every_layout(ranks: RanksFixture, world: int) -> None:
    report(f for rank in ranks(world).run(layouts_job, timeout=120) for f in rank)


def test_beside_torchs_styles(ranks: RanksFixture) -> None:
    report(f for rank in ranks(2).run(mixed_job, timeout=120) for f in rank)


def test_nothing_to_fuse(ranks: RanksFixture) -> None:
    report(f for rank in ranks(2).run(torch_s_own_job, timeout=120) for f in rank)


def test_refusals_name_the_module(ranks: RanksFixture) -> None:
    report(f for rank in ranks(2).run(refusals_job, timeout=120) for f in rank)
