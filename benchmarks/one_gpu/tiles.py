"""The tile loop of one rank compared with `torch.mm`, by shape and configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.one_gpu.machine import Machine
from benchmarks.one_gpu.stages import Case, Row
from tpkernels.common.text import describe_error
from tpkernels.kernels import configs, matmul
from tpkernels.kernels.configs import MatmulConfig

# (M, N, K) of the local GEMM on one of 8 ranks. The key is the full weight of the layer.
SHAPES = {
    "AG 11008,4096": ((4096, 1376, 4096),),
    "AG 28672,8192": ((4096, 3584, 8192), (8192, 3584, 8192), (64, 3584, 8192)),
    "AG 49152,12288": ((4096, 6144, 12288),),
    "RS 4096,14336": ((4096, 4096, 1792),),
    "RS 8192,28672": ((4096, 8192, 3584), (8192, 8192, 3584), (1024, 8192, 3584), (64, 8192, 3584)),
    "RS 12288,49152": ((4096, 12288, 6144),),
    "square": ((8192, 8192, 8192),),
}
MAX_ERROR = 1e-2  # relative, of bf16 results
# Values of FIELDS to time besides the config of the table.
FIELDS = ("block_m", "block_n", "block_k", "num_warps", "num_stages")
SMALL_M_BLOCKS = ((64, 32, 128, 4, 6), (64, 128, 128, 4, 4))
LARGE_M_BLOCKS = ((128, 128, 64, 4, 5), (128, 256, 64, 8, 3), (128, 256, 64, 8, 4))


def cases(machine: Machine) -> Iterator[Case]:
    """Yield a case for each shape."""
    for name, shapes in machine.choose(SHAPES, {"tiny": ((64, 64, 64),)}).items():
        for shape in shapes:
            yield f"{name} {'x'.join(map(str, shape))}", partial(_compare, machine, *shape)


def _compare(machine: Machine, m: int, n: int, k: int) -> Iterator[Row]:
    x, w = machine.random(m, k, seed=1), machine.random(n, k, seed=2).t()
    out, flops = machine.empty(m, n), 2 * m * n * k

    def row(config: str, run: Callable[[], object]) -> Row:
        out.fill_(torch.nan)
        run()
        error = machine.relative_error(out, x, w)
        us = machine.microseconds(run)
        tflops = round(flops / us / 1e6, 1)
        measured = {"us": round(us, 1), "tflops": tflops, "error": float(f"{error:.1e}")}
        return {"config": config, "bad": not error < MAX_ERROR, **measured}

    yield row("torch.mm", machine.mm(x, w, out))
    for name, config in _configs(machine.device, m, n).items():
        try:
            launch = matmul.bind_matmul(config, x, w, x.dtype)
            yield row(name, partial(launch, x, w, None, out))
        except Exception as error:  # such as too much shared memory
            machine.synchronize()
            yield {"config": name, "bad": True, "error": describe_error(error)[:300]}


def _configs(device: torch.device, m: int, n: int) -> dict[str, MatmulConfig]:
    """Return configs by name: the config of the table, other blocks, and loads without TMA."""
    default = configs.config_for(device, torch.bfloat16, m, n)
    tried = {"table": default}
    for blocks in SMALL_M_BLOCKS if m <= configs.SMALL_M else LARGE_M_BLOCKS:
        fields: dict[str, Any] = dict(zip(FIELDS, blocks, strict=True))
        tried["/".join(map(str, blocks))] = replace(default, **fields)
    tried |= {f"group {rows}": replace(default, group_m=rows) for rows in (4, 16)}
    narrow = min(128, default.block_n)
    tried["no TMA"] = replace(default, tma=False, num_stages=3, block_n=narrow)
    return tried
