"""A tensor-parallel MLP has the gradients of the unsharded one, also with activation
checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import tpkernels
from tests.support.cases import RanksFixture
from tests.support.ranked import fresh_group, report
from tests.support.tiers import sweep

F64 = torch.float64


def _leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_()


class Model:
    """A gated MLP with biases, unsharded in float64, and this rank's shards of it as leaves."""

    def __init__(self, group: dist.ProcessGroup, rows: int = 6) -> None:
        torch.manual_seed(3)
        self.group, self.rank, self.world = group, group.rank(), group.size()
        world, hidden = self.world, 5
        self.x = torch.randn(rows * world, 8, dtype=F64, requires_grad=True)
        self.gate, self.up = (
            torch.randn(hidden * world, 8, dtype=F64, requires_grad=True) for _ in range(2)
        )
        self.down = torch.randn(8, hidden * world, dtype=F64, requires_grad=True)
        self.gate_bias = torch.randn(hidden * world, dtype=F64, requires_grad=True)
        self.bias = torch.randn(8, dtype=F64, requires_grad=True)
        self.rows = slice(self.rank * rows, (self.rank + 1) * rows)
        self.columns = slice(self.rank * hidden, (self.rank + 1) * hidden)

    def reference(self) -> dict[str, torch.Tensor]:
        """This rank's shards of the gradients of the unsharded model."""
        inner = (self.x @ self.gate.t() + self.gate_bias).sigmoid() * (self.x @ self.up.t())
        loss = ((inner @ self.down.t() + self.bias + self.x) ** 3).sum()
        names = ("x", "gate", "up", "down", "gate_bias", "bias")
        grads = torch.autograd.grad(loss, [getattr(self, name) for name in names])
        return dict(zip(names, grads, strict=True)) | {"loss": loss.detach()}

    def sharded(self, sequence: bool) -> dict[str, torch.Tensor]:
        mine = {
            "x": self.x[self.rows] if sequence else self.x,
            "gate": self.gate[self.columns],
            "up": self.up[self.columns],
            "down": self.down[:, self.columns],
            "gate_bias": self.gate_bias[self.columns],
            "bias": self.bias,
        }
        return {name: _leaf(value) for name, value in mine.items()}

    def run(self, p: dict[str, torch.Tensor], sequence: bool, algorithm: str) -> torch.Tensor:
        options: dict[str, Any] = {"algorithm": algorithm}
        weights = [p["gate"].t(), p["up"].t()]
        if sequence:
            gate, up = tpkernels.all_gather_matmul(
                p["x"], weights, self.group, biases=[p["gate_bias"], None], **options
            )
            row_parallel = tpkernels.matmul_reduce_scatter
        else:
            x = p["x"].view_as(p["x"])  # only its gradient is summed over the ranks
            x.register_hook(lambda grad: tpkernels.all_reduce(grad, self.group))
            gate, up = x @ weights[0] + p["gate_bias"], x @ weights[1]
            row_parallel = tpkernels.matmul_all_reduce
        down = p["down"].t()
        return row_parallel(
            gate.sigmoid() * up, down, self.group, bias=p["bias"], residual=p["x"], **options
        )

    def differences(self, p: dict[str, torch.Tensor], case: str) -> list[str]:
        want, failures = self.reference(), []
        for name, leaf in p.items():
            whole = want[name]
            exact = {"x": whole[self.rows] if leaf.shape != whole.shape else whole}.get(name, whole)
            if name in ("gate", "up", "gate_bias"):
                exact = whole[self.columns]
            if name == "down":
                exact = whole[:, self.columns]
            if not torch.allclose(leaf.grad, exact, rtol=1e-12, atol=1e-12):  # type: ignore[arg-type]
                failures.append(f"{case}: {name} is off by {(leaf.grad - exact).abs().max()}")
        return failures


def model_job(sequence: bool) -> list[str]:
    """With sequence parallelism each rank has the loss of its rows, without it that of all rows."""
    failures = []
    with fresh_group() as group:
        model = Model(group)
        for algorithm in ("auto", "unfused", "direct", "pipelined"):
            p = model.sharded(sequence)
            (model.run(p, sequence, algorithm) ** 3).sum().backward()
            failures += model.differences(p, f"{algorithm}, sequence={sequence}")
    return failures


def checkpoint_job(reentrant: bool) -> list[str]:
    failures = []
    with fresh_group() as group:
        model = Model(group)
        for sequence in (True, False):
            p = model.sharded(sequence)
            names = list(p)

            def block(*given: torch.Tensor, names: Any = names, sequence: bool = sequence) -> Any:
                return model.run(dict(zip(names, given, strict=True)), sequence, "auto")

            y = checkpoint(block, *p.values(), use_reentrant=reentrant)
            (y**3).sum().backward()
            failures += model.differences(p, f"reentrant={reentrant}, sequence={sequence}")
    return failures


@pytest.mark.parametrize("world", sweep((3, 1, 2, 4)))
@pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "replicated"])
def test_an_mlp_has_the_unsharded_gradients(
    ranks: RanksFixture, world: int, sequence: bool
) -> None:
    report(f for rank in ranks(world).run(model_job, sequence) for f in rank)


@pytest.mark.parametrize("reentrant", sweep([False, True]))
def test_checkpointing(ranks: RanksFixture, reentrant: bool) -> None:
    report(f for rank in ranks(3).run(checkpoint_job, reentrant) for f in rank)
