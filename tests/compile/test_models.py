"""The pass in ``torch.compile``: forward and backward of a DTensor model, enabling and disabling,
several shapes, and the inductor cache."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import custom_graph_pass
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import tpkernels
from tests.support.compiled import graph_runner
from tests.support.ranked import fresh_group, on_ranks

WIDTH, HIDDEN = 16, 24
SLOT = "post_grad_custom_pre_pass"


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=i == 0) for i in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(WIDTH), MLP()

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.mlp(self.norm(x))


SEQUENCE = {
    "norm": SequenceParallel(),
    "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "mlp.gate": ColwiseParallel(),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
}


class Parallel:
    """An unsharded block, and the same block under a torch plan. Both use float64, so a difference
    above rounding is an error."""

    def __init__(self) -> None:
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        torch.manual_seed(0)
        self.unsharded, self.model = Block().double(), Block().double()
        self.model.load_state_dict(self.unsharded.state_dict())
        parallelize_module(self.model, self.mesh, SEQUENCE)
        torch._dynamo.reset()
        counters.clear()

    def shard(self, x: torch.Tensor) -> torch.Tensor:
        return x.chunk(self.mesh.size(), 1)[self.mesh.get_local_rank()].contiguous()

    def step(self, compiled: Any, batch: int, rows: int) -> list[str]:
        """Run a forward and a backward. Return the differences from the unsharded model."""
        for model in (self.unsharded, self.model):
            model.zero_grad()
        draw = torch.Generator().manual_seed(rows)
        x = torch.randn(batch, rows, WIDTH, dtype=torch.float64, generator=draw)
        expected = self.unsharded(x)
        (expected**2).sum().backward()
        y = compiled(self.shard(x))
        (y**2).sum().backward()
        pairs = {"y": (y, self.shard(expected))}
        for (name, p), unsharded in zip(
            self.model.named_parameters(), self.unsharded.parameters(), strict=True
        ):
            grad: Any = p.grad
            pairs[name] = (
                grad.full_tensor() if hasattr(grad, "full_tensor") else grad,
                unsharded.grad,
            )
        return [
            f"[{batch}, {rows}]: {name} differs by {(got - want).abs().max()}"
            for name, (got, want) in pairs.items()
            if not torch.allclose(got, want, rtol=1e-12, atol=1e-12)
        ]


PAIRS = {"all_gather_matmul": 2, "matmul_reduce_scatter": 2}  # one forward, one backward


@pytest.mark.slow
@on_ranks(2, timeout=250)
def test_a_block_with_sequence_parallelism() -> list[str]:
    """All pairs are fused within the context. The second shape makes the graphs dynamic, and later
    shapes do not recompile."""
    parallel, seen = Parallel(), list[Counter[str]]()
    with tpkernels.compile.fuse_collectives() as report:
        compiled = torch.compile(parallel.model, fullgraph=True, backend=graph_runner(seen))
        shapes = [(2, 8), (2, 12), (2, 20), (2, 6)]
        failures = [failure for shape in shapes for failure in parallel.step(compiled, *shape)]
    graphs = counters["stats"]["unique_graphs"]
    assert graphs <= 2 and report.counts == {op: graphs * n for op, n in PAIRS.items()}, str(report)
    assert not report.left_alone and not any("c10d" in name for graph in seen for name in graph)
    assert report.rewritten[0].site.module == "mlp" and "graph 1, backward" in str(report), str(
        report
    )
    assert getattr(inductor_config, SLOT) is None, "the pass is still on"
    return failures


@pytest.mark.slow
@on_ranks(2, timeout=280)
def test_inductor() -> list[str]:
    """Compile twice with inductor. Graphs from its cache are not in the second report."""
    failures, reports = [], []
    with fresh_cache():
        for _ in range(2):
            parallel = Parallel()
            fusion = tpkernels.compile.fuse_collectives(parallel.mesh)
            compiled = torch.compile(parallel.model, fullgraph=True, options=fusion.options)
            failures += parallel.step(compiled, 2, 8)
            reports.append(fusion.report)
    assert reports[0].counts == PAIRS, str(reports[0])
    assert "from inductor's cache" in str(reports[1]), f"not from the cache: {reports[1]}"
    return failures


@pytest.mark.thorough
@pytest.mark.skipif(
    not hasattr(custom_graph_pass, "get_custom_graph_passes"), reason="torch has room for one pass"
)
def test_the_pass_runs_after_an_existing_pass() -> None:
    calls = []

    class UserPass(custom_graph_pass.CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            calls.append(len(list(graph.nodes)))

        def uuid(self) -> str:
            return "mine"

    user_pass = UserPass()
    fusion = tpkernels.compile.fuse_collectives()
    with inductor_config.patch({SLOT: user_pass}), fusion as report:
        assert getattr(inductor_config, SLOT) == (user_pass, fusion)
        compiled = torch.compile(lambda x: x + 1, backend=graph_runner([]))
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    assert len(calls) == 1 and report.graphs == ["graph 0, forward"]
    assert "no collectives" in str(report)


def test_a_model_can_be_wrapped_within_the_context() -> None:
    with tpkernels.compile.fuse_collectives() as report:
        torch.compile(lambda x: x + 1)  # copies the inductor config
    assert not report.graphs


def test_older_torch_supports_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(custom_graph_pass, "get_custom_graph_passes", raising=False)
    with (
        inductor_config.patch({SLOT: lambda graph: None}),
        pytest.raises(RuntimeError, match="supports one pass"),
        tpkernels.compile.fuse_collectives(),
    ):
        pass


def test_a_wrong_group_type_is_refused() -> None:
    with pytest.raises(TypeError, match="must be a ProcessGroup"):
        tpkernels.compile.fuse_collectives(3)  # type: ignore[arg-type]


@on_ranks(2)
def test_the_cache_key_tag_of_the_user_stays() -> None:
    """Two calls extend the tag identically. The key of the pass depends on the groups."""
    tags, fusion = [], tpkernels.compile.fuse_collectives("tp")
    before = fusion.uuid()
    with fresh_group() as group, torch.compiler.config.patch(cache_key_tag="theirs"):
        assert fusion.uuid() != before
        for _ in range(2):
            with torch._subclasses.FakeTensorMode():
                tpkernels.all_reduce(torch.ones(3), group)
            tag = torch.compiler.config.cache_key_tag
            tags.append(tag.replace(f"{group.group_name}: ", "group: "))
    rank = dist.get_rank()
    first, second = tags
    assert first == second and first.startswith("theirs tpkernels{")
    assert f"group: {rank} of 2" in first


def test_the_key_for_the_cache() -> None:
    fuse = tpkernels.compile.fuse_collectives
    assert fuse().uuid() == fuse().uuid()
    assert fuse("one").uuid() != fuse().uuid()
    assert fuse("one", "two").uuid() == fuse("two", "one").uuid()
