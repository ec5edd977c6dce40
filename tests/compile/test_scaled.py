"""The compiler pass on collectives next to ``torch._scaled_mm``: rewritten or left unchanged."""

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
    differences,
    gather,
    graph_runner,
    graphs_job,
    kept,
    one,
    reduce,
    rewritten,
    scatter,
)
from tests.support.ranked import check_job, fresh_group
from tests.support.reference import E4M3
from tests.support.tiers import thorough

F32, BF16, E5M2 = torch.float32, torch.bfloat16, torch.float8_e5m2
AG, RS = "all_gather_scaled_matmul", "scaled_matmul_reduce_scatter"
AR = "scaled_matmul_all_reduce"


def bytes_gathered(x: torch.Tensor, dim: int, world: int, group: str) -> torch.Tensor:
    """As torch writes a gather of fp8 numbers: they travel as bytes, which gloo can send, too."""
    return gather(x.view(torch.uint8), dim, world, group).view(x.dtype)


def product(
    x: torch.Tensor, w: torch.Tensor, scale_x: Any = None, scale_w: Any = None, **options: Any
) -> torch.Tensor:
    """x [..., K] times w [N, K], as torch writes it."""
    scale_x, scale_w = (torch.ones([]) if s is None else s for s in (scale_x, scale_w))
    if scale_x.dim() > 2:
        scale_x = scale_x.reshape(-1, 1)
    options = {"out_dtype": BF16, **options}
    rows, columns = x.flatten(0, -2), w.t()
    try:
        flat = torch._scaled_mm(rows, columns, scale_x, scale_w, **options)
    except RuntimeError as error:  # torch 2.11 takes no row-wise scales on CPUs
        if "per-tensor scaling" not in str(error):
            raise
        flat = ((rows.float() * scale_x) @ (columns.float() * scale_w)).to(options["out_dtype"])
    return flat.reshape(*x.shape[:-1], w.shape[0])


def by_row(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x as fp8, with a power of two for each row."""
    scale = x.abs().sum(-1, keepdim=True).remainder(3).exp2()
    return (x / scale).to(E4M3), scale


def _tensor_wise(gathered: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, w, *where: product(gathered(x.to(E4M3), 0, *where), w.to(E4M3))


def _row_wise(x: Any, w: Any, dim: int, *where: Any) -> Any:
    """The scales are gathered as the rows are."""
    rows, scale = by_row(x)
    columns, scale_w = by_row(w)
    whole = bytes_gathered(rows, dim, *where), gather(scale, dim, *where)
    return product(whole[0], columns, whole[1], scale_w.t().contiguous())


def _replicated_scales(x: Any, w: Any, *where: Any) -> Any:
    """The scales of the gathered rows are there, the same on all ranks."""
    columns, scale_w = by_row(w)
    whole = bytes_gathered(x.to(E4M3), 0, *where)
    scale = torch.arange(whole.shape[0]).remainder(3).float().exp2().view(-1, 1)
    return product(whole, columns, scale, scale_w.t().contiguous())


def _several(x: Any, w: Any, v: Any, *where: Any) -> Any:
    """One gather for two products; the gathered tensor is read by something else, too."""
    whole = bytes_gathered(x.to(E4M3), 0, *where)
    scale, bias = torch.ones([]), torch.ones(w.shape[0], dtype=BF16)
    first = product(whole, w.to(E4M3), scale, bias=bias)
    return first, product(whole, v.to(E4M3), scale), whole.float()


def _scattered(x: Any, w: Any, dim: int, op: str, *where: Any) -> Any:
    rows, scale = by_row(x)
    columns, scale_w = by_row(w)
    partial = product(rows, columns, scale, scale_w.t().contiguous())
    return scatter(partial, dim, *where, op)


def _two_readings(x: Any, w: Any, *where: Any) -> Any:
    """Two products of the same bytes as different numbers."""
    whole = bytes_gathered(x.to(E4M3), 0, *where)
    one = torch.ones([])
    return product(whole, w.to(E4M3), one), product(whole.view(E5M2), w.to(E4M3), one)


GRAPHS = {
    "the same bytes as different numbers": one(AG, _two_readings, (4, 32), (5, 32)),
    "tensor-wise": one(AG, _tensor_wise(bytes_gathered), (4, 32), (5, 32)),
    "fp8 that is sent as such, which gloo cannot": Graph(
        _tensor_wise(gather), ((4, 32), (5, 32)), ((AG, 1),),
        reference=_tensor_wise(bytes_gathered)
    ),
    "row-wise": one(AG, lambda x, w, *g: _row_wise(x, w, 0, *g), (4, 32), (5, 32)),
    "row-wise, along another dim": one(
        AG, lambda x, w, *g: _row_wise(x, w, 1, *g), (2, 3, 32), (5, 32)
    ),
    "scales of all ranks' rows": one(AG, _replicated_scales, (4, 32), (5, 32)),
    "several products, and another reader": one(AG, _several, (4, 32), (5, 32), (7, 32), matmuls=2),
    "scattered along another dim": one(
        RS, lambda x, w, *g: _scattered(x, w, 1, "sum", *g), (3, "2W", 32), (5, 32)
    ),
    "a mean": Graph(
        lambda x, w, *g: _scattered(x, w, 0, "avg", *g), (("2W", 32), (5, 32)), ((RS, 1),),
        reference=lambda x, w, *g: (_scattered(x, w, 0, "sum", *g) / g[0]).to(BF16)
    ),
    "a rank without columns": one(AG, lambda x, w, *g: _row_wise(x, w, 0, *g), (4, 32), (0, 32)),
    "a rank without K": one(RS, lambda x, w, *g: _scattered(x, w, 0, "sum", *g), ("2W", 0), (5, 0)),
    "reduced": one(
        AR, lambda x, w, _, g: reduce(product(x.to(E4M3), w.to(E4M3), out_dtype=F32), g),
        (2, 3, 32), (5, 32)
    ),
}  # fmt: skip


def _sum_of_two(x: Any, w: Any, world: int, group: str) -> Any:
    part = product(x.to(E4M3), w.to(E4M3))
    return reduce(part + product((-x).to(E4M3), w.to(E4M3)), group)


def _own_scale(x: Any, w: Any, world: int, group: str) -> Any:
    whole = bytes_gathered(x.to(E4M3), 0, world, group)
    return product(whole, w.to(E4M3), whole.float().abs().amax())


LEFT_ALONE = [
    ("aten._to_copy reads it and is not a plain matmul",
     lambda x, *g: bytes_gathered(x.to(E4M3), 0, *g).float(), (4, 32)),
    ("the ops do not support uint8",
     lambda x, w, *g: gather(x.to(torch.uint8), 0, *g) @ w.to(torch.uint8), (4, 6), (6, 5)),
    ("aten._scaled_mm reads it and is not a plain matmul",
     lambda x, w, *g: product(
         bytes_gathered(x.to(E4M3), 0, *g), w.to(E4M3), scale_result=torch.ones([])
     ), (4, 32), (5, 32)),
    ("aten._to_copy reads it and is not a plain matmul; the right operand of "
     "aten._scaled_mm, or its bias, also depends on it",
     _own_scale, (4, 32), (5, 32)),
    ("a scaled matmul can be scattered along its rows only",
     lambda x, w, *g: scatter(product(x.to(E4M3), w.to(E4M3)), 1, *g), (3, 32), ("4W", 32)),
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
    return kept(LEFT_ALONE)


@pytest.mark.parametrize(
    ("graphs", "symbolic"),
    [(rewritten_graphs, False), (left_alone, False), thorough(rewritten_graphs, True)],
)
def test_graphs(ranks: RanksFixture, graphs: Any, symbolic: bool) -> None:
    check_job(ranks(2), graphs_job, graphs, F32, symbolic, timeout=120)


def _scales_as_integers(x: Any, w: Any, *where: Any) -> Any:
    """The scales of the rows travel as int32."""
    rows, scale = by_row(x)
    scale = gather(scale.view(torch.int32), 0, *where).view(F32)
    one = torch.ones(1, w.shape[0])
    return product(bytes_gathered(rows, 0, *where), w.to(E4M3), scale, one)


def integers_job() -> list[str]:
    """The gather of scales that travel as integers stays."""
    failures = []
    with fresh_group() as group, torch.no_grad():
        where = group.size(), group.group_name
        x, w = torch.randint(-1, 2, (4, 32)).float(), torch.randint(-1, 2, (5, 32)).float()
        traced, found = rewritten(lambda *xw: _scales_as_integers(*xw, *where), [x, w])
        assert found.counts == {AG: 1} and len(found.left_alone) == 1, str(found)
        failures += differences(traced(x, w), _scales_as_integers(x, w, *where))
    return failures


def model_job() -> list[str]:
    """Up and down projections of DTensors with torch._scaled_mm, compiled with the pass."""
    failures: list[str] = []
    world, rank = dist.get_world_size(), dist.get_rank()
    draw = torch.Generator().manual_seed(0)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-1, 2, shape, generator=draw).float()

    x, up, down = integers(4 * world, 32), integers(8 * world, 32), integers(16, 8 * world)
    mesh = init_device_mesh("cpu", (world,))

    def sharded(whole: torch.Tensor, dim: int) -> DTensor:
        own = whole.chunk(world, dim)[rank].contiguous()
        return DTensor.from_local(own, mesh, [Shard(dim)], run_check=False)

    one = DTensor.from_local(torch.ones([]), mesh, [Replicate()], run_check=False)

    def block(x: Any, up: Any, up_scale: Any, down: Any) -> Any:
        """Row-wise up, where rows and scales are gathered; tensor-wise down, scattered."""
        rows, scale = by_row(x)
        whole = (each.redistribute(placements=[Replicate()]) for each in (rows, scale))
        rows, scale = whole
        hidden = torch._scaled_mm(rows, up.t(), scale, up_scale, out_dtype=BF16)
        hidden = hidden.clamp(-2, 2).to(E4M3)
        y = torch._scaled_mm(hidden, down.t(), one, one, out_dtype=BF16)
        return y.redistribute(placements=[Shard(0)]).to_local()

    columns, up_scale = by_row(up)
    hidden = (x @ up.t()).clamp(-2, 2)
    want = (hidden @ down.t()).to(BF16).chunk(world, 0)[rank]
    operands = (
        sharded(x, 0),
        sharded(columns, 0),
        sharded(up_scale.t().contiguous(), 1),
        sharded(down.to(E4M3), 1),
    )
    seen: list[Counter[str]] = []
    with fresh_cache(), torch.no_grad(), tpkernels.compile.fuse_collectives() as found:
        got = torch.compile(block, backend=graph_runner(seen))(*operands)
    if found.counts != {AG: 1, RS: 1} or found.left_alone:
        failures.append(str(found))
    (ops,) = seen
    if any("c10d" in name for name in ops):
        failures.append(f"a collective is left: {ops}")
    return failures + differences(got, want)


@pytest.mark.parametrize("job", [model_job, integers_job])
def test_scales_that_are_gathered(ranks: RanksFixture, job: Callable[[], list[str]]) -> None:
    check_job(ranks(2), job, timeout=120)
