"""Compare one Linear under the fused styles with the unsharded Linear: all layouts, uneven shards,
layouts that fall back to the torch styles, and refusals. Also a model with both kinds of styles."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp_state
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.two_tensor import TwoTensor

from tests.support.ranked import find_unexpected_messages, on_ranks, record_calls
from tpkernels import groups
from tpkernels.bench.specs import Spec
from tpkernels.parallel import FusedColwiseParallel, FusedRowwiseParallel, styles
from tpkernels.planning.table import Measurement, Table

REPLICATE, F64 = Replicate(), torch.float64


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def _full_tensor(
    x: torch.Tensor, mesh: DeviceMesh, layout: Placement, like: torch.Tensor
) -> torch.Tensor:
    """Return the unsharded tensor, with the shape of ``like``, from the local shard ``x``."""
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [layout], shape=like.shape, stride=like.stride())
    return x.full_tensor()


def _check(
    style: Any,
    shape: tuple[int, ...],
    layout: Placement,
    as_dtensor: bool,
    output: Placement,
    uneven: int = 0,
) -> None:
    """Compare one Linear under ``style`` with the unsharded Linear, in float64.

    The input is laid out as ``layout``. ``uneven`` is added to the number of output features."""
    mesh = _mesh()
    torch.manual_seed(1)
    unsharded = nn.Linear(shape[-1], 6 * mesh.size() + uneven).double()
    linear = parallelize_module(deepcopy(unsharded), mesh, style)
    x = torch.randn(shape, dtype=F64, requires_grad=True)
    local: Any = distribute_tensor(x.detach(), mesh, [layout])
    local = (local if as_dtensor else local.to_local()).requires_grad_()

    expected = unsharded(x)
    cotangent = torch.randn(expected.shape, dtype=F64)
    expected.backward(cotangent)
    with record_calls() as calls:
        y = linear(local)
    case = f"{style}, {layout}"
    assert isinstance(y, DTensor) != style.use_local_output, f"{case}: gives {type(y)}"
    assert not isinstance(y, DTensor) or y.placements == (output,), f"{case}: {y.placements}"
    local_cotangent: Any = distribute_tensor(cotangent, mesh, [output])
    y.backward(local_cotangent if isinstance(y, DTensor) else local_cotangent.to_local())
    pairs = {"y": (_full_tensor(y.detach(), mesh, output, expected), expected)}
    pairs["x"] = (_full_tensor(local.grad, mesh, layout, x), x.grad)
    for name, p in linear.named_parameters():
        pairs[name] = (p.grad.full_tensor(), getattr(unsharded, name).grad)  # type: ignore[union-attr]
    for name, (got, want) in pairs.items():
        assert torch.allclose(got, want, rtol=1e-12, atol=1e-12), f"{case}: {name}"
    op = "all_gather_matmul"
    if isinstance(style, FusedRowwiseParallel):
        replicated = style.output_layouts[0].is_replicate()
        op = f"matmul_{'all_reduce' if replicated else 'reduce_scatter'}"
    assert calls == [op], f"{case}: {calls}"


@on_ranks(2)
def test_every_layout() -> None:
    world = dist.get_world_size()
    k, even = 4 * world, 2 * world
    for dim, local in ((0, True), (1, True), (1, False), (-2, True)):
        shape = (even, 3, k) if dim == 0 else (3, even, k)
        placement = Shard(dim % 3)
        column = FusedColwiseParallel(input_layouts=Shard(dim), use_local_output=local)
        row = FusedRowwiseParallel(output_layouts=Shard(dim), use_local_output=local)
        for as_dtensor in (True, False):
            _check(column, shape, placement, as_dtensor, Shard(2))
            _check(row, shape, Shard(2), as_dtensor, placement)
    shape, gathering = (
        (3, even, k),
        FusedColwiseParallel(input_layouts=Shard(1), output_layouts=REPLICATE),
    )
    _check(gathering, shape, Shard(1), False, REPLICATE)
    _check(FusedRowwiseParallel(), shape, Shard(2), False, REPLICATE)
    _check(FusedRowwiseParallel(input_layouts=REPLICATE), shape, REPLICATE, False, REPLICATE)
    _check(FusedRowwiseParallel(output_layouts=Shard(-1)), shape, Shard(2), True, Shard(2))


@on_ranks(3)
def test_uneven_shards() -> None:
    """DTensors carry the unsharded size, so their shards may be uneven. With one row, some ranks
    hold no rows."""
    world = dist.get_world_size()
    column = FusedColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    for rows in (2 * world + 1, 1):
        shape = (3, rows, 4 * world + 1)
        _check(column, shape, Shard(1), True, Shard(2), uneven=1)
        for dim in (1, 2):
            row = FusedRowwiseParallel(output_layouts=Shard(dim), use_local_output=False)
            _check(row, shape, Shard(2), True, Shard(dim), uneven=1)
    _check(FusedRowwiseParallel(), shape, Shard(2), False, REPLICATE, uneven=1)


@on_ranks(2)
def test_layouts_without_a_fused_op() -> None:
    """The results are bitwise identical to the torch styles."""
    torch.manual_seed(3)
    mesh, x, linear = _mesh(), torch.randn(2, 4, 8), nn.Linear(8, 6)
    for options in ({}, {"output_layouts": REPLICATE}):
        both_styles = FusedColwiseParallel(**options), ColwiseParallel(**options)
        results = [parallelize_module(deepcopy(linear), mesh, style)(x) for style in both_styles]
        assert torch.equal(*results), options


@on_ranks(2)
def test_refusals_name_the_module() -> list[str]:
    mesh = _mesh()
    square = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("dp", "tp"))
    column, row = FusedColwiseParallel(input_layouts=Shard(1)), FusedRowwiseParallel()

    class Special(nn.Linear):
        pass

    fused = parallelize_module(nn.Linear(8, 8), mesh, column)
    integers = nn.Linear(8, 8)
    integers.weight = nn.Parameter(torch.ones(8, 8, dtype=torch.int8), requires_grad=False)
    two_layouts = FusedColwiseParallel(input_layouts=(Shard(1), Shard(1)))
    wrapped = nn.Linear(8, 8)
    wrapped.weight = nn.Parameter(TwoTensor(torch.ones(8, 8), torch.ones(8, 8)))
    torch_sharded = parallelize_module(nn.Linear(8, 8), mesh, ColwiseParallel())
    outside = parallelize_module(
        nn.Linear(8, 8), mesh, FusedColwiseParallel(input_layouts=Shard(3))
    )

    def attempt(style: Any, module: nn.Module, device_mesh: DeviceMesh = mesh) -> Callable[[], Any]:
        return lambda: parallelize_module(module, device_mesh, style)

    plain = "Linear(in_features=8, out_features=8, bias=True)"
    return find_unexpected_messages(
        {
            f"{plain}: the mesh has 2 dims ('dp', 'tp')": attempt(column, nn.Linear(8, 8), square),
            "not Embedding; use the torch styles for nn.Embedding": attempt(
                row, nn.Embedding(8, 8)
            ),
            "NotImplementedError: FusedRowwiseParallel of Special(": attempt(row, Special(8, 8)),
            "of _ColwiseLinear(in_features=8": attempt(column, fused),
            f"{plain}: its weight is a Tensor of int8": attempt(row, integers),
            f"{plain}: its weight is a TwoTensor": attempt(row, wrapped),
            "out_features 1 over 2 ranks is [1, 0]": attempt(column, nn.Linear(8, 1)),
            "in_features 1 over 2 ranks is [1, 0]": attempt(row, nn.Linear(1, 8)),
            f"{plain}: input_layouts must be one placement": attempt(two_layouts, nn.Linear(8, 8)),
            "apply only one style, before fully_shard": attempt(row, torch_sharded),
            f"{plain}: Shard(dim=3) is out of range": lambda: outside(torch.ones(2, 8)),
        }
    )


STYLES: dict[str, Any] = {
    "all_gather_matmul": lambda: FusedColwiseParallel(input_layouts=Shard(0)),
    "matmul_reduce_scatter": lambda: FusedRowwiseParallel(output_layouts=Shard(0)),
    "matmul_all_reduce": lambda: FusedRowwiseParallel(output_layouts=Replicate()),
}


@pytest.mark.parametrize("op", STYLES)
@on_ranks(2)
def test_torch_style_is_kept_unless_the_op_is_faster(op: str) -> None:
    """Parallelize a Linear(24, 40) on a CPU mesh that counts as a GPU mesh. The fused layer is used
    only if a timing for its width shows that the op is faster."""
    world, mesh = dist.get_world_size(), _mesh()
    tables = groups.get(mesh.get_group().group_name).planner_inputs.tables
    gathers = op == "all_gather_matmul"
    width, fused = (24, "_ColwiseLinear") if gathers else (40, "_RowwiseLinear")
    fast, slow = {"unfused": 2.0, "direct": 1.0}, {"unfused": 1.0, "direct": 2.0}
    for ms, measured_width, name in (
        (None, width, "Linear"),
        (slow, width, "Linear"),
        (fast, width, fused),
        (fast, width + 8, "Linear"),
    ):
        tables.pop("cuda", None)
        if ms is not None:
            spec = Spec(
                op, (64, 40, measured_width) if gathers else (64, measured_width, 24), torch.float32
            )
            key = spec.problem(world, "cuda").tuning_key
            assert key is not None
            measurement = Measurement(*key, ms=ms, date="2026-11-22")
            tables["cuda"] = Table((measurement,))
        linear = nn.Linear(24, 40)
        with mock.patch.object(styles, "_has_gpus", lambda mesh: True):
            parallelize_module(linear, mesh, STYLES[op]())
        tables.pop("cuda", None)
        assert type(linear).__name__ == name, (ms, measured_width)


# Fused styles and torch styles in one model.

WIDTH, HIDDEN = 8, 12


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(x + self.down(self.up(self.norm(x)).relu()))


PLAN = {
    "norm": SequenceParallel(),
    "up": FusedColwiseParallel(input_layouts=Shard(1)),
    "down": FusedRowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=REPLICATE),
}


@on_ranks(2)
def test_a_model_with_torch_styles() -> None:
    """Train one step. Gradients, updated weights and the state dict match the unsharded model."""
    mesh = _mesh()
    torch.manual_seed(2)
    unsharded = Model().double()
    model = parallelize_module(deepcopy(unsharded), mesh, PLAN)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (unsharded, model)]
    x = torch.randn(4, 12, WIDTH, dtype=F64)
    local = x.chunk(mesh.size(), 1)[mesh.get_local_rank()].contiguous()
    for module, rows in ((unsharded, x), (model, local)):
        (module(rows) ** 2).sum().backward()
    for (name, p), q in zip(model.named_parameters(), unsharded.parameters(), strict=True):
        got = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        assert torch.allclose(got, q.grad, rtol=1e-12, atol=1e-12), f"the gradient of {name}"
    for optimizer in optimizers:
        optimizer.step()
    full = dcp_state.StateDictOptions(full_state_dict=True)
    state = dcp_state.get_model_state_dict(model, options=full)
    assert list(state) == list(unsharded.state_dict())
    for name, expected in unsharded.state_dict().items():
        assert torch.allclose(state[name], expected, rtol=1e-9, atol=1e-9), name
