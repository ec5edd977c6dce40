"""What the stages of the GPU suite share: settings, results, ranks, times, exact data."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tpkernels import nccl
from tpkernels.launch import Ranks

# The first version of NCCL that lets ranks share a GPU, with NCCL_MULTI_RANK_GPU_ENABLE=1.
_SHARED_GPU = (2, 30, 3)

Job = Callable[[], object]


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

    stage: str
    what: str
    value: str = ""
    ok: bool | None = True

    def __str__(self) -> str:
        return f"{'WRONG ' if self.ok is False else ''}{self.what}: {self.value}"


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


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


def integers(seed: int, device: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Small integers, the same on every device, whose products are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator).to(dtype).to(device)


def over_ranks(
    setting: Setting,
    world: int,
    job: Callable[..., Any],
    *args: object,
    backend: str = "gloo",
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


def right_on_all(ranks: list[list[tuple[str, bool]]]) -> list[tuple[str, bool]]:
    """What each rank checked, and whether it was right on all of them."""
    return [(what, all(dict(rank)[what] for rank in ranks)) for what in dict(ranks[0])]


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
