"""The Triton kernels for the GPU suite: the tile loop, and the fused ops."""

from __future__ import annotations

import itertools
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu.runner import read_results
from benchmarks.gpu.stage import (
    Job,
    Result,
    Setting,
    checks,
    delayed,
    on_gpus,
    over_ranks,
    random,
    times_ms,
)


def matmul_check(setting: Setting) -> Iterator[Result]:
    """The tile loop against float64: odd sizes, both layouts of the weight, every dtype."""
    from tpkernels.kernels.matmul import matmul

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
                yield Result("matmul_check", what, f"error / bound {worst:.2f}", worst <= 1)


# (N, K) before the split over 8 ranks: the layers of Llama-like models.
GATHERS = [(11008, 4096), (14336, 4096), (28672, 8192), (53248, 16384), (29568, 8192)]
SCATTERS = [(4096, 11008), (4096, 14336), (8192, 28672), (16384, 53248), (8192, 29568)]


def matmul_speed(setting: Setting) -> Iterator[Result]:
    """The tile loop compared with torch.matmul, bf16, K-major weights."""
    from tpkernels.kernels.matmul import matmul

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
        yield Result("matmul_speed", f"{m}x{n}x{k}", value, ok=None)
    mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
    what = f"geometric mean over {len(ratios)} of {len(shapes)} shapes"
    yield Result("matmul_speed", what, f"{mean:.3f}x of torch.matmul", ok=None)


FUSED_OPS = ("all_gather_matmul", "matmul_reduce_scatter", "one_shot", "two_shot")
# (M, N, K) of exact calls with many tiles and k-iterations for each program; one of odd sizes.
DEEP = [(4096, 3584, 8192), (1021, 1031, 2053)]


def _fused_job(
    device: str, calls: int, delay_us: int, m: int, n: int, k: int
) -> list[tuple[str, bool]]:
    """Runs the fused ops on one rank, on exact integers and uneven shards, call after call."""
    from benchmarks.gpu.calls import Calls

    made = Calls(device, "fused")
    made.set_chaos(seed=dist.get_rank(), max_delay_us=delay_us)
    exact: dict[str, bool] = {}
    for i in range(calls):
        for op in FUSED_OPS:
            exact[op] = exact.get(op, True) and made.check(op, i, m + i % 3, n, k)
    return list(exact.items())


def fused_check(setting: Setting) -> Iterator[Result]:
    """The fused kernels on ranks that may share a GPU: small calls with and without delays, then
    calls of many tiles and k-iterations."""
    jobs = [(world, 20, delay_us, 300, 72, 40) for world in (1, 2, 4) for delay_us in (0, 200)]
    jobs += [(world, 3, 0, *shape) for world in (2, 4, 8) for shape in DEEP]
    if setting.small:
        jobs = [(world, 1, delay_us, 40, 72, 40) for world in (1, 2) for delay_us in (0, 200)]
        jobs += [(2, 1, 0, 150, 70, 200)]
    for world, calls, delay_us, *shape in jobs:
        given = {"by": f" {'x'.join(map(str, shape))}{delayed(delay_us)}"}
        given["value"] = f"{calls} calls"
        yield from checks(
            "fused_check", setting, world, _fused_job, calls, delay_us, *shape, **given
        )


def _overhead_job(device: str, m: int, n: int, k: int) -> list[tuple[str, float, float]]:
    from benchmarks.gpu.calls import Calls

    return Calls(device, "fused").compare_with_plain(m, n, k)


def fused_speed(setting: Setting) -> Iterator[Result]:
    """The fused kernels at world size 1 and the plain kernel: the cost of hooks and signals."""
    shapes = [(1024, 4096, 4096), (4096, 4096, 4096), (8192, 8192, 4096)]
    for m, n, k in [(32, 32, 32)] if setting.small else shapes:
        for op, fused, plain in over_ranks(setting, 1, _overhead_job, m, n, k)[0]:
            value = f"{fused:.4f} ms, plain {plain:.4f} ms: {fused / plain:.3f}x"
            yield Result("fused_speed", f"{op} {m}x{n}x{k}", value, ok=None)


def _graph_job(device: str, replays: int) -> int:
    from benchmarks.gpu.calls import Calls

    return Calls(device, "fused").replay(replays)


@on_gpus()
def graph(setting: Setting) -> Iterator[Result]:
    """A captured CUDA graph of the fused all-gather and reduce-scatter, replayed with new input."""
    for world in (1, 2):
        for rank, wrong in enumerate(over_ranks(setting, world, _graph_job, 100)):
            what = f"100 replays, rank {rank} of {world}"
            yield Result("graph", what, f"{wrong} wrong", wrong == 0)


def sanitize(setting: Setting) -> Iterator[Result]:
    """The small checks under compute-sanitizer."""
    tool = shutil.which("compute-sanitizer")
    if setting.rehearsal or tool is None:
        yield Result("sanitize", "needs a GPU and compute-sanitizer", ok=None)
        return
    budget = setting.budget_s / 4
    for check, stage in itertools.product(
        ("memcheck", "racecheck"), ("matmul_check", "fused_check")
    ):
        options = ["--tool", check, "--target-processes", "all", "--error-exitcode", "9"]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "results"
            suite = ["-m", "benchmarks.gpu_suite", "--stage", stage, "--into", str(file)]
            suite += ["--small", "--budget-s", str(budget)]
            try:
                ended = subprocess.run(
                    [tool, *options, sys.executable, *suite],
                    capture_output=True, text=True, timeout=budget, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                value = f"not finished in {budget:.0f} s"
                yield Result("sanitize", f"{check} of {stage}", value, ok=None)
                continue
            right = all(result.ok is not False for result in read_results(file))
        reports = [line for line in ended.stdout.splitlines() if line.startswith("=====")]
        right = right and ended.returncode == 0
        yield Result("sanitize", f"{check} of {stage}", reports[-1] if reports else "", right)
