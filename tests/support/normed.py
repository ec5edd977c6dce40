"""Blocks like Llama's, whose all-reduces are followed by a residual and an RMS norm, compiled with
the pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._inductor.utils import fresh_cache

import tpkernels
from tests.support.compiled import graph_runner
from tests.support.traced import reduce

EPS, WIDTH, HIDDEN, BATCH, TOKENS = 1e-5, 32, 24, 2, 3
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
MATMUL, ALONE = "matmul_all_reduce_rms_norm", "all_reduce_rms_norm"


def llama_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As transformers' LlamaRMSNorm writes it."""
    dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + EPS)
    return weight * x.to(dtype)


def torch_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, [x.shape[-1]], weight, EPS)


def squared_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """With a product in place of a power, and the weight first."""
    wide = x.float()
    rows = wide * torch.rsqrt((wide * wide).mean(-1, True) + EPS)
    return (rows * weight.float()).to(x.dtype)


def functional(x: torch.Tensor, w: torch.Tensor, group: str) -> torch.Tensor:
    return reduce(x @ w, group)


def ours(x: torch.Tensor, w: torch.Tensor, group: str) -> torch.Tensor:
    return tpkernels.matmul_all_reduce(x, w, group)


def no_matmul(x: torch.Tensor, w: torch.Tensor, group: str) -> torch.Tensor:
    return reduce(torch.relu(x @ w), group)


def our_sum(x: torch.Tensor, w: torch.Tensor, group: str) -> torch.Tensor:
    return tpkernels.all_reduce(torch.relu(x @ w), group)


Norm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Layer = Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]


def block(h: torch.Tensor, x: torch.Tensor, w: Any, norm: Norm, layer: Layer, group: str) -> Any:
    """A row-parallel layer, the residual and a norm, twice, and a residual stream that goes on."""
    h = h + layer(x, w["out"], group)
    y = norm(h, w["first"])
    h = layer(torch.relu(y @ w["up"]), w["down"], group) + h
    return norm(h, w["second"]), h


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """h is the same on all ranks."""
    same = torch.Generator().manual_seed(0)
    own = torch.Generator().manual_seed(1 + dist.get_rank())

    def drawn(draw: torch.Generator, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    w = {"out": drawn(own, HIDDEN, WIDTH), "up": drawn(own, WIDTH, HIDDEN)}
    w |= {"down": drawn(own, HIDDEN, WIDTH)}
    w |= {name: drawn(same, WIDTH) for name in ("first", "second")}
    return drawn(same, BATCH, TOKENS, WIDTH), drawn(own, BATCH, TOKENS, HIDDEN), w


def compiled(function: Callable[..., Any], given: Any, norms: bool | None) -> Any:
    """The results, the ops in the graphs, and the report."""
    torch._dynamo.reset()
    seen: list[Counter[str]] = []
    fusion = tpkernels.compile.fuse_collectives(norms=norms)
    with fresh_cache(), fusion as told:
        results = torch.compile(function, backend=graph_runner(seen), fullgraph=True)(*given)
    return results, sum(seen, Counter()), told
