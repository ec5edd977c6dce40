"""Functions with functional collectives, traced and rewritten without a compiler: what the pass
does to a graph, op by op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import tpkernels
from tpkernels.compile import Report
from tpkernels.groups import GroupLike

_c10d = torch.ops._c10d_functional


def gather(x: torch.Tensor, dim: int, world: int, group: str) -> torch.Tensor:
    """As torch writes it: along dim 0, then chunks moved to ``dim``."""
    whole = _c10d.wait_tensor(_c10d.all_gather_into_tensor(x.contiguous(), world, group))
    return whole if dim == 0 else torch.cat(whole.chunk(world, 0), dim)


def scatter(x: torch.Tensor, dim: int, world: int, group: str, op: str = "sum") -> torch.Tensor:
    assert x.shape[dim] % world == 0  # as torch has it: a guard where the size is symbolic
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
    """The function's graph after the pass, ready to run, and what the pass says of it."""
    mode = "symbolic" if symbolic else "fake"
    traced = make_fx(function, tracing_mode=mode)(*inputs)
    fusion = tpkernels.compile.fuse_collectives(*only)
    fusion(traced.graph)
    traced.recompile()
    return traced, fusion.report
