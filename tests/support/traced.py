"""Traces functions with functional collectives and applies the pass, without a compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

import tpkernels
from tests.support.ordered import called
from tpkernels.compile import Report
from tpkernels.groups import GroupLike

AG, RS, AR = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"

_c10d = torch.ops._c10d_functional


def gather(x: torch.Tensor, dim: int, world: int, group: str) -> torch.Tensor:
    """A gather as torch writes it: along dim 0, then the chunks are moved to ``dim``."""
    whole = _c10d.wait_tensor(_c10d.all_gather_into_tensor(x.contiguous(), world, group))
    return whole if dim == 0 else torch.cat(whole.chunk(world, 0), dim)


def scatter(x: torch.Tensor, dim: int, world: int, group: str, op: str = "sum") -> torch.Tensor:
    assert x.shape[dim] % world == 0  # torch has this too: a guard if the size is symbolic
    if dim:
        x = torch.cat(x.chunk(world, dim), 0)
    part = _c10d.reduce_scatter_tensor(x.contiguous(), op, world, group)
    result: torch.Tensor = _c10d.wait_tensor(part)
    return result


def reduce(x: torch.Tensor, group: str, op: str = "sum") -> torch.Tensor:
    result: torch.Tensor = _c10d.wait_tensor(_c10d.all_reduce(x.contiguous(), op, group))
    return result


def rewritten(
    function: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    only: Sequence[GroupLike] = (),
    symbolic: bool = False,
) -> tuple[fx.GraphModule, Report]:
    """The function's graph after the pass, ready to run, and the pass's report."""
    mode = "symbolic" if symbolic else "fake"
    traced = make_fx(function, tracing_mode=mode)(*inputs)
    fusion = tpkernels.compile.fuse_collectives(*only)
    fusion(traced.graph)
    traced.recompile()
    return traced, fusion.report


@dataclass(frozen=True)
class Graph:
    """A function, and what the pass does with its graph."""

    function: Callable[..., Any]  #: of the inputs, the group's size and the group's name
    shapes: tuple[tuple[int | str, ...], ...]  #: of the inputs; "2W": twice the number of ranks
    ops: tuple[tuple[str, int], ...] = ()  #: ops inserted, and the number of matmuls in each
    reasons: tuple[str, ...] = ()  #: why collectives are left alone
    reference: Callable[..., Any] | None = None  #: computes the same if gloo cannot


def _integers(graph: Graph, rank: int, world: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Inputs so small that all sums are exact in any order, also in 16 bits."""
    draw = torch.Generator().manual_seed(rank)

    def size(spec: int | str) -> int:
        return spec if isinstance(spec, int) else int(spec[:-1] or 1) * world

    shapes = [[size(spec) for spec in shape] for shape in graph.shapes]
    return [torch.randint(-1, 2, shape, generator=draw).to(dtype) for shape in shapes]


def check(
    graph: Graph,
    group: dist.ProcessGroup,
    dtype: torch.dtype = torch.float32,
    symbolic: bool = False,
) -> list[str]:
    """Checks that the graph contains what it should, and gives the same bits as the function."""
    where = (group.size(), group.group_name)
    inputs = _integers(graph, group.rank(), group.size(), dtype)
    traced, pass_report = rewritten(
        lambda *x: graph.function(*x, *where), inputs, symbolic=symbolic
    )
    failures = []
    ops = tuple((each.op, each.matmuls) for each in pass_report.rewritten)
    reasons = tuple(each.reason for each in pass_report.left_alone)
    if (ops, reasons) != (graph.ops, graph.reasons):
        failures.append(f"{pass_report}, expected {graph.ops}, {graph.reasons}")
    names = [str(target) for target in called(traced)]
    if sum("tpkernels" in name for name in names) != len(graph.ops):
        failures.append(f"the graph holds {names}")
    if graph.ops and any("c10d" in name for name in names):
        failures.append(f"a collective is left: {names}")
    got = tree_leaves(traced(*inputs))
    want = tree_leaves((graph.reference or graph.function)(*inputs, *where))
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        if g.dtype != w.dtype or not torch.equal(g, w):
            failures.append(f"result {i} is {g}, not {w}")
    return failures
