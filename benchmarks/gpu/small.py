"""All-reduces of few bytes for the GPU suite: by LL and LL128, two-shot, and NCCL's; and with the
rows of the sum normalised, in one launch and in two."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from benchmarks.gpu.cuda import WAYS, CudaCalls
from benchmarks.gpu.stage import Result, Setting, nccl_worlds, on_gpus, over_ranks, random
from tpkernels import cuda

SIZES = (8 << 10, 32 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20)  # bytes
ROWS_BYTES, COLUMNS = (16 << 10, 128 << 10, 256 << 10, 1 << 20), 8192
CALLS, REPLAYS = 20, 30


def _call_us(call: Callable[[], object]) -> float:
    """The time of a call in a graph of CALLS of them; all ranks take it together."""
    call()
    torch.cuda.synchronize()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        for _ in range(CALLS):
            call()
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


@on_gpus()
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
            yield Result("small_speed", what, value, all(right for _, right in told))
