"""Models with torch's tensor parallelism: within the context they run the fused ops, with DTensor's
results and gradients."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import tpkernels
from tests.support.cases import RanksFixture
from tests.support.fused import AG, AR, RS, differences, gradients
from tests.support.meshes import S1, R, make_mesh, take
from tests.support.ranked import recorded_calls, report
from tests.support.tiers import thorough

BATCH, TOKENS, HIDDEN, INNER, HEAD = 2, 8, 8, 12, 2  # even: torch's styles want it


class MLP(nn.Module):
    columns = ("gate", "up")

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(HIDDEN, INNER, bias) for _ in self.columns)
        self.down = nn.Linear(INNER, HIDDEN, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Attention(nn.Module):
    columns = ("q", "k", "v")

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN, bias) for _ in self.columns)
        self.down = nn.Linear(HIDDEN, HIDDEN, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            one(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: torch.Tensor = self.down(heads.transpose(1, 2).flatten(2))
        return y


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(HIDDEN), inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(self.norm(x))
        return y


LAYOUTS = ("replicated", "sequence, one gather", "sequence, a gather each")


def _plan(layout: str, columns: tuple[str, ...]) -> dict[str, ParallelStyle]:
    split = layout != "replicated"
    each = ColwiseParallel(input_layouts=S1 if layout == LAYOUTS[2] else R)
    plan: dict[str, ParallelStyle] = {f"inner.{name}": each for name in columns}
    plan["inner.down"] = RowwiseParallel(output_layouts=S1 if split else R)
    if split:
        plan["norm"] = SequenceParallel(use_local_output=layout == LAYOUTS[2])
    if layout == LAYOUTS[1]:
        plan["inner"] = PrepareModuleInput(input_layouts=S1, desired_input_layouts=R)
    return plan


def _calls(layout: str, columns: int) -> tuple[list[str], list[str]]:
    """The ops of the forward and of the backward."""
    if layout == "replicated":
        return [AR], []
    if layout == LAYOUTS[1]:
        return [AG, RS], [AG, "reduce_scatter"]
    return [*[AG] * columns, RS], [AG, *[RS] * columns]


def _check_model(
    kind: type[MLP | Attention], layout: str, bias: bool, mesh: DeviceMesh
) -> list[str]:
    torch.manual_seed(1)
    what = f"{kind.__name__}, {layout}, bias {bias}"
    columns = kind.columns
    model = parallelize_module(Block(kind(bias)), mesh, _plan(layout, columns))
    whole = torch.randn(BATCH, TOKENS, HIDDEN)
    results, failures = [], []
    for context in (contextlib.nullcontext(), tpkernels.fused_dtensor()):
        model.zero_grad()
        mine = whole if layout == "replicated" else take(whole, (S1,), mesh)
        x = mine.clone().requires_grad_()
        with recorded_calls() as calls:
            with context:
                y = model(x)
            forward = len(calls)
            y.square().sum().backward()
        results.append([y.detach(), *gradients([x, *model.parameters()])])
    if [calls[:forward], calls[forward:]] != list(_calls(layout, len(columns))):
        failures.append(f"{what}: ran {calls}")
    return failures + differences(what, *results)


def models_job(layout: str, mesh_shape: tuple[int, ...]) -> list[str]:
    """On the last dim of the mesh."""
    mesh = make_mesh(mesh_shape, [f"{layout} of {i}" for i in mesh_shape])
    assert mesh.mesh_dim_names is not None
    mesh = mesh[mesh.mesh_dim_names[-1]]
    failures = _check_model(MLP, layout, True, mesh)
    return failures + _check_model(Attention, layout, layout == LAYOUTS[0], mesh)


@pytest.mark.parametrize("mesh_shape", [(2,), thorough((2, 2)), thorough((1, 4))], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_models(ranks: RanksFixture, layout: str, mesh_shape: tuple[int, ...]) -> None:
    results = ranks(math.prod(mesh_shape)).run(models_job, layout, mesh_shape)
    report(text for rank in results for text in rank)
