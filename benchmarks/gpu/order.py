"""Calls of two groups on two streams, and the switch's own reduction, for the GPU suite."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from benchmarks.gpu.stage import Result, Setting, checks, integers, on_gpus, synchronize


def _streams_job(device: str, algorithm: str, rounds: int) -> list[tuple[str, bool]]:
    """Calls of two groups, all issued before the host waits: on one stream each, then both on new
    streams in turn. All ranks issue them in one order, but the GPUs may start them in any."""
    from benchmarks.gpu.calls import Calls
    from tpkernels.shards import shard_sizes

    two = [Calls(device, algorithm) for _ in range(2)]
    world, rank = two[0].world, two[0].rank
    sizes = tuple(shard_sizes(40 * world, world))
    x = torch.full((40, 64), float(rank + 1), device=device)
    w = torch.ones(64, 48, device=device)
    want = torch.cat([torch.full((40, 48), 64.0 * (r + 1)) for r in range(world)])
    results = []
    for what, count in (
        ("two groups, a stream for each", 2),
        ("two groups, a new stream for each call", 0),
    ):
        made = [torch.cuda.Stream() for _ in range(count)] if device == "cuda" else []
        outs = []
        for i in range(rounds):
            for g, calls in enumerate(two):
                stream = contextlib.nullcontext()
                if device == "cuda":
                    chosen = made[g] if made else torch.cuda.Stream()
                    chosen.wait_stream(torch.cuda.current_stream())
                    stream = torch.cuda.stream(chosen)
                with stream:
                    op = "all_gather_matmul" if i % 2 else "one_shot"
                    outs.append((op, calls.run(op, x, w, sizes)))
        synchronize(device)
        total = torch.full((40, 48), 64.0 * sum(range(1, world + 1)))
        right = all(
            torch.equal(out.cpu(), want if op == "all_gather_matmul" else total) for op, out in outs
        )
        results.append((what, right))
    return results


def streams_check(setting: Setting) -> Iterator[Result]:
    """Two groups with the same ranks on two streams, by each algorithm with kernels of ours, and by
    `auto`."""
    rounds = 2 if setting.small else 50
    for algorithm in ("auto", "direct", "pipelined", "fused"):
        if setting.rehearsal and algorithm == "fused":
            continue  # `fused_check` runs the interpreter
        for world in (2, 4):
            given = {"by": f" by {algorithm}", "value": f"{rounds} calls of each"}
            yield from checks(
                "streams_check", setting, world, _streams_job, algorithm, rounds, **given
            )


def _multimem_job(device: str, counts: tuple[int, ...]) -> list[tuple[str, bool]]:
    """Whether sums by the switch are exact on integers; nothing without multicast memory."""
    from benchmarks.gpu.cuda import DTYPES, CudaCalls
    from tpkernels import cuda

    made = CudaCalls(device)
    results = []
    for dtype in DTYPES if made.space.multicast else ():
        right = True
        for count in counts:
            xs = [integers(r, device, dtype, count) for r in range(made.world)]
            out = torch.empty_like(xs[0])
            cuda.all_reduce(made.space, made.next(), xs[made.rank], out, way="multimem")
            synchronize(device)
            right = right and torch.equal(out, torch.stack(xs).sum(0).to(dtype))
        results.append((f"multimem all-reduce {dtype}", right))
    dist.barrier()
    return results


@on_gpus(2)
def multimem_check(setting: Setting) -> Iterator[Result]:
    """All-reduces that the switch sums, where there is one."""
    world, counts = min(8, torch.cuda.device_count()), (8, 65_536, 3_000_000)
    found = list(checks("multimem_check", setting, world, _multimem_job, counts))
    yield from found or [Result("multimem_check", "multicast memory", "there is none", ok=None)]
