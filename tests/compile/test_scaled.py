"""The compiler pass on collectives next to ``torch._scaled_mm``: rewritten and unchanged graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import tpkernels
from tests.support.cases import RanksFixture
from tests.support.compiled import (
    Graph,
    compare_results,
    fused_graph,
    gather,
    graph_runner,
    graphs_job,
    reduce,
    scatter,
    trace_and_fuse,
    unfused_graphs,
)
from tests.support.ranked import check_job, fresh_group
from tests.support.reference import E4M3
from tests.support.tiers import thorough

F32, BF16, E5M2 = torch.float32, torch.bfloat16, torch.float8_e5m2
AG, RS = "all_gather_scaled_matmul", "scaled_matmul_reduce_scatter"
AR = "scaled_matmul_all_reduce"


def bytes_gathered(x: torch.Tensor, dim: int, world: int, group: str) -> torch.Tensor:
    """Gather fp8 values as torch does: they are sent as bytes, which gloo supports."""
    return gather(x.view(torch.uint8), dim, world, group).view(x.dtype)


def scaled_matmul(
    x: torch.Tensor, w: torch.Tensor, scale_x: Any = None, scale_w: Any = None, **options: Any
) -> torch.Tensor:
    """Multiply x [..., K] by the transpose of w [N, K], as torch does."""
    scale_x, scale_w = (torch.ones([]) if s is None else s for s in (scale_x, scale_w))
    if scale_x.dim() > 2:
        scale_x = scale_x.reshape(-1, 1)
    options = {"out_dtype": BF16, **options}
    rows, columns = x.flatten(0, -2), w.t()
    try:
        flat = torch._scaled_mm(rows, columns, scale_x, scale_w, **options)
    except RuntimeError as error:  # torch 2.11 lacks row-wise scales on CPUs
        if "per-tensor scaling" not in str(error):
            raise
        flat = ((rows.float() * scale_x) @ (columns.float() * scale_w)).to(options["out_dtype"])
    return flat.reshape(*x.shape[:-1], w.shape[0])


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x to fp8 with one power-of-two scale per row. Return the values and the scales."""
    scale = x.abs().sum(-1, keepdim=True).remainder(3).exp2()
    return (x / scale).to(E4M3), scale


def _tensor_wise(gathered: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, w, *group_args: scaled_matmul(gathered(x.to(E4M3), 0, *group_args), w.to(E4M3))


def _row_wise(x: Any, w: Any, dim: int, *group_args: Any) -> Any:
    """Gather the scales like the rows."""
    rows, scale = quantize_rows(x)
    columns, scale_w = quantize_rows(w)
    gathered = bytes_gathered(rows, dim, *group_args), gather(scale, dim, *group_args)
    return scaled_matmul(gathered[0], columns, gathered[1], scale_w.t().contiguous())


def _replicated_scales(x: Any, w: Any, *group_args: Any) -> Any:
    """Every rank holds the scales of all gathered rows."""
    columns, scale_w = quantize_rows(w)
    gathered = bytes_gathered(x.to(E4M3), 0, *group_args)
    scale = torch.arange(gathered.shape[0]).remainder(3).float().exp2().view(-1, 1)
    return scaled_matmul(gathered, columns, scale, scale_w.t().contiguous())


def _several(x: Any, w: Any, v: Any, *group_args: Any) -> Any:
    """Two matmuls and a further reader share one gather."""
    gathered = bytes_gathered(x.to(E4M3), 0, *group_args)
    scale, bias = torch.ones([]), torch.ones(w.shape[0], dtype=BF16)
    first = scaled_matmul(gathered, w.to(E4M3), scale, bias=bias)
    return first, scaled_matmul(gathered, v.to(E4M3), scale), gathered.float()


def _scattered(x: Any, w: Any, dim: int, op: str, *group_args: Any) -> Any:
    rows, scale = quantize_rows(x)
    columns, scale_w = quantize_rows(w)
    partial = scaled_matmul(rows, columns, scale, scale_w.t().contiguous())
    return scatter(partial, dim, *group_args, op)


def _two_readings(x: Any, w: Any, *group_args: Any) -> Any:
    """Two matmuls read the same bytes as different fp8 dtypes."""
    gathered = bytes_gathered(x.to(E4M3), 0, *group_args)
    unit_scale = torch.ones([])
    return scaled_matmul(gathered, w.to(E4M3), unit_scale), scaled_matmul(
        gathered.view(E5M2), w.to(E4M3), unit_scale
    )


GRAPHS = {
    "the same bytes as different numbers": fused_graph(AG, _two_readings, (4, 32), (5, 32)),
    "tensor-wise": fused_graph(AG, _tensor_wise(bytes_gathered), (4, 32), (5, 32)),
    "fp8 that is sent as such, which gloo cannot": Graph(
        _tensor_wise(gather), ((4, 32), (5, 32)), ((AG, 1),),
        reference=_tensor_wise(bytes_gathered)
    ),
    "row-wise": fused_graph(AG, lambda x, w, *g: _row_wise(x, w, 0, *g), (4, 32), (5, 32)),
    "row-wise, along another dim": fused_graph(
        AG, lambda x, w, *g: _row_wise(x, w, 1, *g), (2, 3, 32), (5, 32)
    ),
    "scales of all ranks' rows": fused_graph(AG, _replicated_scales, (4, 32), (5, 32)),
    "several products, and another reader": fused_graph(
        AG, _several, (4, 32), (5, 32), (7, 32), matmuls=2
    ),
    "scattered along another dim": fused_graph(
        RS, lambda x, w, *g: _scattered(x, w, 1, "sum", *g), (3, "2W", 32), (5, 32)
    ),
    "a mean": Graph(
        lambda x, w, *g: _scattered(x, w, 0, "avg", *g), (("2W", 32), (5, 32)), ((RS, 1),),
        reference=lambda x, w, *g: (_scattered(x, w, 0, "sum", *g) / g[0]).to(BF16)
    ),
    "a rank without columns": fused_graph(
        AG, lambda x, w, *g: _row_wise(x, w, 0, *g), (4, 32), (0, 32)
    ),
    "a rank without K": fused_graph(
        RS, lambda x, w, *g: _scattered(x, w, 0, "sum", *g), ("2W", 0), (5, 0)
    ),
    "reduced": fused_graph(
        AR, lambda x, w, _, g: reduce(scaled_matmul(x.to(E4M3), w.to(E4M3), out_dtype=F32), g),
        (2, 3, 32), (5, 32)
    ),
}  # fmt: skip


def _sum_of_two(x: Any, w: Any, world: int, group: str) -> Any:
    partial = scaled_matmul(x.to(E4M3), w.to(E4M3))
    return reduce(partial + scaled_matmul((-x).to(E4M3), w.to(E4M3)), group)


def _scale_from_gathered(x: Any, w: Any, world: int, group: str) -> Any:
    gathered = bytes_gathered(x.to(E4M3), 0, world, group)
    return scaled_matmul(gathered, w.to(E4M3), gathered.float().abs().amax())


LEFT_ALONE = [
    ("aten._to_copy reads it and is not a plain matmul",
     lambda x, *g: bytes_gathered(x.to(E4M3), 0, *g).float(), (4, 32)),
    ("the ops do not support uint8",
     lambda x, w, *g: gather(x.to(torch.uint8), 0, *g) @ w.to(torch.uint8), (4, 6), (6, 5)),
    ("aten._scaled_mm reads it and is not a plain matmul",
     lambda x, w, *g: scaled_matmul(
         bytes_gathered(x.to(E4M3), 0, *g), w.to(E4M3), scale_result=torch.ones([])
     ), (4, 32), (5, 32)),
    ("aten._to_copy reads it and is not a plain matmul; the right operand of "
     "aten._scaled_mm, or its bias, also depends on it",
     _scale_from_gathered, (4, 32), (5, 32)),
    ("a scaled matmul can be scattered along its rows only",
     lambda x, w, *g: scatter(scaled_matmul(x.to(E4M3), w.to(E4M3)), 1, *g), (3, 32), ("4W", 32)),
    ("aten.mm reinterprets its bytes as bfloat16",
     lambda x, w, *g: gather(x.half(), 0, *g).view(BF16) @ w.to(BF16), (4, 6), (6, 5)),
    ("its input reinterprets the bytes of aten.mm as bfloat16",
     lambda x, w, _, g: reduce(x.to(BF16) @ w.to(BF16) + (x.half() @ w.half()).view(BF16), g),
     (4, 6), (6, 5)),
    ("its input is a sum of several scaled matmuls", _sum_of_two, (3, 32), (5, 32)),
]  # fmt: skip


def rewritten_graphs() -> Any:
    return GRAPHS.items()


def left_alone() -> Any:
    return unfused_graphs(LEFT_ALONE)


@pytest.mark.parametrize(
    ("graphs", "symbolic"),
    [(rewritten_graphs, False), (left_alone, False), thorough(rewritten_graphs, True)],
)
def test_graphs(ranks: RanksFixture, graphs: Any, symbolic: bool) -> None:
    check_job(ranks(2), graphs_job, graphs, F32, symbolic, timeout=120)


def _scales_as_integers(x: Any, w: Any, *group_args: Any) -> Any:
    """Send the scales of the rows as int32."""
    rows, scale = quantize_rows(x)
    scale = gather(scale.view(torch.int32), 0, *group_args).view(F32)
    unit_scale = torch.ones(1, w.shape[0])
    return scaled_matmul(bytes_gathered(rows, 0, *group_args), w.to(E4M3), scale, unit_scale)


def integers_job() -> list[str]:
    """Check that a gather of scales that are sent as integers stays."""
    failures = []
    with fresh_group() as group, torch.no_grad():
        group_args = group.size(), group.group_name
        x, w = torch.randint(-1, 2, (4, 32)).float(), torch.randint(-1, 2, (5, 32)).float()
        traced, report = trace_and_fuse(lambda *xw: _scales_as_integers(*xw, *group_args), [x, w])
        assert report.counts == {AG: 1} and len(report.left_alone) == 1, str(report)
        failures += compare_results(traced(x, w), _scales_as_integers(x, w, *group_args))
    return failures


def model_job() -> list[str]:
    """Compile up and down projections of DTensors with torch._scaled_mm. Both are fused."""
    failures: list[str] = []
    world, rank = dist.get_world_size(), dist.get_rank()
    draw = torch.Generator().manual_seed(0)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-1, 2, shape, generator=draw).float()

    x, up, down = integers(4 * world, 32), integers(8 * world, 32), integers(16, 8 * world)
    mesh = init_device_mesh("cpu", (world,))

    def sharded(full: torch.Tensor, dim: int) -> DTensor:
        local = full.chunk(world, dim)[rank].contiguous()
        return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)

    unit_scale = DTensor.from_local(torch.ones([]), mesh, [Replicate()], run_check=False)

    def block(x: Any, up: Any, up_scale: Any, down: Any) -> Any:
        """Row-wise up projection of gathered rows and scales, then a scattered tensor-wise down
        projection."""
        rows, scale = quantize_rows(x)
        full = (shard.redistribute(placements=[Replicate()]) for shard in (rows, scale))
        rows, scale = full
        hidden = torch._scaled_mm(rows, up.t(), scale, up_scale, out_dtype=BF16)
        hidden = hidden.clamp(-2, 2).to(E4M3)
        y = torch._scaled_mm(hidden, down.t(), unit_scale, unit_scale, out_dtype=BF16)
        return y.redistribute(placements=[Shard(0)]).to_local()

    columns, up_scale = quantize_rows(up)
    hidden = (x @ up.t()).clamp(-2, 2)
    want = (hidden @ down.t()).to(BF16).chunk(world, 0)[rank]
    operands = (
        sharded(x, 0),
        sharded(columns, 0),
        sharded(up_scale.t().contiguous(), 1),
        sharded(down.to(E4M3), 1),
    )
    seen: list[Counter[str]] = []
    with fresh_cache(), torch.no_grad(), tpkernels.compile.fuse_collectives() as report:
        got = torch.compile(block, backend=graph_runner(seen))(*operands)
    if report.counts != {AG: 1, RS: 1} or report.left_alone:
        failures.append(str(report))
    (ops,) = seen
    if any("c10d" in name for name in ops):
        failures.append(f"a collective is left: {ops}")
    return failures + compare_results(got, want)


@pytest.mark.parametrize("job", [model_job, integers_job])
def test_scales_that_are_gathered(ranks: RanksFixture, job: Callable[[], list[str]]) -> None:
    check_job(ranks(2), job, timeout=120)
