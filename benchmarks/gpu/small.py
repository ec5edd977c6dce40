"""All-reduces of few bytes for the GPU suite: low-latency, one-shot with words, and NCCL's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from benchmarks.gpu.cuda import CudaCalls
from benchmarks.gpu.stage import Result, Setting, nccl_worlds, over_ranks
from tpkernels import cuda

SIZES = (8 << 10, 32 << 10, 128 << 10, 256 << 10)  # bytes
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
    generator = torch.Generator(made.device).manual_seed(made.rank)
    x = torch.randn(nbytes // 2, generator=generator, device=made.device).to(torch.bfloat16)
    outs = torch.empty_like(x), torch.empty_like(x), x.clone()
    times = [
        _call_us(lambda: cuda.all_reduce(made.space, 1, x, outs[0], way="low_latency")),
        _call_us(lambda: cuda.all_reduce(made.space, 1, x, outs[1], way="one_shot")),
        _call_us(lambda: dist.all_reduce(outs[2])),
    ]
    return times, torch.equal(outs[0], outs[1])


def _small_job(device: str) -> list[tuple[list[float], bool]]:
    made = CudaCalls(device)
    return [_times_us(made, nbytes) for nbytes in SIZES]


def small_speed(setting: Setting) -> Iterator[Result]:
    """The slowest rank's time of an all-reduce, in a CUDA graph."""
    if setting.rehearsal:
        yield Result(
            "small_speed", "csrc/cuda", "needs a GPU: times of a rehearsal say nothing", None
        )
        return
    for world in nccl_worlds(setting)[0]:
        if world == 1:
            continue
        ranks = over_ranks(setting, world, _small_job, backend="nccl")
        for nbytes, told in zip(SIZES, zip(*ranks, strict=True), strict=True):
            ours, words, theirs = (max(times[i] for times, _ in told) for i in range(3))
            value = f"low_latency {ours:.2f} us, one_shot {words:.2f} us, NCCL {theirs:.2f} us"
            what = f"all_reduce of {nbytes >> 10} KiB bf16, {world} ranks"
            yield Result("small_speed", what, value, all(right for _, right in told))
