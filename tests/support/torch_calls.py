"""What a user of torch would call in place of the ops, on the process group of
`launches.queued`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceScatterOptions


def _synchronous(cls: Any) -> Any:
    options = cls()
    options.asyncOp = False
    return options


def reduced(pg: Any, y: torch.Tensor, scatters: bool) -> torch.Tensor:
    if not scatters:
        pg.allreduce([y], _synchronous(AllreduceOptions))
        return y
    out = y.new_empty(y.shape[0] // pg.world, *y.shape[1:])
    pg._reduce_scatter_base(out, y, _synchronous(ReduceScatterOptions))
    return out


def reduction(scatters: bool) -> Callable[..., Any]:
    def function(
        pg: Any,
        x: torch.Tensor,
        w: torch.Tensor | None = None,
        scatter_dim: int = 0,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        wire_dtype: torch.dtype | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        if w is not None and wire_dtype is not None:
            y = torch.mm(x, w, out_dtype=wire_dtype)
        elif w is not None:
            y = (x.flatten(0, -2) @ w).view(*x.shape[:-1], -1)
        else:
            y = x if scatters else x.clone()
        if scatter_dim:
            y = torch.cat(y.chunk(pg.world, scatter_dim))
        out = reduced(pg, y, scatters)
        for more in (bias, residual):
            out = out if more is None else out + more
        wanted = out_dtype or x.dtype
        if out.dtype != wanted:
            out.to(wanted)

    return function


def gather(
    pg: Any,
    x: torch.Tensor,
    weights: list[torch.Tensor] | None = None,
    gather_dim: int = 0,
    return_gathered: bool = False,
) -> None:
    whole = x.new_empty(pg.world * x.shape[0], *x.shape[1:])
    pg._allgather_base(whole, x, _synchronous(AllgatherOptions))
    if gather_dim:
        whole = torch.cat(whole.chunk(pg.world), gather_dim)
    for w in weights or ():
        whole.flatten(0, -2) @ w
