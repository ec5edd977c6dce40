"""Measurements of the GPU suite that several ranks make together: the ops compared with torch's
calls, its fused ops and the plain kernel; how `fused` brings rows; all-reduces of few bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import tpkernels
from benchmarks.gpu.calls import Calls
from benchmarks.gpu.cuda import WAYS, CudaCalls
from benchmarks.gpu.stage import (
    Job,
    Result,
    Setting,
    captured,
    contests,
    median_ms,
    nccl_worlds,
    over_ranks,
    random,
    stage,
    times_ms,
)
from tpkernels import cuda, groups
from tpkernels.algorithms import fused
from tpkernels.kernels import all_gather_matmul as kernel
from tpkernels.kernels.matmul import matmul


def _path_job(device: str, m: int, n: int, k: int) -> list[tuple[str, float, float]]:
    """(op, our ms, torch's ms) in bf16: all-gather of x [m / world, k] and a product with n / world
    columns; a product of k / world columns with n, then reduce-scatter or all-reduce."""
    made = Calls(device, "auto")
    world, group = made.world, made.group
    shard, whole, w = (random(device, *s) for s in ((m // world, k), (m, k), (k, n // world)))
    part, v = random(device, m, k // world), random(device, k // world, n)
    y, y_own = part @ v, torch.empty(m // world, n, dtype=torch.bfloat16, device=device)

    def gather_and_multiply() -> torch.Tensor:
        dist.all_gather_into_tensor(whole, shard, group)
        return whole @ w

    def multiply_and_scatter() -> None:
        torch.mm(part, v, out=y)
        dist.reduce_scatter_tensor(y_own, y, group=group)

    def multiply_and_reduce() -> None:
        torch.mm(part, v, out=y)
        dist.all_reduce(y, group=group)

    pairs = {
        "all_gather_matmul": (
            lambda: tpkernels.all_gather_matmul(shard, w, group), gather_and_multiply,
        ),
        "matmul_reduce_scatter": (
            lambda: tpkernels.matmul_reduce_scatter(part, v, group), multiply_and_scatter,
        ),
        "matmul_all_reduce": (
            lambda: tpkernels.matmul_all_reduce(part, v, group), multiply_and_reduce,
        ),
    }  # fmt: skip
    return [(op, *(median_ms(group, device, job) for job in pair)) for op, pair in pairs.items()]


@stage()
def path_speed(setting: Setting) -> Iterator[Result]:
    """`auto` compared with the two calls of torch, which it must never lose to."""
    shapes = [(1, 4096, 4096), (64, 8192, 8192), (2048, 8192, 8192), (8192, 8192, 28672)]
    for world in nccl_worlds(setting)[0]:
        for m, n, k in [(8, 16, 16)] if setting.small else shapes:
            args = _path_job, max(m, world), n, k
            yield from contests(setting, world, *args, other="torch", backend="nccl")


def _overhead_job(device: str, m: int, n: int, k: int) -> list[tuple[str, float, float]]:
    """(op, ms, ms of the plain kernel) at world size 1, bf16."""
    made, x, w = Calls(device, "fused"), random(device, m, k), random(device, n, k).t()
    results = []
    for op in ("all_gather_matmul", "matmul_reduce_scatter", "one_shot"):
        jobs: list[Job] = [lambda op=op: made.run(op, x, w, (m,)), lambda: matmul(x, w)]  # type: ignore[misc]
        ours, plain = times_ms(device, jobs)
        results.append((op, ours, plain))
    return results


@stage()
def fused_speed(setting: Setting) -> Iterator[Result]:
    """The fused kernels at world size 1 and the plain kernel: the cost of hooks and signals."""
    shapes = [(1024, 4096, 4096), (4096, 4096, 4096), (8192, 8192, 4096)]
    for shape in [(32, 32, 32)] if setting.small else shapes:
        yield from contests(setting, 1, _overhead_job, *shape, other="plain")


def _symm_mem_job(device: str, m: int, n: int, k: int) -> list[tuple[str, float, float]]:
    """(op, our ms, their ms) on ranks that may share a GPU, bf16; the same on every rank."""
    import torch.distributed._symmetric_memory as symmetric

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


@stage(gpus=2)
def symm_mem(setting: Setting) -> Iterator[Result]:
    """The fused kernels compared with torch.ops.symm_mem.fused_*, two ranks with a GPU each: ranks
    that share one would measure its time slices."""
    for shape in [(512, 4096, 4096), (2048, 4096, 4096), (8192, 4096, 4096)]:
        yield from contests(setting, 2, _symm_mem_job, *shape, other="symm_mem")


# How `fused` brings rows: it times the constants that were chosen without a GPU.

KIB, MIB = 1 << 10, 1 << 20
# Fields of the config of a call by fetchers.
FETCHERS: list[dict[str, int]] = [
    {"fetchers": fetchers, "piece_bytes": piece}
    for fetchers in (8, 12, 16)
    for piece in (64 * KIB, 128 * KIB, 256 * KIB)
]
CHUNKS = (2 * MIB, 4 * MIB, 8 * MIB)


def _bring_job(device: str, rows: int, n: int, k: int, ways: int) -> list[tuple[str, float]]:
    """(way, ms) of a gather of ``rows`` rows of each rank and a product with n columns in bf16:
    unfused, then `fused` in ``ways`` ways with fetchers and as many with copy engines."""
    made = Calls(device, "fused")
    own, group = groups.get(made.group.group_name), made.group
    x, w, choose = random(device, rows, k), random(device, k, n), fused._config

    def time(algorithm: str, fields: dict[str, Any], engines_from: int, chunk: int) -> float:
        own.forget_calls()  # which are bound to their block sizes
        call = functools.partial(tpkernels.all_gather_matmul, x, w, group, algorithm=algorithm)
        with (
            mock.patch.object(fused, "_config", lambda *given: replace(choose(*given), **fields)),
            mock.patch.object(fused, "COPY_ENGINE_BYTES", engines_from),
            mock.patch.object(kernel, "_CHUNK_BYTES", chunk),
        ):
            return median_ms(group, device, call)

    never = 1 << 62
    found = [("unfused", time("unfused", {}, never, MIB))]
    for fields in FETCHERS[:ways]:
        what = f"{fields['fetchers']} fetchers, pieces of {fields['piece_bytes'] // KIB} KiB"
        found.append((what, time("fused", fields, never, MIB)))
    for chunk in CHUNKS[:ways]:
        found.append((f"copy engines, chunks of {chunk // MIB} MiB", time("fused", {}, 0, chunk)))
    return found


@stage()
def bring_speed(setting: Setting) -> Iterator[Result]:
    """An all-gather and product by `fused`, next to `unfused`, as the peers' rows are brought."""
    world = 2 if setting.rehearsal else torch.cuda.device_count()
    if world < 2:
        yield Result("needs two GPUs: links between ranks", ok=None)
        return
    n, k = 28672 // world, 8192
    shapes = [(rows, n, k, len(FETCHERS)) for rows in (16, 64, 128, 256, 512, 1024)]
    for rows, n, k, ways in [(40, 16, 24, 1)] if setting.small else shapes:
        backend = "gloo" if setting.rehearsal else "nccl"
        ranks = over_ranks(setting, world, _bring_job, rows, n, k, ways, backend=backend)
        for what, ms in ranks[0]:
            shard = f"shards of {rows * k * 2 // KIB} KiB, N {n}, {world} ranks"
            yield Result(f"{shard}: {what}", f"{ms:.4f} ms", ok=None)


# All-reduces of few bytes.

SIZES = (8 << 10, 32 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20)  # bytes
ROWS_BYTES, COLUMNS = (16 << 10, 128 << 10, 256 << 10, 1 << 20), 8192
CALLS, REPLAYS = 20, 30


def _call_us(call: Callable[[], object]) -> float:
    """The time of a call in a graph of CALLS of them; all ranks take it together."""

    def calls() -> None:
        for _ in range(CALLS):
            call()

    recorded, _ = captured(calls)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for replay in range(REPLAYS + 5):
        if replay == 5:
            begin.record()
        recorded.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / (CALLS * REPLAYS)


def _times_us(made: CudaCalls, nbytes: int) -> tuple[list[float], bool]:
    """Of each way, and whether ours agree to the bit."""
    x = random(made.device, nbytes // 2)
    outs = [torch.empty_like(x) for _ in WAYS]
    times = [
        _call_us(lambda way=way, out=out: cuda.all_reduce(made.space, 1, x, out, way=way))  # type: ignore[misc]
        for way, out in zip(WAYS, outs, strict=True)
    ]
    theirs = x.clone()
    times.append(_call_us(lambda: dist.all_reduce(theirs)))
    return times, all(torch.equal(outs[0], out) for out in outs)


def _normed_us(made: CudaCalls, nbytes: int) -> tuple[list[float], bool]:
    """Of rows of COLUMNS with a residual: in one launch, with torch's norm behind our sum, behind
    NCCL's; and whether the first two have the same sum."""
    x = random(made.device, nbytes // 2).view(-1, COLUMNS)
    weight, residual = torch.ones_like(x[0]), torch.ones_like(x)
    normed, total, behind, theirs = (torch.empty_like(x) for _ in range(4))
    fused = cuda.prepare_normed_all_reduce(
        made.world, x, total, normed, weight, 1e-5, residual=residual
    )

    def in_steps() -> None:
        cuda.all_reduce(made.space, 1, x, behind, residual=residual)
        torch.nn.functional.rms_norm(behind, [COLUMNS], weight, 1e-5)

    def by_nccl() -> None:
        dist.all_reduce(theirs.copy_(x))
        torch.nn.functional.rms_norm(theirs.add_(residual), [COLUMNS], weight, 1e-5)

    times = [_call_us(call) for call in (lambda: fused.run(made.space, 1), in_steps, by_nccl)]
    return times, torch.equal(total, behind)


def _behind_product_us(made: CudaCalls, nbytes: int) -> tuple[list[float], bool]:
    """Of a product of COLUMNS / world x COLUMNS and the sum of its rows: by a kernel that starts
    while the product runs, by one that does not, by NCCL; and whether the first two agree."""
    rows, k = nbytes // 2 // COLUMNS, COLUMNS // made.world
    x, w = random(made.device, rows, k), random(made.device, COLUMNS, k).t()
    partial, early, late = (x.new_empty(rows, COLUMNS) for _ in range(3))

    def behind(out: torch.Tensor, starts_early: bool) -> None:
        torch.mm(x, w, out=partial)
        cuda.all_reduce(made.space, 1, partial, out, early=starts_early)

    def by_nccl() -> None:
        dist.all_reduce(torch.mm(x, w, out=partial))

    calls = (lambda: behind(early, True), lambda: behind(late, False), by_nccl)
    return [_call_us(call) for call in calls], torch.equal(early, late)


def _small_job(device: str) -> list[tuple[list[float], bool]]:
    made = CudaCalls(device)
    plain = [_times_us(made, nbytes) for nbytes in SIZES]
    normed = [_normed_us(made, nbytes) for nbytes in ROWS_BYTES]
    return [*plain, *normed, *(_behind_product_us(made, nbytes) for nbytes in ROWS_BYTES)]


_PLAIN = ("all_reduce", (*WAYS, "NCCL"))
_NORMED = ("all_reduce, residual and norm", ("one launch", "two launches", "NCCL and torch"))
_BEHIND_PRODUCT = ("product and all_reduce", ("started early", "not early", "NCCL"))


@stage(gpus=1)
def small_speed(setting: Setting) -> Iterator[Result]:
    """The slowest rank's time of an all-reduce, in a CUDA graph."""
    for world in nccl_worlds(setting)[0]:
        if world == 1:
            continue
        ranks = over_ranks(setting, world, _small_job, backend="nccl")
        measured = [(_PLAIN, nbytes) for nbytes in SIZES]
        measured += [(what, n) for what in (_NORMED, _BEHIND_PRODUCT) for n in ROWS_BYTES]
        for ((op, ways), nbytes), told in zip(measured, zip(*ranks, strict=True), strict=True):
            slowest = [max(times[i] for times, _ in told) for i in range(len(ways))]
            value = ", ".join(f"{way} {us:.2f} us" for way, us in zip(ways, slowest, strict=True))
            what = f"{op} of {nbytes >> 10} KiB bf16, {world} ranks"
            yield Result(what, value, all(right for _, right in told))
