"""Stages of the GPU suite that inform choices: block sizes; this package's or torch's fused ops."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.distributed as dist

from benchmarks.gpu.stage import (
    Result,
    Setting,
    compared,
    median_ms,
    on_gpus,
    over_ranks,
    random,
    times_ms,
)

SHAPES = {
    True: [(16, 3584, 8192), (64, 3584, 8192), (64, 8192, 3584)],
    False: [(1024, 3584, 8192), (4096, 3584, 8192), (4096, 8192, 3584), (8192, 6656, 16384)],
}
GROUPS = (4, 8, 16)


def tune(setting: Setting) -> Iterator[Result]:
    """The candidates for the config table, bf16, compared with torch.matmul. Copy the best of each
    class to kernels/configs.py by hand, with device, date and this command."""
    from triton.runtime.errors import OutOfResources

    from tpkernels.kernels.configs import CANDIDATES, choose
    from tpkernels.kernels.matmul import matmul

    for few, candidates in CANDIDATES.items():
        shapes = [(32, 32, 32)] if setting.small else SHAPES[few]
        means: list[tuple[float, str]] = []
        for fields in candidates[:1] if setting.small else candidates:
            for group_m in GROUPS[:1] if few or setting.small else GROUPS:
                ratios = []
                for m, n, k in shapes:
                    a, b = random(setting.device, m, k), random(setting.device, n, k).t()
                    config = choose(a.device, a.dtype, m, fields)
                    config = replace(config, group_m=group_m)
                    jobs: list[Callable[[], object]] = [
                        lambda a=a, b=b, config=config: matmul(a, b, config=config),
                        lambda a=a, b=b: torch.matmul(a, b),
                    ]
                    try:
                        ours, torchs = times_ms(setting.device, jobs, rounds=3)
                    except OutOfResources as error:  # not a candidate on this GPU
                        yield Result("tune", str(config), str(error), ok=None)
                        break
                    ratios.append(torchs / ours)
                else:
                    mean = math.exp(statistics.fmean(map(math.log, ratios)))
                    means.append((mean, str(config)))
                    yield Result("tune", str(config), f"{mean:.3f}x of torch.matmul", ok=None)
        if means:
            best, config_text = max(means)
            what = f"best for {'few' if few else 'many'} rows: {config_text}"
            yield Result("tune", what, f"{best:.3f}x of torch.matmul", ok=None)


def _symm_mem_job(device: str, m: int, n: int, k: int) -> list[tuple[str, float, float]]:
    """(op, our ms, their ms) on ranks that may share a GPU, bf16; the same on every rank."""
    import torch.distributed._symmetric_memory as symmetric

    from benchmarks.gpu.calls import Calls

    group = dist.group.WORLD
    assert group is not None
    calls = Calls(device, "fused")
    symmetric.enable_symm_mem_for_group(group.group_name)
    world, sizes = calls.world, (m // calls.world,) * calls.world
    shard, whole = random(device, m // world, k), random(device, m, k)
    w = random(device, n, k).t()
    theirs = torch.ops.symm_mem
    name = group.group_name
    pairs = {
        "all_gather_matmul": (
            lambda: calls.run("all_gather_matmul", shard, w, sizes),
            lambda: theirs.fused_all_gather_matmul(shard, [w], 0, name),
        ),
        "matmul_reduce_scatter": (
            lambda: calls.run("matmul_reduce_scatter", whole, w, sizes),
            lambda: theirs.fused_matmul_reduce_scatter(whole, w, "sum", 0, name),
        ),
    }
    return [
        (op, median_ms(group, device, ours, 1), median_ms(group, device, other, 1))
        for op, (ours, other) in pairs.items()
    ]


@on_gpus(2)
def symm_mem(setting: Setting) -> Iterator[Result]:
    """The fused kernels compared with torch.ops.symm_mem.fused_*, two ranks with a GPU each: ranks
    that share one would measure its time slices."""
    for m, n, k in [(512, 4096, 4096), (2048, 4096, 4096), (8192, 4096, 4096)]:
        ranks = over_ranks(setting, 2, _symm_mem_job, m, n, k)
        for op, ours, theirs in ranks[0]:
            what, value = f"{op} {m}x{n}x{k}, 2 ranks", compared(ours, "symm_mem", theirs)
            yield Result("symm_mem", what, value, ok=None)
