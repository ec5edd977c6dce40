"""The NCCL communicator for the GPU suite, and the GPU-marked tests."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu.stage import Result, Setting, checks, integers, nccl_worlds, stage
from tpkernels import nccl


def _nccl_job(device: str, count: int) -> list[tuple[str, bool]]:
    """The calls on one rank, and whether each was exact."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    group = dist.new_group()
    assert group is not None
    exact = []
    for dtype in (torch.float32, torch.bfloat16):
        every = [integers(r, device, dtype, world * count, 3) for r in range(world)]
        total, mine = torch.stack(every).sum(0), slice(rank * count, (rank + 1) * count)
        with nccl.Communicator(group, timeout=30.0) as comm:
            wanted = {
                "all_gather": torch.cat(every),
                "all_reduce": total,
                "reduce_scatter": total[mine],
                "all_to_all": torch.cat([each[mine] for each in every]),
            }
            results = [getattr(comm, name)(every[rank]) for name in wanted]
            comm.wait()
            for (name, want), got in zip(wanted.items(), results, strict=True):
                exact.append((f"{name} {dtype}", torch.equal(got, want)))
    return exact


@stage(gpus=1)
def nccl_check(setting: Setting) -> Iterator[Result]:
    """Every collective on one rank, and on two that share a GPU where NCCL allows it."""
    worlds, why = nccl_worlds(setting)
    for world in worlds:
        count, version = 100 if setting.small else 100_000, nccl.load().version
        yield from checks(setting, world, _nccl_job, count, value=version)
    yield Result("numbers of ranks", why, ok=None)


@stage()
def gpu_tests(setting: Setting) -> Iterator[Result]:
    """The tests marked ``gpu``, except those that would run this suite."""
    if setting.rehearsal or importlib.util.find_spec("hypothesis") is None:
        yield Result("need a GPU and tpkernels[test]", ok=None)
        return
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu"]
    command += ["--ignore=tests/benchmarks/test_gpu_suite.py"]
    root = Path(__file__).resolve().parents[2]
    try:
        ended = subprocess.run(
            command, cwd=root, capture_output=True, text=True, timeout=setting.budget_s, check=False
        )
    except subprocess.TimeoutExpired:
        value = f"not finished in {setting.budget_s:.0f} s"
        yield Result("pytest -m gpu", value, ok=None)
        return
    lines = [*ended.stderr.splitlines(), *ended.stdout.splitlines()] or ["no output"]
    yield Result("pytest -m gpu", lines[-1], ended.returncode == 0)
