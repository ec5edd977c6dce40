"""What the stages of the GPU suite share: settings, results, ranks, times, exact data."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

import tpkernels
from tpkernels import nccl
from tpkernels.launch import Ranks

# The first version of NCCL that lets ranks share a GPU, with NCCL_MULTI_RANK_GPU_ENABLE=1.
_SHARED_GPU = (2, 30, 3)

Job = Callable[[], object]
T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """The device and the time limit of a stage."""

    device: str
    budget_s: float
    small: bool = False  #: sizes too small to measure speed

    @property
    def rehearsal(self) -> bool:
        return self.device == "cpu"


@dataclass(frozen=True)
class Result:
    """One line of the report; ``ok`` is None if nothing was checked."""

    what: str
    value: str = ""
    ok: bool | None = True
    stage: str = ""  #: filled in by `stage`

    def __str__(self) -> str:
        return f"{'WRONG ' if self.ok is False else ''}{self.what}: {self.value}"


Stage = Callable[[Setting], Iterator[Result]]
STAGES: dict[str, Stage] = {}


def stage(gpus: int = 0) -> Callable[[Stage], Stage]:
    """Register a stage. Where there are fewer GPUs than it needs its only result says so."""

    def register(run: Stage) -> Stage:
        name = run.__name__

        @functools.wraps(run)
        def named(setting: Setting) -> Iterator[Result]:
            if gpus and (setting.rehearsal or torch.cuda.device_count() < gpus):
                needs = "needs a GPU" if gpus == 1 else f"needs {gpus} GPUs"
                yield Result("nothing was run", needs, None, name)
                return
            for result in run(setting):
                yield replace(result, stage=name)

        STAGES[name] = named
        return named

    return register


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def captured(call: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """Make a call, which compiles and loads its kernels, and capture another in a graph; return the
    graph and its result."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def times_ms(device: str, jobs: list[Job], rounds: int = 5) -> list[float]:
    """The median time of each job, interleaved."""
    samples: list[list[float]] = [[] for _ in jobs]
    for _ in range(rounds):
        for job, times in zip(jobs, samples, strict=True):
            if device == "cuda":
                import triton

                times.append(triton.testing.do_bench(job, warmup=5, rep=20, return_mode="median"))
            else:
                begin = time.perf_counter()
                job()
                times.append((time.perf_counter() - begin) * 1e3)
    return [statistics.median(times) for times in samples]


def random(device: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def median_ms(group: Any, device: str, job: Job, warmup: int = 3) -> float:
    """The median time of a call that all ranks of a group make together."""
    timed = tpkernels.benchmark(job, warmup=warmup, iterations=20, group=group, device=device)
    return timed.median


def integers(seed: int, device: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Small integers, the same on every device, whose products are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator).to(dtype).to(device)


def over_ranks(
    setting: Setting, world: int, job: Callable[..., Any], *args: object, backend: str = "gloo"
) -> list[Any]:
    """Runs ``job(device, *args)`` on ``world`` ranks; returns the results by rank. A rehearsal
    takes gloo whatever ``backend`` is."""
    env = {
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # needs NCCL 2.30.3, without NVLS
        "NCCL_NVLS_ENABLE": "0" if world > torch.cuda.device_count() else "1",
    }
    if setting.rehearsal:
        backend, env["TRITON_INTERPRET"] = "gloo", "1"
    with Ranks(world, backend=backend, env=env) as ranks:
        return ranks.run(job, setting.device, *args, timeout=setting.budget_s)


def checks(
    setting: Setting,
    world: int,
    job: Callable[..., list[tuple[str, bool]]],
    *args: object,
    by: str = "",
    value: str = "",
    backend: str = "gloo",
) -> Iterator[Result]:
    """Runs a job on ranks. Yields what each rank checked, and whether it was right on all."""
    ranks = over_ranks(setting, world, job, *args, backend=backend)
    for what in dict(ranks[0]):
        right = all(dict(rank)[what] for rank in ranks)
        yield Result(f"{what}{by}, {world} ranks", value, right)


def contests(
    setting: Setting,
    world: int,
    job: Callable[..., list[tuple[str, float, float]]],
    *shape: int,
    other: str,
    backend: str = "gloo",
) -> Iterator[Result]:
    """Runs a job on ranks that returns (op, our ms, another's ms). Yields them with the
    speed-up."""
    for op, ours, theirs in over_ranks(setting, world, job, *shape, backend=backend)[0]:
        value = f"{ours:.4f} ms, {other} {theirs:.4f} ms: {theirs / ours:.3f}x"
        yield Result(f"{op} {'x'.join(map(str, shape))}, {world} ranks", value, ok=None)


def delayed(delay_us: int) -> str:
    return f", delays up to {delay_us} us" if delay_us else ""


def nccl_worlds(setting: Setting) -> tuple[list[int], str]:
    """The numbers of ranks that NCCL can have here, and why there are no more: 1, 2, 4 and 8 as far
    as there are GPUs, and 2 on one GPU where NCCL allows it."""
    if setting.rehearsal:
        return [1, 2], "a rehearsal"
    gpus, version = torch.cuda.device_count(), nccl.load().version
    worlds = [world for world in (1, 2, 4, 8) if world <= gpus]
    if gpus == 1 and tuple(map(int, version.split("."))) >= _SHARED_GPU:
        return [*worlds, 2], "ranks share the GPU"
    return worlds, f"{gpus} GPUs, NCCL {version}; ranks share a GPU from NCCL 2.30.3"
