"""Input of `all_gather_matmul` in symmetric memory, for the GPU suite: copy engines of the peers
read it where it lies. Checked, and timed against input that is first copied to the workspace."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist

import tpkernels
from benchmarks.gpu.calls import Calls
from benchmarks.gpu.stage import (
    Result,
    Setting,
    captured,
    checks,
    contests,
    delayed,
    integers,
    median_ms,
    stage,
    synchronize,
)
from tpkernels import cuda, groups
from tpkernels.algorithms import fused

BF16 = torch.bfloat16
ALGORITHMS = ("pipelined", "copied")  # the latter: `fused` with copy engines


class InPlace:
    """The op on a symmetric tensor [rows, k] of each rank."""

    def __init__(self, device: str, algorithm: str, rows: int, n: int, k: int) -> None:
        if algorithm == "copied":
            fused.COPY_ENGINE_BYTES = 0
        self.made = Calls(device, "fused" if algorithm == "copied" else algorithm)
        self.rows, self.k, self.world = rows, k, self.made.world
        self.w = integers(1 + self.made.rank, device, BF16, k, n)
        self.x = self._symmetric((rows, k))

    def _symmetric(self, shape: tuple[int, ...]) -> torch.Tensor:
        made = self.made
        if made.device == "cuda":
            return tpkernels.empty(*shape, dtype=BF16, group=made.group, device="cuda")
        own = groups.get(groups.name_of(made.group)).ready("cuda")  # a rehearsal
        return own.make_symmetric(shape, BF16, torch.device(made.device))

    def call(self, x: torch.Tensor) -> torch.Tensor:
        return self.made.run("all_gather_matmul", x, self.w, (self.rows,) * self.world)

    def is_right(self, got: torch.Tensor, seed: int) -> bool:
        """Whether the result is exact, for x that `fill` has filled."""
        whole = integers(seed, self.made.device, BF16, self.world * self.rows, self.k)
        return torch.equal(got, (whole.double() @ self.w.double()).to(BF16))

    def fill(self, seed: int) -> None:
        whole = integers(seed, self.made.device, BF16, self.world * self.rows, self.k)
        self.x.copy_(whole[self.made.rank * self.rows :][: self.rows])

    def calls(self, count: int) -> bool:
        """Whether calls are right though x is overwritten as soon as each is queued."""
        results = []
        for seed in range(count):
            self.fill(seed)
            results.append(self.call(self.x))
            self.x.fill_(math.nan)
        synchronize(self.made.device)
        return all(self.is_right(got, seed) for seed, got in enumerate(results))

    def replays(self, count: int) -> bool:
        """The same of replays of a graph."""
        recorded, got = captured(lambda: self.call(self.x))
        right = True
        for seed in range(count):
            self.fill(100 + seed)
            recorded.replay()
            self.x.fill_(math.nan)
            synchronize("cuda")
            right = right and self.is_right(got, 100 + seed)
        return right


def check_job(device: str, algorithm: str, calls: int, delay_us: int) -> list[tuple[str, bool]]:
    made = InPlace(device, algorithm, 96, 72, 40)
    made.call(made.x)  # sets the group up
    made.made.set_chaos(seed=dist.get_rank(), max_delay_us=delay_us)
    copied = AssertionError("the input was copied to the workspace")
    with mock.patch.object(cuda.CopyCall, "put", side_effect=copied):
        results = [("symmetric input", made.calls(calls))]
        if device == "cuda":
            results.append(("symmetric input, graph replays", made.replays(4 * calls)))
    return results


@stage(gpus=1)
def in_place_check(setting: Setting) -> Iterator[Result]:
    """`all_gather_matmul` of symmetric tensors that are overwritten once the call is queued."""
    for algorithm in ALGORITHMS:
        for world, delay_us in ((2, 0), (4, 0), (4, 200)):
            by = f" by {algorithm}{delayed(delay_us)}"
            args = algorithm, 5, delay_us
            yield from checks(setting, world, check_job, *args, by=by, value="5 calls")


def speed_job(device: str, m: int, n: int, k: int) -> list[tuple[str, float, float]]:
    """(algorithm, milliseconds with symmetric and with plain input)."""
    times, world = [], dist.get_world_size()
    for algorithm in ALGORITHMS:
        made = InPlace(device, algorithm, m // world, n // world, k)
        made.fill(1)
        calls = (functools.partial(made.call, x) for x in (made.x, made.x.clone()))
        in_place, copied = (median_ms(made.made.group, device, call) for call in calls)
        times.append((f"all_gather_matmul by {algorithm}", in_place, copied))
    return times


@stage(gpus=1)
def in_place_speed(setting: Setting) -> Iterator[Result]:
    """What the copy to the workspace costs: one pass over x, beside the first product."""
    for world in (world for world in (2, 4, 8) if world <= torch.cuda.device_count()):
        for shape in ((2048, 8192, 8192), (8192, 8192, 8192), (16384, 28672, 8192)):
            yield from contests(setting, world, speed_job, *shape, other="copied")
