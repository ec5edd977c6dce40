"""The Triton tile loop for the GPU suite: checked, timed, and its block sizes compared."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import replace

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.gpu.stage import Job, Result, Setting, random, stage, times_ms
from tpkernels.kernels.configs import CANDIDATES, choose
from tpkernels.kernels.matmul import matmul


@stage()
def matmul_check(setting: Setting) -> Iterator[Result]:
    """The tile loop against float64: odd sizes, both layouts of the weight, every dtype."""
    sizes = [(1, 33, 7), (65, 70, 40)]
    if not setting.small:
        sizes += [(1, 4096, 4096), (7, 1023, 33), (1023, 129, 1000), (2048, 1024, 4096)]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for m, n, k in sizes:
            for major in ("k", "n"):
                a = random(setting.device, m, k, dtype=dtype)
                b = random(setting.device, *((n, k) if major == "k" else (k, n)), dtype=dtype)
                b = b.t() if major == "k" else b
                exact, terms = a.double() @ b.double(), a.double().abs() @ b.double().abs()
                unit = torch.finfo(torch.float32).eps
                bound = torch.finfo(dtype).eps / 2 * exact.abs() + (k + 2) * unit * terms
                worst = ((matmul(a, b) - exact).abs() / bound).max().item()
                what = f"matmul {m}x{n}x{k} {dtype} {major}-major"
                yield Result(what, f"error / bound {worst:.2f}", worst <= 1)


# (N, K) before the split over 8 ranks: the layers of Llama-like models.
GATHERS = [(11008, 4096), (14336, 4096), (28672, 8192), (53248, 16384), (29568, 8192)]
SCATTERS = [(4096, 11008), (4096, 14336), (8192, 28672), (16384, 53248), (8192, 29568)]


@stage()
def matmul_speed(setting: Setting) -> Iterator[Result]:
    """The tile loop compared with torch.matmul, bf16, K-major weights."""
    world = 8
    shapes = [(m, n // world, k) for m in (1024, 4096, 8192) for n, k in GATHERS]
    shapes += [(m, n, k // world) for m in (1024, 4096, 8192) for n, k in SCATTERS]
    if setting.small:
        shapes = [(64, 64, 64)]
    ratios = []
    for m, n, k in shapes:
        a, b = random(setting.device, m, k), random(setting.device, n, k).t()
        jobs: list[Job] = [lambda a=a, b=b: matmul(a, b), lambda a=a, b=b: torch.matmul(a, b)]
        ours, torchs = times_ms(setting.device, jobs)
        ratios.append(torchs / ours)
        rate = 2 * m * n * k / ours * 1e-9
        value = f"{ours:.4f} ms, torch {torchs:.4f} ms: {torchs / ours:.3f}x, {rate:.0f} TFLOP/s"
        yield Result(f"{m}x{n}x{k}", value, ok=None)
    mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
    what = f"geometric mean over {len(ratios)} of {len(shapes)} shapes"
    yield Result(what, f"{mean:.3f}x of torch.matmul", ok=None)


SHAPES = {
    True: [(16, 3584, 8192), (64, 3584, 8192), (64, 8192, 3584)],
    False: [(1024, 3584, 8192), (4096, 3584, 8192), (4096, 8192, 3584), (8192, 6656, 16384)],
}
GROUPS = (4, 8, 16)


@stage()
def tune(setting: Setting) -> Iterator[Result]:
    """The candidates for the config table, bf16, compared with torch.matmul. Copy the best of each
    class to kernels/configs.py by hand, with device, date and this command."""
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
                    jobs: list[Job] = [
                        lambda a=a, b=b, config=config: matmul(a, b, config=config),
                        lambda a=a, b=b: torch.matmul(a, b),
                    ]
                    try:
                        ours, torchs = times_ms(setting.device, jobs, rounds=3)
                    except OutOfResources as error:  # not a candidate on this GPU
                        yield Result(str(config), str(error), ok=None)
                        break
                    ratios.append(torchs / ours)
                else:
                    mean = math.exp(statistics.fmean(map(math.log, ratios)))
                    means.append((mean, str(config)))
                    yield Result(str(config), f"{mean:.3f}x of torch.matmul", ok=None)
        if means:
            best, config_text = max(means)
            what = f"best for {'few' if few else 'many'} rows: {config_text}"
            yield Result(what, f"{best:.3f}x of torch.matmul", ok=None)
